"""Arguments of the loops, checked once before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from epoch_moe.checks import MOST, choice, flag, in_vocabulary, real, special_ids, whole
from epoch_moe.decoding.commit import transfer_schedule
from epoch_moe.decoding.parts import ModelParts

Remasking = Literal["low_confidence", "random"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every loop is told. Fields without a line here have the meaning documented at the loop's function.

    Attributes:
        schedule: rows that the n-th iteration of a block must at least commit.
        stop_in_block: a sequence is done with a block as soon as its answer has ended there.
        drop_ended: a sequence whose answer has ended is not in later blocks.
        mask_id: id of undecoded positions.
        eos_ids: ids that end an answer.
        pad_id: fills left padding and the tails of shorter answers.
    """

    gen_length: int
    block_length: int
    schedule: tuple[int, ...]
    threshold: float = math.inf
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    stop_in_block: bool = False
    drop_ended: bool = True
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionSettings(Settings):
    """Settings of `generate`.

    Attributes:
        delete_id, split_id: ids by which the model edits a block (LLaDA2.2); None where it does not.
    """

    editing_threshold: float | None
    max_post_steps: int
    num_to_transfer: int
    use_cache: bool
    prefill_chunk: int
    delete_id: int | None
    split_id: int | None


@dataclass(frozen=True, kw_only=True)
class CanvasSettings(Settings):
    """Settings of `generate_semi_autoregressive`."""

    cfg_scale: float
    remasking: Remasking


def _check(parts: ModelParts, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, each checked for itself; the end ids, mask id and padding id under the names of `Settings`."""
    most = getattr(parts.config, "max_position_embeddings", None)
    context = "" if most is None else f"; the model's max_position_embeddings={most}"
    fits = partial(whole, least=1, most=MOST if most is None else most)
    checks: dict[str, Callable[[str, Any], Any]] = {
        "gen_length": partial(fits, meaning=f"the number of tokens to generate{context}"),
        "block_length": partial(fits, meaning=f"positions of a block; released models use 32{context}"),
        "steps": partial(whole, meaning="forwards, of a block or an answer", least=1),
        "minimal_topk": partial(whole, meaning="it caps steps at gen_length // minimal_topk", least=1),
        "prefill_chunk": partial(whole, meaning="the prompt positions per prefill forward", least=1),
        "num_to_transfer": partial(whole, meaning="the masks that an iteration fills at least", least=1),
        "max_post_steps": partial(whole, meaning="the number of iterations after the last mask"),
        "editing_threshold": partial(
            real, most=1.0, expected="a probability: None (committed tokens stay) or a number from 0 (rewrite whenever "
            "another token is more probable) to 1 (never)",
        ),
        "threshold": partial(
            real, most=1.0, expected="a probability: a number from 0 (commit every row at once) to 1 (follow the "
            "schedule)",
        ),
        "temperature": partial(real, expected="0 (greedy) or a positive finite number"),
        "top_k": partial(whole, meaning="None or 0 keeps all tokens"),
        "top_p": partial(real, expected="None (keep all) or a number above 0 and up to 1", most=1.0, above=True),
        "cfg_scale": partial(real, expected="a finite number of at least 0"),
        "remasking": partial(choice, options=("low_confidence", "random")),
        "eos_early_stop": flag,
        "use_cache": flag,
    }  # fmt: skip
    ids = special_ids(parts.model, parts.embedding_VH.shape[0], given.pop("eos_token_id"), given.pop("mask_token_id"))
    default = {name for name in ("threshold", "editing_threshold", "top_k", "top_p") if given.get(name) is None}
    checked = {name: None if name in default else checks[name](name, value) for name, value in given.items()}
    return checked | dict(zip(("eos_ids", "mask_id", "pad_id"), ids, strict=True))


def block_diffusion_settings(parts: ModelParts, **given: Any) -> BlockDiffusionSettings:
    """The arguments of `generate`, checked against each other and against the model's configuration.

    Raises:
        ValueError: an argument is out of range, or an id is neither given nor in the configuration.
        TypeError: an argument of the wrong kind.
    """
    checked = _check(parts, given)
    gen_length, block_length, minimal_topk = (checked[n] for n in ("gen_length", "block_length", "minimal_topk"))
    if minimal_topk > gen_length:
        raise ValueError(
            f"minimal_topk={minimal_topk} with gen_length={gen_length} leaves no iteration (steps are capped at "
            "gen_length // minimal_topk): lower minimal_topk to at most gen_length"
        )
    pool_rows = parts.config.block_size if getattr(parts.config, "expert_capacity", None) else None
    if pool_rows and block_length % pool_rows:
        raise ValueError(
            f"block_length={block_length}: this model routes in pools of block_size={pool_rows} rows that must not "
            f"straddle blocks; use block_length={pool_rows}"
        )
    delete_id, split_id = (None, None) if checked["editing_threshold"] is None else _edit_ids(parts)
    mask_id, eos_ids = checked["mask_id"], checked["eos_ids"]
    if delete_id is not None and len({delete_id, split_id, mask_id, *eos_ids}) < 3 + len(set(eos_ids)):
        raise ValueError(
            f"config.delete_token_id={delete_id}, config.split_token_id={split_id}, mask_token_id={mask_id} and "
            f"eos_token_id={eos_ids}: expected different ids"
        )
    if checked["threshold"] is None:
        checked["threshold"] = 0.95 if delete_id is None else 0.5
    steps = min(checked.pop("steps"), gen_length // checked.pop("minimal_topk"))
    return BlockDiffusionSettings(
        schedule=tuple(transfer_schedule(block_length, steps)),
        stop_in_block=checked.pop("eos_early_stop"),
        delete_id=delete_id,
        split_id=split_id,
        **checked,
    )


def canvas_settings(parts: ModelParts, **given: Any) -> CanvasSettings:
    """The arguments of `generate_semi_autoregressive`, checked like those of `generate`."""
    checked = _check(parts, given)
    gen_length, block_length, steps = checked["gen_length"], checked["block_length"], checked.pop("steps")
    if gen_length % block_length:
        raise ValueError(f"gen_length={gen_length}: expected a multiple of block_length={block_length}")
    blocks = gen_length // block_length
    if steps % blocks:
        raise ValueError(
            f"steps={steps}: expected a multiple of the number of blocks, gen_length / block_length = {blocks}"
        )
    return CanvasSettings(
        schedule=tuple(transfer_schedule(block_length, min(steps // blocks, block_length))),
        drop_ended=checked.pop("eos_early_stop"),
        **checked,
    )


def _edit_ids(parts: ModelParts) -> tuple[int | None, int | None]:
    """DELETE and SPLIT of a model that writes them (LLaDA2.2), else None."""
    ids = [getattr(parts.config, name, None) for name in ("delete_token_id", "split_token_id")]
    if ids == [None, None]:
        return None, None
    if None in ids:
        raise ValueError(
            f"the config has delete_token_id={ids[0]} and split_token_id={ids[1]}: a model that edits by such ids has "
            "both; set the missing one, or both to None"
        )
    vocab_size = parts.embedding_VH.shape[0]
    delete_id = in_vocabulary("config.delete_token_id", ids[0], vocab_size)
    return delete_id, in_vocabulary("config.split_token_id", ids[1], vocab_size)
