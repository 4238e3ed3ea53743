"""The worklist: token-expert pairs in expert order, with the way back.

The host's form is made here; `epoch_moe.kernels.worklist` makes the same one on the device, cut in tiles. Shapes depend
on R and K alone, never on how many pairs are valid, so neither needs a host sync: empty pairs sort behind all experts,
no expert's segment reaches them, and `combine` skips them.

Shape suffixes: R rows, K top-k, P = R x K pairs (empty ones included), E experts, N upper bound on tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.routing import NO_EXPERT

GROUPS = 8
"""Groups of consecutive experts that a row's sum goes by: as many as the ranks that give one process's bits."""


@dataclass(frozen=True)
class Tiles:
    """The segments of a worklist cut in tiles, for the kernels.

    Attributes:
        expert_N: int32, the expert of each tile, -1 behind the last tile.
        row_N: int32, the first sorted position of each tile, 0 behind the last tile. A tile ends after ``size``
            positions or with its expert's segment.
        count: int32 ``[1]``, how many there are.
        size: sorted positions per tile.
    """

    expert_N: Tensor
    row_N: Tensor
    count: Tensor
    size: int


@dataclass(frozen=True)
class Worklist:
    """Pairs of R rows sorted by expert, within an expert by row, then k.

    Attributes:
        pair_P: integer, the pair ``row * K + k`` at each sorted position; without meaning behind the last segment.
        rank_RK: integer, the sorted position of each pair, -1 for empty ones.
        counts_E: int64, pairs of each expert.
        begins_E1: int32 ``[E+1]``, where each expert's segment begins; the last entry is the number of valid pairs.
        groups: of experts that `combine` sums by, as `expert_groups` gives them; None for the kernels, which sum in
            order of k.
        tiles: of the segments; None for the host's form.
    """

    pair_P: Tensor
    rank_RK: Tensor
    counts_E: Tensor
    begins_E1: Tensor
    groups: tuple[Tensor, int] | None = None
    tiles: Tiles | None = None

    @property
    def row_P(self) -> Tensor:
        """The row of each sorted pair."""
        return self.pair_P // self.rank_RK.shape[1]

    @property
    def ends_E(self) -> Tensor:
        """int32, where each expert's segment ends."""
        return self.begins_E1[1:]


def max_tiles(num_pairs: int, num_experts: int, size: int) -> int:
    """The most tiles of so many positions that so many pairs can make: N, known without looking at them."""
    # Each expert with pairs ends at most one tile early; the more of them, the more tiles.
    experts = min(num_pairs, num_experts)
    return experts + (num_pairs - experts) // size


def count_pairs(ids_RK: Tensor, num_experts: int) -> Tensor:
    """Pairs of each expert, int64 ``[E]``, without a host sync; empty ones (``NO_EXPERT``) are left out."""
    keys_P = ids_RK.reshape(-1)
    keys_P = torch.where(keys_P != NO_EXPERT, keys_P, num_experts)
    # One extra bin collects the empty pairs; scatter_add is deterministic on integers.
    bins = torch.zeros(num_experts + 1, dtype=torch.int64, device=keys_P.device)
    return bins.scatter_add_(0, keys_P, torch.ones_like(keys_P))[:num_experts]


def build_worklist(ids_RK: Tensor, num_experts: int, part: tuple[int, int] | None = None) -> Worklist:
    """Sort the pairs ``ids_RK`` (int64, ``NO_EXPERT`` = empty) by expert; within an expert by row, then k.

    Args:
        part: the number of the first of these experts in its layer, and how many the layer has; None: these are all.
    """
    num_rows, top_k = ids_RK.shape
    flat_P = ids_RK.reshape(-1)
    valid_P = flat_P != NO_EXPERT
    keys_P = torch.where(valid_P, flat_P, num_experts)
    order_P = keys_P.argsort(stable=True)
    rank_P = torch.empty_like(order_P)
    rank_P[order_P] = torch.arange(order_P.numel(), device=order_P.device)
    counts_E = count_pairs(ids_RK, num_experts)
    return Worklist(
        pair_P=order_P,
        rank_RK=rank_P.masked_fill(~valid_P, -1).view(num_rows, top_k),
        counts_E=counts_E,
        begins_E1=F.pad(counts_E.cumsum(0), (1, 0)).to(torch.int32),
        groups=expert_groups(ids_RK, num_experts, part),
    )


def expert_groups(ids_RK: Tensor, num_experts: int, part: tuple[int, int] | None = None) -> tuple[Tensor, int]:
    """In which of a layer's `GROUPS` groups of consecutive experts each pair lies, counted from the first one here.

    Args:
        ids_RK: int64, among the ``num_experts`` experts that are here; what empty pairs get means nothing.
        num_experts: experts here.
        part: as for `build_worklist`.

    Returns:
        The groups, and how many of them are here.
    """
    first, total = part or (0, max(num_experts, 1))  # no expert, no pair: residency asks for that
    lowest, highest = (expert * GROUPS // total for expert in (first, first + num_experts - 1))
    return (ids_RK + first) * GROUPS // total - lowest, highest - lowest + 1


def tree_sum(parts: Tensor) -> Tensor:
    """Sum over the first dimension by neighbours: ``((0 + 1) + (2 + 3)) + ...``, a missing one being 0.

    A half, quarter or eighth of them, summed alone, is a partial sum of the whole.
    """
    while parts.shape[0] > 1:
        if parts.shape[0] % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:1])])
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def combine(pairs_PH: Tensor, weights_RK: Tensor, worklist: Worklist, dtype: torch.dtype) -> Tensor:
    """Weighted sum over the K pairs of each row, fp32, rounded once to ``dtype``: ``[R,H]``.

    The order does not depend on how experts are split over 1, 2, 4 or 8 ranks: the pairs of a group of experts in
    order of k, then the groups by `tree_sum`. With ``dtype`` fp32 the sum of a part of the experts is that part of the
    whole, bit for bit.

    Rows of ``pairs_PH`` behind the last segment are uninitialised memory: the empty pairs of a row are summed apart,
    and nobody looks at it.

    Args:
        pairs_PH: expert outputs in the worklist's order.
        weights_RK: fp32; those of empty pairs may hold anything.
        worklist: of the rows.
        dtype: of the result.
    """
    assert worklist.groups is not None
    group_RK, count = worklist.groups
    num_rows = group_RK.shape[0]
    empty_RK = worklist.rank_RK < 0
    row_R1 = torch.arange(num_rows, device=group_RK.device).unsqueeze(1)
    bag_P = (group_RK.masked_fill(empty_RK, count) + row_R1 * (count + 1)).reshape(-1)
    bag_P, order_P = bag_P.sort(stable=True)
    starts = torch.searchsorted(bag_P, torch.arange(num_rows * (count + 1), device=bag_P.device))
    sums = F.embedding_bag(
        worklist.rank_RK.clamp_min(0).reshape(-1)[order_P],
        pairs_PH.float(),
        starts,
        mode="sum",
        per_sample_weights=weights_RK.float().masked_fill(empty_RK, 0.0).reshape(-1)[order_P],
    )
    sums_GRH = sums.view(num_rows, count + 1, pairs_PH.shape[1])[:, :count].transpose(0, 1)
    return tree_sum(sums_GRH).to(dtype)
