"""The plain-torch references in the place of the kernels, so that whole decodes on the device path take milliseconds.

Those that look at values are ops, as the kernels are: what records an iteration then sees one call.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from epoch_moe.kernels.combine_restore_reference import combine_reference, combine_restore_reference
from epoch_moe.kernels.compaction_reference import compact_reference
from epoch_moe.kernels.grouped_mlp_reference import grouped_mlp_reference
from epoch_moe.kernels.route_reference import route_reference
from epoch_moe.kernels.worklist_reference import worklist_reference
from epoch_moe.plan.atlas import compile_support
from epoch_moe.routing import RouterSpec
from epoch_moe.worklist import Worklist


@torch.library.custom_op("epoch_moe_tests::pairs", mutates_args=())
def _pairs(
    x_TH: Tensor,
    rows_R: Tensor | None,
    pair_P: Tensor,
    begins_E1: Tensor,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    top_k: int,
) -> Tensor:
    lists = Worklist(pair_P, pair_P, pair_P, begins_E1)
    return grouped_mlp_reference(x_TH, rows_R, lists, gate_EFH, up_EFH, down_EHF, top_k)


def _grouped_mlp(
    x_TH: Tensor, rows_R: Tensor | None, worklist: Worklist, gate: Tensor, up: Tensor, down: Tensor, top_k: int,
    config: object,
) -> Tensor:  # fmt: skip
    pairs_PH: Tensor = _pairs(x_TH, rows_R, worklist.pair_P, worklist.begins_E1, gate, up, down, top_k)
    return pairs_PH


@torch.library.custom_op("epoch_moe_tests::combine_restore", mutates_args=("cache_MH", "out_TH"))
def _combine_restore(
    pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, source_T: Tensor, store_R: Tensor, cache_MH: Tensor,
    out_TH: Tensor,
) -> None:  # fmt: skip
    combine_restore_reference(pairs_PH, rank_RK, weights_RK, source_T, store_R, cache_MH, out_TH)


@torch.library.custom_op("epoch_moe_tests::combine", mutates_args=())
def _combine(pairs_PH: Tensor, rank_RK: Tensor, weights_RK: Tensor, count: Tensor | None = None) -> Tensor:
    return combine_reference(pairs_PH, rank_RK, weights_RK, count)


@torch.library.custom_op("epoch_moe_tests::compile_support", mutates_args=())
def _compile(
    selection_GWE: Tensor, weights_GWE: Tensor, votes_GW: Tensor, only_G: Tensor | None, kind: str, top_k: int,
    n_group: int, topk_group: int, coverage: float, factor: int, max_support: int | None, least_saving: float,
) -> Tensor:  # fmt: skip
    experts = selection_GWE.shape[2]
    spec = RouterSpec(kind=kind, num_experts=experts, top_k=top_k, n_group=n_group, topk_group=topk_group)  # type: ignore[arg-type]
    # As the kernel: rows that do not vote may hold anything.
    selection, weights = (t.masked_fill(~votes_GW.unsqueeze(-1), 0.0) for t in (selection_GWE, weights_GWE))
    settings = {"max_support": max_support, "least_saving": least_saving}
    support_GE = compile_support(selection, weights, votes_GW, spec, coverage, factor, **settings)  # type: ignore[arg-type]
    return support_GE if only_G is None else support_GE & only_G.unsqueeze(1)


def _compile_support_device(
    selection_GWE: Tensor, weights_GWE: Tensor, votes_GW: Tensor, spec: RouterSpec, coverage: float, factor: int,
    only_G: Tensor | None = None, *, max_support: int | None = None, least_saving: float = 0.0,
) -> Tensor:  # fmt: skip
    support_GE: Tensor = _compile(
        selection_GWE, weights_GWE, votes_GW, only_G, spec.kind, spec.top_k, spec.n_group, spec.topk_group, coverage,
        factor, max_support, least_saving,
    )  # fmt: skip
    return support_GE


class Setter(Protocol):
    """What replaces an attribute for a while (`pytest.MonkeyPatch`)."""

    def setattr(self, target: object, name: str, value: object) -> None:
        """Replace it."""
        ...


def use_references(replace: Setter) -> None:
    """Put the references where the library looks for the kernels."""
    from epoch_moe.kernels import atlas, combine_restore, compaction, grouped_mlp, route, worklist

    replace.setattr(atlas, "compile_support_device", _compile_support_device)
    replace.setattr(combine_restore, "combine_restore", _combine_restore)
    replace.setattr(combine_restore, "combine", _combine)
    replace.setattr(compaction, "compact", compact_reference)
    replace.setattr(grouped_mlp, "grouped_mlp", _grouped_mlp)
    replace.setattr(route, "route", route_reference)
    replace.setattr(worklist, "device_worklist", worklist_reference)
