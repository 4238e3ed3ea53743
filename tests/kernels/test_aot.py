"""Ahead-of-time compilation: what it refuses, what it reads from machine code, and where kernels say that they run."""

from __future__ import annotations

import pytest
import torch
from aot import compiler

from epoch_moe.kernels import launch


def test_no_compiler_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = compiler.AotCase("k", "s", None, {}, {}, 4, 2, 0)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compiler.aot_compile(case, 90)


def test_parameters_are_named_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    class Function:
        arg_names = ["x_ptr", "size"]

    with pytest.raises(ValueError, match=r"k\[s\].*\['x_ptr'\].*\['size', 'x_ptr'\]"):
        compiler.aot_compile(compiler.AotCase("k", "s", Function, {"x_ptr": "*fp32"}, {}, 4, 2, 0), 90)
    case = compiler.AotCase("k", "s", Function, {"x_ptr": "*fp32", "size": "i32"}, {}, 4, 2, 0, 0, frozenset({"y"}))
    with pytest.raises(ValueError, match=r"not_divisible names \['y'\]"):
        compiler.aot_compile(case, 90)


def test_opcodes_are_counted_by_kind() -> None:
    facts = compiler.AotFacts(
        arch=90,
        registers=32,
        spill_bytes=0,
        shared_bytes=0,
        opcodes={
            "HGMMA.64x16x16.F32.BF16": 4,
            "HMMA.16816.F32": 2,
            "LDG.E.128": 3,
            "LDG.E.64": 9,
            "LDGSTS.E.BYPASS.LTC128B.128": 5,
            "LDG.E.LTC128B": 7,
            "UTMALDG.2D": 1,
        },
        sass="",
    )
    assert (facts.wgmma, facts.mma, facts.wide_loads) == (4, 6, 9)
    assert facts.summary()["wgmma"] == 4 and "sass" not in facts.summary()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launch.supports_triton(cpu) == (True, "")
    monkeypatch.delenv("TRITON_INTERPRET")
    fits, reason = launch.supports_triton(cpu)
    assert not fits and "TRITON_INTERPRET=1" in reason
    assert "on meta" in launch.supports_triton(torch.device("meta"))[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        fits, reason = launch.supports_triton(cuda)
        assert fits is expected
        assert fits or "compute capability 7.5" in reason
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in launch.supports_triton(cuda)[1]
