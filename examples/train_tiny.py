"""Train the tiny LLaDA2-style checkpoint that ships with the library, on two CPU cores.

    python examples/train_tiny.py --out runs/tiny          # train, evaluate now and then, export at the end
    python examples/train_tiny.py --out runs/tiny --resume # go on after an interruption
    python examples/train_tiny.py --out runs/tiny --eval   # judge what was exported

The model is a LLaDA2 in miniature (group-limited sigmoid router with a bias, shared expert, first layer dense), the
data are worked answers to small problems (`epoch_moe.problems`), and the objective is that of block diffusion: a noisy
copy of each answer block sees itself and clean copies of the blocks before it.

Shape suffixes: B packs or sequences, S rows of one, A sequences not yet finished, N rows of a block, R masked rows,
T = B x S, P (row, expert) pairs, H hidden, F expert inner size, V vocabulary, E experts, K top-k, L layers.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from muon import Muon
from safetensors.torch import load_file, save
from tiny_data import BLOCK, CHUNK, MAX_BLOCKS, PACK_BLOCKS, Batch, batches, build_tokenizer, encode, save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface

from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.outputs import write_output
from epoch_moe.problems import EOS_TOKEN, KINDS, Problem, check, generate_problems

# -------------------------------------------------------------------------------------------------------------- model


def make_config(tokenizer: Tokenizer, args: argparse.Namespace) -> LLaDA2MoeConfig:
    """A LLaDA2 configuration with the official keys."""
    eos = tokenizer.token_to_id(EOS_TOKEN)
    return LLaDA2MoeConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 16) * 16,
        hidden_size=128,
        intermediate_size=args.dense_inner,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=args.expert_inner,
        num_shared_experts=1,
        first_k_dense_replace=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        router_dtype="fp32",
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        rope_theta=10_000,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
        mask_token_id=tokenizer.token_to_id("<mask>"),
        eos_token_id=eos,
        pad_token_id=eos,
    )


class RouterBalance:
    """Counts each expert's pairs and nudges the routers' selection bias towards equal counts (no auxiliary loss)."""

    def __init__(self, model: nn.Module, rate: float):
        self.rate = rate
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]  # type: ignore[union-attr]
        self.counts_LE = torch.zeros(len(self.gates), self.gates[0].expert_bias.numel())
        for index, gate in enumerate(self.gates):
            gate.register_forward_hook(partial(self._count, index))

    def _count(self, index: int, gate: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        if gate.training:
            self.counts_LE[index] += torch.bincount(output[0].flatten(), minlength=self.counts_LE.shape[1])

    @torch.no_grad()
    def step(self, factor: float) -> float:
        """Move every bias by `rate * factor` and return the worst load: the fullest expert's pairs over the mean."""
        mean_L1 = self.counts_LE.mean(1, keepdim=True)
        for gate, nudge_E in zip(self.gates, torch.sign(mean_L1 - self.counts_LE), strict=True):
            gate.expert_bias += factor * self.rate * nudge_E
        return float((self.counts_LE / mean_L1).max())


class FlatGradients:
    """All gradients as views of one buffer, with room for counts behind them: one collective per step.

    One worker per core with one thread each beats two threads in one process: most operations here are too short to be
    worth splitting, and a thread that loses its core to another program would hold up the other one hundreds of times a
    step.
    """

    def __init__(self, params: list[nn.Parameter], counts: int = 0):
        sizes = [p.numel() for p in params]
        self.buffer = torch.zeros(sum(sizes) + counts)
        *grads, self.counts = self.buffer.split([*sizes, counts])
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.view_as(param)
        self.gradients = self.buffer[: sum(sizes)]

    def reduce_and_clip(self, workers: int, limit: float = 1.0) -> float:
        """Average over the workers, limit the norm, and return what it was."""
        if workers > 1:
            dist.all_reduce(self.buffer)
            self.gradients /= workers
        norm = float(self.gradients.norm())
        if norm > limit:
            self.gradients *= limit / norm
        return norm


# --------------------------------------------------------------------------------------------------------- evaluation


@dataclass
class Score:
    """Result of decoding some problems: accuracy, speed and what the routers did."""

    right: dict[str, list[bool]]
    tokens: dict[str, list[int]]
    forwards: dict[str, list[int]]
    experts_cold: list[float]
    experts_mean: list[float]
    misses: list[tuple[str, str, str]]

    def line(self) -> str:
        """One line: per kind accuracy and tokens per forward, then distinct experts per block and MoE layer."""
        kinds = [k for k in KINDS if k in self.right]
        parts = [
            f"{k} {sum(self.right[k]) / len(self.right[k]):.1%} ({sum(self.tokens[k]) / sum(self.forwards[k]):.2f} tpf)"
            for k in kinds
        ]
        right = [r for k in kinds for r in self.right[k]]
        tokens, forwards = sum(map(sum, self.tokens.values())), sum(map(sum, self.forwards.values()))
        cold = " ".join(f"{e:.1f}" for e in self.experts_cold)
        mean = " ".join(f"{e:.1f}" for e in self.experts_mean)
        return (
            f"exact {sum(right) / len(right):.1%} of {len(right)}, {tokens / forwards:.2f} tokens/forward | "
            f"{', '.join(parts)} | experts per block: first forward {cold}, all forwards {mean}"
        )


@torch.no_grad()
def evaluate(model: nn.Module, tokenizer: Tokenizer, problems: list[Problem], threshold: float = 0.95) -> Score:
    """Greedy block diffusion over whole windows with a block-causal mask, without a K/V cache, all problems at once."""
    was_training = model.training
    model.eval()
    chosen: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]  # type: ignore[union-attr]
    hooks = [gate.register_forward_hook(lambda _g, _a, out: chosen.append(out[0])) for gate in gates]
    mask_id, eos_id = tokenizer.token_to_id("<mask>"), tokenizer.token_to_id(EOS_TOKEN)
    num_experts = gates[0].expert_bias.numel()

    full_BS, prompt_B, _ = encode(problems, tokenizer)
    positions_S = torch.arange(full_BS.shape[1])
    ids_BS = torch.where(positions_S < prompt_B.unsqueeze(1), full_BS, mask_id)
    block_S = positions_S // BLOCK
    mask_11SS = (block_S.unsqueeze(1) >= block_S)[None, None]
    block_B, forwards_B = prompt_B // BLOCK, torch.zeros_like(prompt_B)
    cold_B = torch.ones_like(prompt_B, dtype=torch.bool)
    counts_cold, counts_all = [], []
    active_B = torch.ones_like(cold_B)
    while active_B.any():
        rows = active_B.nonzero().squeeze(1)
        end = (int(block_B[rows].max()) + 1) * BLOCK
        ids_AS = ids_BS[rows, :end]
        chosen.clear()
        hidden = model.model(
            input_ids=ids_AS,
            attention_mask=mask_11SS[..., :end, :end],
            position_ids=positions_S[:end].expand_as(ids_AS),
        ).last_hidden_state
        own_AS = block_S[:end] == block_B[rows].unsqueeze(1)
        probs, tokens = model.lm_head(hidden[own_AS]).float().softmax(-1).max(-1)  # type: ignore[operator]
        ids_AN = ids_AS[own_AS].view(-1, BLOCK)
        masked_AN = ids_AN == mask_id
        conf_AN = probs.view(-1, BLOCK).masked_fill(~masked_AN, -1.0)
        take_AN = (conf_AN > threshold) | (conf_AN == conf_AN.amax(1, keepdim=True))
        ids_AN = torch.where(take_AN & masked_AN, tokens.view(-1, BLOCK), ids_AN)
        ids_AS[own_AS] = ids_AN.flatten()
        ids_BS[rows, :end] = ids_AS
        forwards_B[rows] += 1

        used = []
        for topk_TK in chosen:
            own_AP = topk_TK.view(len(rows), end, -1)[own_AS].view(len(rows), -1)
            used.append((F.one_hot(own_AP, num_experts).sum(1) > 0).sum(-1).float())
        used_LA = torch.stack(used)
        counts_all.append(used_LA)
        counts_cold.append(used_LA[:, cold_B[rows]])

        done_A = ~(ids_AN == mask_id).any(1)
        ended_A = done_A & ((ids_AN == eos_id).any(1) | (block_B[rows] == MAX_BLOCKS - 1))
        block_B[rows] += done_A.long()
        cold_B[rows] = done_A
        active_B[rows] = ~ended_A
    for hook in hooks:
        hook.remove()
    model.train(was_training)

    score = Score(defaultdict(list), defaultdict(list), defaultdict(list), [], [], [])
    decoded = zip(problems, ids_BS.tolist(), prompt_B.tolist(), forwards_B.tolist(), strict=True)
    for problem, ids, start, forwards in decoded:
        text = tokenizer.decode(ids[start:], skip_special_tokens=False)
        right = check(problem, text)
        answer = ids[start:]
        score.right[problem.kind].append(right)
        score.tokens[problem.kind].append(answer.index(eos_id) + 1 if eos_id in answer else len(answer))
        score.forwards[problem.kind].append(forwards)
        if not right:
            score.misses.append((problem.prompt, problem.answer, text.split(EOS_TOKEN, 1)[0]))
    score.experts_cold = torch.cat(counts_cold, 1).mean(1).tolist()
    score.experts_mean = torch.cat(counts_all, 1).mean(1).tolist()
    return score


# ----------------------------------------------------------------------------------------------------------- training


def grouped_query_attention(
    _module: nn.Module, q_BNSD: Tensor, k_BnSD: Tensor, v_BnSD: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """torch's attention without the copies of keys and values that transformers makes for grouped queries."""
    out_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BnSD, v_BnSD, mask, scale=scaling, enable_gqa=True)
    return out_BNSD.transpose(1, 2), None


def stack_for_training(model: nn.Module) -> list[nn.Parameter]:
    """Make every MoE layer train on stacked expert weights, and return those weights.

    The stacked tensors are the storage that the per-expert parameters view, so `state_dict` follows by itself. An
    optimizer then handles two tensors per layer in place of 192, and one grouped product replaces a loop whose
    backward pass would copy the whole output for each expert.
    """
    stacked_params: list[nn.Parameter] = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        block = layer.mlp
        if not hasattr(block, "gate"):
            continue
        for expert_param in block.experts.parameters():
            expert_param.requires_grad_(False)
        stacked = block._weights.ensure()
        gate_up_E2FH, down_EHF = nn.Parameter(stacked.gate_up_E2FH), nn.Parameter(stacked.down_EHF)
        stacked_params += [gate_up_E2FH, down_EHF]

        def forward(
            x_BSH: Tensor,
            block: nn.Module = block,
            gate_up_E2FH: Tensor = gate_up_E2FH,
            down_EHF: Tensor = down_EHF,
            library_forward: Any = block.forward,
        ) -> Any:
            if not torch.is_grad_enabled():
                return library_forward(x_BSH)
            ids_TK, weights_TK, _ = block.gate(x_BSH)  # type: ignore[operator]
            x_TH = x_BSH.flatten(0, 1)
            routed_TH = grouped_experts(x_TH, ids_TK, weights_TK, gate_up_E2FH, down_EHF)
            return routed_TH.view_as(x_BSH) + block.shared_experts(x_BSH)  # type: ignore[operator]

        block.forward = forward
    return stacked_params


def grouped_experts(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_E2FH: Tensor, down_EHF: Tensor) -> Tensor:
    """Weighted sum of each row's experts, pairs sorted by expert."""
    top_k, inner = ids_TK.shape[1], down_EHF.shape[-1]
    flat_P = ids_TK.flatten()
    order_P = flat_P.argsort(stable=True)
    back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P)))
    ends_E = flat_P.bincount(minlength=len(down_EHF)).cumsum(0).to(torch.int32)
    gate_up_P2F = F.grouped_mm(x_TH.index_select(0, order_P // top_k), gate_up_E2FH.mT, offs=ends_E)
    hidden_PF = F.silu(gate_up_P2F[:, :inner]) * gate_up_P2F[:, inner:]
    out_TKH = F.grouped_mm(hidden_PF, down_EHF.mT, offs=ends_E).index_select(0, back_P).view(-1, top_k, x_TH.shape[1])
    return torch.einsum("tk,tkh->th", weights_TK, out_TKH)


def make_optimizers(
    model: nn.Module, experts: list[nn.Parameter], args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states (experts included), AdamW for embeddings, head, gates and norms."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    adam = [p for n, p in named if p.dim() < 2 or any(k in n for k in ("embed", "lm_head", "mlp.gate."))]
    muon = [p for _, p in named if all(p is not q for q in adam)]
    (muon if args.muon_experts else adam).extend(experts)
    return [
        Muon(muon, args.lr),
        torch.optim.AdamW(adam, args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learning_rate(step: int, steps: int, warmup: int = 280) -> float:
    """Factor on the learning rate: short linear warm-up, level, then linear decay to zero over the second half."""
    return min(step / warmup, 1.0, 2.0 * (1.0 - step / steps))


def loss_and_accuracy(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Weighted cross entropy and the share of weight that greedy prediction gets right."""
    hidden_BSH = model.model(  # type: ignore[operator]
        input_ids=batch.ids_BS, attention_mask=batch.mask_B1SS, position_ids=batch.positions_BS
    ).last_hidden_state
    rows_BS = batch.weight_BS > 0
    logits_RV = model.lm_head(hidden_BSH[rows_BS])  # type: ignore[operator]
    targets_R, weight_R = batch.targets_BS[rows_BS], batch.weight_BS[rows_BS]
    loss = (F.cross_entropy(logits_RV, targets_R, reduction="none") * weight_R).sum()
    right = (((logits_RV.detach().argmax(-1) == targets_R) * weight_R).sum() / weight_R.sum()).item()
    return loss, right


def train(rank: int, args: argparse.Namespace) -> None:
    """One worker: train, and on rank 0 print a line now and then, keep `state.pt` for --resume and export."""
    torch.set_num_threads(args.threads)
    if args.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=args.workers)
    tokenizer = build_tokenizer()
    torch.manual_seed(args.seed)
    AttentionInterface.register("grouped_query", grouped_query_attention)
    model = LLaDA2MoeModelLM(make_config(tokenizer, args)).float().train()
    model.config._attn_implementation = "grouped_query"
    experts = stack_for_training(model)
    optimizers = make_optimizers(model, experts, args)
    balance = RouterBalance(model, args.balance_rate)
    params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    gradients = FlatGradients(params, balance.counts_LE.numel())
    balance.counts_LE = gradients.counts.view_as(balance.counts_LE)
    state_path = args.out / "state.pt"
    first_step, elapsed = 0, 0.0
    if args.resume and state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step, elapsed = state["step"], state["elapsed"]
    problems = generate_problems(args.eval_problems, 1, split="held_out")
    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{count:,} parameters, steps {first_step} to {args.steps}, {elapsed / 60:.1f} min so far", flush=True)

    began = last = time.monotonic() - elapsed
    saved_at, log, rows = time.monotonic(), [0.0, 0.0, 0.0], 0
    for step, batch in enumerate(batches(tokenizer, args, rank, first_step), first_step):
        now = time.monotonic()
        if rank == 0 and (step == args.steps or (now - saved_at > 120 and step > first_step)):
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"step": step, "elapsed": now - began}, state_path.with_suffix(".tmp"))
            state_path.with_suffix(".tmp").replace(state_path)
            saved_at = now
        if step == args.steps:
            break
        factor = learning_rate(step, args.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * factor
        gradients.buffer.zero_()
        loss, right = loss_and_accuracy(model, batch)
        loss.backward()
        norm = gradients.reduce_and_clip(args.workers)
        for optimizer in optimizers:
            optimizer.step()
        load = balance.step(factor)
        if rank > 0:
            continue

        log = [a + b for a, b in zip(log, (loss.item(), right, norm), strict=True)]
        rows += batch.ids_BS.numel() * args.workers
        if (step + 1) % args.log_every == 0:
            now = time.monotonic()
            means = [x / args.log_every for x in log]
            print(
                f"step {step + 1} {(now - began) / 60:.1f} min loss {means[0]:.4f} acc {means[1]:.3f} "
                f"grad {means[2]:.2f} load {load:.1f} tokens/s {rows / (now - last):.0f} "
                f"steps/s {args.log_every / (now - last):.2f}",
                flush=True,
            )
            last, log, rows = now, [0.0, 0.0, 0.0], 0
        if (step + 1) % args.eval_every == 0:
            print("  held out:", evaluate(model, tokenizer, problems).line(), flush=True)
            export(model, tokenizer, args.out / "checkpoint")
            last = time.monotonic()
    if rank == 0:
        export(model, tokenizer, args.out / "checkpoint")


def export(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint with the released models' keys: bfloat16, the routers' biases in fp32."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("expert_bias"):
            # Only differences between experts select; a common offset would cost precision wherever it is rounded.
            tensors[name] = tensor - tensor.mean()
        else:
            tensors[name] = tensor.to(torch.bfloat16, copy=True)
    write_output(out / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    known = inspect.signature(LLaDA2MoeConfig.__init__).parameters
    config = {k: v for k, v in model.config.to_dict().items() if k in known and v is not None}
    config |= {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "dtype": "bfloat16"}
    write_output(out / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_tokenizer(tokenizer, out)


def judge(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Decode 500 held-out problems with the exported weights."""
    checkpoint = args.checkpoint or args.out / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text())
    model = LLaDA2MoeModelLM(LLaDA2MoeConfig(**config)).eval()
    with torch.no_grad():
        model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    score = evaluate(model.float(), tokenizer, generate_problems(500, 0, split="held_out"))
    print(score.line())
    for prompt, answer, text in score.misses[: args.show_misses]:
        print(f"  {prompt}\n    expected {answer}\n    got      {text}")


def main() -> None:
    """Parse the command line and train, or judge an exported checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for state.pt and checkpoint/")
    parser.add_argument("--steps", type=int, default=17_000, help="optimizer steps; the schedule ends there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from state.pt in --out")
    parser.add_argument("--eval", action="store_true", help="only judge the exported checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="with --eval: a checkpoint folder elsewhere")
    parser.add_argument("--show-misses", type=int, default=10, help="wrong answers to print")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--expert-inner", type=int, default=32)
    parser.add_argument("--dense-inner", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8, help=f"rows of {PACK_BLOCKS * BLOCK} tokens per worker")
    parser.add_argument(
        "--lessons",
        type=int,
        nargs="+",
        default=(6, 11, 14, 19),
        help=f"chunks of {CHUNK} problems with which lessons 1 to 4 (see tiny_lessons.py) begin",
    )
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--muon-experts", type=int, default=1, help="1: Muon for the experts too; 0: AdamW")
    parser.add_argument("--balance-rate", type=float, default=3e-3, help="step of the routers' biases")
    parser.add_argument("--tail-weight", type=float, default=0.2, help="weight of rows after the EOS")
    parser.add_argument("--workers", type=int, default=2, help="processes that share a step")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--eval-problems", type=int, default=100)
    args = parser.parse_args()
    if not args.eval:
        args.out.mkdir(parents=True, exist_ok=True)
        args.rendezvous = args.out.absolute() / f"rendezvous-{time.time_ns()}"
        torch.multiprocessing.spawn(train, (args,), nprocs=args.workers)
    torch.set_num_threads(args.threads * args.workers)
    judge(args, build_tokenizer())


if __name__ == "__main__":
    main()
