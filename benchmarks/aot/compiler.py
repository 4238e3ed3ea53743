"""Ahead-of-time compilation of kernels for GPUs that need not be here, and what their machine code says.

    python benchmarks/aot/compiler.py MODULE [--arch 90] [--match TEXT]

compiles the ``aot_cases()`` of ``benchmarks/aot/MODULE.py`` and prints one JSON object per case. Triton's interpreter
replaces the compiler in a process that has ``TRITON_INTERPRET`` set, so tests call `compile_elsewhere`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import epoch_moe
from epoch_moe.kernels.launch import interpreter_on

# Shared memory that one program may have, bytes (CUDA C programming guide, table of compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+|@!?UPT\s+|@!?PT\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
# LDG loads into registers, LDGSTS into shared memory (cp.async); UBLKCP and UTMALDG: the tensor memory accelerator.
_WIDE = re.compile(r"LDG(STS)?\.(\w+\.)*128|UTMALDG|UBLKCP")


# Spellings of a tensor's dtype in a Triton signature.
SIGNATURE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}


def pointer(dtype: torch.dtype) -> str:
    """A tensor of ``dtype`` in a Triton signature, ``"*bf16"`` say."""
    return "*" + SIGNATURE_NAMES[dtype]


@dataclass(frozen=True)
class AotCase:
    """One kernel with the arguments of one shape: what an ahead-of-time compilation needs, and what the work costs.

    Attributes:
        kernel: name of the kernel, ``"grouped_mlp_down"`` say.
        shape: the shape in words, ``"llada2-mini bf16 weight-bound"`` say; unique among the cases of a kernel.
        function: the ``@triton.jit`` function.
        signature: Triton type of each run-time argument, by parameter name: ``"*bf16"`` (see `pointer`), ``"i32"``,
            ``"i64"``, ``"fp32"``. Parameters in ``constexprs`` are left out.
        constexprs: value of each compile-time parameter. As a launch does it, an argument of the shape that is 1
            belongs here too, and so does None for a tensor that is not passed.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
        bytes_moved: bytes that the kernel must read and write for this shape, each once.
        flops: floating-point operations that it must do (a multiply-add is two), 0 where bytes alone matter.
        not_divisible: pointers and integers of the signature that are not multiples of 16. All others are taken to
            be, as a launch specialises them: allocations are, and so are the sizes of the released models.
        tensor_cores: whether the SASS must hold tensor-core instructions.
        wide_loads: whether it must hold 16-byte global loads.
        archs: compute capabilities that it is for; a configuration may need what others lack.
        options: further compiler options that the launch gives, ``{"enable_fp_fusion": False}`` say.
    """

    kernel: str
    shape: str
    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    bytes_moved: int
    flops: int = 0
    not_divisible: frozenset[str] = field(default_factory=frozenset)
    tensor_cores: bool = False
    wide_loads: bool = False
    archs: tuple[int, ...] = (80, 90)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``"<kernel>[<shape>]"``."""
        return f"{self.kernel}[{self.shape}]"


@dataclass(frozen=True)
class AotFacts:
    """What the compiler made of an `AotCase`.

    Attributes:
        arch: compute capability, 90 for sm_90.
        registers: per thread.
        spill_bytes: stack and local memory per thread: kernels here have no arrays, so both are spills.
        shared_bytes: dynamic and static shared memory of one program.
        opcodes: how often each SASS instruction occurs, modifiers included (``"HGMMA.64x128x16.F32.BF16"``).
        sass: the machine code as ``cuobjdump -sass`` prints it.
    """

    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    opcodes: dict[str, int]
    sass: str

    def count(self, pattern: str) -> int:
        """Occurrences of the opcodes that ``pattern`` (a regular expression) matches from their start."""
        return sum(times for opcode, times in self.opcodes.items() if re.match(pattern, opcode))

    @property
    def wgmma(self) -> int:
        """Warpgroup matrix instructions (sm_90)."""
        return self.count(r"[HIQ]GMMA")

    @property
    def mma(self) -> int:
        """Matrix instructions of any kind."""
        return self.count(r"[HIQD]G?MMA")

    @property
    def wide_loads(self) -> int:
        """Global loads of 16 bytes per thread, or by the tensor memory accelerator."""
        return sum(times for opcode, times in self.opcodes.items() if _WIDE.match(opcode))

    def summary(self) -> dict[str, Any]:
        """Everything but the machine code, for JSON."""
        facts = asdict(self)
        del facts["sass"], facts["opcodes"]
        return facts | {"wgmma": self.wgmma, "mma": self.mma, "wide_loads": self.wide_loads}


def aot_compile(case: AotCase, arch: int) -> AotFacts:
    """Compile ``case`` for compute capability ``arch`` (90, 80); no GPU is needed.

    Raises:
        RuntimeError: in a process with ``TRITON_INTERPRET`` set, where there is no compiler.
        ValueError: when signature and constexprs do not name the kernel's parameters exactly once.
    """
    if interpreter_on():
        raise RuntimeError("TRITON_INTERPRET is set: compile in a process without it (compile_elsewhere)")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.function.arg_names)
    given = [*case.signature, *case.constexprs]
    if sorted(given) != sorted(names):
        raise ValueError(
            f"{case.name}: signature and constexprs name {sorted(given)}, the kernel's parameters are {sorted(names)}"
        )
    if unknown := case.not_divisible - set(case.signature):
        raise ValueError(f"{case.name}: not_divisible names {sorted(unknown)}, which are not in the signature")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    divisible = [
        index
        for index, name in enumerate(names)
        if name not in case.not_divisible and (signature[name].startswith("*") or signature[name] in ("i32", "i64"))
    ]
    source = ASTSource(
        fn=case.function,
        signature=signature,
        constexprs=dict(case.constexprs),
        attrs={(index,): [["tt.divisibility", 16]] for index in divisible},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        registers, stack, static, local = _usage(cubin)
        sass = _cuobjdump("-sass", str(cubin))
    opcodes: dict[str, int] = {}
    for match in _OPCODE.finditer(sass):
        opcodes[match[1]] = opcodes.get(match[1], 0) + 1
    return AotFacts(
        arch=arch,
        registers=registers,
        spill_bytes=stack + local,
        shared_bytes=max(static, int(compiled.metadata.shared)),
        opcodes=opcodes,
        sass=sass,
    )


def _cuobjdump(*arguments: str) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _usage(cubin: Path) -> tuple[int, int, int, int]:
    text = _cuobjdump("-res-usage", str(cubin))
    match = _USAGE.search(text)
    if match is None:
        raise RuntimeError(f"cuobjdump -res-usage printed no resource usage: {text!r}")
    registers, stack, shared, local = map(int, match.groups())
    return registers, stack, shared, local


def aot_cases(module: str) -> list[AotCase]:
    """The cases of ``benchmarks/aot/<module>.py``."""
    cases: list[AotCase] = importlib.import_module(f"aot.{module}").aot_cases()
    return cases


def compile_elsewhere(module: str, arch: int, match: str = "", timeout: float = 100.0) -> list[dict[str, Any]]:
    """Compile cases of a kernel file in a process of its own, without the interpreter.

    Args:
        module: name of the file in ``benchmarks/aot``.
        arch: compute capability.
        match: only cases whose name contains this (and that are for ``arch``).
        timeout: seconds.

    Returns:
        One dict per case: ``name``, `AotFacts.summary`, and what the case promises (``tensor_cores_expected``,
        ``wide_loads_expected``).
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(epoch_moe.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
    command = [sys.executable, __file__, module, "--arch", str(arch), "--match", match]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Command line: compile the cases of one kernel file and print JSON lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("module", help="file in benchmarks/aot, without .py")
    parser.add_argument("--arch", type=int, default=90, help="compute capability (default: 90)")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    for case in aot_cases(args.module):
        if args.match in case.name and args.arch in case.archs:
            facts = aot_compile(case, args.arch).summary()
            promised = {"tensor_cores_expected": case.tensor_cores, "wide_loads_expected": case.wide_loads}
            print(json.dumps({"name": case.name, **promised, **facts}), flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # so that cases find this file under its name
    main()
