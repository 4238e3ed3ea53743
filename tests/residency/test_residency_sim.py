"""`benchmarks/residency_sim.py`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from demands import demand_of
from PIL import Image
from residency_sim import main
from traces.figure import draw_replays
from traces.simulate import simulate
from traces.trace import Trace, TraceForward, load_trace


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_decode_is_recorded_replayed_printed_written_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, numbers, picture = tmp_path / "a.trace", tmp_path / "a.json", tmp_path / "a.png"
    status, out, _ = run(
        capsys, trace, "--record", "--problems", 2, "--seed", 9, "--batch-size", 2, "--no-progress",
        "--policy", "retention", "lru", "belady_bound", "--budget", 0.2, 0.5,
        "--json", numbers, "--figure", picture,
    )  # fmt: skip
    assert status == 0
    assert "3 MoE layers of 64 experts" in out and "preset default" in out and "seed 9" in out
    written = json.loads(numbers.read_text())
    assert written["about"]["batch_size"] == 2 and written["about"]["model"] == "tiny-llada2"
    recorded = load_trace(trace)
    replays = simulate(recorded, ["retention", "lru", "belady_bound"], [12, 32])
    assert written["replays"] == [replay.as_dict() for replay in replays]
    for replay in replays:
        assert f"{replay.hit_rate:.3f}" in out
    with Image.open(picture) as image:
        assert image.width > 500
    figure = draw_replays(replays, 64)
    hits = figure.axes[0]
    assert [line.get_label() for line in hits.lines] == ["retention", "lru", "belady bound"]
    assert list(hits.lines[0].get_ydata()) == [100 * replay.hit_rate for replay in replays[:2]]
    assert list(hits.lines[0].get_xdata()) == [100 * 12 / 64, 50.0]

    # A second run needs no model; another trace may be the profile of what stays.
    status, out, _ = run(capsys, trace, "--policy", "static", "--budget", 0.5, "--profile", trace, "--no-progress")
    assert status == 0 and "static" in out


def test_wrong_input_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, tmp_path / "no.trace")
    assert status == 2 and "no such file" in err and err.count("\n") == 1
    status, _, err = run(capsys, tmp_path / "no.trace", "--budget", 1.2)
    assert status == 2 and "--budget 1.2" in err
    with pytest.raises(SystemExit, match="2"):
        run(capsys, tmp_path / "no.trace", "--json", tmp_path / "no" / "x.json")
    assert "folder does not exist" in capsys.readouterr().err
    for budget in ("2GB", "lots", "0", "120%"):
        status, _, err = run(capsys, tmp_path / "no.trace", "--budget", budget)
        assert status == 2 and f"--budget {budget}: expected shares" in err
    status, _, err = run(capsys, tmp_path / "no.trace", "--figure", tmp_path / "x.picture")
    assert status == 2 and "matplotlib does not write '.picture'" in err
    status, _, err = run(capsys, tmp_path / "no" / "a.trace", "--record", "--model", "is not looked for yet")
    assert status == 2 and "folder does not exist" in err
    status, _, err = run(capsys, tmp_path / "no.trace", "--record", "--problems", 0)
    assert status == 2 and "--problems 0" in err


def save_trace(path: Path) -> None:
    """Three forwards of one layer of 8 experts, which share two of them."""
    forwards = [
        TraceForward([demand_of([0, 1, number], number, 8)], torch.full((3,), 0.5), torch.ones(3, dtype=torch.bool))
        for number in (3, 4, 5)
    ]
    Trace(1, 8, [100], {}, forwards).save(path)


def test_a_share_may_be_given_in_percent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "a.trace"
    save_trace(trace)
    outs = [
        run(capsys, trace, "--policy", "lru", "--budget", budget, "--no-progress") for budget in ("25%", "0.25", "1.0")
    ]
    assert [status for status, _, _ in outs] == [0, 0, 0]
    assert outs[0] == outs[1] != outs[2]


def test_a_trace_that_was_cut_short_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "a.trace"
    save_trace(trace)
    trace.write_bytes(trace.read_bytes()[:-1])
    status, out, err = run(capsys, trace, "--no-progress")
    assert (status, out) == (2, "") and "incomplete" in err and err.count("\n") == 1


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no replay"):
        draw_replays([], 64)
