"""`benchmarks/device_check.py` beyond its dry run: the graph section over a tape, and what an error leaves behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_kernel_benchmarks import load

import epoch_moe.models.decoder


@pytest.fixture
def device(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plan"))
    return load("device_check", monkeypatch)


@pytest.fixture
def block(device, monkeypatch):
    """A tiny block's decode; the references in the kernels' place."""
    from parts.device_decode import Decode, make_model
    from parts.device_reference import use_references

    use_references(monkeypatch)
    monkeypatch.setattr(epoch_moe.models.decoder, "_check_ids", lambda *args: None)  # as on a GPU
    with torch.no_grad():
        yield Decode(make_model(torch.device("cpu"), True, 0), 2, 0)


def test_the_graph_section_over_a_tape(block):
    """Its calls fit the capture API: every iteration but the cold pass is replayed once all kinds are recorded."""
    from parts.device_decode import GRAPH, measure, same_as_uncaptured
    from test_capture import Tape

    assert same_as_uncaptured(block, Tape) == 0.0
    replays = []
    replay = Tape.replay

    class Counting(Tape):
        def replay(self):
            replays.append(1)
            replay(self)

    numbers = measure(block, (GRAPH,), 2, Counting)[GRAPH.name]
    # Of 8 forwards 1 is cold and 1 is a refresh; a kind is replayed from its third time on. Five decodes: 3 warm up.
    assert len(numbers["seconds_all"]) == 2 and len(replays) == (6 * 5 - 2) + (1 * 5 - 2)


@pytest.mark.parametrize("section", ["times", "decode", "graph"])
def test_an_error_loses_nothing_that_was_measured(section, device, monkeypatch, tmp_path):
    def times(setting, batches, records):
        records.append({"name": "route"})
        raise SystemExit("results differ")

    def decodes(setting, batches, name, result):
        result["relative_rms"] = 0.5
        raise SystemExit("results differ")

    monkeypatch.setattr(device, "times", times)
    monkeypatch.setattr(device, "decodes", decodes)
    path = tmp_path / "device.json"
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--dry-run", "--sections", section, "--json", str(path)])
    with pytest.raises(SystemExit, match="results differ"):
        device.main()
    kept = [{"name": "route"}] if section == "times" else {"relative_rms": 0.5}
    assert json.loads(path.read_text())[section] == kept
