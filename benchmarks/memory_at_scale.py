"""How much memory does one MoE layer need beside its input and its weights, at 512 sequences of 32 rows?

LLaDA2.0-mini's layer (hidden 2048, 256 experts of 512, top-8), bf16, 16,384 rows, on the synthetic router logits of
`routing_trace.py`. Three forwards of a block plan's trajectory (4 tokens per forward, M = 5): the cold pass (all rows
fresh), the fifth (20 of 32 rows) and the last (8 of 32). Of each:

  dense        all rows through their experts, with buffers for all pairs
  freshlane    the fresh rows through theirs, the others from the cache, the dense shard restored
  ... budget   the same with a workspace: the worklist goes through in runs of experts, then of rows

First it is checked that the results agree: with and without a budget bit for bit, the fresh rows of freshlane with
dense's to bf16 rounding, the reused rows with the cache bit for bit. With a budget the peak must stay below what is
promised: one output row per pair, the budget, the layer's own output and the worklist's indices. The cold pass and
every refresh compute all rows, so fresh rows alone bound nothing: what a block needs at most is the cold pass.

The peak is counted twice. (1) Every allocation and release that torch's CPU allocator reports to the profiler, added up
in order: exact, and blind to memory that a library takes past this allocator. (2) The growth of the process's resident
memory to its high-water mark (Linux: /proc/self/clear_refs resets it), in a run of its own, which misses nothing, but
counts whole pages, threads and what the heap keeps. The script refuses to report where (2) exceeds (1) by more than a
quarter and 64 MiB.

Shape suffixes: B sequences, S rows per sequence, T = B x S, R fresh rows, K top-k, E experts, H hidden, F inner size.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from routing_trace import BLOCK, MASK, SHAPES, Knobs, Shape, trace
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.restore import pack, restore
from epoch_moe.functional import moe_forward
from epoch_moe.functional.views import expert_views
from epoch_moe.outputs import output_file, write_json
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows
from epoch_moe.routing import combine_weights, select

MIB = 2**20
SHOWN = {0: "cold pass", 4: "fifth forward", 7: "last forward"}
INDICES = 10
"""int64 per pair that sorting the worklist takes at most (keys, order, its inverse, the rows, scratch of these)."""


def counted_peak(call: Callable[[], Tensor]) -> int:
    """Largest sum of bytes that torch's CPU allocator had given out during the call, beyond what there was."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def resident_peak(call: Callable[[], Tensor]) -> tuple[int | None, float]:
    """Growth of resident memory to its high-water mark during the call (None where there is no /proc), and seconds."""

    def read(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found.group(1)) * 1024

    linux = Path("/proc/self/clear_refs").exists()
    if linux:
        Path("/proc/self/clear_refs").write_text("5")
        before = read("VmRSS")
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return (read("VmHWM") - before if linux else None), seconds


@dataclass(frozen=True)
class Case:
    """One forward: what its rows are and where they go."""

    name: str
    rows: ListedRows
    ids_TK: Tensor
    weights_TK: Tensor


def cases(shape: Shape, batch: int, seed: int) -> list[Case]:
    """The forwards that are shown, with the row plans of the default configuration and natural routing."""
    plan = BlockPlan(
        EpochConfig(), 1, batch=batch, window=BLOCK, prefix=0, prefix_constant=False, counters=Counters(1, [0])
    )
    found = []
    for number, forward in enumerate(trace(shape, Knobs(), batch, seed)):
        # The previous block's rows of the first forward are left out: 16,384 rows are asked for.
        ids_BS = forward.ids_BS[:, forward.lead :]
        planned = plan.next_forward(ids_BS, mask_id=MASK, valid_BS=None, lead=0, live_BN=None, changed_BN=None)
        plan.complete(planned)
        if number in SHOWN:
            ids_TK = select(forward.scores.selection_TE, shape.router)
            weights_TK = combine_weights(forward.scores.combine_TE, ids_TK, shape.router, torch.bfloat16)
            top_k = ids_TK.shape[1]
            ids_TK, weights_TK = (
                t.view(batch, -1, top_k)[:, forward.lead :].reshape(-1, top_k) for t in (ids_TK, weights_TK)
            )
            found.append(Case(SHOWN[number], planned.rows, ids_TK, weights_TK))
    return found


def promised(rows: int, most_pairs: int, shape: Shape, workspace: int, total: int) -> int:
    """Bytes that a budgeted call may take: see the top of the file. An expert's pairs are never cut."""
    pairs, hidden = rows * shape.router.top_k, shape.hidden
    one_expert = most_pairs * (2 * hidden + 4 * shape.inner) * 2
    copies = (2 * rows + total) * hidden * 2  # the packed rows, their sums, and the dense shard
    return pairs * hidden * 2 + max(workspace, one_expert) + copies + pairs * INDICES * 8


def same(name: str, a: Tensor, b: Tensor) -> None:
    if not torch.equal(a, b):
        raise SystemExit(f"results differ, nothing is reported: {name}: expected the same bits")


def measure(case: Case, x_TH: Tensor, cache_TH: Tensor, views: ExpertViews, shape: Shape, workspace: int) -> Any:
    """Check one forward's results, then count its memory in the four ways."""
    rows = case.rows
    ids_RK, weights_RK = pack(case.ids_TK, rows), pack(case.weights_TK, rows)
    # The cache is written with the fresh rows' outputs; a copy keeps the runs alike, and is not of the layer's making.
    scratch_TH = cache_TH.clone()

    def dense(budget: int | None) -> Tensor:
        return moe_forward(x_TH, case.ids_TK, case.weights_TK, views, workspace=budget)

    def freshlane(budget: int | None) -> Tensor:
        y_RH = moe_forward(pack(x_TH, rows), ids_RK, weights_RK, views, workspace=budget)
        return restore(y_RH, rows, scratch_TH)

    everything, fresh = dense(None), freshlane(None)
    same(f"{case.name}, dense with a budget", dense(workspace), everything)
    same(f"{case.name}, freshlane with a budget", freshlane(workspace), fresh)
    same(f"{case.name}, reused rows", fresh[rows.reuse_dst], cache_TH[rows.reuse_src])
    reference = everything[rows.fresh_R].float()
    error = float((fresh[rows.fresh_R].float() - reference).norm() / reference.norm())
    if not error < 0.01:
        raise SystemExit(f"results differ, nothing is reported: {case.name}, fresh rows: {error:.4f}, expected < 0.01")
    del everything, fresh, reference

    result: dict[str, Any] = {
        "rows": x_TH.shape[0],
        "fresh_rows": rows.num_fresh,
        "relative_rms_of_fresh_rows": error,
        "ways": {},
    }
    for name, function, budget in (
        ("dense", dense, None),
        ("dense, budget", dense, workspace),
        ("freshlane", freshlane, None),
        ("freshlane, budget", freshlane, workspace),
    ):

        def call(function: Callable[[int | None], Tensor] = function, budget: int | None = budget) -> Tensor:
            return function(budget)

        resident, seconds = resident_peak(call)
        counted = counted_peak(call)
        if resident is not None and resident > 1.25 * counted + 64 * MIB:
            raise SystemExit(
                f"{case.name}, {name}: resident memory grew by {resident / MIB:.0f} MiB, counted were "
                f"{counted / MIB:.0f}: something allocates past torch, so nothing is reported"
            )
        way = {"counted_bytes": counted, "resident_bytes": resident, "seconds": seconds}
        if budget is not None:
            num = x_TH.shape[0] if function is dense else rows.num_fresh
            chosen = case.ids_TK if function is dense else ids_RK
            bound = promised(num, int(chosen.flatten().bincount().max()), shape, budget, x_TH.shape[0])
            if counted > bound:
                raise SystemExit(f"{case.name}, {name}: peak {counted} bytes, promised {bound}: the budget is not kept")
            way["promised_bytes"] = bound
        result["ways"][name] = way
        print(
            f"  {case.name:14} {name:18} {rows.num_fresh if function is freshlane else x_TH.shape[0]:6} rows  peak "
            f"{counted / MIB:7.0f} MiB counted, "
            + ("no /proc" if resident is None else f"{resident / MIB:7.0f} MiB resident")
            + f"  {seconds:6.2f} s (CPU)",
            flush=True,
        )
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512, help="sequences of 32 rows (default: 512)")
    parser.add_argument("--workspace", type=int, default=256, metavar="MIB", help="budget in MiB (default: 256)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="32 sequences, hidden 512, 32 experts: does it run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    shape, batch, workspace = SHAPES["llada2-mini"], arguments.batch, arguments.workspace * MIB
    if arguments.quick:
        shape = replace(shape, hidden=512, inner=128, router=replace(shape.router, num_experts=32))
        batch, workspace = 32, 8 * MIB
    experts = shape.router.num_experts
    print(f"building: hidden {shape.hidden}, {experts} experts of {shape.inner}, {batch * BLOCK} rows", flush=True)
    generator = torch.Generator().manual_seed(arguments.seed)

    def weights(*size: int) -> Tensor:
        # One expert after another: no second copy of the layer in fp32.
        out = torch.empty(experts, *size, dtype=torch.bfloat16)
        for part in out:
            part.copy_(torch.randn(*size, generator=generator) * size[-1] ** -0.5)
        return out

    views = expert_views(weights(2 * shape.inner, shape.hidden), weights(shape.hidden, shape.inner))
    x_TH = torch.randn(batch * BLOCK, shape.hidden, generator=generator).bfloat16()
    cache_TH = torch.randn(batch * BLOCK, shape.hidden, generator=generator).bfloat16()
    result: dict[str, Any] = {
        "shape": {"hidden": shape.hidden, "experts": experts, "expert_inner": shape.inner, "rows": batch * BLOCK},
        "workspace_bytes": workspace,
        "input_bytes": x_TH.numel() * 2,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seed": arguments.seed,
        "forwards": {},
    }
    with torch.no_grad():
        for case in cases(shape, batch, arguments.seed):
            print(f"{case.name}: checking", flush=True)
            result["forwards"][case.name] = measure(case, x_TH, cache_TH, views, shape, workspace)
    peaks = {name: max(f["ways"][name]["counted_bytes"] for f in result["forwards"].values()) for name in
             ("dense", "freshlane", "freshlane, budget")}  # fmt: skip
    result["block_peak_bytes"] = peaks
    print("largest over the block: " + ", ".join(f"{k} {v / MIB:.0f} MiB" for k, v in peaks.items()))
    write_json(arguments.json, result)


if __name__ == "__main__":
    sys.exit(main())
