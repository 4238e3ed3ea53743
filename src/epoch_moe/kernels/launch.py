"""Where the kernels run.

This file does not import triton, so that asking whether it can be used costs nothing where it is not installed.
"""

from __future__ import annotations

import importlib.util
import os

import torch

MIN_CAPABILITY = (8, 0)


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


def require_triton(device: torch.device) -> None:
    """Refuse a device on which the kernels do not run.

    Raises:
        ValueError: with the reason.
    """
    fits, reason = supports_triton(device)
    if not fits:
        raise ValueError(f"the kernels cannot run here: {reason}")


def by_kernels(x: torch.Tensor) -> bool:
    """Whether small steps around a layer take a kernel: on a GPU that has them, where no gradient is asked for."""
    return x.is_cuda and not torch.is_grad_enabled() and supports_triton(x.device)[0]
