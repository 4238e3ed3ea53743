"""Which of two experts joins a support, where either would do: the one whose rank holds fewer of it.

Shape suffixes: B supports, E experts, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEAR_TIE = 0.05
"""Experts that add at least ``1 - NEAR_TIE`` times what the best one adds are as good as it."""


def contiguous_ranks(num_experts: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """The rank of each expert where ranks own equal contiguous ranges: int64 ``[E]``.

    Raises:
        ValueError: experts that cannot be split evenly.
    """
    if ranks < 1 or num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts cannot be split evenly over {ranks} ranks: use a number of ranks that divides "
            f"{num_experts}"
        )
    return torch.arange(num_experts, device=device) // (num_experts // ranks)


class Placement:
    """Where experts lie, and how many of one support may lie on one rank.

    Args:
        rank_of_expert_E: int64, the rank of each expert.
        max_per_rank: None = any number.
    """

    def __init__(self, rank_of_expert_E: Tensor, max_per_rank: int | None = None):
        if rank_of_expert_E.dim() != 1 or rank_of_expert_E.dtype != torch.int64:
            raise ValueError(
                f"rank_of_expert_E is {rank_of_expert_E.dtype} {tuple(rank_of_expert_E.shape)}: expected int64 "
                "[experts]"
            )
        if max_per_rank is not None and max_per_rank < 1:
            raise ValueError(f"max_per_rank={max_per_rank}: expected None or a number of experts >= 1")
        self.rank_E, self.max_per_rank = rank_of_expert_E, max_per_rank
        self.num_ranks = int(rank_of_expert_E.max()) + 1  # read on the host, as compiling a support does anyway

    def held(self, support_BE: Tensor) -> Tensor:
        """Experts of each support on each rank: int64 ``[B,P]``."""
        counts_BP = torch.zeros(support_BE.shape[0], self.num_ranks, dtype=torch.int64, device=support_BE.device)
        return counts_BP.scatter_add_(1, self.rank_E.expand_as(support_BE), support_BE.long())

    def best(self, worth_BE: Tensor, held_BP: Tensor, *, may_exceed: bool) -> tuple[Tensor, Tensor]:
        """The expert of each support to add, and whether to add it: int64 and bool ``[B,1]``.

        Of the experts on ranks below the cap (where none of them is worth anything and ``may_exceed``: of all), those
        within `NEAR_TIE` of the best; of them, those on the rank that holds fewest; of them the best; of equals the
        first.

        Args:
            worth_BE: fp32, what each expert adds; 0 for experts that are not to be added.
            held_BP: of the supports so far.
        """
        held_BE = held_BP.gather(1, self.rank_E.expand_as(worth_BE))
        if self.max_per_rank is not None:
            open_BE = worth_BE.masked_fill(held_BE >= self.max_per_rank, 0.0)
            nothing_B1 = (open_BE <= 0).all(dim=1, keepdim=True)
            worth_BE = torch.where(nothing_B1, worth_BE, open_BE) if may_exceed else open_BE
        near_BE = (worth_BE > 0) & (worth_BE >= (1.0 - NEAR_TIE) * worth_BE.amax(dim=1, keepdim=True))
        more_than_any = worth_BE.shape[1] + 1
        fewest_B1 = held_BE.masked_fill(~near_BE, more_than_any).amin(dim=1, keepdim=True)
        best_B1 = worth_BE.masked_fill(~near_BE | (held_BE > fewest_B1), 0.0).argmax(dim=1, keepdim=True)
        return best_B1, worth_BE.gather(1, best_B1) > 0
