"""What is asked of a decode: the prompts, and what every loop takes beside its settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, WHOLE_DTYPES, flag, instance, is_list, tensor, whole, wrong
from epoch_moe.decoding.parts import ModelParts
from epoch_moe.decoding.settings import Settings
from epoch_moe.plan.context import BlockPlanContext, UntrackedContext, open_context

ASKED = ("input_ids", "attention_mask", "plan", "record", "streamer", "progress", "generator")
"""Arguments of a loop's function that are no settings."""
PromptIds = Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | Sequence[int]


@dataclass(frozen=True)
class Request:
    """What a decode is asked, beside its settings.

    Attributes:
        prompts: int64 ``[P]`` each, without padding.
        context: where the model's MoE layers find their plan.
        streamer: with ``put(ids)`` and ``end()``, or None.
        progress: show a bar.
        generator: source of randomness; None: torch's own.
    """

    prompts: list[Tensor]
    context: BlockPlanContext | UntrackedContext
    streamer: Any = None
    progress: bool = False
    generator: torch.Generator | None = None

    @classmethod
    def read(
        cls, parts: ModelParts, settings: Settings, *, input_ids: Any, attention_mask: Any, plan: Any, record: Any,
        streamer: Any, progress: Any, generator: Any,
    ) -> Request:  # fmt: skip
        """What every loop takes beside its settings, checked.

        Raises:
            TypeError, ValueError: as `epoch_moe.generate`.
        """
        prompts = read_prompts(input_ids, attention_mask, settings, parts)
        flag("progress", progress)
        if streamer is not None:
            if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
                raise wrong("streamer", streamer, "None or an object with put(ids) and end(), as in transformers")
            if len(prompts) > 1:
                raise ValueError(
                    f"a streamer serves one sequence, input_ids holds {len(prompts)}: call it once for each"
                )
        where, device = getattr(generator, "device", None), parts.embedding_VH.device
        if isinstance(where, torch.device) and where.type != device.type:
            raise ValueError(
                f"the generator is on {where}, the model on {device}: make it with "
                f"torch.Generator(device={device.type!r})"
            )
        instance("generator", generator, (torch.Generator, type(None)), "None or a torch.Generator")
        return cls(prompts, open_context(parts.model, plan, record=record), streamer, progress, generator)


def read_prompts(
    input_ids: PromptIds, attention_mask: Tensor | None, settings: Settings, parts: ModelParts
) -> list[Tensor]:
    """Prompts as 1-D int64 tensors without padding, each checked against settings and model."""
    if isinstance(input_ids, Tensor):
        if input_ids.layout != torch.strided or input_ids.device.type == "meta":
            raise wrong("input_ids", input_ids, "a dense tensor with values")
        if input_ids.dim() not in (1, 2):
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}: expected [batch, positions] or [positions]"
            )
        rows = list(input_ids.unsqueeze(0) if input_ids.dim() == 1 else input_ids)
    elif is_list(input_ids):
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a padded tensor: a list of prompts has no padding, leave it out")
        alone = len(input_ids) > 0 and isinstance(input_ids[0], Integral)
        rows = [_row(number, row) for number, row in enumerate([input_ids] if alone else input_ids)]
    else:
        hint = "; pass its 'input_ids' (and 'attention_mask')" if hasattr(input_ids, "keys") else ""
        raise TypeError(f"input_ids is a {type(input_ids).__name__}: expected a tensor or a list of prompts{hint}")
    if not rows:
        raise ValueError("input_ids holds no prompt: expected at least one")
    if attention_mask is not None:
        rows = _strip_padding(rows, attention_mask)
    for number, row in enumerate(rows):
        _check_prompt(number, row, settings, parts)
    return [row.long() for row in rows]


def _row(number: int, row: Any) -> Tensor:
    """A prompt of a list as a tensor."""
    if isinstance(row, str):
        raise TypeError(f"prompt {number} is the text {row[:40]!r}: expected token ids, tokenize it first")
    if isinstance(row, Tensor):
        return row
    if not isinstance(row, Iterable):
        raise wrong(f"input_ids[{number}]", row, "a list or tensor of token ids")
    named = ((f"input_ids[{number}][{place}]", one) for place, one in enumerate(row))
    return torch.tensor([whole(name, one, "a token id", least=-MOST) for name, one in named])


def _strip_padding(rows: list[Tensor], attention_mask: Tensor) -> list[Tensor]:
    expected = (len(rows), rows[0].shape[0])
    if isinstance(attention_mask, Tensor) and tuple(attention_mask.shape) != expected:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected that of input_ids, {expected}; "
            "generate builds the block mask itself"
        )
    mask_BP = tensor("attention_mask", attention_mask, (torch.bool, *WHOLE_DTYPES, *FLOAT_DTYPES), expected)
    real_BP = mask_BP.to(rows[0].device) == 1
    if not bool((real_BP | (mask_BP.to(rows[0].device) == 0)).all()):
        raise wrong("attention_mask", mask_BP, "1 for tokens and 0 for padding, and no other value in it")
    stripped = []
    for number, (row, real_P) in enumerate(zip(rows, real_BP, strict=True)):
        places = real_P.nonzero().flatten()
        if places.numel() and int(places[-1] - places[0]) + 1 != places.numel():
            raise ValueError(
                f"attention_mask of prompt {number} has zeros between ones: expected padding on the left or right only"
            )
        stripped.append(row[real_P])
    return stripped


def _check_prompt(number: int, prompt: Tensor, settings: Settings, parts: ModelParts) -> None:
    if prompt.numel() == 0:
        raise ValueError(
            f"prompt {number} is empty: expected at least one token; pass the model's BOS or chat template prefix to "
            "generate from nothing"
        )
    if prompt.dim() != 1:
        raise ValueError(
            f"prompt {number} has shape {tuple(prompt.shape)}: expected a list of 1-D prompts; of a [1, P] tensor, "
            "take [0]"
        )
    tensor(f"prompt {number} of input_ids", prompt, WHOLE_DTYPES, ("ids",))
    vocab_size, length = parts.embedding_VH.shape[0], len(prompt)
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"prompt {number} holds id {low if low < 0 else high}: the model's vocabulary is 0 to {vocab_size - 1}; "
            "does the tokenizer belong to this model?"
        )
    if bool((prompt == settings.mask_id).any()):
        raise ValueError(
            f"prompt {number} holds the mask id {settings.mask_id}: generate adds the positions to decode itself, "
            "pass the prompt alone"
        )
    context = getattr(parts.config, "max_position_embeddings", None)
    if context is not None and length + settings.gen_length > context:
        raise ValueError(
            f"prompt {number} has {length} tokens and gen_length is {settings.gen_length}: together they must not "
            f"exceed the model's context, max_position_embeddings={context}; shorten the prompt or lower gen_length"
            f"{f' to {context - length}' if length < context else ''}"
        )
