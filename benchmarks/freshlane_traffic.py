"""How many bytes does expert parallelism move per block, if only fresh rows travel, once per destination rank?

Three ways to move the rows of one MoE layer through ranks that own equal ranges of its experts and equal shares of the
sequences, rows in bf16 in both directions:

  a  per pair: an all-to-all with one row per (row, expert), all rows of every forward
  b  gathered: every rank receives all rows (all-gather) and adds its part to each (reduce-scatter)
  c  FreshLane: the fresh rows of a block plan, one row per (row, destination rank); `FreshLaneDispatcher`

Counted is what goes to *other* ranks: rows (2 bytes x hidden), ids and weights (8 bytes per slot: one slot per row in
a, top-k in the others), the partial sums back (2 bytes x hidden), and the row counts that a and c exchange first.

Rows, plans, supports and routing are the library's own, on the synthetic router logits of `routing_trace.py`: a block
of 32 rows per sequence, 4 more decoded per forward, 8 forwards, M = 5; the cold pass is in, and so are the previous
block's rows that ride in it to have their K/V written (`without_commit` leaves those out). The same trace for both
shapes; LLaDA-MoE as released decodes on a canvas instead, where more rows are stable.

The first part runs a, b and c on gloo processes: results must agree with the experts on one process (these narrowed to
16 inner columns: they have no part in the traffic), in fp32 and bf16, and bytes with what is counted; then the
exchanges are timed, alternating, without experts. The second part, alone with --count-only, counts without sending.

Shape suffixes: B sequences, S rows per sequence, T = B x S, R rows in the lane, N received rows, G supports, K top-k,
E experts, H hidden.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parts.three_ways import Gathered, Lane, Moved, PerPair
from routing_trace import BLOCK, MASK, SHAPES, Forward, Knobs, Shape, calibrate, describe, show, trace
from torch import Tensor

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.experts.run import run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.collectives import Ranks
from epoch_moe.outputs import output_file, write_json
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.support import route_fresh
from epoch_moe.routing import NO_EXPERT, Routing, combine_weights, select

TOP_LEVEL = ("llada2-mini", "default")
INNER = 16


# ----------------------------------------------------------------------------------------------------- plans and counts


class Plans:
    """One layer's block plan over a trace."""

    def __init__(self, config: EpochConfig, shape: Shape, batch: int):
        self.config, self.shape = config, shape
        self.plan = BlockPlan(
            config, 1, batch=batch, window=BLOCK, prefix=0, prefix_constant=False, counters=Counters(1, [0])
        )

    def step(self, forward: Forward) -> tuple[ListedRows, Routing]:
        """Fresh rows of the next forward, and their experts."""
        planned = self.plan.next_forward(
            forward.ids_BS, mask_id=MASK, valid_BS=None, lead=forward.lead, live_BN=None, changed_BN=None
        )
        step = planned.enter(0, torch.empty(*forward.ids_BS.shape, 1, dtype=torch.bfloat16), torch.bfloat16, None)
        assert step is not None
        scores = forward.scores
        fresh = replace(
            scores,
            logits_TE=scores.logits_TE[step.rows.fresh_R],
            selection_TE=scores.selection_TE[step.rows.fresh_R],
            combine_TE=scores.combine_TE[step.rows.fresh_R],
        )
        support = step.state.support
        routing = route_fresh(
            fresh, self.shape.router, step.rows, support, self.config, cold=step.cold, dtype=torch.bfloat16
        )
        self.plan.complete(planned)
        return step.rows, routing

    def experts_per_rank(self, ranks: int) -> tuple[float, float]:
        """Experts of a support, and those of them on its fullest rank; means over the supports."""
        support_GE = self.plan.layers[0].support.support_GE
        if support_GE is None:
            return 0.0, 0.0
        held_GR = support_GE.view(support_GE.shape[0], ranks, -1).sum(-1).float()
        return float(held_GR.sum(-1).mean()), float(held_GR.amax(-1).mean())


def natural(forward: Forward, shape: Shape) -> Routing:
    """Routing of all rows without a support."""
    ids_TK = select(forward.scores.selection_TE, shape.router)
    return Routing(ids_TK, combine_weights(forward.scores.combine_TE, ids_TK, shape.router, torch.bfloat16))


def homes(forward: Forward, ranks: int) -> Tensor:
    """The rank that owns each of the T rows: equal shares of the sequences."""
    batch, seq_len = forward.ids_BS.shape
    return (torch.arange(batch) * ranks // batch).repeat_interleave(seq_len)


def remote(ids_RK: Tensor, home_R: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Per row: pairs on other ranks, and how many other ranks have one."""
    owner_RK = torch.where(ids_RK == NO_EXPERT, home_R.unsqueeze(1), ids_RK // (experts // ranks))
    away_RK = owner_RK != home_R.unsqueeze(1)
    needed = torch.zeros(ids_RK.shape[0], ranks, dtype=torch.bool).scatter_(1, owner_RK, True)
    return away_RK.sum(1), needed.sum(1) - needed.gather(1, home_R.unsqueeze(1)).squeeze(1).long()


class Count:
    """Bytes of all ways over a trace."""

    def __init__(self, ranks: int):
        self.ranks, self.rows, self.fresh = ranks, 0, 0
        self.per_pair, self.gathered, self.per_rank, self.lane = Moved(), Moved(), Moved(), Moved()

    def forward(
        self, shape: Shape, dense: Routing, home_T: Tensor, rows: ListedRows, routing: Routing, of_T: Tensor
    ) -> None:
        """Add a forward's rows, as far as they are in ``of_T``."""
        experts, top_k, counts = shape.router.num_experts, shape.router.top_k, self.ranks * (self.ranks - 1)
        pairs_T, ranks_T = remote(dense.ids_TK, home_T, experts, self.ranks)
        _, lane_R = remote(routing.ids_TK, home_T[rows.fresh_R], experts, self.ranks)
        of_R, number = of_T[rows.fresh_R], int(of_T.sum())
        self.rows += number
        self.fresh += int(of_R.sum())
        self.per_pair.add(int(pairs_T[of_T].sum()), shape.hidden, 1, counts)
        self.gathered.add(number * (self.ranks - 1), shape.hidden, top_k, 0)
        self.per_rank.add(int(ranks_T[of_T].sum()), shape.hidden, top_k, counts)
        self.lane.add(int(lane_R[of_R].sum()), shape.hidden, top_k, counts)

    def ratios(self) -> dict[str, float]:
        """FreshLane's bytes over those of the better dense way, and the factors that it is made of."""
        best = min(self.per_pair.total, self.gathered.total)
        ratio, one_row, live = self.lane.total / best, self.per_rank.total / best, self.fresh / self.rows
        return {
            "ratio_to_best_dense": ratio,
            "factor_fresh_rows": live,
            "factor_one_row_per_rank": one_row,
            "factor_support_and_rest": ratio / (one_row * live),
        }


def count(
    shape: Shape, knobs: Knobs, config: EpochConfig, ranks: int, batch: int, layers: int, seed: int
) -> dict[str, Any]:
    """Bytes of one block in ``layers`` layers under one configuration."""
    whole, block = Count(ranks), Count(ranks)
    sizes = []
    for layer in range(layers):
        plans = Plans(config, shape, batch)
        for forward in trace(shape, knobs, batch, seed + 1000 + layer):
            dense, home_T = natural(forward, shape), homes(forward, ranks)
            rows, routing = plans.step(forward)
            position_T = torch.arange(forward.ids_BS.numel()) % forward.ids_BS.shape[1]
            whole.forward(shape, dense, home_T, rows, routing, torch.ones_like(position_T, dtype=torch.bool))
            block.forward(shape, dense, home_T, rows, routing, position_T >= forward.lead)
        sizes.append(plans.experts_per_rank(ranks))
    support, fullest = (statistics.mean(values) for values in zip(*sizes, strict=True))
    return {
        **whole.ratios(),
        "a_per_pair": whole.per_pair.as_dict(),
        "b_gathered": whole.gathered.as_dict(),
        "all_rows_once_per_rank": whole.per_rank.as_dict(),
        "freshlane": whole.lane.as_dict(),
        "rows": whole.rows,
        "fresh_rows": whole.fresh,
        "support_experts": support,
        "support_experts_on_fullest_rank": fullest,
        "without_commit": block.ratios(),
    }


# -------------------------------------------------------------------------------------------------------- on gloo ranks


@dataclass(frozen=True)
class Step:
    """One forward of all ranks' rows: natural routing, and the plan's."""

    seq_len: int
    dense: Routing
    fresh_R: Tensor
    planned: Routing

    def of(self, rank: int, world: int, batch: int) -> tuple[slice, Tensor, slice]:
        """A rank's rows, its fresh ones among them, and where these lie among all fresh rows."""
        rows = batch // world * self.seq_len
        first, last = (int((self.fresh_R < rank_rows).sum()) for rank_rows in (rank * rows, (rank + 1) * rows))
        return slice(rank * rows, (rank + 1) * rows), self.fresh_R[first:last] - rank * rows, slice(first, last)


def rows_of(routing: Routing, where: slice) -> tuple[Tensor, Tensor]:
    return routing.ids_TK[where], routing.weights_TK[where]


def gate(
    rank: int, world: int, batch: int, hidden: int, num_experts: int, steps: list[Step], dtype: torch.dtype
) -> dict[str, float]:
    """Largest relative RMS difference of a, b and c to the experts on one process, on the fresh rows."""
    generator = torch.Generator().manual_seed(5)
    scale = hidden**-0.5
    gate_up = torch.randn(num_experts, 2 * INNER, hidden, generator=generator).mul_(scale).to(dtype)
    down = torch.randn(num_experts, hidden, INNER, generator=generator).to(dtype)
    everywhere, local = ExpertViews.fused(gate_up, down), num_experts // world
    own = ExpertViews.fused(gate_up[rank * local : (rank + 1) * local], down[rank * local : (rank + 1) * local])

    def experts(x_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        return run_experts(x_NH, ids_NK, weights_NK, own, "loop")

    ranks = Ranks(dist.group.WORLD)
    ways = {"a": PerPair(ranks, num_experts), "b": Gathered(ranks, num_experts), "c": Lane(ranks, num_experts)}
    worst: dict[str, float] = defaultdict(float)
    for number, step in enumerate(steps):
        rows, fresh_R, where = step.of(rank, world, batch)
        x_TH = torch.randn(rows.stop - rows.start, hidden, generator=torch.Generator().manual_seed(100 * number + rank))
        x_TH = x_TH.to(dtype)
        # The same routing for all: the plan's for fresh rows.
        ids_TK, weights_TK = (t.clone() for t in rows_of(step.dense, rows))
        ids_TK[fresh_R], weights_TK[fresh_R] = rows_of(step.planned, where)
        expected_RH = run_experts(x_TH[fresh_R], ids_TK[fresh_R], weights_TK[fresh_R], everywhere, "loop").float()
        for name, way in ways.items():
            if name == "c":
                y_RH = way(x_TH[fresh_R], ids_TK[fresh_R], weights_TK[fresh_R], experts)
            else:
                y_RH = way(x_TH, ids_TK, weights_TK, experts)[fresh_R]
            if number == 0 and y_RH.shape[0] != x_TH.shape[0]:
                raise RuntimeError("the cold pass must compute all rows")
            if y_RH.numel():
                error = (y_RH.float() - expected_RH).norm() / expected_RH.norm()
                worst[name] = max(worst[name], float(error))
    keys = sorted(worst)
    errors = ranks.maximum(torch.tensor([worst[key] for key in keys]), "largest error")
    return dict(zip(keys, errors.tolist(), strict=True))


def exchange(
    rank: int, world: int, batch: int, hidden: int, num_experts: int, steps: list[Step], repeats: int
) -> dict[str, Any]:
    """Bytes of all ranks and seconds of the slowest for all forwards of one layer; experts left out."""

    def echo(x_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        return x_NH

    ranks = Ranks(dist.group.WORLD)
    makers = {"a": PerPair, "b": Gathered, "c": Lane}
    seconds: dict[str, list[float]] = defaultdict(list)
    moved: dict[str, Moved] = {}
    x_TH = torch.randn(batch // world * 2 * BLOCK, hidden).bfloat16()
    for repeat in range(repeats + 1):
        for name, maker in makers.items():
            way = maker(ranks, num_experts)
            dist.barrier()
            start = time.perf_counter()
            for step in steps:
                rows, fresh_R, where = step.of(rank, world, batch)
                if name == "c":
                    way(x_TH[fresh_R], *rows_of(step.planned, where), echo)
                else:
                    way(x_TH[: rows.stop - rows.start], *rows_of(step.dense, rows), echo)
            spent = ranks.maximum(torch.tensor([time.perf_counter() - start]), "slowest rank")
            if repeat:
                seconds[name].append(float(spent))
            moved[name] = way.moved
    totals = {}
    for name, own in moved.items():
        sums = torch.tensor([own.rows, own.dispatch_bytes, own.combine_bytes, own.count_bytes])
        dist.all_reduce(sums)
        totals[name] = Moved(*sums.tolist()).as_dict()
    return {"moved": totals, "seconds": {k: statistics.median(v) for k, v in seconds.items()}, "seconds_all": seconds}


def worker(rank: int, world: int, folder: str, batch: int, hidden: int, num_experts: int, repeats: int) -> None:
    """One gloo process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    steps = torch.load(f"{folder}/steps.pt", weights_only=False)
    errors = {
        str(dtype).removeprefix("torch."): gate(rank, world, batch, hidden, num_experts, steps, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    result = {"relative_rms": errors, **exchange(rank, world, batch, hidden, num_experts, steps, repeats)}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measure(shape: Shape, knobs: Knobs, world: int, batch: int, repeats: int, seed: int) -> dict[str, Any]:
    """Start the ranks; refuse results or bytes that are not as they must be."""
    plans = Plans(EpochConfig(), shape, batch)
    steps = []
    for forward in trace(shape, knobs, batch, seed + 1000):
        rows, routing = plans.step(forward)
        steps.append(Step(forward.ids_BS.shape[1], natural(forward, shape), rows.fresh_R, routing))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(steps, f"{folder}/steps.pt")
        mp.spawn(worker, (world, folder, batch, shape.hidden, shape.router.num_experts, repeats), nprocs=world)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    for dtype, limit in (("float32", 1e-5), ("bfloat16", 0.01)):
        for name, error in result["relative_rms"][dtype].items():
            if not error < limit:
                raise SystemExit(f"results disagree: ({name}) in {dtype} differs by {error:.2g}, expected < {limit}")
    counted = count(shape, knobs, EpochConfig(), world, batch, 1, seed)
    for name, key in (("a", "a_per_pair"), ("b", "b_gathered"), ("c", "freshlane")):
        if result["moved"][name] != counted[key]:
            raise SystemExit(f"({name}) sent {result['moved'][name]}, counted were {counted[key]}")
    bytes_of, spent = ({k: v["bytes"] for k, v in result["moved"].items()}, result["seconds"])
    result["bytes_c_over_best"] = bytes_of["c"] / min(bytes_of["a"], bytes_of["b"])
    result["seconds_ratios"] = {"c_over_a": spent["c"] / spent["a"], "c_over_b": spent["c"] / spent["b"]}
    return result


# --------------------------------------------------------------------------------------------------------- command line


def report(label: str, numbers: dict[str, Any]) -> None:
    """One line of a count."""
    gigabytes = {key: numbers[key]["bytes"] / 1e9 for key in ("a_per_pair", "b_gathered", "freshlane")}
    print(
        f"  {label:20} ratio {numbers['ratio_to_best_dense']:.3f} = fresh rows {numbers['factor_fresh_rows']:.3f} x "
        f"one row per rank {numbers['factor_one_row_per_rank']:.3f} x rest {numbers['factor_support_and_rest']:.3f}   "
        + ", ".join(f"{key} {value:.2f} GB" for key, value in gigabytes.items())
        + f"; support {numbers['support_experts']:.1f}, fullest rank {numbers['support_experts_on_fullest_rank']:.1f}",
        flush=True,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count-only", action="store_true", help="count, send nothing")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="ranks that are counted (default: 8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512], help="sequences counted (default: 128 512)")
    parser.add_argument("--layers", type=int, default=4, help="layers, each with its own logits (default: 4)")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["llada2-mini", "llada-moe"])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="gloo ranks that are run (default: 2 4)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats after one warm-up (default: 5)")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the logits (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 gloo ranks, rows of 64, one layer: does it run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    layers, repeats, worlds, batch_run = arguments.layers, arguments.repeats, arguments.world, 32
    if arguments.quick:
        layers, repeats, worlds, batch_run = 1, 1, [2], 8
    for ranks in arguments.ranks:
        for name in arguments.shape:
            if SHAPES[name].router.num_experts % ranks:
                parser.error(f"--ranks {ranks} does not divide the experts of {name}")
        for batch in arguments.batch:
            if batch % ranks:
                parser.error(f"--batch {batch} is no multiple of --ranks {ranks}")
    result: dict[str, Any] = {
        "ratio_to_best_dense": None,
        "ratio_to_best_dense_of": None,
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seed": arguments.seed,
        "layers": layers,
        "shapes": {},
    }
    for name in arguments.shape:
        shape = SHAPES[name]
        if arguments.quick:
            shape = replace(shape, hidden=64)
        print(f"{name}: searching for the regime", flush=True)
        knobs = calibrate(shape, arguments.spread, arguments.seed)
        entry: dict[str, Any] = {"ratio_to_best_dense": None, "regime": describe(shape, knobs, arguments.seed)}
        show(name, entry["regime"], lambda line: print(line, flush=True))
        result["shapes"][name] = entry
        entry["exchange"] = {}
        for world in [] if arguments.count_only else worlds:
            print(f"{name}: {world} gloo ranks, {batch_run} sequences", flush=True)
            numbers = measure(shape, knobs, world, batch_run, repeats, arguments.seed)
            entry["exchange"][str(world)] = {"batch": batch_run, **numbers}
            print(
                "  results and bytes agree; "
                + ", ".join(f"{k} {v['bytes'] / 1e6:.1f} MB" for k, v in numbers["moved"].items())
                + f"; c / best {numbers['bytes_c_over_best']:.3f} in bytes; seconds (CPU) "
                + ", ".join(f"{k} {v:.2f}" for k, v in numbers["seconds"].items()),
                flush=True,
            )
        entry["counts"] = []
        for ranks in arguments.ranks:
            for batch in arguments.batch:
                print(f"{name}: counting {ranks} ranks, {batch} sequences", flush=True)
                for label, config in (("default", EpochConfig()), ("paper", EpochConfig.paper())):
                    numbers = count(shape, knobs, config, ranks, batch, layers, arguments.seed)
                    report(label, numbers)
                    entry["counts"].append({"ranks": ranks, "batch": batch, "plan": label, **numbers})
                    if label == TOP_LEVEL[1]:
                        entry["ratio_to_best_dense"] = numbers["ratio_to_best_dense"]
                        where = f"{name}, {label} plan, {ranks} ranks, batch {batch}"
                        if name == TOP_LEVEL[0] or result["ratio_to_best_dense"] is None:
                            result["ratio_to_best_dense"] = numbers["ratio_to_best_dense"]
                            result["ratio_to_best_dense_of"] = where
    print(f"ratio_to_best_dense {result['ratio_to_best_dense']:.3f} ({result['ratio_to_best_dense_of']})")
    write_json(arguments.json, result)


if __name__ == "__main__":
    sys.exit(main())
