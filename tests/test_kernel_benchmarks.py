"""The scripts about kernels: what they refuse, and what they report where no GPU is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from epoch_moe.kernels.aot import AotFacts
from epoch_moe.kernels.launch import AotCase

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name, monkeypatch):
    """A script as a module, its folder on the path as when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def run(script, *arguments, timeout=110, **variables):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def product(**changes):
    """A case and facts that pass every gate."""
    function = SimpleNamespace(src="acc += tl.dot(a, b)")
    case = {"kernel": "gemm", "shape": "some", "function": function, "signature": {"a": "*bf16"}, "constexprs": {}}
    case |= {"num_warps": 8, "num_stages": 3, "bytes_moved": 3_350_000, "flops": 990_000_000, "wide_loads": True}
    facts = {"arch": 90, "registers": 128, "spill_bytes": 0, "shared_bytes": 100_000, "sass": ""}
    facts["opcodes"] = {"HGMMA.64x128x16.F32.BF16": 4, "LDG.E.128": 2, "LDG.E": 9}
    case |= {name: value for name, value in changes.items() if name in AotCase.__dataclass_fields__}
    facts |= {name: value for name, value in changes.items() if name in AotFacts.__dataclass_fields__}
    return AotCase(**case), AotFacts(**facts)


def test_aot_gates_pass_what_is_right(monkeypatch):
    report = load("aot_report", monkeypatch)
    made = report.entry("gemm", *product())
    assert made["failed"] == []
    assert (made["wgmma"], made["hmma"], made["wide_loads"], made["arch"]) == (4, 0, 2, "sm_90")
    # 3.35 MB at 3.35 TB/s and 0.99 GFLOP at 990 TFLOP/s are one microsecond each.
    assert made["floor_us_bandwidth"] == made["floor_us_flops"] == made["floor_us"] == pytest.approx(1.0)
    # 65,536 registers hold two programs of 8 warps x 32 threads x 128; shared memory holds two of 98 KiB in 228.
    assert made["programs_per_sm"] == 2
    assert report.programs_per_sm(*product(registers=40, shared_bytes=0)) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spill_bytes": 8}, "spills: 8 bytes"),
        ({"shared_bytes": 227 * 1024 + 1}, "shared: 232449 bytes, the limit is 232448"),
        ({"arch": 80, "shared_bytes": 200_000}, "shared: 200000 bytes, the limit is 166912"),
        ({"opcodes": {"LDG.E.128": 1, "FFMA": 512}}, "tensor cores: no such"),
        ({"opcodes": {"HGMMA.64x8x16": 1, "LDG.E.64": 9}}, "wide loads: no 16-byte"),
    ],
)
def test_aot_gates_name_what_fails(changes, words, monkeypatch):
    report = load("aot_report", monkeypatch)
    (failed,) = report.failed_gates(*product(**changes))
    assert failed.startswith(words)


def test_aot_gates_ask_for_tensor_cores_in_16_bit_products_only(monkeypatch):
    report = load("aot_report", monkeypatch)
    plain = {"opcodes": {"LDG.E.128": 1, "FFMA": 512}}
    assert report.failed_gates(*product(signature={"a": "*fp32"}, **plain)) == []
    assert report.failed_gates(*product(function=SimpleNamespace(src="acc += a * b"), **plain)) == []


def test_aot_report_compiles_and_writes_json(tmp_path):
    """With the interpreter asked for as well, which the script turns off: it would take the compiler's place."""
    path = tmp_path / "aot.json"
    options = ("--quick", "--arch", "90", "--match", "restore", "--json", str(path))
    done = run("aot_report.py", *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["failed"] == [] and "not a measurement" in result["floors"] and "not a measurement" in done.stdout
    assert {entry["name"] for entry in result["kernels"]} == {"combine_restore", "restore"}
    for entry in result["kernels"]:
        assert entry["arch"] == "sm_90" and entry["spill_bytes"] == 0 and 16 <= entry["registers"] <= 255
        assert entry["floor_us"] == max(entry["floor_us_bandwidth"], entry["floor_us_flops"]) > 0


def test_aot_report_says_which_kernels_there_are():
    done = run("aot_report.py", "--match", "no such case")
    assert done.returncode != 0 and "combine_restore" in done.stderr
