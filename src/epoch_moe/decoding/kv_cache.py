"""The K/V cache of block diffusion: rows are provisional until their block is committed.

Every forward of a block writes its rows' keys and values behind the committed ones and over those of the previous
forward, so iterations need no concatenation and no cropping. Committing moves a length.

Shape suffixes: B sequences, N key/value heads, S rows of the forward, C committed rows, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from epoch_moe.checks import MOST, whole


class BlockKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one attention layer, ``[B,N,max_length,D]`` each, allocated by the first `update`."""

    is_sliding = False

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch, heads, dtype and device of the first rows."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], self.max_length, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[B,N,S,D]`` behind the committed rows.

        Returns:
            Views ``[B,N,C+S,D]`` of the keys and values: the committed rows and these.

        Raises:
            ValueError: the rows do not fit, or their batch is not the cache's.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        if end > self.max_length or key_states.shape[0] != self.keys.shape[0]:
            raise ValueError(
                f"{key_states.shape[2]} rows of {key_states.shape[0]} sequences do not fit: the cache holds "
                f"{self.length} committed rows of at most {self.max_length}, for {self.keys.shape[0]} sequences"
            )
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` ``[B']``, in that order."""
        if self.is_initialized:
            indices = indices.to(self.device)
            self.keys, self.values = (states.index_select(0, indices) for states in (self.keys, self.values))

    reorder_cache = batch_select_indices  # transformers' name for beams

    def reset(self) -> None:
        """Forget all rows; the memory stays allocated."""
        self.length = 0

    def get_seq_length(self) -> int:
        """Committed rows."""
        return self.length

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Keys that a forward of `query` rows sees, and their offset (transformers 4.57 passes the row positions)."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """Rows that the layer can hold."""
        return self.max_length

    get_max_cache_shape = get_max_length  # transformers 4.57's name


class BlockKVCache(Cache):  # type: ignore[misc]
    """A transformers `Cache` whose rows count only once they are committed.

    `get_seq_length` is the number of committed rows, during a forward too. After a forward over C + N rows of which
    the first C are final, `commit(C)` keeps those; the next forward overwrites the others.

    Args:
        num_layers: attention layers of the model.
        max_length: rows per sequence that it must hold, provisional ones included.
    """

    def __init__(self, num_layers: int, max_length: int):
        num_layers = whole("num_layers", num_layers, "attention layers", least=1)
        max_length = whole("max_length", max_length, "rows per sequence", least=1)
        super().__init__(layers=[BlockKVLayer(max_length) for _ in range(num_layers)])
        self.max_length = max_length

    @property
    def length(self) -> int:
        """Committed rows per sequence."""
        return self.layers[0].length

    def commit(self, rows: int) -> None:
        """Make the first `rows` rows of the last forward permanent.

        Raises:
            ValueError: `rows` is negative, or no layer can hold that many.
        """
        rows = whole("rows", rows, "of the last forward", least=-MOST)
        if rows < 0 or self.length + rows > self.max_length:
            raise ValueError(
                f"cannot commit {rows} rows behind {self.length} committed ones: "
                f"expected between 0 and {self.max_length - self.length}"
            )
        for layer in self.layers:
            layer.length += rows

    def select(self, indices: list[int]) -> None:
        """Keep only the sequences `indices`, in that order."""
        first = self.layers[0]
        most = first.keys.shape[0] - 1 if first.is_initialized else MOST
        kept = [whole(f"indices[{place}]", one, "a sequence", most=most) for place, one in enumerate(list(indices))]
        self.batch_select_indices(torch.tensor(kept, dtype=torch.long))
