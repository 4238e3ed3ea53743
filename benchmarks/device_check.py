"""Are the kernels right on this GPU, how long do they take, and what does a plan save there?

Sections, in this order; each is skipped by name when the time that is left would not do for it:

  correct   every kernel in bf16 against fp64 (what moves integers: against its reference), at the released models'
            shapes, over poisoned memory. Nothing is timed unless all of it is right.
  times     median times (`triton.testing.do_bench`) of every kernel, over inputs that rotate so that the L2 cache does
            not hold them, beside their floors, beside a layer with `F.grouped_mm` and one with a loop over experts
  decode    one block of a model with LLaDA2.0-mini's layers at several numbers of sequences: dense and with a plan,
            experts by `F.grouped_mm` and by the kernels
  graph     the plan's iterations captured as CUDA graphs, in the same decode

The floors are arithmetic: bytes that must move at 3.35 TB/s (H100) and 4.8 TB/s (H200), operations at 990 TFLOP/s.

Without a GPU this refuses, except with --dry-run: all but the graph at tiny shapes on the CPU, fp32 and fp16, in
Triton's interpreter, to test the script itself; the times that it prints then mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

if __name__ == "__main__":
    # Triton reads this when it is imported.
    if "--dry-run" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from parts.device_decode import GRAPH, WAYS, Decode, agree, distinct_experts, make_model, measure, same_as_uncaptured
from parts.kernel_checks import Checks
from parts.kernel_layers import RELEASED, TINY, LayerShape, make_weights
from parts.kernel_times import Timed, Timer

import epoch_moe
from epoch_moe.kernels.launch import supports_triton
from epoch_moe.outputs import output_file, write_output

SECTIONS = ("correct", "times", "decode", "graph")
# Seconds that a section's next step must be expected to fit into.
STEP = {"correct": 20.0, "times": 20.0, "decode": 30.0, "graph": 20.0}


@dataclass
class Budget:
    """What is left of the time for the whole run."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.clock() + self.seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - self.clock()

    def allows(self, section: str, step: str) -> bool:
        """Whether there is time for the step; else it is named as skipped."""
        if self.left >= STEP[section]:
            return True
        self.skipped.append(f"{section}: {step}")
        print(f"skipped, {self.left:.0f} s of {self.seconds:.0f} s are left: {section}: {step}", flush=True)
        return False


@dataclass(frozen=True)
class Setting:
    """What a run runs on."""

    device: torch.device
    dry: bool
    seed: int
    budget: Budget
    timer: Timer
    shapes: tuple[LayerShape, ...]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The interpreter's bf16 is not a device's."""
        return (torch.float32, torch.float16) if self.dry else (torch.bfloat16,)


def correct(setting: Setting) -> list[dict[str, Any]]:
    """The first section. Exits where anything is wrong."""
    found = []
    for shape in setting.shapes:
        for dtype in setting.dtypes:
            if not setting.budget.allows("correct", f"{shape.name} {dtype}"):
                continue
            checks = Checks(shape, dtype, 45 if setting.dry else 1021, setting.device, setting.seed)
            for check in checks.run():
                found.append(check.as_dict())
                print(f"  {check}", flush=True)
    return found


def times(setting: Setting, batches: list[int], records: list[dict[str, Any]]) -> None:
    """The second section; ``records`` is what it fills, so that an error later on loses nothing."""
    dtype = torch.float32 if setting.dry else torch.bfloat16
    for shape in setting.shapes:
        generator = torch.Generator(setting.device).manual_seed(setting.seed)
        if not setting.budget.allows("times", shape.name):
            continue
        weights = make_weights(shape, dtype, generator)
        for batch in batches:
            rows = batch * 32
            if not setting.budget.allows("times", f"{shape.name}, {rows} rows"):
                continue
            timed = Timed(shape, weights, rows, generator, copies=2 if setting.dry else 4)
            if not (error := timed.agree()) < 0.03:
                raise SystemExit(f"results differ, nothing is timed: {shape.name}, {rows} rows: {error:.4f}")
            for record in timed.measure(setting.timer):
                records.append(record)
                print(
                    f"  {record['shape']} {record['rows']:6} rows  {record['name']:18} {record['us']:10.1f} us  floor "
                    f"{record['floor_us_H100']:8.1f} (H100) {record['floor_us_H200']:8.1f} (H200)",
                    flush=True,
                )
            del timed


def decodes(setting: Setting, batches: list[int], section: str, result: dict[str, Any]) -> None:
    """One of the last two sections: fills ``result`` with seconds per block, by number of sequences and way."""
    if section == "graph" and setting.dry:
        setting.budget.skipped.append("graph: needs a GPU")
        return
    # The interpreter takes minutes for a plan's decode: two forwards there, and times of the torch backends only.
    forwards, ways = (2, tuple(way for way in WAYS if way.backend != "triton")) if setting.dry else (8, WAYS)
    result["batches"] = {}
    model = None
    for batch in batches:
        if not setting.budget.allows(section, f"{batch} sequences"):
            continue
        if model is None:
            model = make_model(setting.device, setting.dry, setting.seed)
            if section == "decode":
                first = Decode(model, 1, setting.seed, forwards)
                result["distinct_experts"] = distinct_experts(model, first)
                # fp32 in the interpreter; bf16 rounds differently in every backend, and near-ties flip with it.
                result["relative_rms"] = agree(first, ("grouped", "triton"), 1e-4 if setting.dry else 0.05)
        decode = Decode(model, batch, setting.seed, forwards)
        of_batch: dict[str, Any] = {}
        result["batches"][str(batch)] = of_batch
        if section == "decode":
            of_batch |= measure(decode, ways, repeats=1 if setting.dry else 5)
        else:
            of_batch["captured_against_plain"] = error = same_as_uncaptured(decode)
            if not error < 0.01:
                raise SystemExit(f"captured iterations differ: relative RMS {error:.4f} at {batch} sequences")
            of_batch |= measure(decode, (GRAPH,), repeats=5)
        for name, numbers in of_batch.items():
            if isinstance(numbers, dict):
                print(f"  {batch:4} sequences  {name:20} {numbers['seconds'] * 1e3:9.2f} ms per block", flush=True)
        del decode


def cpu_timer(call: Callable[[], object]) -> float:
    """One call: for a dry run, where time means nothing."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def gpu_timer(call: Callable[[], object]) -> float:
    """Median of `do_bench`, which also clears the L2 cache between calls."""
    return float(triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median"))


def pick_device(dry: bool) -> torch.device:
    """The GPU, or the CPU for a dry run.

    Raises:
        SystemExit: where neither fits, with what there is.
    """
    if dry:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit(
            "device_check.py needs a CUDA GPU of compute capability 8.0 or above, and torch sees none; --dry-run tests "
            "the script at tiny shapes on the CPU"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    fits, reason = supports_triton(device)
    if not fits:
        raise SystemExit(f"device_check.py cannot run here: {reason}")
    return device


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--batch", type=int, nargs="+", default=None, help="sequences (default: 1 32 128 512)")
    parser.add_argument("--budget", type=float, default=330.0, metavar="SECONDS", help="for all of it (default: 330)")
    parser.add_argument("--shape", nargs="+", metavar="NAME", help=f"of {', '.join(RELEASED)}; dry: {', '.join(TINY)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: does the script run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    dry = arguments.dry_run
    device = pick_device(dry)
    batches = arguments.batch or ([1] if dry else [1, 32, 128, 512])
    known = TINY if dry else RELEASED
    if unknown := set(arguments.shape or ()) - set(known):
        raise SystemExit(f"no shape is named {', '.join(sorted(unknown))}: expected of {', '.join(known)}")
    shapes = tuple(known[name] for name in arguments.shape or known)
    setting = Setting(device, dry, arguments.seed, Budget(arguments.budget), cpu_timer if dry else gpu_timer, shapes)
    result: dict[str, Any] = {
        "dry_run": dry,
        "device": "cpu" if dry else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "epoch_moe": epoch_moe.__version__,
        "seed": arguments.seed,
        "batches": batches,
    }

    def write() -> None:
        # After every section, whatever its end: what was measured is not lost.
        result["skipped"], result["seconds"] = setting.budget.skipped, arguments.budget - setting.budget.left
        if arguments.json is not None:
            write_output(arguments.json, json.dumps(result, indent=1) + "\n")

    note = ", dry run: times mean nothing" if dry else ""
    print(f"on {result['device']}, {arguments.budget:.0f} s{note}", flush=True)
    with torch.no_grad():
        if "correct" in arguments.sections:
            result["correct"] = correct(setting)
            write()
            if wrong := [c for c in result["correct"] if not c["right"]]:
                print(f"{len(wrong)} of {len(result['correct'])} checks are wrong, nothing is timed", file=sys.stderr)
                return 1
        for section in SECTIONS[1:]:
            if section not in arguments.sections:
                continue
            result[section] = [] if section == "times" else {}
            try:
                if section == "times":
                    times(setting, batches, result[section])
                else:
                    decodes(setting, batches, section, result[section])
            finally:
                write()
    write()
    if setting.budget.skipped:
        print("skipped: " + "; ".join(setting.budget.skipped))
    print(f"{result['seconds']:.0f} s" + (f", written to {arguments.json}" if arguments.json else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
