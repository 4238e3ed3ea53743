"""Tokenizer and training batches for `train_tiny.py`.

Shape suffixes: M problems, P packs, B packs of one batch, N blocks of a pack or of a list, S rows (of a pack, or the 32
of a block where N stands before it).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_lessons import lesson_problems
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from epoch_moe.problems import EOS_TOKEN, GAINS, LOSSES, NAMES, OBJECTS, Problem

TOKEN_PATTERN = r" ?[a-z]+|[0-9]| |[^a-z0-9 ]"
"""Words with their leading space, digits, spaces and marks."""
MAX_TOKENS = 96
"""Prompt, answer and end-of-sequence token together."""
BLOCK = 32
MAX_BLOCKS = MAX_TOKENS // BLOCK
PACK_BLOCKS = 6
"""Blocks in one training row: 192 rows hold one to six problems' clean and noisy blocks."""
CHUNK = 20_000
"""Problems generated and packed at a time; every chunk is new, so no problem is trained on twice on purpose."""


# ---------------------------------------------------------------------------------------------------------- tokenizer


def vocabulary() -> list[str]:
    """Every token of the problems and of the lessons before them, in a fixed order, without special tokens."""
    starts = ("sum", "work", "totals", "sort", "reverse", *NAMES)
    words = ("out", "of", "so", "has", "and", "gives", "how", "many", "who", "what", "he", "she")
    inner = (*words, *NAMES, *OBJECTS, *GAINS, *LOSSES)
    return [*"0123456789", *" +-=:.?", *starts, *(f" {word}" for word in inner)]


def build_tokenizer() -> Tokenizer:
    """Word-level tokenizer whose decode gives back the exact text; special tokens come last, as in released models."""
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
        "model_input_names": ["input_ids", "attention_mask"],
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

    Half of the blocks mask every row with the same probability t. The other half look like the states that decoding
    meets: nearly everything before a frontier is known, nearly everything after it is not.
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


def batches(tokenizer: Tokenizer, args: argparse.Namespace, rank: int, first_step: int) -> Iterator[Batch]:
    """Endless batches of one worker; number `first_step` is the same whether or not the ones before it were made."""
    seed, size = args.seed, args.batch * args.workers
    mask_id = tokenizer.token_to_id("<mask>")
    step, chunk = 0, 0
    while True:
        lesson = sum(chunk >= first for first in args.lessons)
        packs = pack(lesson_problems(CHUNK, seed * 100_003 + chunk, lesson), tokenizer)
        order = torch.randperm(len(packs.problem_PN), generator=torch.Generator().manual_seed(chunk))
        for rows in order.split(size)[:-1]:
            if step >= first_step:
                generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * args.workers + rank)
                yield make_batch(packs, rows[rank :: args.workers], mask_id, args.tail_weight, generator)
            step += 1
        chunk += 1
