"""The benchmark scripts run, refuse to time wrong results, and write the JSON that the docs quote."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


def run(script, *arguments, timeout=600):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    done = run(script, "--help", timeout=110)
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_block_decode_reports_ratios_and_regime(tmp_path):
    path = tmp_path / "block.json"
    done = run("block_decode.py", "--quick", "--repeats", "1", "--batch", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["device"] == "cpu"
    assert 0 < result["regime"]["distinct_experts"] <= 64 and 0 < result["regime"]["adjacent_load_cosine"] <= 1
    numbers = result["batches"]["1"]
    assert set(numbers["ratios"]) == {"a_over_b", "b_over_c"}
    assert max(numbers["relative_rms"].values()) < 0.05
    # Counted by hand: 160 rows, then 7 x 32; 64 rows, then 7 x 32; two MoE layers.
    assert numbers["work"]["b"]["rows"] == 2 * (160 + 7 * 32 + 64 + 7 * 32)
    assert numbers["work"]["c"]["rows"] < numbers["work"]["b"]["rows"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sweep_writes_every_cell(tmp_path):
    path, table = tmp_path / "sweep.json", tmp_path / "sweep.md"
    done = run("sweep.py", "--problems", "2", "--single", "1", "--json", str(path), "--markdown", str(table))
    assert done.returncode == 0, done.stderr
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == (1 + 4 * 2 + 1) * 5
    exact = next(c for c in cells if c["coverage"] is None and c["refresh_interval"] == 1)
    assert exact["agreement"] == 1.0 and exact["pairs"] == pytest.approx(1.0)
    assert table.read_text().count("\n| ") == 1 + 10
