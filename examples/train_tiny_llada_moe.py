"""Train the tiny LLaDA-MoE checkpoint that ships with the library, on two CPU cores.

    python examples/train_tiny_llada_moe.py --out runs/moe          # train, evaluate now and then, export at the end
    python examples/train_tiny_llada_moe.py --out runs/moe --resume # go on after an interruption
    python examples/train_tiny_llada_moe.py --out runs/moe --eval   # judge what was exported

The model is a LLaDA-MoE in miniature: softmax router, no shared expert, bidirectional attention over a fixed canvas of
prompt and answer. The problems are those of `train_tiny.py`; the objective is that of LLaDA: answer tokens are masked
at random, and the model predicts them from both sides.

Shape suffixes: B sequences, S canvas rows, N answer rows, R masked rows, T = B x S, H hidden, E experts, K top-k.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tiny_data import build_tokenizer, encode, noise, save_tokenizer
from tiny_lessons import lesson_problems
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_tiny import FlatGradients, grouped_experts, learning_rate, make_optimizers

from epoch_moe.models.llada_moe import LLaDAMoEConfig, LLaDAMoEModelLM, LLaDAMoESparseMoeBlock
from epoch_moe.outputs import write_output
from epoch_moe.problems import EOS_TOKEN, KINDS, Problem, check, generate_problems

ANSWER = 32
"""Rows of the answer on the canvas; what the answer leaves free is filled with end tokens."""
CHUNK = 20_000
"""Problems generated at a time; every chunk is new."""


def make_config(tokenizer: Tokenizer, args: argparse.Namespace) -> LLaDAMoEConfig:
    """A LLaDA-MoE configuration with the official keys."""
    eos = tokenizer.token_to_id(EOS_TOKEN)
    return LLaDAMoEConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 16) * 16,
        hidden_size=128,
        dense_intermediate_size=384,
        expert_intermediate_size=args.expert_inner,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=512,
        rope_theta=10_000,
        mask_token_id=tokenizer.token_to_id("<mask>"),
        eos_token_id=eos,
        pad_token_id=eos,
    )


class RouterBalance:
    """The auxiliary loss that keeps experts in use: experts x sum of (share of pairs x mean probability), per layer."""

    def __init__(self) -> None:
        self.terms: list[Tensor] = []
        self.worst = 0.0

    def add(self, probs_TE: Tensor, ids_TK: Tensor) -> None:
        """Record one layer's routing of one forward."""
        num_experts = probs_TE.shape[1]
        share_E = ids_TK.flatten().bincount(minlength=num_experts) / ids_TK.numel()
        self.terms.append(num_experts * (share_E * probs_TE.mean(0)).sum())
        self.worst = max(self.worst, float(share_E.max()) * num_experts)

    def take(self) -> Tensor:
        """The loss of the forward, mean over layers; forgets it."""
        loss = torch.stack(self.terms).mean()
        self.terms.clear()
        return loss


def stack_for_training(model: nn.Module, balance: RouterBalance) -> list[nn.Parameter]:
    """Make every MoE layer train on stacked expert weights (see `train_tiny.stack_for_training`), and return those."""
    stacked_params: list[nn.Parameter] = []
    for block in model.modules():
        if not isinstance(block, LLaDAMoESparseMoeBlock):
            continue
        for expert_param in block.experts.parameters():
            expert_param.requires_grad_(False)
        stacked = block._weights.ensure()
        gate_up_E2FH, down_EHF = nn.Parameter(stacked.gate_up_E2FH), nn.Parameter(stacked.down_EHF)
        stacked_params += [gate_up_E2FH, down_EHF]

        def forward(
            x_BSH: Tensor,
            block: LLaDAMoESparseMoeBlock = block,
            gate_up_E2FH: Tensor = gate_up_E2FH,
            down_EHF: Tensor = down_EHF,
            library_forward: Any = block.forward,
        ) -> Tensor:
            if not torch.is_grad_enabled():
                return library_forward(x_BSH)
            x_TH = x_BSH.flatten(0, 1)
            probs_TE = block.gate(x_TH).softmax(-1)
            weights_TK, ids_TK = probs_TE.topk(block.top_k, dim=-1)
            balance.add(probs_TE, ids_TK)
            return grouped_experts(x_TH, ids_TK, weights_TK, gate_up_E2FH, down_EHF).view_as(x_BSH)

        block.forward = forward  # type: ignore[method-assign]
    return stacked_params


def canvases(problems: list[Problem], tokenizer: Tokenizer) -> dict[int, tuple[Tensor, Tensor]]:
    """Problems by prompt length P: canvases ``[M, P + ANSWER]`` and the rows ``[M]`` behind the answer's end token."""
    ids_MS, prompt_M, total_M = encode(problems, tokenizer)
    by_length: dict[int, tuple[Tensor, Tensor]] = {}
    for length in prompt_M.unique().tolist():
        rows = ((prompt_M == length) & (total_M <= length + ANSWER)).nonzero().squeeze(1)
        if len(rows):
            by_length[length] = ids_MS[rows, : length + ANSWER], total_M[rows]
    return by_length


def batches(tokenizer: Tokenizer, args: argparse.Namespace, rank: int, first_step: int) -> Iterator[Any]:
    """Endless ``(prompt length, canvas ids, masked canvas ids, weights)`` of one worker.

    Canvases of one length make a batch, so that nothing is padded.
    """
    mask_id, size = tokenizer.token_to_id("<mask>"), args.batch * args.workers
    step, chunk = 0, 0
    while True:
        if chunk < args.mixed_chunks:
            problems = lesson_problems(CHUNK, args.seed * 100_003 + chunk, 4)
        else:
            problems = generate_problems(CHUNK, args.seed * 100_003 + chunk, split="train")
        by_length = canvases(problems, tokenizer)
        generator = torch.Generator().manual_seed(args.seed * 7_919 + chunk)
        groups = []
        for length, (ids_MS, _) in by_length.items():
            order = torch.randperm(len(ids_MS), generator=generator)
            groups += [(length, rows) for rows in order.split(size) if len(rows) == size]
        for group in torch.randperm(len(groups), generator=generator).tolist():
            if step >= first_step:
                length, rows = groups[group]
                rows = rows[rank :: args.workers]
                ids_BS, total_B = by_length[length][0][rows], by_length[length][1][rows]
                generator_own = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * args.workers + rank)
                masked_BN = noise(torch.ones(len(rows), ANSWER, dtype=torch.bool), generator_own)
                tail_BN = torch.arange(length, length + ANSWER) >= total_B.unsqueeze(1)
                row_weight_BN = torch.where(tail_BN, args.tail_weight, 1.0)
                share_B1 = masked_BN.float().mean(1, keepdim=True)
                weight_BN = row_weight_BN * masked_BN / share_B1.clamp_min(0.15)
                masked_BS = F.pad(masked_BN, (length, 0))
                noisy_BS = ids_BS.masked_fill(masked_BS, mask_id)
                yield ids_BS, noisy_BS, F.pad(weight_BN / row_weight_BN.sum(), (length, 0))
            step += 1
        chunk += 1


@torch.no_grad()
def evaluate(
    model: nn.Module, tokenizer: Tokenizer, problems: list[Problem], block_length: int, steps: int
) -> tuple[str, list[tuple[Problem, str]]]:
    """Greedy low-confidence decoding, as the released loop does it; a line of results, and the wrong answers."""
    was_training = model.training
    model.eval()
    mask_id = tokenizer.token_to_id("<mask>")
    by_length: dict[int, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_length[len(tokenizer.encode(problem.prompt).ids)].append(problem)
    right: dict[str, list[bool]] = defaultdict(list)
    misses = []
    per_block = steps * block_length // ANSWER
    need = block_length // per_block
    for length, group in by_length.items():
        ids_MS, _, _ = encode(group, tokenizer)
        ids_BS = ids_MS[:, : length + ANSWER].clone()
        ids_BS[:, length:] = mask_id
        for end in range(length + block_length, length + ANSWER + 1, block_length):
            for _ in range(per_block):
                conf_BS, token_BS = model(input_ids=ids_BS).logits.softmax(-1).max(-1)
                conf_BS = conf_BS.masked_fill(ids_BS != mask_id, -1.0)
                conf_BS[:, end:] = -1.0
                best_BN = conf_BS.topk(need, dim=1).indices
                ids_BS.scatter_(1, best_BN, token_BS.gather(1, best_BN))
        for problem, ids in zip(group, ids_BS[:, length:].tolist(), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            right[problem.kind].append(check(problem, text))
            if not right[problem.kind][-1]:
                misses.append((problem, text.split(EOS_TOKEN, 1)[0]))
    model.train(was_training)
    everything = [r for kind in right.values() for r in kind]
    parts = [f"{kind} {sum(right[kind]) / len(right[kind]):.1%}" for kind in KINDS if kind in right]
    line = (
        f"exact {sum(everything) / len(everything):.1%} of {len(everything)} at {ANSWER / steps:.0f} tokens/forward, "
        f"blocks of {block_length} | {', '.join(parts)}"
    )
    return line, misses


def train(rank: int, args: argparse.Namespace) -> None:
    """One worker: train, and on rank 0 print a line now and then, keep `state.pt` for --resume and export."""
    torch.set_num_threads(args.threads)
    if args.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=args.workers)
    tokenizer = build_tokenizer()
    torch.manual_seed(args.seed)
    model = LLaDAMoEModelLM(make_config(tokenizer, args)).float().train()
    with torch.no_grad():  # rare words are not learnt from embeddings that start far below the layers' outputs
        model.model.embed_tokens.weight.normal_(std=args.embedding_std)
    balance = RouterBalance()
    experts = stack_for_training(model, balance)
    optimizers = make_optimizers(model, experts, args)
    gradients = FlatGradients([p for o in optimizers for g in o.param_groups for p in g["params"]])
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
    saved_at, log = time.monotonic(), [0.0, 0.0, 0.0]
    for step, (ids_BS, noisy_BS, weight_BS) in enumerate(batches(tokenizer, args, rank, first_step), first_step):
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
        rows_BS = weight_BS > 0
        logits_RV = model.lm_head(model.model(input_ids=noisy_BS).last_hidden_state[rows_BS])
        targets_R, weight_R = ids_BS[rows_BS], weight_BS[rows_BS]
        loss = (F.cross_entropy(logits_RV, targets_R, reduction="none") * weight_R).sum()
        (loss + args.balance * balance.take()).backward()
        norm = gradients.reduce_and_clip(args.workers)
        for optimizer in optimizers:
            optimizer.step()
        if rank > 0:
            continue

        right = (((logits_RV.detach().argmax(-1) == targets_R) * weight_R).sum() / weight_R.sum()).item()
        log = [a + b for a, b in zip(log, (loss.item(), right, norm), strict=True)]
        if (step + 1) % args.log_every == 0:
            now = time.monotonic()
            means = [x / args.log_every for x in log]
            print(
                f"step {step + 1} {(now - began) / 60:.1f} min loss {means[0]:.4f} acc {means[1]:.3f} grad "
                f"{means[2]:.2f} load {balance.worst:.1f} steps/s {args.log_every / (now - last):.2f}",
                flush=True,
            )
            last, log, balance.worst = now, [0.0, 0.0, 0.0], 0.0
        if (step + 1) % args.eval_every == 0:
            for steps in (32, 16):
                print("  held out:", evaluate(model, tokenizer, problems, 16, steps)[0], flush=True)
            export(model, tokenizer, args.out / "checkpoint")
            last = time.monotonic()
    if rank == 0:
        export(model, tokenizer, args.out / "checkpoint")


def export(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint with the released models' keys, in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in model.state_dict().items()}
    write_output(out / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    known = inspect.signature(LLaDAMoEConfig.__init__).parameters
    config = {k: v for k, v in model.config.to_dict().items() if k in known}
    config |= {"architectures": ["LLaDAMoEModelLM"], "model_type": "lladamoe", "dtype": "bfloat16"}
    write_output(out / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_tokenizer(tokenizer, out)


def judge(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Decode 500 held-out problems with the exported weights."""
    checkpoint = args.checkpoint or args.out / "checkpoint"
    model = LLaDAMoEModelLM(LLaDAMoEConfig(**json.loads((checkpoint / "config.json").read_text()))).eval()
    with torch.no_grad():
        model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    problems = generate_problems(500, 0, split="held_out")
    for steps in (32, 16):
        line, misses = evaluate(model.float(), tokenizer, problems, 16, steps)
        print(line)
        for problem, text in misses[: args.show_misses]:
            print(f"  {problem.prompt}\n    expected {problem.answer}\n    got      {text}")


def main() -> None:
    """Parse the command line and train, or judge an exported checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for state.pt and checkpoint/")
    parser.add_argument("--steps", type=int, default=12_000, help="optimizer steps; the schedule ends there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from state.pt in --out")
    parser.add_argument("--eval", action="store_true", help="only judge the exported checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="with --eval: a checkpoint folder elsewhere")
    parser.add_argument("--show-misses", type=int, default=10, help="wrong answers to print")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--expert-inner", type=int, default=24)
    parser.add_argument("--batch", type=int, default=24, help="canvases per worker")
    parser.add_argument(
        "--mixed-chunks",
        type=int,
        default=20,
        help=f"chunks of {CHUNK} problems of the last lesson (see tiny_lessons.py) before those that are judged",
    )
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--muon-experts", type=int, default=1, help="1: Muon for the experts too; 0: AdamW")
    parser.add_argument("--embedding-std", type=float, default=0.3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the routers' auxiliary loss")
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
