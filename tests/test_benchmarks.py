"""The benchmark scripts run, refuse to time wrong results, and write the JSON that the docs quote."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_script

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


def run(script, *arguments, timeout=600):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    done = run_script(ROOT / "benchmarks" / script, "--help")
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
    assert exact["agreement"] == 1.0 and 2 / 3 < exact["pairs"] < 1.0
    assert table.read_text().count("\n| ") == 1 + 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_operating_points_go_on_where_they_ended(tmp_path):
    path = tmp_path / "points.json"
    few = ("--problems", "2", "--timed", "2", "--thresholds", ".999", "--workers", "1", "--json", str(path))
    done = run("operating_points.py", "exact", *few)
    assert done.returncode == 0 and "dense at 0.999" in done.stdout, done.stderr
    done = run("operating_points.py", "exact", "coverage=none refresh_interval=none drift=.95", *few)
    assert done.returncode == 0 and "1 tasks" in done.stdout and "dense at" not in done.stdout, done.stderr
    point = json.loads(path.read_text())["points"]["0.999"]
    exact, drift = point["settings"].values()
    assert len(point["dense"]["texts"]) == 2 and exact["paired"]["changed"] == 0
    assert exact["ratios"]["pairs"] == 1.0 > drift["ratios"]["pairs"] and drift["cpu_ratio"] > 0
    done = run("operating_points.py", "exact", *few, "--seed", "1")
    assert done.returncode == 2 and "is of another run" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rules_of_peers_are_compared_with_ours(tmp_path):
    path = tmp_path / "rules.json"
    done = run("rules.py", "--problems", "2", "--thresholds", ".999", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rules = json.loads(path.read_text())["thresholds"]["0.999"]["rules"]
    assert rules["dense"]["pairs"] == rules["dense"]["experts"] == 1.0 and rules["dense"]["paired"]["changed"] == 0
    assert rules["dinfer"]["pairs"] < rules["team"]["pairs"] < 1.0
    assert rules["des-vote .4"]["experts"] < rules["des-vote .6"]["experts"] < 1.0


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    path = tmp_path_factory.mktemp("traffic") / "traffic.json"
    done = run(
        "freshlane_traffic.py", "--quick", "--shape", "llada-moe", "--ranks", "4", "--batch", "8", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_traffic_is_counted_as_it_is_sent(traffic):
    """The script itself refuses results and bytes of gloo ranks that differ; here, numbers from first principles."""
    assert traffic["ratio_to_best_dense"] == traffic["shapes"]["llada-moe"]["ratio_to_best_dense"]
    assert "llada-moe, default plan, 4 ranks, batch 8" in traffic["ratio_to_best_dense_of"]
    numbers = next(c for c in traffic["shapes"]["llada-moe"]["counts"] if c["plan"] == "default")
    rows, hidden, top_k = 8 * (64 + 7 * 32), 64, 8
    # Four more decoded before each forward. Fresh: the lead, then rows that are not decoded or not cached yet; M = 5.
    assert numbers["rows"] == rows and numbers["fresh_rows"] == 8 * (32 + 32 + 32 + 28 + 24 + 20 + 32 + 12 + 8)
    assert numbers["b_gathered"]["rows"] == rows * 3
    assert numbers["b_gathered"]["bytes"] == rows * 3 * (2 * hidden + 8 * top_k + 2 * hidden)
    per_pair = numbers["a_per_pair"]
    assert per_pair["dispatch_bytes"] == per_pair["rows"] * (2 * hidden + 8)
    assert per_pair["rows"] == pytest.approx(rows * top_k * 3 / 4, rel=0.1)
    assert numbers["freshlane"]["rows"] < numbers["all_rows_once_per_rank"]["rows"] < per_pair["rows"]
    best = min(per_pair["bytes"], numbers["b_gathered"]["bytes"])
    assert numbers["ratio_to_best_dense"] == pytest.approx(numbers["freshlane"]["bytes"] / best)
    factors = [numbers[key] for key in numbers if key.startswith("factor_")]
    assert len(factors) == 3 and math.prod(factors) == pytest.approx(numbers["ratio_to_best_dense"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_traffic_reports_the_regime_and_three_ways(traffic):
    entry = traffic["shapes"]["llada-moe"]
    asked, reached = entry["regime"]["asked"], entry["regime"]["reached"]
    for key in ("live", "new", "stable"):
        assert reached[key] == pytest.approx(asked[key], abs=0.05)
    assert reached["distinct"] == pytest.approx(asked["distinct"], abs=2)
    exchange = entry["exchange"]["2"]
    assert set(exchange["seconds"]) == set(exchange["moved"]) == {"a", "b", "c"}
    assert max(exchange["relative_rms"]["float32"].values()) < 1e-5
    assert {c["plan"] for c in entry["counts"]} == {"default", "paper"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_at_scale_bounds_what_it_promises(tmp_path):
    path = tmp_path / "memory.json"
    done = run("memory_at_scale.py", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    forwards = json.loads(path.read_text())["forwards"]
    assert [f["fresh_rows"] for f in forwards.values()] == [1024, 32 * 20, 32 * 8]
    for forward in forwards.values():
        ways = forward["ways"]
        # At least the outputs of all pairs exist at one time, and a budget keeps what it promises.
        assert ways["dense"]["counted_bytes"] > 1024 * 8 * 512 * 2
        for name in ("dense", "freshlane"):
            limited = ways[f"{name}, budget"]
            assert limited["counted_bytes"] <= limited["promised_bytes"]
            assert limited["counted_bytes"] < ways[name]["counted_bytes"]
    first, *_, last = forwards.values()
    assert last["ways"]["freshlane"]["counted_bytes"] < 0.5 * first["ways"]["freshlane"]["counted_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_load_at_scale_keeps_its_share_only(tmp_path):
    path = tmp_path / "load.json"
    done = run("load_at_scale.py", "--quick", "--ranks", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    parts = result["parts"]
    assert result["one_process"]["parameter_bytes"] == parts["rest"] + parts["experts"]
    for rank in result["ranks"]:
        assert rank["parameter_bytes"] == parts["rest"] + parts["experts"] // 2
        assert rank["parameter_bytes"] < rank["peak_anonymous_bytes"] <= rank["promised_bytes"]
    # Two layers of 256 experts with three projections of 64 x 512.
    assert parts["experts"] == 2 * 256 * 3 * 64 * 512 * 2
    flash = result["llada2_flash"]
    biases = 31 * 256 * 2  # fp32
    assert sum(flash["parts"].values()) == 2 * 102_889_705_216 + biases  # the released number of parameters
    assert flash["bytes_per_rank"]["8"] < flash["promised_on_8"] < 80e9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_residency_at_scale_keeps_its_budget_and_its_tokens(tmp_path):
    path = tmp_path / "scale.json"
    done = run("residency_at_scale.py", "--quick", "--folder", str(tmp_path), "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["scale.json"], "the checkpoint is removed"
    result = json.loads(path.read_text())
    runs = result["runs"]
    assert len({numbers["hidden"] for numbers in runs.values()}) == 1 and {"retention", "lru", "disk"} <= set(runs)
    assert runs["disk"]["residency"]["hit_rate"] == 0 < runs["lru"]["residency"]["hit_rate"]
    for name in ("retention", "lru"):
        numbers = runs[name]["residency"]
        assert numbers["fast_bytes"] <= result["budget_bytes"] and runs[name]["peak_bytes"] <= runs[name]["bound_bytes"]
        # One expert in bf16: every byte that was read is a load or a bypass (swaps were read as bypasses).
        reads = numbers["loads"] - numbers["swaps"] + numbers["bypassed"]
        assert numbers["file_bytes"] == reads * 3 * 256 * 128 * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_residency_replays_traces_that_say_what_they_are(tmp_path):
    path = tmp_path / "residency.json"
    done = run("residency.py", "--quick", "--part", "traces", "--json", str(path), timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    kinds = {trace["about"]["kind"] for trace in result["traces"].values()}
    assert kinds == {"recorded", "made up"}
    for trace in result["traces"].values():
        for numbers in trace["budgets"].values():
            best = numbers["policies"]["belady_bound"]["hits"]
            assert numbers["policies"]["belady"]["hits"] == best
            assert all(one["hits"] <= best for name, one in numbers["policies"].items() if name != "static")
    headline = result["summary"]["0.4"]
    assert headline["retention_hit_rate"] > headline["lru_hit_rate"] > headline["plain_lru_hit_rate"]
    assert headline["share_of_belady"] > 0.9
