"""The scripts about kernels: what they refuse, and what they report where no GPU is."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aot.compiler import AotCase, AotFacts

from epoch_moe.kernels.tuning import GROUPED_MLP

HERE = "cuda" if torch.cuda.is_available() else "cpu"
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


def refusal(script, monkeypatch, *arguments):
    """What a script says when it ends itself, without a GPU."""
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        script.main()
    return str(stopped.value)


def test_aot_report_says_which_kernels_there_are(monkeypatch):
    said = refusal(load("aot_report", monkeypatch), monkeypatch, "--match", "no such case")
    assert "'no such case'" in said and "combine_restore" in said and "grouped_mlp_down" in said


@pytest.fixture
def tune(monkeypatch):
    return load("tune_kernels", monkeypatch)


def target_cost(tune, target):
    """A fake timer: every field that is not the target's costs 10 %."""
    asked = []

    def cost(config):
        asked.append(config)
        off = sum(tune.changed(config, name, value_of(target, name)) != config for name in tune.field_names())
        return 1.1**off

    return cost, asked


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_the_search_finds_the_fastest_and_times_nothing_twice(tune):
    (_, start), *_, (_, target) = GROUPED_MLP["half", True]
    cost, asked = target_cost(tune, target)
    found = tune.descend(start, cost)
    assert found.config == target and found.finished
    assert found.cost == pytest.approx(1 / cost(start)) and found.tried == len(set(asked)) == len(asked) - 1


def test_the_search_stays_where_nothing_gains_more_than_noise(tune):
    (_, start), *_ = GROUPED_MLP["half", True]
    found = tune.descend(start, lambda config: 1.0 if config == start else 0.995)
    assert found.config == start and found.cost == 1.0


def test_the_search_passes_over_what_cannot_run(tune):
    (_, start), *_, (_, target) = GROUPED_MLP["half", True]
    cost, _ = target_cost(tune, target)
    found = tune.descend(start, lambda config: math.inf if config.block_m == target.block_m else cost(config))
    assert found.config == tune.changed(target, "block_m", start.block_m)


def test_the_search_ends_with_the_time_and_says_so(tune):
    (_, start), *_, (_, target) = GROUPED_MLP["half", True]
    cost, asked = target_cost(tune, target)
    found = tune.descend(start, cost, out_of_time=lambda: len(asked) >= 5)
    assert not found.finished and len(asked) == found.tried == 5 and found.cost <= 1.0


def test_a_shape_that_takes_long_does_not_count_for_more(tune):
    assert tune.geometric_mean([1.0, 100.0]) == pytest.approx(tune.geometric_mean([2.0, 50.0])) == pytest.approx(10.0)
    assert tune.geometric_mean([1.0, math.inf]) == math.inf


def test_what_is_printed_is_the_table_of_tuning(tune):
    """The lines that a search would print for the present table are the present table."""
    from epoch_moe.kernels import tuning

    for entries in GROUPED_MLP.values():
        lines = "\n".join(tune.entry_text(limit, config) for limit, config in entries)
        assert eval(f"({lines})", vars(tuning)) == tuple(entries)


def test_every_field_and_every_value_is_searched(tune):
    """What the table uses lies in the search space, and so does a change of each of its fields."""
    for entries in GROUPED_MLP.values():
        for limit, config in entries:
            assert tune.typical(limit) <= limit
            for name in tune.field_names():
                value, others = value_of(config, name), tune.alternatives(config, name)
                assert {value, *(value_of(other, name) for other in others)} == set(tune.SPACE[name.split(".")[-1]])


def test_tuning_lists_its_space_and_refuses_without_a_gpu(tune, monkeypatch, capsys):
    said = refusal(tune, monkeypatch)
    assert "tune_kernels.py times kernels and needs a CUDA GPU" in said and "--list" in said
    monkeypatch.setattr(sys, "argv", ["script", "--list"])
    assert tune.main() == 0
    assert "gate_up.block_n: 32, 64, 128, 256" in capsys.readouterr().out


@pytest.fixture
def device(monkeypatch):
    return load("device_check", monkeypatch)


def test_device_check_skips_by_name_when_the_time_is_over(device, capsys):
    now = [0.0]
    budget = device.Budget(30.0, clock=lambda: now[0])
    assert budget.allows("times", "llada2-mini") and budget.skipped == []
    now[0] = 10.5  # 19.5 s are left, a step of this section may take 20
    assert not budget.allows("times", "llada2-flash, 32 rows")
    assert budget.skipped == ["times: llada2-flash, 32 rows"] and "llada2-flash, 32 rows" in capsys.readouterr().out


def test_inputs_rotate(device, monkeypatch):
    from parts.kernel_times import rotating

    call = rotating([lambda: "a", lambda: "b", lambda: "c"])
    assert [call() for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_device_check_refuses_without_a_gpu(device, monkeypatch):
    said = refusal(device, monkeypatch)
    assert "device_check.py needs a CUDA GPU of compute capability 8.0" in said and "--dry-run" in said
    said = refusal(device, monkeypatch, "--dry-run", "--shape", "llada2-mini")
    assert "no shape is named llada2-mini" in said and "tiny odd" in said


def checks(device, rows=11):
    from parts import kernel_checks

    return kernel_checks, kernel_checks.Checks(device.TINY["tiny odd"], torch.float32, rows, torch.device(HERE), 0)


def test_device_check_finds_all_kernels_right(device):
    _, of_shape = checks(device)
    found = list(of_shape.run())
    assert [str(check) for check in found if not check.right] == []
    kernels = {"compact", "route", "worklist", "grouped_mlp", "combine", "combine_restore", "restore", "layer", "atlas"}
    assert {check.kernel for check in found} == kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "spoil", "wrong"),
    [
        ("grouped_mlp", lambda out: out.mul_(1.0001), {"grouped_mlp", "layer"}),
        ("grouped_mlp", lambda out: out.nan_to_num_(0.0), {"grouped_mlp"}),  # written behind the last segment
        ("combine", lambda out: out.add_(1e-3), {"combine", "combine_restore", "restore", "layer"}),
        ("route", lambda out: out[1].mul_(1.0001), {"route"}),
        ("compact", lambda out: out[1].add_(1), {"compact"}),
        ("compile_support_device", lambda out: out[0].fill_(True), {"atlas"}),
    ],
)
def test_device_check_finds_what_is_wrong(kernel, spoil, wrong, device, monkeypatch):
    module, of_shape = checks(device)
    original = getattr(module, kernel)

    def spoiled(*args, **kwargs):
        out = original(*args, **kwargs)
        spoil(out)
        return out

    monkeypatch.setattr(module, kernel, spoiled)
    found = {check.kernel for check in of_shape.run() if not check.right}
    assert found == wrong


@pytest.mark.slow
def test_device_check_in_the_interpreter(tmp_path):
    """The script from end to end at a tiny shape."""
    path = tmp_path / "device.json"
    done = run("device_check.py", "--dry-run", "--sections", "correct", "--shape", "tiny odd", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["dry_run"] and result["skipped"] == [] and all(check["right"] for check in result["correct"])
    assert {check["dtype"] for check in result["correct"]} == {"float32", "float16"}


@pytest.mark.slow
def test_device_check_times_in_the_interpreter(tmp_path):
    path = tmp_path / "device.json"
    done = run("device_check.py", "--dry-run", "--sections", "times", "--shape", "tiny groups", "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["times"]
    names = {record["name"] for record in records}
    assert {"grouped_mlp", "layer, triton", "layer, grouped_mm", "layer, loop"} <= names
    for record in records:
        assert record["us"] > 0 and record["floor_us_H200"] <= record["floor_us_H100"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_device_check_decodes_in_the_interpreter(tmp_path):
    """Dense and the exact plan agree in both backends on two forwards; captured graphs need a GPU."""
    path = tmp_path / "device.json"
    done = run("device_check.py", "--dry-run", "--sections", "decode", "graph", "--json", str(path), timeout=580)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    errors = result["decode"]["relative_rms"]
    assert set(errors) == {"dense, grouped", "exact plan, grouped", "dense, triton", "exact plan, triton"}
    assert result["skipped"] == ["graph: needs a GPU"] and 8 <= result["decode"]["distinct_experts"] <= 16
