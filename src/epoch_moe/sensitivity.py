"""What each MoE layer's bounds and coverage would save and change, from one decode that computes every row.

A traced decode runs under a plan that reuses nothing but keeps each row's input and output. For every bound a layer
replays the rule on its own inputs, and adds up which rows and experts it would have computed and how far the outputs
that it would have reused are from the right ones. Nothing travels from layer to layer: an estimate, to propose by.

Shape suffixes: T rows of a forward, M cache entries, E experts, K top-k, G sequences; D, V and C: bounds on decoded
rows, bounds on undecided ones, and coverages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.plan.atlas import compile_rows
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.routing import NO_EXPERT, Scores, route, select

DRIFTS = (1.0, 0.98, 0.95, 0.9, 0.8)
LIVE_DRIFTS = (1.0, 0.995, 0.99, 0.98)
COVERAGES = (None, 0.98, 0.95, 0.9)
TRACED = EpochConfig(coverage=None, refresh_interval=None, drift=1.0, live_drift=1.0)
"""Computes every row that can change, and keeps its input and output."""


class Choice(NamedTuple):
    """One layer's settings: `EpochConfig`'s fields of these names."""

    drift: float
    live_drift: float
    coverage: float | None


CHOICES = tuple(Choice(d, v, c) for d in DRIFTS for v in LIVE_DRIFTS for c in COVERAGES)


class _Kept:
    """For one bound: the input and output of each entry as they were computed last."""

    def __init__(self, bound: float, like_MH: Tensor):
        self.bound, self.inputs_MH, self.outputs_MH = bound, like_MH.clone(), like_MH.clone()

    def moved(self, at_R: Tensor, x_RH: Tensor, y_RH: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows are computed again (bool ``[R]``), and the squared error of reusing the others (fp32 scalar)."""
        cosine_R = torch.cosine_similarity(x_RH.float(), self.inputs_MH[at_R].float(), dim=-1).clamp(max=1.0)
        moved_R = ~(cosine_R > self.bound)
        error_R = (y_RH.float() - self.outputs_MH[at_R].float()).square().sum(-1)
        return moved_R, error_R.masked_fill(moved_R, 0.0).sum()

    def keep(self, at_R: Tensor, x_RH: Tensor, y_RH: Tensor) -> None:
        """Note rows that were computed."""
        self.inputs_MH[at_R], self.outputs_MH[at_R] = x_RH, y_RH


class LayerTrace:
    """One layer's sums over the forwards of traced decodes.

    Attributes:
        rows_DV, experts_DVC: rows and distinct experts that the layer would have computed.
        errors: squared errors of each bound and coverage, one tensor for each field of `Choice`.
        norm: squared length of all outputs.
    """

    def __init__(self, block: EpochMoEBlock):
        self.block = block
        counts = len(DRIFTS), len(LIVE_DRIFTS), len(COVERAGES)
        self.rows_DV, self.experts_DVC = torch.zeros(counts[:2]), torch.zeros(counts)
        self.errors, self.norm = [torch.zeros(count) for count in counts], 0.0
        self._kept: list[list[_Kept]] = []
        self._supports: list[Tensor | None] = []

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Any) -> None:
        """Forward hook of the block: add this forward."""
        forward = self.block.slot.active
        if not isinstance(forward, ForwardPlan):
            return
        state = forward.plan.layers[self.block.index]
        assert state.inputs_M1H is not None and state.cache_MH is not None
        x_TH, (places, classes) = args[0].flatten(0, 1), (forward.places, forward.classes)
        masks = forward.masks_of(self.block.index)
        gate_EH, bias_E = self.block.spec.read_gate(self.block)
        routing, scores = route(
            x_TH, gate_EH, bias_E, self.block.spec.router, batch=args[0].shape[0], valid_BS=forward.valid_BS
        )
        if forward.cold:
            self._supports = [self._compile(forward, scores, coverage) for coverage in COVERAGES]
            self._kept = [[_Kept(bound, state.cache_MH) for bound in own] for own in (DRIFTS, LIVE_DRIFTS)]
        named_CTE = self._named(routing.ids_TK, scores, masks.restricted_T, places.group_T)
        size_T = torch.zeros_like(masks.valid_T, dtype=torch.float32)
        here_T = masks.stored_T | masks.drifting_T
        size_T[here_T] = state.cache_MH[places.entry_T[here_T]].float().square().sum(-1)
        self.norm += float(size_T.sum())
        self._add_lost(scores, routing.ids_TK, masks.restricted_T, places.group_T, size_T)
        # What is computed under every bound; then, class by class, what each bound computes beside it.
        always_T = masks.fresh_T & ~masks.drifting_T
        used = [named_CTE[:, always_T].any(dim=1)]  # [C,E], then [D,C,E] and [V,C,E]
        rows = [always_T.sum().cpu()]
        undecided_T, stored_at_R = classes.live_T | classes.awake_T, places.entry_T[masks.stored_T & always_T]
        for number, class_T in enumerate((~undecided_T, undecided_T)):
            drifting_R = (masks.drifting_T & class_T).nonzero().squeeze(1)
            drifting_at_R, again = places.entry_T[drifting_R], []
            for place, kept in enumerate(self._kept[number]):
                moved_R, error = kept.moved(drifting_at_R, x_TH[drifting_R], state.cache_MH[drifting_at_R])
                self.errors[number][place] += error.cpu()
                again.append(drifting_R[moved_R])
                for at_R in (drifting_at_R[moved_R], stored_at_R):
                    kept.keep(at_R, state.inputs_M1H[at_R], state.cache_MH[at_R])
            used.append(torch.stack([named_CTE[:, row_R].any(dim=1) for row_R in again]))
            rows.append(torch.tensor([len(row_R) for row_R in again]))
        self.rows_DV += rows[0] + rows[1].unsqueeze(1) + rows[2]
        self.experts_DVC += (used[0] | used[1].unsqueeze(1) | used[2]).sum(dim=-1).cpu()

    def _compile(self, forward: ForwardPlan, scores: Scores, coverage: float | None) -> Tensor | None:
        """The supports ``[G,E]`` of a cold pass; None: all experts."""
        spec, at_V = self.block.spec.router, forward.masks.voting_T.nonzero().squeeze(1)
        if coverage is None or spec.kind == "block_pool":
            return None
        return compile_rows(
            scores.selection_TE[at_V], scores.combine_TE[at_V], forward.places.group_T[at_V], forward.places.groups,
            spec, coverage, TRACED.candidate_factor, max_support=None, least_saving=TRACED.least_saving,
        )  # fmt: skip

    def _named(self, ids_TK: Tensor, scores: Scores, restricted_T: Tensor, group_T: Tensor) -> Tensor:
        """The experts that each row uses under each coverage: bool ``[C,T,E]``."""
        named = []
        for support_GE in self._supports:
            chosen_TK = ids_TK
            if support_GE is not None and bool(restricted_T.any()):
                own_RE, support_RE = scores.selection_TE[restricted_T], support_GE[group_T[restricted_T]]
                chosen_TK = ids_TK.masked_scatter(
                    restricted_T.unsqueeze(1), select(own_RE, self.block.spec.router, support_RE)
                )
            marks_TE = torch.zeros_like(scores.selection_TE, dtype=torch.bool)
            named.append(marks_TE.scatter_(1, chosen_TK.clamp_min(0), True))
        return torch.stack(named)

    def _add_lost(self, scores: Scores, ids_TK: Tensor, restricted_T: Tensor, group_T: Tensor, size_T: Tensor) -> None:
        """What supports change, if experts' outputs are as good as orthogonal and equally long.

        Then a row's output is made of squared weights: those outside the support are lost, and as much comes instead.
        """
        ids_RK, weights_RE = ids_TK[restricted_T], scores.combine_TE[restricted_T].clamp_min(0)
        squares_RK = weights_RE.gather(1, ids_RK.clamp_min(0)).masked_fill(ids_RK == NO_EXPERT, 0.0).square()
        for place, support_GE in enumerate(self._supports):
            if support_GE is not None and len(ids_RK):
                outside_RK = ~support_GE[group_T[restricted_T]].gather(1, ids_RK.clamp_min(0))
                lost_R = 2 * (squares_RK * outside_RK).sum(-1) / squares_RK.sum(-1).clamp_min(1e-30)
                self.errors[2][place] += float((lost_R * size_T[restricted_T]).sum())

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each of `CHOICES`: rows, distinct experts, and relative squared error; fp32."""
        drift_D, live_V, lost_C = (errors / max(self.norm, 1e-30) for errors in self.errors)
        errors_DVC = drift_D[:, None, None] + live_V[:, None] + lost_C
        rows_DVC = self.rows_DV.unsqueeze(-1).expand_as(errors_DVC)
        return rows_DVC.reshape(-1), self.experts_DVC.reshape(-1), errors_DVC.reshape(-1)


@contextmanager
def tracing(blocks: Sequence[EpochMoEBlock]) -> Iterator[list[LayerTrace]]:
    """Trace decodes under `TRACED` on these blocks."""
    traces = [LayerTrace(block) for block in blocks]
    handles = [block.register_forward_hook(trace) for block, trace in zip(blocks, traces, strict=True)]
    try:
        yield traces
    finally:
        for handle in handles:
            handle.remove()


def allocate(cost_LS: Tensor, error_LS: Tensor, most: int) -> list[list[int]]:
    """Settings for all layers on the way from the least error to the least cost, at most so many, tight ones first.

    Each minimises cost + w x error for some weight w, layer by layer: no other has less of both.

    Args:
        cost_LS: what each choice costs in each layer; one row: the same choice in all layers.
        error_LS: the error that it brings.

    Returns:
        For each setting the place of each layer's choice.
    """
    cost_LS = cost_LS / cost_LS.amax(dim=1).sum()
    found: dict[tuple[int, ...], float] = {}
    for weight in torch.logspace(7, -4, 221, dtype=torch.float64):
        best_L = (cost_LS.double() + weight * error_LS.double()).argmin(dim=1)
        found.setdefault(tuple(best_L.tolist()), float(cost_LS.gather(1, best_L.unsqueeze(1)).sum()))
    ways = list(found.items())
    wanted = torch.linspace(ways[0][1], ways[-1][1], most + 1)[1:].tolist()  # evenly by cost, without the first
    near = {min(range(len(ways)), key=lambda i: abs(ways[i][1] - cost)) for cost in wanted}
    return [list(ways[place][0]) for place in sorted(near)]
