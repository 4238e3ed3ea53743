"""All ops of a plan's layer in one function: compiled without a graph break, the same values."""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.config import EpochConfig
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.padded import DeviceSelection, restore_padded, run_padded
from epoch_moe.kernels.compaction import compact
from epoch_moe.plan.packed import pad_rows
from epoch_moe.plan.rules import RowClasses, RowPlaces, cached_rows, decide_rows
from epoch_moe.plan.support import SupportState, route_fresh
from epoch_moe.routing import RouterSpec, router_scores

SPEC = RouterSpec(kind="sigmoid_group", num_experts=8, top_k=2, n_group=4, topk_group=2)
BATCH, SEQ, HIDDEN, INNER = 2, 5, 16, 8


def layer(
    x_TH: Tensor, ids_BS: Tensor, stamps_BS: Tensor, gate_EH: Tensor, stacked: ExpertViews, support_BE: Tensor,
    short_B: Tensor, cache_MH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Row decision, routing with the supports' watch, worklist, experts, combine and restore."""
    ids_T, row_T = ids_BS.view(-1), torch.arange(BATCH * SEQ)
    yes_T, live_T = row_T >= 0, ids_T == 9
    cached_T = cached_rows(stamps_BS.view(-1), ids_T, None)
    classes = RowClasses(yes_T, yes_T, live_T, ~yes_T, cached_T, yes_T, ~yes_T, ~yes_T, ~yes_T, ~yes_T)
    masks = decide_rows(classes, EpochConfig())
    rows = pad_rows(masks, RowPlaces(BATCH, SEQ, SEQ, row_T // SEQ, row_T, row_T), compact)
    config = EpochConfig(coverage=0.7)
    scores = router_scores(x_TH.index_select(0, rows.fresh_R) @ gate_EH.T, None, SPEC)
    state = SupportState(fixed=True, support_GE=support_BE, short_G=short_B)
    by = DeviceSelection(scores, None, SPEC, config, rows, x_TH.dtype)
    routing = route_fresh(scores, SPEC, rows, state, config, cold=False, dtype=x_TH.dtype, by=by)
    pairs_PH, worklist = run_padded(x_TH, rows, routing, stacked)
    out_TH = restore_padded(pairs_PH, rows, worklist, routing.weights_TK, cache_MH)
    return out_TH, worklist.counts_E, rows.count


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, ExpertViews, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    ids_BS = torch.tensor([[9, 1, 2, 9, 3], [4, 9, 9, 5, 6]])
    stamps_BS = torch.tensor([[-1, 1, 2, -1, -1], [4, -1, -1, 5, 7]])
    stacked = ExpertViews.fused(torch.randn(8, 2 * INNER, HIDDEN) / 4, torch.randn(8, HIDDEN, INNER) / 4)
    support_BE = torch.tensor([[True] * 4 + [False] * 4, [True] * 8])
    cache_MH = torch.randn(BATCH * SEQ, HIDDEN).masked_fill_((stamps_BS == -1).view(-1, 1), float("nan"))
    x_TH, gate_EH = torch.randn(BATCH * SEQ, HIDDEN), torch.randn(8, HIDDEN)
    return x_TH, ids_BS, stamps_BS, gate_EH, stacked, support_BE, torch.tensor([False, True]), cache_MH


@torch.no_grad()
def test_one_graph_with_the_same_values() -> None:
    plain, compiled = inputs(), inputs()
    expected = layer(*plain)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*compiled)
    assert expected[2].tolist() == [6] and torch.isfinite(expected[0]).all()
    for a, b in zip((*expected, *plain[5:]), (*found, *compiled[5:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
