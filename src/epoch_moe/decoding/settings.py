"""Arguments of the loops, checked once before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from epoch_moe.checks import MOST, choice, flag, in_vocabulary, real, special_ids, whole
from epoch_moe.decoding.parts import ModelParts, is_canvas_model

Remasking = Literal["low_confidence", "random"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a loop is told, checked. Fields without a line here have the meaning documented at the loop's function.

    Attributes:
        schedule: rows that the n-th iteration of a block must at least commit.
        stop_in_block: a sequence is done with a block as soon as its answer has ended there.
        drop_ended: a sequence whose answer has ended is not in later blocks.
        mask_id: id of undecoded positions.
        eos_ids: ids that end an answer.
        pad_id: fills left padding and the tails of shorter answers.
        delete_id, split_id: ids by which the model edits a block (LLaDA2.2); None where it does not.
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
    editing_threshold: float | None = None
    max_post_steps: int = 0
    num_to_transfer: int = 1
    use_cache: bool = False
    prefill_chunk: int = 0
    delete_id: int | None = None
    split_id: int | None = None
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"


def transfer_schedule(block_length: int, steps: int) -> list[int]:
    """Rows that each of `steps` iterations must at least commit: `block_length` split evenly, larger shares first."""
    base, extra = divmod(block_length, steps)
    return [base + (step < extra) for step in range(steps)]


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


def block_diffusion_settings(parts: ModelParts, **given: Any) -> Settings:
    """The arguments of `generate`, checked against each other and against the model's configuration.

    Raises:
        ValueError: an argument is out of range, an id is neither given nor in the configuration, or the model decodes
            on a canvas.
        TypeError: an argument of the wrong kind.
    """
    if is_canvas_model(parts.config):
        raise ValueError(
            f"{type(parts.model).__name__} sees its whole canvas from both sides, so blocks cannot be cached: call "
            "epoch_moe.generate_semi_autoregressive"
        )
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
    return Settings(
        schedule=tuple(transfer_schedule(block_length, steps)),
        stop_in_block=checked.pop("eos_early_stop"),
        delete_id=delete_id,
        split_id=split_id,
        **checked,
    )


def canvas_settings(parts: ModelParts, **given: Any) -> Settings:
    """The arguments of `generate_semi_autoregressive`, checked like those of `generate`."""
    if getattr(parts.config, "model_type", None) == "llada2_moe":
        raise ValueError(
            f"{type(parts.model).__name__} decodes under a block-causal mask, not on a bidirectional canvas: call "
            "epoch_moe.generate"
        )
    checked = _check(parts, given)
    gen_length, block_length, steps = checked["gen_length"], checked["block_length"], checked.pop("steps")
    if gen_length % block_length:
        raise ValueError(f"gen_length={gen_length}: expected a multiple of block_length={block_length}")
    blocks = gen_length // block_length
    if steps % blocks:
        raise ValueError(
            f"steps={steps}: expected a multiple of the number of blocks, gen_length / block_length = {blocks}"
        )
    return Settings(
        schedule=tuple(transfer_schedule(block_length, min(steps // blocks, block_length))),
        drop_ended=checked.pop("eos_early_stop"),
        **checked,
    )


def _edit_ids(parts: ModelParts) -> tuple[int | None, int | None]:
    """DELETE and SPLIT of a model that writes them (LLaDA2.2), else None."""
    ids = {name: getattr(parts.config, name, None) for name in ("delete_token_id", "split_token_id")}
    if all(value is None for value in ids.values()):
        return None, None
    if None in ids.values():
        given = " and ".join(f"{name}={value}" for name, value in ids.items())
        raise ValueError(f"the config has {given}: a model that edits by such ids has both; set both, or both to None")
    vocab_size = parts.embedding_VH.shape[0]
    delete_id, split_id = (in_vocabulary(f"config.{name}", value, vocab_size) for name, value in ids.items())
    return delete_id, split_id
