"""The canvas of block diffusion: prompts and the masks behind them, every sequence on its own block grid.

A sequence's blocks start at its position 0. In a batch, shorter prompts are padded on the left by whole blocks, so that
the first block with something to decode lies in the same slots for all sequences, and no grid moves.

Shape suffixes: B sequences, W slots of the canvas, S a range of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, WHOLE_DTYPES, flag, is_list, tensor, whole, wrong
from epoch_moe.decoding.settings import BlockDiffusionSettings

if TYPE_CHECKING:
    from epoch_moe.decoding.semi_autoregressive import CanvasSettings

PromptIds = Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | Sequence[int]


def read_request(
    config: Any,
    settings: BlockDiffusionSettings | CanvasSettings,
    vocab_size: int,
    device: torch.device,
    input_ids: Any,
    attention_mask: Any,
    streamer: Any,
    generator: Any,
    progress: Any,
) -> list[Tensor]:
    """The checked prompts of a decode, with the checks of what both loops take beside them."""
    prompts = read_prompts(input_ids, attention_mask)
    context_length = getattr(config, "max_position_embeddings", None)
    check_prompts(prompts, settings.mask_id, settings.gen_length, vocab_size, context_length)
    flag("progress", progress)
    if streamer is not None:
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise wrong("streamer", streamer, "None or an object with put(ids) and end(), as in transformers")
        if len(prompts) > 1:
            raise ValueError(f"a streamer serves one sequence, input_ids holds {len(prompts)}: call it once for each")
    if generator is not None:
        where = getattr(generator, "device", None)
        if isinstance(where, torch.device) and where.type != device.type:
            raise ValueError(
                f"the generator is on {where}, the model on {device}: make it with "
                f"torch.Generator(device={device.type!r})"
            )
        if not isinstance(generator, torch.Generator):
            raise wrong("generator", generator, "None or a torch.Generator")
    return prompts


def read_prompts(input_ids: PromptIds, attention_mask: Tensor | None = None) -> list[Tensor]:
    """Prompts as 1-D int64 tensors without padding.

    Args:
        input_ids: ``[B,P]`` or ``[P]`` ids, or a list of prompts of any lengths.
        attention_mask: ``[B,P]``, 1 = real, 0 = padding on the left or right of a prompt; only with a tensor.

    Raises:
        TypeError: not ids at all (a tokenizer's dictionary, floats).
        ValueError: a shape that cannot be prompts, an empty prompt, or a mask that does not fit.
    """
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
        if row.numel() == 0:
            raise ValueError(
                f"prompt {number} is empty: expected at least one token; pass the model's BOS or chat template prefix "
                "to generate from nothing"
            )
        if row.dim() != 1:
            raise ValueError(
                f"prompt {number} has shape {tuple(row.shape)}: expected a list of 1-D prompts; of a [1, P] tensor, "
                "take [0]"
            )
        tensor(f"prompt {number} of input_ids", row, WHOLE_DTYPES, ("ids",))
    return [row.long() for row in rows]


def _row(number: int, row: Any) -> Tensor:
    """A prompt as a tensor."""
    if isinstance(row, str):
        raise TypeError(f"prompt {number} is the text {row[:40]!r}: expected token ids, tokenize it first")
    if isinstance(row, Tensor):
        return row
    try:
        ids = list(row)
    except TypeError:
        raise wrong(f"input_ids[{number}]", row, "a list or tensor of token ids") from None
    named = ((f"input_ids[{number}][{place}]", one) for place, one in enumerate(ids))
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
        slots = real_P.nonzero().flatten()
        if slots.numel() and int(slots[-1] - slots[0]) + 1 != slots.numel():
            raise ValueError(
                f"attention_mask of prompt {number} has zeros between ones: expected padding on the left or right only"
            )
        stripped.append(row[real_P])
    return stripped


def check_prompts(
    prompts: list[Tensor], mask_id: int, gen_length: int, vocab_size: int, context: int | None
) -> None:
    """Check the ids and lengths of prompts.

    Raises:
        ValueError: an id outside the vocabulary, a mask id in a prompt, or more positions than the model's context.
    """
    for number, prompt in enumerate(prompts):
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"prompt {number} holds id {low if low < 0 else high}: the model's vocabulary is 0 to "
                f"{vocab_size - 1}; does the tokenizer belong to this model?"
            )
        if bool((prompt == mask_id).any()):
            raise ValueError(
                f"prompt {number} holds the mask id {mask_id}: generate adds the positions to decode itself, "
                "pass the prompt alone"
            )
        if context is not None and len(prompt) + gen_length > context:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens and gen_length is {gen_length}: together they must "
                f"not exceed the model's context, max_position_embeddings={context}; shorten the prompt or lower "
                f"gen_length{f' to {context - len(prompt)}' if len(prompt) < context else ''}"
            )


class Canvas:
    """Ids of all sequences and where each sequence's parts lie.

    Attributes:
        ids_BW: ``[B,W]`` int64: padding, prompt, decoded tokens and masks.
        starts: per sequence, the slot of its position 0 (a multiple of the block length).
        prompt_ends: per sequence, the slot behind its prompt.
        first_block: slot at which the first block to decode starts, the same for all sequences.
    """

    def __init__(self, prompts: list[Tensor], settings: BlockDiffusionSettings, device: torch.device):
        block = settings.block_length
        whole = [len(prompt) // block * block for prompt in prompts]
        self.block_length = block
        self.mask_id = settings.mask_id
        self.first_block = max(whole)
        self.starts = [self.first_block - rows for rows in whole]
        self.prompt_ends = [start + len(prompt) for start, prompt in zip(self.starts, prompts, strict=True)]
        slots = -(-(max(self.prompt_ends) + settings.gen_length) // block) * block  # whole blocks
        ids_BW = torch.full((len(prompts), slots), settings.mask_id)
        for row, (prompt, start, end) in enumerate(zip(prompts, self.starts, self.prompt_ends, strict=True)):
            ids_BW[row, :start] = settings.pad_id
            ids_BW[row, start:end] = prompt
        self.ids_BW = ids_BW.to(device)
        self._to_device()

    def _to_device(self) -> None:
        self.starts_B1 = torch.tensor(self.starts, device=self.ids_BW.device).unsqueeze(1)
        self.prompt_ends_B1 = torch.tensor(self.prompt_ends, device=self.ids_BW.device).unsqueeze(1)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.starts)

    @property
    def padded(self) -> bool:
        """Whether any sequence has padding in front."""
        return any(self.starts)

    def select(self, indices: list[int]) -> None:
        """Keep only the sequences `indices`, in that order."""
        self.ids_BW = self.ids_BW[torch.tensor(indices, device=self.ids_BW.device)]
        self.starts = [self.starts[i] for i in indices]
        self.prompt_ends = [self.prompt_ends[i] for i in indices]
        self._to_device()

    def slots(self, begin: int, end: int) -> Tensor:
        """``[S]`` the slot numbers of ``begin:end``."""
        return torch.arange(begin, end, device=self.ids_BW.device)

    def positions(self, begin: int, end: int) -> Tensor:
        """``[B,S]`` position of each slot in its own sequence; 0 for padding."""
        return (self.slots(begin, end) - self.starts_B1).clamp(min=0)

    def real(self, begin: int, end: int) -> Tensor:
        """``[B,S]`` bool, False for padding."""
        return self.slots(begin, end) >= self.starts_B1

    def answer(self, begin: int, end: int) -> Tensor:
        """``[B,S]`` bool, True behind the prompt."""
        return self.slots(begin, end) >= self.prompt_ends_B1

    def undecoded(self, begin: int, end: int) -> list[int]:
        """Per sequence, the rows of a block that nobody has decoded yet, known without a look at the device."""
        return [end - max(begin, prompt_end) for prompt_end in self.prompt_ends]

    def attention_bias(self, begin: int, end: int, dtype: torch.dtype) -> Tensor | None:
        """The additive mask ``[B|1,1,S,end]`` of queries ``begin:end`` over keys ``0:end``; None if all may be seen.

        A query sees its own block and the blocks before it, without the padding. Padding queries see padding: their
        output is never used, but a softmax over nothing would put NaN into their keys and values.
        """
        block = self.block_length
        one_block = begin // block == (end - 1) // block
        if one_block and not self.padded:
            return None
        queries_S, keys = self.slots(begin, end), self.slots(0, end)
        seen = ((keys // block).unsqueeze(0) <= (queries_S // block).unsqueeze(1)).unsqueeze(0)
        if self.padded:
            seen = seen & (self.real(0, end).unsqueeze(1) | ~self.real(begin, end).unsqueeze(2))
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        return torch.where(seen, zero, float("-inf")).unsqueeze(1)
