"""The canvas of a decode: the prompts, and the masks behind them that become answers.

Canvas positions are counted from the left end, the same for all sequences; a row's *position id* is counted from its
own prompt's first token. Shorter prompts are padded on the left, so that all sequences decode the same canvas positions
at one time.

Shape suffixes: B sequences, W positions of the canvas, S a range of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.decoding.settings import Settings


class Canvas:
    """Ids of all sequences, and where each sequence's parts lie.

    Args:
        prompts: int64 ``[P]`` each.
        settings: of the decode.
        device: where the ids are kept.
        own_grid: a sequence's blocks start at its position id 0, so padding is whole blocks, and the first block may
            begin with the end of a prompt. False: the first block begins behind all prompts.

    Attributes:
        ids_BW: ``[B,W]`` int64: padding, prompt, decoded tokens and masks.
        starts: per sequence, the position of its prompt's first token.
        prompt_ends: per sequence, the position behind its prompt.
        first_block: where the first block to decode begins.
    """

    def __init__(self, prompts: list[Tensor], settings: Settings, device: torch.device, own_grid: bool):
        block = settings.block_length
        fronts = [len(prompt) // block * block if own_grid else len(prompt) for prompt in prompts]
        self.first_block = max(fronts)
        self.starts = [self.first_block - rows for rows in fronts]
        self.prompt_ends = [start + len(prompt) for start, prompt in zip(self.starts, prompts, strict=True)]
        behind = max(self.prompt_ends) - self.first_block + settings.gen_length
        width = self.first_block + -(-behind // block) * block  # whole blocks
        ids_BW = torch.full((len(prompts), width), settings.mask_id)
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
        """B."""
        return len(self.starts)

    @property
    def width(self) -> int:
        """W."""
        return self.ids_BW.shape[1]

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

    def positions(self, begin: int, end: int) -> Tensor:
        """``[S]`` int64, the canvas positions ``begin:end``."""
        return torch.arange(begin, end, device=self.ids_BW.device)

    def position_ids(self, begin: int, end: int) -> Tensor:
        """``[B,S]`` int64, counted from each sequence's own start; 0 for padding."""
        return (self.positions(begin, end) - self.starts_B1).clamp(min=0)

    def real(self, begin: int, end: int) -> Tensor:
        """``[B,S]`` bool, False for padding."""
        return self.positions(begin, end) >= self.starts_B1

    def answer(self, begin: int, end: int) -> Tensor:
        """``[B,S]`` bool, True behind the prompt."""
        return self.positions(begin, end) >= self.prompt_ends_B1

    def undecoded(self, begin: int, end: int) -> list[int]:
        """Masks of each sequence in a block that no forward has seen yet; known without a look at the device."""
        return [end - max(begin, prompt_end) for prompt_end in self.prompt_ends]
