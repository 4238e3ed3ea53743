"""Made-up expert traces in a released model's shapes: routing of `routing_trace.py` under a block plan of the library.

Blocks follow each other: each has other rows and a common part of its own, and the layers keep what is common to all
their rows. The decoder's confidences are made up too, and no measured number stands behind them: a row that the forward
commits gets one above .95, a row that is committed g forwards later ``.95 exp(-.4 g)`` times a number in .6 to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from routing_trace import BLOCK, MASK, Forward, Knobs, Shape, trace
from torch import Tensor
from traces.recorder import TraceRecorder
from traces.trace import Trace

from epoch_moe import EpochConfig
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.support import route_fresh
from epoch_moe.residency.clock import Clock
from epoch_moe.residency.demand import RowClass
from epoch_moe.routing import Scores

KNOBS = Knobs(shared=0.8828125, across=0.9780859375, live=0.845703125, stable=0.884765625, turnover=0.7890625)
"""What `routing_trace.calibrate` found for LLaDA2.0-mini (spread 1, seed 0), as in results/freshlane_traffic.json."""
THRESHOLD, FALL, LOWEST = 0.95, 0.4, 0.6


def made_up_trace(
    shape: Shape, knobs: Knobs, config: EpochConfig, *, batch: int, blocks: int, layers: int, seed: int
) -> Trace:
    """A trace of ``blocks`` blocks of ``batch`` sequences; see the top of this file."""
    experts = shape.router.num_experts
    generator = torch.Generator().manual_seed(seed)
    layer_LE = torch.randn(layers, experts, generator=generator)
    expert_bytes = 3 * shape.hidden * shape.inner * 2
    recorder = TraceRecorder(layers, experts, [expert_bytes] * layers)
    clock = Clock(recorder, layers, experts)
    for block in range(blocks):
        start = seed * 1_000_003 + block * 101
        steps = [list(trace(shape, knobs, batch, start + 1 + i, layer_LE[i], start)) for i in range(layers)]
        plan = BlockPlan(
            config, layers, batch=batch, window=BLOCK, prefix=0, prefix_constant=True, counters=Counters(layers, [0])
        )
        for number, confidence_BS in enumerate(_confidences(steps[0], generator)):
            _forward(plan, clock, [layer[number] for layer in steps], confidence_BS, shape, config)
    return recorder.trace


def _forward(
    plan: BlockPlan,
    clock: Clock,
    layers: list[Forward],
    confidence_BS: Tensor,
    shape: Shape,
    config: EpochConfig,
) -> None:
    first = layers[0]
    planned = plan.next_forward(
        first.ids_BS, mask_id=MASK, valid_BS=None, lead=first.lead, live_BN=None, changed_BN=None
    )
    for index, forward in enumerate(layers):
        step = planned.enter(index, torch.empty(*first.ids_BS.shape, 1, dtype=torch.bfloat16), torch.bfloat16, None)
        assert step is not None
        scores, fresh_R = forward.scores, step.rows.fresh_R
        fresh = Scores(scores.logits_TE[fresh_R], scores.selection_TE[fresh_R], scores.combine_TE[fresh_R])
        routing = route_fresh(
            fresh, shape.router, step.rows, step.state.support, config, cold=step.cold, dtype=torch.bfloat16
        )
        clock.observe(index, routing.ids_TK, routing.weights_TK, planned)
    clock.end_forward(planned, confidence_BS)
    plan.complete(planned)


def _confidences(forwards: list[Forward], generator: torch.Generator) -> list[Tensor]:
    """``[B,S]`` for each forward: NaN where nothing was drawn."""
    live_DBN = torch.stack([forward.ids_BS[:, forward.lead :] == MASK for forward in forwards])
    left_DBN = live_DBN.flip(0).cumsum(0).flip(0)  # forwards in which the row is still live, this one included
    found = []
    for forward, left_BN in zip(forwards, left_DBN, strict=True):
        noise_BN = torch.rand(left_BN.shape, generator=generator)
        later_BN = THRESHOLD * torch.exp(-FALL * (left_BN - 1)) * (LOWEST + (1 - LOWEST) * noise_BN)
        now_BN = THRESHOLD + (1 - THRESHOLD) * noise_BN
        confidence_BN = torch.where(left_BN == 1, now_BN, later_BN).masked_fill(left_BN == 0, float("nan"))
        found.append(torch.nn.functional.pad(confidence_BN, (forward.lead, 0), value=float("nan")))
    return found


def statistics(trace: Trace) -> dict[str, float]:
    """What the rows of a trace do, in the terms of what was measured on released models.

    ``adjacent``, ``fifth``: cosine of a layer's pairs per expert in the block's forwards 1 and 5 apart (0 = there are
    none so far apart). ``unique``: experts that a forward of a layer uses; ``unique_block``: by rows of the block, in
    forwards that compute all of them. ``live``, ``new``, ``stable``: share of its branches that a row has kept since
    it was computed last.
    """
    kept: dict[int, list[float]] = {c: [] for c in (RowClass.LIVE, RowClass.NEW, RowClass.STABLE)}
    cosines: dict[int, list[float]] = {1: [], 5: []}
    unique: list[int] = []
    unique_block: list[int] = []
    for layer in range(trace.num_layers):
        before: Tensor | None = None
        loads: list[Tensor] = []
        for forward in trace.forwards:
            for demand in forward.demands:
                if demand.layer != layer:
                    continue
                window_R, experts = demand.window_R, demand.num_experts
                own = window_R >= 0
                places, ids_RK, class_R = window_R[own], demand.ids_RK[own], demand.class_R[own].long()
                if not places.numel():
                    continue
                size = int(places.max()) + 1
                if demand.cold or before is None:
                    before, loads = torch.full((size, ids_RK.shape[1]), -1), []
                old_RK = before[places]
                seen_R = (old_RK >= 0).any(1)
                share_R = (old_RK.unsqueeze(2) == ids_RK.unsqueeze(1)).any(2).float().mean(1)
                for row_class, values in kept.items():
                    values += share_R[seen_R & (class_R == row_class)].tolist()
                before[places] = ids_RK
                load_E = torch.bincount(ids_RK[ids_RK >= 0], minlength=experts).float()
                for apart, cosine in cosines.items():
                    if len(loads) >= apart:
                        cosine.append(float(torch.cosine_similarity(load_E, loads[-apart], dim=0)))
                loads.append(load_E)
                unique.append(len(demand.experts))
                if places.numel() == before.shape[0]:
                    unique_block.append(int((load_E > 0).sum()))

    def mean(values: list[Any]) -> float:
        return sum(values) / len(values) if values else 0.0

    return {
        "adjacent": mean(cosines[1]),
        "fifth": mean(cosines[5]),
        "unique": mean(unique),
        "unique_block": mean(unique_block),
        "live": mean(kept[RowClass.LIVE]),
        "new": mean(kept[RowClass.NEW]),
        "stable": mean(kept[RowClass.STABLE]),
    }
