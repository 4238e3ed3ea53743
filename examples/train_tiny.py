"""Train the tiny LLaDA2-style checkpoint that ships with the library, on two CPU cores.

    python examples/train_tiny.py --out runs/tiny          # train, evaluate now and then, export at the end
    python examples/train_tiny.py --out runs/tiny --resume # go on after an interruption
    python examples/train_tiny.py --out runs/tiny --eval   # judge what was exported

The model is a LLaDA2 in miniature (group-limited sigmoid router with a bias, shared expert, first layer dense), the data are
worked answers to small problems (`epoch_moe.problems`), and the objective is that of block diffusion: a noisy copy of each
answer block sees itself and clean copies of the blocks before it.

Shape suffixes: B packs or sequences, S rows of one, N blocks of one (S = 32 N), H hidden, V vocabulary, E experts, K top-k.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.problems import (
    EOS_TOKEN,
    KINDS,
    MAX_TOKENS,
    TOKEN_PATTERN,
    Problem,
    check,
    generate_problems,
    vocabulary,
)

BLOCK = 32
MAX_BLOCKS = MAX_TOKENS // BLOCK
PACK_BLOCKS = 6
"""Blocks in one training row: 192 rows hold one to six problems' clean and noisy blocks."""
CHUNK = 20_000
"""Problems generated and packed at a time; every chunk is new, so no problem is trained on twice on purpose."""


# ---------------------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer() -> Tokenizer:
    """Word-level tokenizer whose decode gives back the exact text; special tokens come last, as in the released models."""
    words = vocabulary()
    special = ["<unk>", EOS_TOKEN, "<mask>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*words, *special])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4 and 5 both read."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_TOKENS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Packs:
    """Problems laid out as blocks of 32 rows, several problems to a row of `PACK_BLOCKS` blocks.

    Attributes:
        ids_MNS: tokens of M problems, ``[M, MAX_BLOCKS, 32]``, filled up with EOS.
        prompt_M, total_M: tokens of the prompt; of prompt, answer and EOS.
        problem_PN, block_PN: which problem and which of its blocks lies in each place of P packs; -1 where empty.
        noisy_PN: True for the copy that gets masked.
    """

    ids_MNS: Tensor
    prompt_M: Tensor
    total_M: Tensor
    problem_PN: Tensor
    block_PN: Tensor
    noisy_PN: Tensor


def encode(problems: list[Problem], tokenizer: Tokenizer) -> tuple[Tensor, Tensor, Tensor]:
    """``ids [M, MAX_TOKENS]``, prompt lengths ``[M]`` and total lengths ``[M]`` (with one EOS)."""
    eos = tokenizer.token_to_id(EOS_TOKEN)
    prompts = tokenizer.encode_batch_fast([p.prompt for p in problems])
    answers = tokenizer.encode_batch_fast([p.answer for p in problems])
    rows, prompt_lens, total_lens = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt.ids + answer.ids
        if len(ids) >= MAX_TOKENS:
            raise ValueError(f"a problem takes {len(ids)} tokens; {MAX_TOKENS - 1} fit beside the EOS")
        rows.append(ids + [eos] * (MAX_TOKENS - len(ids)))
        prompt_lens.append(len(prompt.ids))
        total_lens.append(len(ids) + 1)
    return torch.tensor(rows), torch.tensor(prompt_lens), torch.tensor(total_lens)


def pack(problems: list[Problem], tokenizer: Tokenizer) -> Packs:
    """Place the blocks that training needs: clean copies of all but the last block, noisy ones of all answer blocks."""
    ids_MS, prompt_M, total_M = encode(problems, tokenizer)
    places: list[list[tuple[int, int, bool]]] = []
    open_packs: list[list[tuple[int, int, bool]]] = []
    for index, (prompt_len, total_len) in enumerate(zip(prompt_M.tolist(), total_M.tolist(), strict=True)):
        first, count = prompt_len // BLOCK, -(-total_len // BLOCK)
        blocks = [(index, j, False) for j in range(count - 1)] + [(index, j, True) for j in range(first, count)]
        for slot, row in enumerate(open_packs):
            if len(row) + len(blocks) <= PACK_BLOCKS:
                row.extend(blocks)
                if len(row) == PACK_BLOCKS:
                    places.append(open_packs.pop(slot))
                break
        else:
            open_packs.append(blocks)
            if len(open_packs) > 32:
                places.append(open_packs.pop(0))
    places.extend(open_packs)
    table = torch.tensor([row + [(-1, 0, False)] * (PACK_BLOCKS - len(row)) for row in places])  # [P, N, 3]
    problem_PN, block_PN, noisy_PN = table.unbind(-1)
    return Packs(ids_MS.view(-1, MAX_BLOCKS, BLOCK), prompt_M, total_M, problem_PN, block_PN, noisy_PN.bool())


@dataclass(frozen=True)
class Batch:
    """One training batch: ``ids_BS`` with masks, ``targets_BS``, ``weight_BS`` (0 outside masked answer rows)."""

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    mask_B1SS: Tensor
    weight_BS: Tensor


def noise(answer_NS: Tensor, generator: torch.Generator) -> Tensor:
    """Which answer rows of N noisy blocks to mask: bool ``[N, 32]``.

    Half of the blocks mask every row with the same probability t. The other half look like the states that decoding meets:
    nearly everything before a frontier is known, nearly everything after it is not.
    """
    count, size = answer_NS.shape

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    uniform_NS = rand(count, 1).expand(count, size)
    first_N1 = answer_NS.float().argmax(1, keepdim=True)
    frontier_N1 = first_N1 + rand(count, 1) * (size - first_N1)
    before_N1 = torch.where(rand(count, 1) < 0.5, 0.0, 0.2 * rand(count, 1))
    after_N1 = torch.where(rand(count, 1) < 0.5, 1.0, 0.6 + 0.4 * rand(count, 1))
    staged_NS = torch.where(torch.arange(size) < frontier_N1.floor(), before_N1, after_N1)
    prob_NS = torch.where(rand(count, 1) < 0.5, uniform_NS, staged_NS)
    return answer_NS & (rand(count, size) < prob_NS)


def make_batch(packs: Packs, rows: Tensor, mask_id: int, tail_weight: float, generator: torch.Generator) -> Batch:
    """Tokens, noise, positions and attention mask of the packs `rows`."""
    problem_BN, block_BN, noisy_BN = packs.problem_PN[rows], packs.block_PN[rows], packs.noisy_PN[rows]
    used_BN = problem_BN >= 0
    targets_BNS = packs.ids_MNS[problem_BN.clamp_min(0), block_BN]
    positions_BNS = block_BN.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)

    prompt_BN1 = packs.prompt_M[problem_BN.clamp_min(0)].unsqueeze(-1)
    total_BN1 = packs.total_M[problem_BN.clamp_min(0)].unsqueeze(-1)
    answer_BNS = (positions_BNS >= prompt_BN1) & (used_BN & noisy_BN).unsqueeze(-1)
    masked_BNS = torch.zeros_like(answer_BNS)
    masked_BNS[noisy_BN] = noise(answer_BNS[noisy_BN], generator)

    # A block counts by its answer rows, however few of them are masked: 1/t of the usual objective, with the share that
    # was really masked in place of t, and bounded.
    row_weight_BNS = torch.where(positions_BNS < total_BN1, 1.0, tail_weight) * answer_BNS
    share_BN1 = masked_BNS.sum(-1, keepdim=True) / answer_BNS.sum(-1, keepdim=True).clamp_min(1)
    weight_BNS = row_weight_BNS * masked_BNS / share_BN1.clamp_min(0.15)

    same_BNN = problem_BN.unsqueeze(2) == problem_BN.unsqueeze(1)
    query_BN1, key_B1N = block_BN.unsqueeze(2), block_BN.unsqueeze(1)
    query_noisy_BN1, key_noisy_B1N = noisy_BN.unsqueeze(2), noisy_BN.unsqueeze(1)
    own_BNN = (query_BN1 == key_B1N) & (query_noisy_BN1 == key_noisy_B1N)
    before_BNN = (key_B1N < query_BN1) & ~key_noisy_B1N
    see_BNN = same_BNN & (own_BNN | before_BNN)
    mask_BSS = see_BNN.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return Batch(
        targets_BNS.masked_fill(masked_BNS, mask_id).flatten(1),
        targets_BNS.flatten(1),
        positions_BNS.flatten(1),
        mask_BSS.unsqueeze(1),
        (weight_BNS / row_weight_BNS.sum()).flatten(1),
    )


def batches(tokenizer: Tokenizer, batch: int, seed: int, first_step: int, tail_weight: float) -> Iterator[Batch]:
    """Endless batches; batch number `first_step` is the same whether or not the ones before it were made."""
    mask_id = tokenizer.token_to_id("<mask>")
    step, chunk = 0, 0
    while True:
        packs = pack(generate_problems(CHUNK, seed * 100_003 + chunk, split="train"), tokenizer)
        order = torch.randperm(len(packs.problem_PN), generator=torch.Generator().manual_seed(chunk))
        for rows in order.split(batch)[:-1]:
            if step >= first_step:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
                yield make_batch(packs, rows, mask_id, tail_weight, generator)
            step += 1
        chunk += 1


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
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_cache=False,
        mask_token_id=tokenizer.token_to_id("<mask>"),
        eos_token_id=eos,
        pad_token_id=eos,
    )


class RouterBalance:
    """Counts the pairs of each expert and nudges the routers' selection bias towards equal counts (no auxiliary loss)."""

    def __init__(self, model: nn.Module, rate: float):
        self.rate = rate
        self.counts: dict[nn.Module, Tensor] = {}
        for layer in model.model.layers:  # type: ignore[union-attr]
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._count)

    def _count(self, gate: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        if gate.training:
            counts_E = torch.bincount(output[0].flatten(), minlength=gate.expert_bias.numel())  # type: ignore[operator]
            self.counts[gate] = self.counts.get(gate, 0) + counts_E

    @torch.no_grad()
    def step(self) -> float:
        """Move every bias by `rate` and return the worst load: the fullest expert's pairs over the mean."""
        worst = 0.0
        for gate, counts_E in self.counts.items():
            mean = counts_E.float().mean()
            gate.expert_bias += self.rate * torch.sign(mean - counts_E)  # type: ignore[operator]
            worst = max(worst, float(counts_E.max() / mean))
        self.counts.clear()
        return worst


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for matrices ``[M,N]`` and stacks of matrices ``[E,M,N]``.

    Matrices of one shape are orthogonalised together: on a CPU the small products cost more to start than to compute.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient are left alone."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape[-2:]].append(param)
            for shape, params in by_shape.items():
                updates = []
                for param in params:
                    state = self.state[param]
                    if not state:
                        state["momentum"] = torch.zeros_like(param)
                    state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                    updates.append(param.grad.lerp(state["momentum"], group["momentum"]).reshape(-1, *shape))
                # The factor gives an update the root mean square of an AdamW step, so that both share one learning rate.
                scale = -group["lr"] * 0.2 * max(shape) ** 0.5
                orthogonal = self._orthogonalise(torch.cat(updates)).split([len(u) for u in updates])
                for param, update in zip(params, orthogonal, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update.reshape(param.shape), alpha=scale)

    @staticmethod
    def _orthogonalise(x_EMN: Tensor) -> Tensor:
        """Five Newton-Schulz steps towards the nearest matrix with all singular values one."""
        tall = x_EMN.shape[-2] > x_EMN.shape[-1]
        x_EMN = x_EMN.mT if tall else x_EMN
        x_EMN = x_EMN / (x_EMN.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = x_EMN @ x_EMN.mT
            x_EMN = 3.4445 * x_EMN + (-4.7750 * gram + 2.0315 * gram @ gram) @ x_EMN
        return x_EMN.mT if tall else x_EMN


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
            f"exact {sum(right) / len(right):.1%} of {len(right)}, {tokens / forwards:.2f} tokens/forward | {', '.join(parts)}"
            f" | experts per block: first forward {cold}, all forwards {mean}"
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
    positions_S = torch.arange(MAX_TOKENS)
    ids_BS = torch.where(positions_S < prompt_B.unsqueeze(1), full_BS, mask_id)
    block_S = positions_S // BLOCK
    mask_11SS = (block_S.unsqueeze(1) >= block_S)[None, None]
    block_B, forwards_B = prompt_B // BLOCK, torch.zeros_like(prompt_B)
    cold_B = torch.ones_like(prompt_B, dtype=torch.bool)
    counts_cold, counts_all = [], []
    active_B = torch.ones_like(cold_B)
    while active_B.any():
        rows = active_B.nonzero().squeeze(1)
        ids_AS = ids_BS[rows]
        chosen.clear()
        hidden = model.model(
            input_ids=ids_AS, attention_mask=mask_11SS, position_ids=positions_S.expand_as(ids_AS)
        ).last_hidden_state
        own_AS = block_S == block_B[rows].unsqueeze(1)
        probs, tokens = model.lm_head(hidden[own_AS]).float().softmax(-1).max(-1)  # type: ignore[operator]
        ids_AN = ids_AS[own_AS].view(-1, BLOCK)
        masked_AN = ids_AN == mask_id
        conf_AN = probs.view(-1, BLOCK).masked_fill(~masked_AN, -1.0)
        take_AN = (conf_AN > threshold) | (conf_AN == conf_AN.amax(1, keepdim=True))
        ids_AN = torch.where(take_AN & masked_AN, tokens.view(-1, BLOCK), ids_AN)
        ids_AS[own_AS] = ids_AN.flatten()
        ids_BS[rows] = ids_AS
        forwards_B[rows] += 1

        used = []
        for topk_TK in chosen:
            used_ANE = F.one_hot(topk_TK.view(len(rows), MAX_TOKENS, -1)[own_AS], num_experts).view(len(rows), -1, num_experts)
            used.append((used_ANE.sum(1) > 0).sum(-1).float())
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
    for problem, ids, start, forwards in zip(problems, ids_BS.tolist(), prompt_B.tolist(), forwards_B.tolist(), strict=True):
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


def make_optimizers(model: nn.Module, experts: list[nn.Parameter], args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states (experts included), AdamW for embeddings, head, gates and norms."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    adam = [p for n, p in named if p.dim() < 2 or any(k in n for k in ("word_embeddings", "lm_head", "mlp.gate."))]
    muon = [p for _, p in named if all(p is not q for q in adam)]
    (muon if args.muon_experts else adam).extend(experts)
    return [
        Muon(muon, args.lr),
        torch.optim.AdamW(adam, args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float, warmup: float = 0.02) -> float:
    """Factor on the learning rate: short linear warm-up, level, then linear decay to zero."""
    return min(progress / warmup, 1.0, (1.0 - progress) / 0.5)


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


def train(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Train, print a line now and then, keep `state.pt` for --resume and export at the end."""
    torch.manual_seed(args.seed)
    model = LLaDA2MoeModelLM(make_config(tokenizer, args)).float().train()
    experts = stack_for_training(model)
    optimizers = make_optimizers(model, experts, args)
    balance = RouterBalance(model, args.balance_rate)
    state_path = args.out / "state.pt"
    first_step, elapsed = 0, 0.0
    if args.resume and state_path.exists():
        state = torch.load(state_path, weights_only=True)
        with torch.no_grad():
            model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step, elapsed = state["step"], state["elapsed"]
        print(f"resumed at step {first_step} after {elapsed / 60:.1f} min", flush=True)
    problems = generate_problems(args.eval_problems, 1, split="held_out")
    count = sum(p.numel() for n, p in model.named_parameters())
    print(f"{count:,} parameters, {args.steps} steps", flush=True)

    began = last = time.monotonic() - elapsed
    saved_at, log, rows = time.monotonic(), [0.0, 0.0, 0.0], 0
    for step, batch in enumerate(batches(tokenizer, args.batch, args.seed, first_step, args.tail_weight), first_step):
        progress = max(step / args.steps, (time.monotonic() - began) / 60 / args.minutes if args.minutes else 0.0)
        finished = progress >= 1
        if finished or (time.monotonic() - saved_at > 120 and step > first_step):
            saved_at = time.monotonic()
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "elapsed": saved_at - began,
            }
            torch.save(state, state_path.with_suffix(".tmp"))
            state_path.with_suffix(".tmp").replace(state_path)
        if finished:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate(progress)
        loss, right = loss_and_accuracy(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_([p for o in optimizers for g in o.param_groups for p in g["params"]], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        load = balance.step()

        log = [a + b for a, b in zip(log, (loss.item(), right, norm.item()), strict=True)]
        rows += batch.ids_BS.numel()
        if (step + 1) % args.log_every == 0:
            now = time.monotonic()
            means = [x / args.log_every for x in log]
            print(
                f"step {step + 1} {(now - began) / 60:.1f} min loss {means[0]:.4f} acc {means[1]:.3f} grad {means[2]:.2f} "
                f"load {load:.1f} rows/s {rows / (now - last):.0f} steps/s {args.log_every / (now - last):.2f}",
                flush=True,
            )
            last, log, rows = now, [0.0, 0.0, 0.0], 0
        if (step + 1) % args.eval_every == 0:
            print("  held out:", evaluate(model, tokenizer, problems).line(), flush=True)
            export(model, tokenizer, args.out / "checkpoint")
            last = time.monotonic()
    export(model, tokenizer, args.out / "checkpoint")
    judge(args, tokenizer)


def export(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint with the released models' keys: bfloat16, the routers' biases in fp32."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor if name.endswith("expert_bias") else tensor.to(torch.bfloat16)).contiguous().clone()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    config |= {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
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
    parser.add_argument("--steps", type=int, default=12_000, help="optimizer steps; the schedule ends there")
    parser.add_argument("--minutes", type=float, help="end earlier, with the schedule stretched over this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from state.pt in --out")
    parser.add_argument("--eval", action="store_true", help="only judge the exported checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="with --eval: a checkpoint folder elsewhere")
    parser.add_argument("--show-misses", type=int, default=10, help="wrong answers to print")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--expert-inner", type=int, default=32)
    parser.add_argument("--dense-inner", type=int, default=384)
    parser.add_argument("--batch", type=int, default=16, help=f"rows of {PACK_BLOCKS * BLOCK} tokens per step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--muon-experts", type=int, default=1, help="1: Muon for the experts too; 0: AdamW")
    parser.add_argument("--balance-rate", type=float, default=1e-3, help="step of the routers' biases")
    parser.add_argument("--tail-weight", type=float, default=0.2, help="weight of rows after the EOS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--eval-problems", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    if args.eval:
        judge(args, tokenizer)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, tokenizer)


if __name__ == "__main__":
    main()
