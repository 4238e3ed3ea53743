"""A warm layer under a plan never waits for the device: its whole path runs on tensors without values.

`.item()`, `nonzero()` and friends raise on meta tensors; so would an index on another device.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from epoch_moe.config import EpochConfig
from epoch_moe.experts.run import pick_backend, run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.restore import pack, restore
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.rules import RowPlaces
from epoch_moe.plan.support import SupportState, route_fresh
from epoch_moe.routing import RouterSpec, router_logits, router_scores
from epoch_moe.worklist import build_worklist

BATCH, SEQ, FRESH, EXPERTS, HIDDEN, INNER = 2, 8, 10, 16, 32, 16
SPEC = RouterSpec(kind="sigmoid_group", num_experts=EXPERTS, top_k=4, n_group=4, topk_group=2)


def warm_layer(config: EpochConfig, device: str) -> torch.Tensor:
    """What `EpochMoEBlock._planned` does on a forward that is not cold."""

    def ids(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    def flags(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.bool, device=device)

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    rows = ListedRows(
        places=RowPlaces(BATCH, SEQ, SEQ, ids(BATCH * SEQ), ids(BATCH * SEQ), ids(BATCH * SEQ)),
        fresh_R=ids(FRESH),
        restricted_R=flags(FRESH),
        joining_R=flags(FRESH),
        vote_R=ids(FRESH),
        group_R=ids(FRESH),
        entry_R=ids(FRESH),
        store_src=ids(5),
        store_dst=ids(5),
        reuse_src=ids(6),
        reuse_dst=ids(6),
        num_rows=BATCH * SEQ,
        num_restricted=5,
        num_voting=5,
    )
    supports = BATCH if config.support_scope == "sequence" else 1
    state = SupportState(support_GE=torch.ones(supports, EXPERTS, dtype=torch.bool, device=device))
    x_RH = pack(values(BATCH * SEQ, HIDDEN), rows)
    scores = router_scores(router_logits(x_RH, values(EXPERTS, HIDDEN), SPEC), values(EXPERTS).float(), SPEC)
    routing = route_fresh(scores, SPEC, rows, state, config, cold=False, dtype=x_RH.dtype)
    counters = Counters(1, [1])
    assert state.used_G is not None
    state.count(counters, 0)
    worklist = build_worklist(routing.ids_TK, EXPERTS)
    counters.add_layer(0, FRESH, worklist.counts_E)
    stacked = ExpertViews.fused(values(EXPERTS, 2 * INNER, HIDDEN), values(EXPERTS, HIDDEN, INNER))
    y_RH = run_experts(x_RH, routing.ids_TK, routing.weights_TK, stacked, pick_backend("grouped", stacked), worklist)
    return restore(y_RH, rows, values(BATCH * SEQ, HIDDEN))


@pytest.mark.parametrize(
    ("on_miss", "scope", "restrict_new"),
    list(itertools.product(("reselect", "drop", "expand"), ("sequence", "batch"), (False, True))),
)
def test_no_host_sync(on_miss: str, scope: str, restrict_new: bool) -> None:
    config = EpochConfig(on_miss=on_miss, support_scope=scope, restrict_new=restrict_new)  # type: ignore[arg-type]
    with torch.no_grad():
        assert warm_layer(config, "meta").shape == (BATCH * SEQ, HIDDEN)


def test_a_sync_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import epoch_moe.plan.support as support

    honest = support._weight
    monkeypatch.setattr(support, "_weight", lambda scores, ids: honest(scores, ids) * bool(ids.sum().item() + 1))
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        warm_layer(EpochConfig(), "meta")
