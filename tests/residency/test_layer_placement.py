"""Placement: nothing a pass needs is lost in it, slots are never over-full, and the slot table tells the truth."""

from __future__ import annotations

import pytest
import torch
from demands import demand_of
from hypothesis import given, settings
from hypothesis import strategies as st
from traces.policies import make_policy
from traces.simulate import Placement

from epoch_moe.residency.placement import NOT_HERE, LayerPlacement, PlacementCounts

EXPERTS = 7
ONLINE = ("retention", "lru", "lfu", "interval", "static")


def always(rows: int, reuse: float) -> bool:
    return True


@settings(max_examples=150)
@given(
    st.sampled_from((*ONLINE, "belady", "profile")),
    st.integers(0, EXPERTS),
    st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=1, max_size=8),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_every_step_keeps_its_promises(
    name: str, slots: int, passes: list[set[int]], carry_out: bool, seed: int
) -> None:
    options = {}
    if name == "belady":
        options["future"] = [[sorted(one) for one in passes]]
    if name == "profile":
        name, options["profile_LE"] = "static", torch.arange(EXPERTS)[None] % 3
    policy = make_policy(name, 1, EXPERTS, slots, **options)
    placement = Placement(slots, EXPERTS)
    draw = torch.Generator().manual_seed(seed)
    content: dict[int, int] = {}  # slot -> expert, kept by the steps alone
    for number, needed in enumerate(passes):
        demand = demand_of(sorted(needed), number, EXPERTS)
        policy.observe(demand)
        before = dict(content)
        steps = placement.plan(demand, policy, lambda rows, reuse: float(torch.rand(1, generator=draw)) > 0.3)
        for expert, slot, evicted in steps.loads:
            assert 0 <= slot < slots
            assert before.get(slot, NOT_HERE) == evicted
            assert evicted not in needed
            assert expert not in before.values()
            content[slot] = expert
        table = {int(s): e for e, s in enumerate(placement.slot_of_E) if s != NOT_HERE}
        assert table == content
        for move in steps.swaps:  # when the pass has used both
            expert, slot, evicted = move
            assert expert in steps.bypass and evicted in steps.hits and content[slot] == evicted
            if carry_out:
                placement.swap(move)
                content[slot] = expert
        loaded = [expert for expert, _, _ in steps.loads]
        assert len(set(loaded)) == len(loaded) and len({slot for _, slot, _ in steps.loads}) == len(loaded)
        assert steps.hits == sorted(needed & set(before.values()))
        # Every expert of the pass is in a slot or bypassed, exactly one of the two.
        assert sorted(needed) == sorted(steps.hits + [e for e in loaded if e in needed] + steps.bypass)
        table = {int(s): e for e, s in enumerate(placement.slot_of_E) if s != NOT_HERE}
        assert table == content
        assert placement.resident == sorted(content.values()) and len(content) <= slots
    counts = placement.counts
    assert counts.forwards == len(passes)
    assert counts.demanded == counts.hits + counts.misses == sum(map(len, passes))
    assert counts.loads - counts.evictions == len(content)


def test_counts_are_of_experts_and_of_pairs() -> None:
    policy, placement = make_policy("lru", 1, 4, 2), LayerPlacement(2, 4)
    for number, ids in enumerate([[[0, 1], [0, 1]], [[0, 2], [0, 3]], [[3, 2], [1, -1]]]):
        demand = demand_of(ids, number, 4)
        policy.observe(demand)
        steps = placement.plan(demand, policy, always)
    # Forward 1: 0 is there, 2 takes the place of 1, nothing is left for 3. Forward 2: 1 or 3 takes the place of 0.
    assert steps.hits == [2] and steps.loads == [(1, 0, 0)] and steps.bypass == [3]
    assert placement.counts == PlacementCounts(
        forwards=3, demanded=8, hits=2, misses=6, hit_pairs=3, miss_pairs=8,
        loads=4, swaps=0, evictions=2, bypassed=2, bypassed_pairs=2,
    )  # fmt: skip
    total = placement.counts + placement.counts
    assert (total.loads, total.bypassed_pairs) == (8, 4)


def test_the_cost_rule_hears_of_rows_and_reuse_and_can_refuse_a_load() -> None:
    policy, placement = make_policy("lfu", 1, 3, 1), LayerPlacement(1, 3)
    asked = []
    for number, ids in enumerate([[[0], [0]], [[1], [2]]]):
        demand = demand_of(ids, number, 3)
        policy.observe(demand)
        steps = placement.plan(demand, policy, lambda *what: bool(asked.append(what)))
    assert [rows for rows, _ in asked] == [2, 1, 1]
    assert asked[0][1] == 100.0 and asked[1][1] == pytest.approx(1.0)  # used in 1 of 1 forwards, in 1 of 2
    assert steps.loads == [] and steps.bypass == [1, 2] and placement.resident == []


def test_forgotten_experts_leave_their_slots() -> None:
    policy, placement = make_policy("lru", 1, 3, 2), LayerPlacement(2, 3)
    demand = demand_of([0, 1], 0, 3)
    policy.observe(demand)
    placement.plan(demand, policy, always)
    placement.forget([1, 2])
    assert placement.resident == [0] and placement.slot_of_E.tolist() == [0, NOT_HERE, NOT_HERE]
    demand = demand_of([0, 1], 1, 3)
    policy.observe(demand)
    assert placement.plan(demand, policy, always).loads == [(1, 1, NOT_HERE)]


def test_a_swap_waits_until_the_pass_has_used_who_leaves() -> None:
    policy, placement = make_policy("belady", 1, 3, 1, future=[[[0], [0, 1], [1]]]), LayerPlacement(1, 3)
    steps = None
    for number, ids in enumerate([[0], [0, 1]]):
        demand = demand_of(ids, number, 3)
        policy.observe(demand)
        steps = placement.plan(demand, policy, always)
    assert steps is not None and (steps.hits, steps.loads, steps.bypass) == ([0], [], [1])
    assert steps.swaps == [(1, 0, 0)] and placement.resident == [0]
    placement.swap(steps.swaps[0])
    assert placement.resident == [1] and placement.counts.swaps == 1
    with pytest.raises(ValueError, match="slot 0 holds expert 1: expected 0"):
        placement.swap(steps.swaps[0])
