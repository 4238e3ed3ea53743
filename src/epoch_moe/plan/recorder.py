"""`ExpertRecorder`: which experts every layer used in every forward, for pictures and debugging; off by default.

Shape suffixes: G supports, E experts, L MoE layers, D recorded forwards.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

HISTORY_LENGTH = 4096
"""Forwards that a decode remembers one by one; older ones are forgotten, so that a long decode does not grow."""


class ExpertRecorder:
    """Keeps device tensors and reads them once, at the end: recording makes no forward wait.

    Memory: 5 bytes per forward, layer and expert.

    Args:
        num_layers: L.
        length: forwards to keep, the latest ones.
    """

    def __init__(self, num_layers: int, length: int = HISTORY_LENGTH):
        self.num_layers = num_layers
        self._forwards: deque[tuple[list[Tensor | None], list[Tensor | None]]] = deque(maxlen=length)
        self.begin_forward()

    def begin_forward(self) -> None:
        """Drop the entries of a forward that ended by an exception; called before each forward."""
        self._pairs: list[Tensor | None] = [None] * self.num_layers
        self._support: list[Tensor | None] = [None] * self.num_layers

    def add_layer(self, layer: int, counts_E: Tensor) -> None:
        """Pairs per expert of one layer, in this forward."""
        self._pairs[layer] = counts_E.to(torch.int32)

    def add_support(self, layer: int, support_GE: Tensor, used_G: Tensor) -> None:
        """The supports that restricted rows of one layer, in this forward."""
        self._support[layer] = (support_GE & used_G.unsqueeze(1)).any(dim=0)

    def end_forward(self) -> None:
        """Keep the forward."""
        self._forwards.append((self._pairs, self._support))
        self.begin_forward()

    def read(self) -> tuple[Tensor, Tensor]:
        """Everything kept, oldest first, on the CPU.

        Returns:
            ``[D,L,E]`` int32 pairs, and ``[D,L,E]`` bool experts in a support that restricted rows. All zero where a
            layer was not reached or restricted nothing.
        """
        sizes = {counts_E.numel() for pairs, _ in self._forwards for counts_E in pairs if counts_E is not None}
        if len(sizes) > 1:
            raise ValueError(f"the MoE layers have {sorted(sizes)} experts: expected the same number in all of them")
        shape = (len(self._forwards), self.num_layers, max(sizes, default=0))
        pairs_DLE, support_DLE = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.bool)
        for number, (pairs, support) in enumerate(self._forwards):
            for layer, (counts_E, support_E) in enumerate(zip(pairs, support, strict=True)):
                if counts_E is not None:
                    pairs_DLE[number, layer] = counts_E.cpu()
                if support_E is not None:
                    support_DLE[number, layer] = support_E.cpu()
        return pairs_DLE, support_DLE
