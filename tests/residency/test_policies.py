"""Each policy against a plain statement of its rule, belady against all that could have been done."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch
from demands import demand_of
from traces.policies import POLICIES, make_policy, next_uses
from traces.simulate import Placement, bound_counts

from epoch_moe.residency.demand import RowClass
from epoch_moe.residency.retention import KEPT, Retention

EXPERTS = 6


def always(rows: int, reuse: float) -> bool:
    return True


def random_passes(seed: int, length: int = 12, most: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [sorted(draw.sample(range(EXPERTS), draw.randint(0, most))) for _ in range(length)]


def replay(policy: object, passes: list[list[int]], slots: int) -> list[tuple[set[int], set[int]]]:
    """Residents and hits of each pass, as the placement has them after it."""
    placement, seen = Placement(slots, EXPERTS), []
    for number, needed in enumerate(passes):
        demand = demand_of(needed, number, EXPERTS)
        policy.observe(demand)
        steps = placement.plan(demand, policy, always)
        for move in steps.swaps:
            placement.swap(move)
        seen.append((set(placement.resident), set(steps.hits)))
    return seen


@pytest.mark.parametrize("name", ["lru", "lfu"])
@pytest.mark.parametrize("slots", range(EXPERTS + 1))
def test_lru_and_lfu_keep_what_their_rules_say(name: str, slots: int) -> None:
    for seed in range(8):
        passes = random_passes(seed)
        last, uses = dict.fromkeys(range(EXPERTS), 0), dict.fromkeys(range(EXPERTS), 0)
        resident: set[int] = set()
        for number, ((after, hits), needed) in enumerate(
            zip(replay(make_policy(name, 1, EXPERTS, slots), passes, slots), passes, strict=True)
        ):
            assert hits == resident & set(needed)
            for expert in needed:
                last[expert], uses[expert] = number + 1, uses[expert] + 1
            worth = last if name == "lru" else uses
            for expert in sorted(set(needed) - resident, key=lambda e: (-worth[e], e)):
                victims = sorted(resident - set(needed), key=lambda e: (worth[e], -e))
                # Who is needed now gives way to nobody who is worth no more.
                victims += sorted((e for e in resident & set(needed) if worth[e] < worth[expert]), key=lambda e: -e)
                victims.sort(key=lambda e: (worth[e], -e))
                if len(resident) == slots:
                    if not victims:
                        continue
                    resident.remove(victims[0])
                resident.add(expert)
            assert after == resident


def test_interval_moves_at_refreshes_only_and_takes_the_experts_with_most_rows() -> None:
    policy, placement = make_policy("interval", 1, EXPERTS, 2, interval=3), Placement(2, EXPERTS)
    passes = [
        (True, [0, 0, 0, 1, 2, 2]),  # first block: every forward refreshes
        (False, [3, 3, 4]),
        (True, [5, 5, 4, 4, 3]),  # second block: forwards 0 and 3
        (False, [0, 0, 1]),
        (False, [2, 0]),
        (False, [2, 2, 0, 5]),
    ]
    residents, loads = [], []
    for number, (cold, ids) in enumerate(passes):
        demand = demand_of(ids, number, EXPERTS, cold=cold)
        policy.observe(demand)
        steps = placement.plan(demand, policy, always)
        for move in steps.swaps:
            placement.swap(move)
        residents.append(placement.resident)
        loads.append((sorted(expert for expert, _, _ in steps.loads), steps.swaps))
    assert residents == [[0, 2], [3, 4], [4, 5], [4, 5], [4, 5], [0, 2]]
    # In the third pass 4 and 5 have most rows, but the pass itself needs 3, which goes when it was used.
    assert loads == [([0, 2], []), ([3, 4], []), ([], [(5, 0, 3)]), ([], []), ([], []), ([2], [(0, 0, 5)])]


def test_static_holds_its_profile_or_what_came_first() -> None:
    profile_LE = torch.tensor([[5, 1, 0, 9, 5, 0]])
    seen = replay(make_policy("static", 1, EXPERTS, 2, profile_LE=profile_LE), [[1], [0, 4], [2]], 2)
    assert [after for after, _ in seen] == [{0, 3}] * 3 and [hits for _, hits in seen] == [set(), {0}, set()]
    seen = replay(make_policy("static", 1, EXPERTS, 2), [[1], [0, 4], [2]], 2)
    assert [after for after, _ in seen] == [{1}, {0, 1}, {0, 1}]


def best_hits(passes: list[list[int]], slots: int) -> int:
    """The most hits of any sequence of resident sets, each made of the set before and what the pass between used."""
    sets = [frozenset(needed) for needed in passes]

    @cache
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(sets):
            return 0
        pool = resident | sets[number]
        kept = min(slots, len(pool))
        following = max(best(number + 1, frozenset(chosen)) for chosen in itertools.combinations(sorted(pool), kept))
        return len(resident & sets[number]) + following

    return best(0, frozenset())


@pytest.mark.parametrize("most", [1, 4])
def test_belady_cannot_be_beaten(most: int) -> None:
    better_than_lru = 0
    for seed in range(25):
        passes = random_passes(seed, length=9 if most > 1 else 14, most=most)
        for slots in (1, 2, 3):
            policy = make_policy("belady", 1, EXPERTS, slots, future=[passes])
            hits = sum(len(hits) for _, hits in replay(policy, passes, slots))
            assert hits == bound_counts(passes, slots, EXPERTS).hits == best_hits(passes, slots)
            lru = sum(len(hits) for _, hits in replay(make_policy("lru", 1, EXPERTS, slots), passes, slots))
            better_than_lru += hits > lru
    assert better_than_lru > 30  # else the passes would be too easy


def test_belady_does_not_admit_what_is_used_later_than_all_residents() -> None:
    passes = [[0], [1], [2], [0], [1], [2]]
    seen = replay(make_policy("belady", 1, EXPERTS, 2, future=[passes]), passes, 2)
    assert [after for after, _ in seen[:3]] == [{0}, {0, 1}, {0, 1}]
    policy = make_policy("belady", 1, EXPERTS, 2, future=[passes])
    with pytest.raises(ValueError, match="forward 0: this is not the trace"):
        policy.observe(demand_of([3], 0, EXPERTS))


def test_next_uses_are_the_first_from_each_pass_on() -> None:
    assert next_uses([[0], [1], [0]], 3).tolist() == [[0, 1, 3], [2, 1, 3], [2, 3, 3], [3, 3, 3]]


def test_unknown_policies_and_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="policy='mru': expected one of retention, lru"):
        make_policy("mru", 1, 4, 2)
    with pytest.raises(ValueError, match="slots=5"):
        make_policy("lru", 1, 4, 5)
    with pytest.raises(ValueError, match="interval=0"):
        make_policy("interval", 1, 4, 2, interval=0)
    with pytest.raises(ValueError, match=r"profile_LE has shape \(2, 4\)"):
        make_policy("static", 1, 4, 2, profile_LE=torch.zeros(2, 4))
    assert all(make_policy(name, 1, 4, 2, **({"future": [[]]} if name == "belady" else {})) for name in POLICIES)


def retention(**options: float) -> Retention:
    return Retention(1, EXPERTS, **options)


def expected_uses(policy: Retention) -> torch.Tensor:
    """The part of the value that comes from rows and what they turn to."""
    state = policy._layers[0]
    assert state is not None
    return policy._uses_E(state)[0]


def rows(*classes: RowClass) -> dict[str, torch.Tensor]:
    return {"class_R": torch.tensor(classes, dtype=torch.int8)}


def test_rows_about_to_be_committed_give_up_their_experts() -> None:
    values = []
    for confidence in (0.05, 0.95):
        policy = retention(history=0.0)
        number = 0
        for _ in range(30):  # rows with a confidence of .95 were committed by the next forward, those with .05 were not
            policy.observe(demand_of([[4, 5], [4, 5]], number, EXPERTS, cold=True))
            policy.end_forward(torch.tensor([0.05, 0.95]))
            policy.observe(demand_of([[4, 5], [4, 5]], number + 1, EXPERTS))
            policy.end_forward(torch.tensor([0.05, 0.95]))
            policy.observe(demand_of([[4, 5], [2, 3]], number + 2, EXPERTS, **rows(RowClass.LIVE, RowClass.NEW)))
            number += 3
        policy.observe(demand_of([[0, 1]], number, EXPERTS, cold=True))
        policy.end_forward(torch.tensor([confidence]))
        policy.observe(demand_of([[0, 1]], number + 1, EXPERTS))
        values.append(expected_uses(policy))
    unsure_E, sure_E = values
    assert float(unsure_E[0]) > 2 * float(sure_E[0])
    assert float(sure_E[2]) > float(unsure_E[2]) + 0.1  # what new rows go to gains instead


def test_stable_rows_count_more_as_their_refresh_comes_near_and_commit_rows_for_nothing() -> None:
    def value(row: RowClass, to_refresh: int | None) -> float:
        policy = retention(history=0.0)
        policy.observe(demand_of([[0, 1]], 0, EXPERTS, to_refresh=to_refresh, **rows(row)))
        return float(expected_uses(policy)[0])

    assert value(RowClass.STABLE, 1) > value(RowClass.STABLE, 4) > value(RowClass.STABLE, None) == 0.0
    assert value(RowClass.COMMIT, 1) == 0.0
    assert value(RowClass.OTHER, None) > value(RowClass.LIVE, None) > 0.3


def test_the_kept_share_is_counted_and_starts_from_what_was_measured() -> None:
    policy = retention(history=0.0)
    policy.observe(demand_of([[0, 1]], 0, EXPERTS))
    state = policy._layers[0]
    assert state is not None
    first = (state.kept_CDK / state.tried_CDK)[RowClass.LIVE, 0]
    assert first.tolist() == pytest.approx([KEPT[RowClass.LIVE]] * 2)
    number = 1
    for number in range(1, 200):  # the heavy branch stays, the light one goes to another expert every time
        policy.observe(demand_of([[0, 1 + number % 2]], number, EXPERTS))
    kept_DK = (state.kept_CDK / state.tried_CDK)[RowClass.LIVE]
    assert kept_DK[0, 0] > 0.9 and kept_DK[0, 1] < 0.1
    assert kept_DK[1, 1] > 0.8  # it comes back to where it was two forwards ago
    value_E = policy.value_E(0)
    assert value_E[0] > value_E[1 + (number + 1) % 2] > value_E[1 + number % 2] > value_E[5]


def test_a_new_block_and_another_window_forget_the_rows() -> None:
    for fields in ({"cold": True}, {"seq_len": 3}):
        policy = retention(history=0.0)
        policy.observe(demand_of([[0, 1], [2, 3]], 0, EXPERTS, **rows(RowClass.OTHER, RowClass.OTHER)))
        policy.observe(demand_of([[4, 5]], 1, EXPERTS, **rows(RowClass.OTHER), **fields))
        state = policy._layers[0]
        assert state is not None
        assert set(state.ids_MDK.flatten().tolist()) == {-1, 4, 5}


def test_lead_rows_leave_no_trace_in_the_window() -> None:
    # Two sequences of one lead row and two window rows: flat rows 1, 2, 4 and 5 are places 0 to 3.
    policy = retention()
    demand = demand_of([[0], [1], [2], [3], [4], [5]], 0, EXPERTS, seq_len=3, lead=1)
    assert demand.window_R.tolist() == [-1, 0, 1, -1, 2, 3]
    policy.observe(demand)
    policy.end_forward(torch.tensor([0.0, 0.15, 0.25, 0.0, 0.35, float("nan")]))
    assert policy._commits._known.tolist() == [1, 2, 3, 10]
    policy.observe(demand_of([[1], [2], [4], [5]], 1, EXPERTS, seq_len=2))
    assert policy._layers[0].ids_MDK[:, 0, 0].tolist() == [1, 2, 4, 5]


def test_without_confidences_live_rows_are_committed_at_the_rate_seen() -> None:
    policy = retention()
    for number in range(60):
        new = number % 3 == 2
        row = RowClass.NEW if new else RowClass.LIVE
        policy.observe(demand_of([[0, 1]], number, EXPERTS, cold=number % 3 == 0, **rows(row)))
        policy.end_forward(None, torch.tensor([not new]))
    # Of two forwards with a live row, one ends with the row committed.
    assert float(policy._commits.chance(1)[0]) == pytest.approx((20 + 2.56) / (40 + 16))


def test_ids_below_zero_are_no_experts_and_unknown_rows_are_counted_only() -> None:
    for name in ("retention", "lru", "lfu", "interval", "static"):
        policy, placement = make_policy(name, 1, EXPERTS, 2), Placement(2, EXPERTS)
        for number in range(3):
            demand = demand_of([[0, -1], [-1, -1], [-1, 3]], number, EXPERTS, row_R=torch.tensor([0, -1, -1]))
            policy.observe(demand)
            placement.plan(demand, policy, always)
            policy.end_forward(torch.tensor([0.5, 0.5, 0.5]))
        assert placement.resident == [0, 3] and placement.counts.hits == 4
