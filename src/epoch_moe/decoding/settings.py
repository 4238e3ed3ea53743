"""Arguments of block diffusion, checked once before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epoch_moe.checks import flag, in_vocabulary, real, special_ids, whole
from epoch_moe.decoding.commit import transfer_schedule


@dataclass(frozen=True)
class BlockDiffusionSettings:
    """Checked arguments of `generate`; the fields have the meaning documented there.

    Attributes:
        schedule: rows that the n-th iteration of a block must at least commit.
        mask_id: id of undecoded positions.
        eos_ids: ids that end an answer.
        pad_id: fills left padding and the tails of shorter answers.
        delete_id, split_id: ids by which the model edits a block (LLaDA2.2); None where it does not.
    """

    gen_length: int
    block_length: int
    schedule: tuple[int, ...]
    threshold: float
    editing_threshold: float | None
    max_post_steps: int
    num_to_transfer: int
    temperature: float
    top_k: int | None
    top_p: float | None
    eos_early_stop: bool
    prefill_chunk: int
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    delete_id: int | None
    split_id: int | None


def check_settings(
    model: Any,
    vocab_size: int,
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    threshold: float | None,
    editing_threshold: float | None,
    max_post_steps: int,
    num_to_transfer: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_early_stop: bool,
    minimal_topk: int,
    eos_token_id: int | Sequence[int] | None,
    mask_token_id: int | None,
    prefill_chunk: int,
) -> BlockDiffusionSettings:
    """Check the arguments of `generate` against each other and against the model's configuration.

    Raises:
        ValueError: an argument is out of range, or an id is neither given nor in the configuration.
        TypeError: an argument that must be a whole number is not.
    """
    config = model.config
    gen_length = in_context(config, "gen_length", gen_length, "the number of tokens to generate")
    block_length = in_context(config, "block_length", block_length, "positions of a block; released models use 32")
    steps = whole("steps", steps, "the iterations per block", least=1)
    minimal_topk = whole("minimal_topk", minimal_topk, "it caps steps at gen_length // minimal_topk", least=1)
    prefill_chunk = whole("prefill_chunk", prefill_chunk, "the prompt positions per prefill forward", least=1)
    if minimal_topk > gen_length:
        raise ValueError(
            f"minimal_topk={minimal_topk} with gen_length={gen_length} leaves no iteration (steps are capped at "
            "gen_length // minimal_topk): lower minimal_topk to at most gen_length"
        )
    num_to_transfer = whole("num_to_transfer", num_to_transfer, "the masks that an iteration fills at least", least=1)
    max_post_steps = whole("max_post_steps", max_post_steps, "the number of iterations after the last mask")
    delete_id = split_id = None
    if editing_threshold is not None:
        editing_threshold = real(
            "editing_threshold",
            editing_threshold,
            "a probability: None (committed tokens stay) or a number from 0 (rewrite whenever another token is more "
            "probable) to 1 (never)",
            most=1.0,
        )
        delete_id, split_id = _edit_ids(config, vocab_size)
    if threshold is None:
        threshold = 0.95 if delete_id is None else 0.5
    threshold = real(
        "threshold",
        threshold,
        "a probability: a number from 0 (commit every row at once) to 1 (follow the schedule)",
        most=1.0,
    )
    temperature = real("temperature", temperature, "0 (greedy) or a positive finite number")
    if top_k is not None:
        top_k = whole("top_k", top_k, "None or 0 keeps all tokens")
    if top_p is not None:
        top_p = real("top_p", top_p, "None (keep all) or a number above 0 and up to 1", most=1.0, above=True)
    pool_rows = getattr(config, "block_size", None) if getattr(config, "expert_capacity", None) else None
    if pool_rows and block_length % pool_rows:
        raise ValueError(
            f"block_length={block_length}: this model routes in pools of block_size={pool_rows} rows that must not "
            f"straddle blocks; use block_length={pool_rows}"
        )
    eos_ids, mask_id, pad_id = special_ids(model, vocab_size, eos_token_id, mask_token_id)
    if delete_id is not None and len({delete_id, split_id, mask_id, *eos_ids}) < 3 + len(set(eos_ids)):
        raise ValueError(
            f"config.delete_token_id={delete_id}, config.split_token_id={split_id}, mask_token_id={mask_id} and "
            f"eos_token_id={eos_ids}: expected different ids"
        )
    return BlockDiffusionSettings(
        gen_length=gen_length,
        block_length=block_length,
        schedule=tuple(transfer_schedule(block_length, min(steps, gen_length // minimal_topk))),
        threshold=threshold,
        editing_threshold=editing_threshold,
        max_post_steps=max_post_steps,
        num_to_transfer=num_to_transfer,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_early_stop=flag("eos_early_stop", eos_early_stop),
        prefill_chunk=prefill_chunk,
        mask_id=mask_id,
        eos_ids=eos_ids,
        pad_id=pad_id,
        delete_id=delete_id,
        split_id=split_id,
    )


def in_context(config: Any, name: str, value: Any, meaning: str) -> int:
    """A number of positions that fits into the model's context."""
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        return whole(name, value, meaning, least=1)
    return whole(name, value, f"{meaning}; the model's max_position_embeddings={context}", least=1, most=context)


def _edit_ids(config: Any, vocab_size: int) -> tuple[int | None, int | None]:
    """DELETE and SPLIT of a model that writes them (LLaDA2.2), else None."""
    ids = [getattr(config, name, None) for name in ("delete_token_id", "split_token_id")]
    if ids == [None, None]:
        return None, None
    if None in ids:
        raise ValueError(
            f"the config has delete_token_id={ids[0]} and split_token_id={ids[1]}: a model that edits by such ids has "
            "both; set the missing one, or both to None"
        )
    delete_id = in_vocabulary("config.delete_token_id", ids[0], vocab_size)
    return delete_id, in_vocabulary("config.split_token_id", ids[1], vocab_size)
