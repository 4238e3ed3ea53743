"""What the kernels share: where they run, and how a case of one is described for ahead-of-time compilation.

This file does not import triton, so that asking whether it can be used costs nothing where it is not installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)

# Spellings of a tensor's dtype in a Triton signature.
SIGNATURE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}


def interpreter_on() -> bool:
    """Whether Triton's interpreter is asked for (``TRITON_INTERPRET=1``); Triton reads this when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def supports_triton(device: torch.device) -> tuple[bool, str]:
    """Whether the kernels run on ``device``, and if not, why.

    They do on CUDA devices of compute capability 8.0 and above, and on the CPU under Triton's interpreter, which is for
    tests: it takes seconds where a kernel takes microseconds.
    """
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed (it has wheels for Linux only)"
    if device.type == "cpu":
        if interpreter_on():
            return True, ""
        return False, "on the CPU Triton has its interpreter only: set TRITON_INTERPRET=1 before triton is imported"
    if device.type != "cuda":
        return False, f"Triton kernels are for CUDA devices, the tensors are on {device.type}"
    if torch.version.hip is not None:
        return False, "the kernels are for NVIDIA GPUs, this is a ROCm build of torch"
    if interpreter_on():
        return True, ""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
            return False, f"the GPU has compute capability {have}, the kernels need {need}"
    # Without a GPU only fake CUDA tensors get here, and nothing is launched on those.
    return True, ""


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
