"""Demands: sums over pairs, and the classes of a forward's rows."""

from __future__ import annotations

import torch
from demands import demand_of

from epoch_moe.config import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.slot import DenseForward
from epoch_moe.residency.clock import Clock
from epoch_moe.residency.demand import RowClass
from epoch_moe.residency.policies import LRU

L, N, S, C, O = RowClass.LIVE, RowClass.NEW, RowClass.STABLE, RowClass.COMMIT, RowClass.OTHER  # noqa: E741
MASK = 0


def test_sums_are_those_of_a_loop() -> None:
    ids = torch.randint(-1, 5, (9, 3), generator=torch.Generator().manual_seed(3))
    demand = demand_of(ids, 0, 6)
    for expert in range(6):
        assert int(demand.counts_E[expert]) == sum(i == expert for i in ids.flatten().tolist())
    assert demand.experts == sorted({i for i in ids.flatten().tolist() if i >= 0})


def classes(forwards: list[list[int]], lead: int = 0, config: EpochConfig | None = None, **block: int) -> list:
    """Classes of the fresh rows of forwards of one sequence, with the rows they are of and the way to the refresh."""
    plan = BlockPlan(
        config or EpochConfig.exact(),
        2,
        **({"batch": 1, "window": len(forwards[-1]), "prefix": 0, "prefix_constant": True} | block),
        counters=Counters(2, [1, 1]),
    )
    seen, clock = [], Clock(LRU(2, 100), 2, 100)
    for number, ids in enumerate(forwards):
        forward = plan.next_forward(
            torch.tensor([ids]),
            mask_id=MASK,
            valid_BS=None,
            lead=lead if number == 0 else 0,
            live_BN=None,
            changed_BN=None,
        )
        rows = forward.rows
        ids_RK = torch.arange(rows.num_fresh).unsqueeze(1)
        demand = clock.observe(1, ids_RK, torch.ones(ids_RK.shape), forward)
        assert (demand.layer, demand.forward, demand.cold) == (1, number + 1, number == 0)
        seen.append((demand.row_R.tolist(), demand.class_R.tolist(), demand.to_refresh, demand.window_R.tolist()))
        plan.complete(forward)
    return seen


def test_rows_of_a_block_go_from_live_to_new_to_stable() -> None:
    seen = classes([[9, 9, 5, MASK, MASK], [5, 3, MASK], [5, 3, 4], [5, 3, 4]], lead=2)
    assert seen[0] == ([0, 1, 2, 3, 4], [C, C, S, L, L], 1, [-1, -1, 0, 1, 2])
    assert seen[1] == ([0, 1, 2], [S, N, L], 1, [0, 1, 2])
    assert seen[2][1] == [S, S, N]
    assert seen[3][1] == [S, S, S]


def test_reused_rows_make_no_demand_until_the_refresh() -> None:
    config = EpochConfig(coverage=None, refresh_interval=3)
    seen = classes([[5, MASK], [5, MASK], [5, 6], [5, 6]], config=config)
    assert [(rows, row, left) for rows, row, left, _ in seen] == [
        ([0, 1], [S, L], 3),
        ([1], [L], 2),
        ([1], [N], 1),
        ([0, 1], [S, S], 3),
    ]
    never = classes([[5, MASK], [5, MASK]], config=EpochConfig(refresh_interval=None))
    assert never[1][2] is None


def test_prefix_and_future_rows() -> None:
    never = EpochConfig(coverage=None, refresh_interval=None)
    constant = classes([[7, MASK, MASK]] * 2, prefix=1, future=1, config=never)
    assert constant[0][1] == [C, L, O] and constant[1][:2] == ([1, 2], [L, O])
    drifting = classes([[7, MASK, MASK]] * 2, prefix=1, future=1, prefix_constant=False)
    assert drifting[0][1] == drifting[1][1] == [S, L, O]


def test_rows_without_a_plan_come_back_every_time() -> None:
    clock, ids = Clock(LRU(1, 4), 1, 4), torch.tensor([[1], [2]])
    exist = torch.tensor([[True, False, False, False], [False, True, False, False]])
    forward = DenseForward(Counters(1, [1]), exist.shape, exist)
    demand = clock.observe(0, ids, torch.ones(2, 1), forward)
    assert demand.row_R.tolist() == demand.window_R.tolist() == [0, 5]
    assert demand.class_R.tolist() == [O, O] and demand.to_refresh is None
    # Other ranks' rows: how many there are is all that is known.
    demand = clock.observe(0, ids, torch.ones(2, 1), forward, known_rows=False)
    assert demand.row_R.tolist() == demand.window_R.tolist() == [-1, -1] and demand.class_R.tolist() == [O, O]


def test_forwards_are_told_apart_by_the_order_of_their_layers_where_nothing_else_does() -> None:
    clock = Clock(LRU(2, 4), 2, 4)
    numbers, cold = [], []
    for layer, rows in ((0, 2), (1, 2), (0, 2), (1, 2), (0, 3)):
        demand = clock.observe(layer, torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1), None)
        numbers.append(demand.forward)
        cold.append(demand.cold)
    assert numbers == [1, 1, 2, 2, 3] and cold == [True, False, False, False, True]
