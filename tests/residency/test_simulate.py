"""Replays of traces: the same numbers as policies and placements driven by hand, and bounds that hold."""

from __future__ import annotations

import random

import pytest
import torch
from demands import demand_of
from traces.policies import POLICIES, make_policy
from traces.simulate import BOUND, PLAIN_LRU, Placement, plain_lru_counts, simulate, slots_of
from traces.trace import Trace, TraceForward

EXPERTS, LAYERS = 8, 2


def random_trace(seed: int, forwards: int = 30) -> Trace:
    """Rows that keep most of their experts from one forward to the next, in blocks of five forwards."""
    draw = torch.Generator().manual_seed(seed)
    trace = Trace(LAYERS, EXPERTS, [10, 100], {"seed": seed})
    ids = torch.zeros(LAYERS, 4, 2, dtype=torch.int64)
    for number in range(forwards):
        demands = []
        for layer in range(LAYERS):
            new = torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in range(4)])
            change = torch.rand(4, 1, generator=draw) < (1.0 if number % 5 == 0 else 0.3)
            ids[layer] = torch.where(change, new, ids[layer])
            demands.append(demand_of(ids[layer].clone(), number, EXPERTS, layer=layer, cold=number % 5 == 0))
        trace.forwards.append(TraceForward(demands, torch.rand(4, generator=draw), torch.ones(4, dtype=torch.bool)))
    return trace


def test_a_replay_is_what_policy_and_placement_do() -> None:
    trace = random_trace(0)
    for replay in simulate(trace, ["retention", "lru", "interval"], [2, 5]):
        policy = make_policy(replay.policy, LAYERS, EXPERTS, replay.slots)
        layers = [Placement(replay.slots, EXPERTS) for _ in range(LAYERS)]
        for forward in trace.forwards:
            for demand in forward.demands:
                policy.observe(demand)
                for move in layers[demand.layer].plan(demand, policy, lambda *_: True).swaps:
                    layers[demand.layer].swap(move)
            policy.end_forward(forward.confidence_T, forward.live_T)
        assert replay.per_layer == tuple(layer.counts for layer in layers)
        counts = [layer.counts for layer in layers]
        assert replay.loaded_bytes == sum(c.loads * size for c, size in zip(counts, [10, 100], strict=True))
        assert replay.hit_rate == sum(c.hits for c in counts) / sum(c.demanded for c in counts)
        assert replay.utilisation == sum(c.hits for c in counts) / (replay.slots * 30 * LAYERS)
        numbers = replay.as_dict()
        missed = sum((c.loads + c.bypassed - c.swaps) * size for c, size in zip(counts, [10, 100], strict=True))
        assert numbers["missed_bytes_per_forward"] * 30 == pytest.approx(missed)


def test_nobody_beats_the_bound_and_belady_reaches_it() -> None:
    for seed in range(3):
        trace = random_trace(seed)
        names = [*POLICIES, PLAIN_LRU, BOUND]
        replays = {(r.policy, r.slots): r for r in simulate(trace, names, [0, 2, 4, 8])}
        for (_, slots), replay in replays.items():
            assert replay.counts.hits <= replays[BOUND, slots].counts.hits
            assert replay.counts.hits + replay.counts.misses == replay.counts.demanded
        for slots in (0, 2, 4, 8):
            assert replays["belady", slots].counts.hits == replays[BOUND, slots].counts.hits
            assert replays["retention", 0].hit_rate == 0.0
            assert replays["retention", 8].hit_rate > 0.8
        # A profile fills the slots ahead, which no placement that waits for misses can.
        ahead = simulate(trace, ["static"], [8], profile_LE=random_trace(seed + 10).uses_LE())[0]
        assert ahead.counts.hits > replays[BOUND, 8].counts.hits and ahead.counts.loads == LAYERS * EXPERTS


def test_confidences_and_the_cost_rule_reach_the_replay() -> None:
    trace = random_trace(4)
    with_them, without = (simulate(trace, ["retention"], [3], confidences=c)[0] for c in (True, False))
    assert with_them.counts != without.counts
    refused = simulate(trace, ["lru"], [3], worth_loading=lambda *_: False)[0]
    assert refused.counts.loads == refused.counts.hits == 0


def test_plain_lru_is_a_cache_of_single_experts() -> None:
    for seed in range(5):
        draw = random.Random(seed)
        passes = [sorted(draw.sample(range(6), draw.randint(0, 4))) for _ in range(20)]
        for slots in range(7):
            recent: list[int] = []
            hits = 0
            for expert in (expert for needed in passes for expert in needed):
                hits += expert in recent
                recent = [one for one in recent if one != expert] + [expert]
                recent = recent[len(recent) - slots :] if len(recent) > slots else recent
            assert plain_lru_counts(passes, slots).hits == hits


def test_budgets_are_shares_of_a_layer() -> None:
    assert [slots_of(share, 64) for share in (0.0, 0.001, 0.1, 0.4, 1.0)] == [0, 1, 6, 25, 64]
    with pytest.raises(ValueError, match=r"budget=1.5"):
        slots_of(1.5, 64)
    with pytest.raises(ValueError, match="policy='mru'"):
        simulate(random_trace(0), ["mru"], [2])
