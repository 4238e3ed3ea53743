"""What does the compiler make of every kernel, at the released models' shapes, for GPUs that need not be here?

Compiles each case of `aot/` (one file for each of `epoch_moe.kernels` that holds a kernel) for sm_90 (H100,
H200) and sm_80 (A100) with Triton's own compiler and ptxas, and reads the machine code: registers, spills, shared
memory, tensor-core instructions, 16-byte global loads. No GPU is needed, and nothing is run.

Gates, each named with its case when it fails (exit status 1):

  spills         stack or local memory is used
  shared         more shared memory than a program can have (sm_90: 227 KiB, sm_80: 163 KiB)
  tensor cores   no tensor-core instruction in a matrix product of a 16-bit type
  wide loads     no 16-byte global load where the case's rows are aligned
  covered        a kernel (a @triton.jit function named ...kernel) that no case compiles

The floors are arithmetic, not a measurement: the bytes that the case must move, each once, at an H100's 3.35 TB/s, and
its floating-point operations at 990 TFLOP/s (dense bf16 on tensor cores). With cold caches no kernel is faster
there; how near one comes, only a GPU can tell (`device_check.py`). Programs per multiprocessor are arithmetic as well,
from registers, shared memory and warps.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The interpreter takes the compiler's place where this is set when triton is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what launches get today; unset, Triton 3.9 warns

import torch
import triton
from aot.compiler import SHARED_LIMIT, AotCase, AotFacts, aot_cases, aot_compile

import epoch_moe
import epoch_moe.kernels
from epoch_moe.outputs import output_file, write_json

ARCHES = (90, 80)
BYTES_PER_SECOND = 3.35e12
FLOPS_PER_SECOND = 990e12
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32
"""Of one multiprocessor, both architectures."""
SHARED_PER_SM = {90: 228 * 1024, 80: 164 * 1024}


def collect() -> tuple[dict[str, list[AotCase]], list[str]]:
    """The cases of every kernel file, and the kernels that no case covers."""
    cases: dict[str, list[AotCase]] = {}
    kernels: dict[str, Any] = {}
    for info in pkgutil.iter_modules(epoch_moe.kernels.__path__):
        module = importlib.import_module(f"epoch_moe.kernels.{info.name}")
        for name, value in vars(module).items():
            own = isinstance(value, triton.runtime.JITFunction) and value.fn.__module__ == module.__name__
            if own and name.endswith("kernel"):
                kernels[f"{info.name}.{name}"] = value
        if (Path(__file__).parent / "aot" / f"{info.name}.py").exists():
            cases[info.name] = aot_cases(info.name)
    compiled = {id(case.function) for of_file in cases.values() for case in of_file}
    return cases, sorted(name for name, kernel in kernels.items() if id(kernel) not in compiled)


def is_16_bit_product(case: AotCase) -> bool:
    """Whether the case is a matrix product of a 16-bit type, by its source and not by what it says of itself."""
    return "tl.dot(" in case.function.src and bool({"*bf16", "*fp16"} & set(case.signature.values()))


def failed_gates(case: AotCase, facts: AotFacts) -> list[str]:
    """The gates of the top of the file that this case does not pass."""
    failed = []
    if facts.spill_bytes:
        failed.append(f"spills: {facts.spill_bytes} bytes per thread")
    if facts.shared_bytes > SHARED_LIMIT[facts.arch]:
        failed.append(f"shared: {facts.shared_bytes} bytes, the limit is {SHARED_LIMIT[facts.arch]}")
    if (case.tensor_cores or is_16_bit_product(case)) and not facts.mma:
        failed.append("tensor cores: no such instruction in a matrix product of a 16-bit type")
    if case.wide_loads and not facts.wide_loads:
        failed.append("wide loads: no 16-byte global load, though rows are aligned")
    return failed


def programs_per_sm(case: AotCase, facts: AotFacts) -> int:
    """How many programs of the kernel fit on one multiprocessor at a time."""
    # Registers are given to warps in units of 256, and every program takes 1 KiB of shared memory for itself.
    of_warp = -(-facts.registers * 32 // 256) * 256
    by_registers = REGISTERS // (of_warp * case.num_warps)
    by_shared = SHARED_PER_SM[facts.arch] // (facts.shared_bytes + 1024)
    return min(by_registers, by_shared, WARPS // case.num_warps, PROGRAMS)


def entry(file: str, case: AotCase, facts: AotFacts) -> dict[str, Any]:
    """One record of the report."""
    bandwidth, flops = case.bytes_moved / BYTES_PER_SECOND * 1e6, case.flops / FLOPS_PER_SECOND * 1e6
    return {
        "name": case.kernel,
        "file": file,
        "shape": case.shape,
        "arch": f"sm_{facts.arch}",
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "constexprs": {name: value for name, value in case.constexprs.items() if isinstance(value, int | str | float)},
        "registers": facts.registers,
        "spill_bytes": facts.spill_bytes,
        "shared_bytes": facts.shared_bytes,
        "shared_limit": SHARED_LIMIT[facts.arch],
        "programs_per_sm": programs_per_sm(case, facts),
        "tensor_core_instructions": facts.mma,
        "wgmma": facts.wgmma,
        "hmma": facts.count(r"HMMA"),
        "wide_loads": facts.wide_loads,
        "bytes_moved": case.bytes_moved,
        "flops": case.flops,
        "floor_us_bandwidth": bandwidth,
        "floor_us_flops": flops,
        "floor_us": max(bandwidth, flops),
        "failed": failed_gates(case, facts),
    }


def table(entries: list[dict[str, Any]]) -> str:
    """Markdown: one line per kernel and architecture."""

    def span(values: Iterable[int]) -> str:
        low, high = min(found := list(values)), max(found)
        return str(low) if low == high else f"{low} to {high}"

    lines = [
        "| kernel | arch | cases | registers | spills | shared KiB, at most | wgmma | HMMA | 16-byte loads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arch in dict.fromkeys((e["name"], e["arch"]) for e in entries):
        of = [e for e in entries if (e["name"], e["arch"]) == (name, arch)]
        lines.append(
            f"| `{name}` | {arch} | {len(of)} | {span(e['registers'] for e in of)} | "
            f"{max(e['spill_bytes'] for e in of)} | {max(e['shared_bytes'] for e in of) / 1024:.0f} | "
            f"{span(e['wgmma'] for e in of)} | {span(e['hmma'] for e in of)} | {span(e['wide_loads'] for e in of)} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHES, default=list(ARCHES))
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name (kernel[shape]) holds this")
    parser.add_argument("--quick", action="store_true", help="the first case of each kernel: does it run?")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    of_files, uncovered = collect()
    chosen = [(file, case) for file, cases in of_files.items() for case in cases if arguments.match in case.name]
    if arguments.quick:
        chosen = list({case.kernel: (file, case) for file, case in reversed(chosen)}.values())[::-1]
    if not chosen:
        kernels = sorted({case.kernel for cases in of_files.values() for case in cases})
        raise SystemExit(f"no case holds {arguments.match!r}; kernels: {', '.join(kernels)}")
    failures = [f"{name}: covered: no case compiles it" for name in uncovered]
    entries = []
    total = sum(arch in case.archs for arch in arguments.arch for _, case in chosen)
    for arch in arguments.arch:
        for file, case in chosen:
            if arch not in case.archs:
                continue
            start = time.perf_counter()
            made = entry(file, case, aot_compile(case, arch))
            seconds = time.perf_counter() - start
            entries.append(made)
            failures += [f"{case.name}, sm_{arch}: {reason}" for reason in made["failed"]]
            print(
                f"{len(entries):3}/{total} sm_{arch} {case.name}: {made['registers']} registers, {made['spill_bytes']} "
                f"spilled, {made['shared_bytes'] / 1024:.0f} KiB shared, {made['wgmma']} wgmma, {made['hmma']} HMMA, "
                f"{made['wide_loads']} wide loads; floor {made['floor_us']:.2f} us ({seconds:.1f} s)"
                + "".join(f"  FAILED {reason}" for reason in made["failed"]),
                flush=True,
            )
    result = {
        "floors": "arithmetic for an H100 (3.35 TB/s, 990 TFLOP/s dense bf16), not a measurement; nothing was run",
        "bytes_per_second": BYTES_PER_SECOND,
        "flops_per_second": FLOPS_PER_SECOND,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "failed": failures,
        "kernels": entries,
    }
    print("\n" + table(entries))
    write_json(arguments.json, result)
    print("floors are arithmetic for an H100 (3.35 TB/s, 990 TFLOP/s bf16), not a measurement")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
