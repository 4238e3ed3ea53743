"""Traces: recorded from decodes, written, read back, the same."""

from __future__ import annotations

import copy
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN
from safetensors.torch import load_file, save_file
from traces.recorder import TraceRecorder, record_trace
from traces.trace import Trace, load_trace

import epoch_moe
from epoch_moe import EpochConfig, ResidencyConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.residency.clock import Clock
from epoch_moe.residency.demand import Demand, RowClass

MASK_ID = 125
PROMPTS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [15, 16, 17, 18, 19, 20, 21, 22, 23, 24]])
OPTIONS = {"gen_length": 16, "block_length": 8, "steps": 4, "eos_token_id": 1, "mask_token_id": MASK_ID}


def plain_model() -> LLaDA2MoeModelLM:
    return LLaDA2MoeModelLM.from_pretrained(GOLDEN / "llada2", dtype=torch.float32).eval()


def patched_model() -> LLaDA2MoeModelLM:
    model = plain_model()
    epoch_moe.patch(model)
    return model


def assert_same(first: Trace, second: Trace) -> None:
    assert (first.num_layers, first.num_experts) == (second.num_layers, second.num_experts)
    assert first.bytes_per_expert == second.bytes_per_expert and first.about == second.about
    for one, other in zip(first.forwards, second.forwards, strict=True):
        for name in ("confidence_T", "live_T"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)))
        for a, b in zip(one.demands, other.demands, strict=True):
            for name, value in vars(b).items():
                mine = getattr(a, name)
                assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name


@pytest.mark.parametrize("plan", [EpochConfig(), EpochConfig.exact(), None], ids=["default", "exact", "dense"])
def test_a_recorded_decode_comes_back_from_its_file(plan: EpochConfig | None, tmp_path: Path) -> None:
    model = patched_model()
    free = epoch_moe.generate(model, PROMPTS, plan=plan, **OPTIONS)
    with record_trace(model, tmp_path / "a.trace", {"what": "test"}) as recorder:
        out = epoch_moe.generate(model, PROMPTS, plan=plan, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(out.answers, free.answers, strict=True))
    assert model._epoch_moe.slot.listener is None
    trace = load_trace(tmp_path / "a.trace")
    assert_same(trace, recorder.trace)
    assert trace.about == {"model_type": model.config.model_type, "what": "test"}
    assert trace.bytes_per_expert == model._epoch_moe.bytes_per_expert()
    assert len(trace.forwards) == out.forwards + out.prefill_forwards
    # The pairs that the counters saw are the trace's.
    per_layer = out.counters.read().per_layer
    for layer, work in enumerate(per_layer):
        demands = [d for forward in trace.forwards for d in forward.demands if d.layer == layer]
        assert sum(int(d.counts_E.sum()) for d in demands) == work.pairs
        assert sum(d.row_R.numel() for d in demands) == work.rows
        assert sum(len(d.experts) for d in demands) == work.active_experts
    assert sum(forward.confidence_T is not None for forward in trace.forwards) == out.forwards
    if plan is not None:
        first = trace.forwards[0].demands[0]
        assert first.cold and RowClass.LIVE in first.class_R.tolist() and RowClass.COMMIT in first.class_R.tolist()
        assert all(forward.live_T is not None and forward.live_T.any() for forward in trace.forwards)


@pytest.mark.parametrize("plan", [EpochConfig(), None], ids=["default", "dense"])
def test_a_trace_holds_what_the_policy_of_a_live_model_sees(
    plan: EpochConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model()
    epoch_moe.patch(model, residency=ResidencyConfig(budget=0.5))
    seen: list[Demand] = []
    policy = model._epoch_moe.residency.clock.observer
    monkeypatch.setattr(policy, "observe", lambda demand, honest=policy.observe: (seen.append(demand), honest(demand)))
    with record_trace(model, tmp_path / "a.trace") as recorder:
        out = epoch_moe.generate(model, torch.cat([PROMPTS] * 3, dim=1), plan=plan, prefill_chunk=8, **OPTIONS)
    recorded = [demand for forward in recorder.trace.forwards for demand in forward.demands]
    assert len(recorded) == len(seen) and out.prefill_forwards > 0
    for one, other in zip(recorded, seen, strict=True):
        for name, value in vars(other).items():
            mine = getattr(one, name, None)
            if name in ("layer", "cold", "to_refresh", "num_experts", "seq_len", "lead"):
                assert mine == value, name
            elif name in ("ids_RK", "weights_RK", "row_R", "class_R"):
                assert torch.equal(mine, value), name


def test_other_loops_are_recorded_too(tmp_path: Path) -> None:
    model = patched_model()
    with record_trace(model, tmp_path / "b.trace") as recorder:
        for _ in range(2):
            model(PROMPTS)
    trace = recorder.trace
    assert [len(forward.demands) for forward in trace.forwards] == [trace.num_layers] * 2
    assert [forward.demands[0].cold for forward in trace.forwards] == [True, False]
    assert trace.forwards[0].confidence_T is None
    assert set(trace.forwards[0].demands[0].class_R.tolist()) == {RowClass.OTHER}


def test_what_was_recorded_before_an_error_is_kept(tmp_path: Path) -> None:
    model = patched_model()
    with pytest.raises(KeyError), record_trace(model, tmp_path / "c.trace"):
        model(PROMPTS)
        raise KeyError
    assert len(load_trace(tmp_path / "c.trace").forwards) == 1 and model._epoch_moe.slot.listener is None


def test_what_cannot_be_recorded_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patch"), record_trace(plain_model(), tmp_path / "d.trace"):
        pass
    model = patched_model()
    with pytest.raises(ValueError, match="folder does not exist"), record_trace(model, tmp_path / "no" / "d.trace"):
        pass
    with record_trace(model, tmp_path / "d.trace"):
        with pytest.raises(ValueError, match="already"), record_trace(model, tmp_path / "e.trace"):
            pass
        assert model._epoch_moe.slot.listener is not None
        with pytest.raises(RuntimeError, match="a recording"):
            epoch_moe.unpatch(model)
    assert load_trace(tmp_path / "d.trace").forwards == []
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_trace(tmp_path / "nothing")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="no trace of epoch_moe"):
        load_trace(tmp_path / "other")
    (tmp_path / "cut").write_bytes((tmp_path / "d.trace").read_bytes()[:-1][:100])
    with pytest.raises(ValueError, match="no safetensors file, or an incomplete one"):
        load_trace(tmp_path / "cut")


def test_rows_that_layers_share_are_written_once(tmp_path: Path) -> None:
    recorder = TraceRecorder(3, 4, [1, 1, 1])
    clock = Clock(recorder, 3, 4)
    for layer in range(3):
        clock.observe(layer, torch.tensor([[0], [layer]]), torch.ones(2, 1), None)
    from safetensors import safe_open

    recorder.trace.save(tmp_path / "f.trace")
    with safe_open(tmp_path / "f.trace", framework="pt") as file:
        assert file.get_tensor("row_Q").numel() == 2 and file.get_tensor("ids_RK").shape[0] == 6
    assert_same(load_trace(tmp_path / "f.trace"), recorder.trace)


def test_a_copy_made_meanwhile_is_not_recorded(tmp_path: Path) -> None:
    model = patched_model()
    with record_trace(model, tmp_path / "g.trace") as recorder:
        other = copy.deepcopy(model)
        other(PROMPTS)
        assert recorder.trace.forwards == []
        model(PROMPTS)
        assert len(recorder.trace.forwards) == 1


@pytest.mark.parametrize("raises", [False, True])
def test_a_trace_that_cannot_be_written_is_not_lost(
    raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, path, stopped = patched_model(), tmp_path / "h.trace", KeyboardInterrupt()
    with pytest.raises(OSError, match="No space left") as error, record_trace(model, path) as recorder:
        model(PROMPTS)
        monkeypatch.setattr(Path, "write_bytes", full)
        if raises:
            raise stopped
    assert error.value.filename == str(path) and not path.exists()
    assert error.value.__cause__ is (stopped if raises else None)
    assert error.value.trace is recorder.trace and len(recorder.trace.forwards) == 1  # type: ignore[attr-defined]
    assert model._epoch_moe.slot.listener is None


def test_what_is_no_file_is_refused_before_the_decode_and_what_is_one_is_written_in_place(tmp_path: Path) -> None:
    model, pipe = patched_model(), tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ValueError, match="expected the path of a file"), record_trace(model, path):
            raise AssertionError("the decode was begun")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o664)
    link.symlink_to(real)
    with record_trace(model, link):
        model(PROMPTS)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o664
    assert len(load_trace(real).forwards) == 1


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def set_to(tensor: str, place: tuple[int, ...], value: int) -> Change:
    return lambda header, tensors: tensors[tensor].__setitem__(place, value)


def header(**changes: object) -> Change:
    return lambda header, tensors: header.update(changes)


DAMAGED: dict[str, tuple[Change, str]] = {
    "no version": (lambda h, t: h.pop("version"), "its version is None"),
    "another version": (header(version=2), "its version is 2: expected 1"),
    "no layers": (header(num_layers=0), "num_layers=0"),
    "more layers than sizes": (header(num_layers=10**9), "bytes_per_expert"),
    "a layer that is a truth": (header(num_layers=True), "num_layers=True"),
    "fewer experts than are used": (header(num_experts=1), "expert .*: expected -1 to 0"),
    "experts without size": (header(bytes_per_expert=[-5, -5]), "bytes_per_expert"),
    "sizes that are text": (header(bytes_per_expert="ab"), "bytes_per_expert"),
    "about is a list": (header(about=[1]), "about"),
    "a forward that is not there": (set_to("entries_VX", (0, 0), 10**6), "forward 1000000"),
    "a layer that is not there": (set_to("entries_VX", (0, 1), -2), "layer -2"),
    "no rows in a sequence": (set_to("entries_VX", (0, 5), 0), "0 rows per sequence"),
    "rows that are no whole sequences": (set_to("entries_VX", (0, 5), 9), "whole sequences of 9"),
    "lead rows beyond a sequence": (set_to("entries_VX", (0, 6), 1000), "lead rows 1000"),
    "rows behind the end": (set_to("entries_VX", (0, 7), 10**9), "place of the rows"),
    "a negative number of rows": (set_to("entries_VX", (0, 8), -50), "rows of a demand -50"),
    "more rows than ids": (set_to("entries_VX", (0, 8), 1), "the demands have not the rows"),
    "an expert beyond the last": (set_to("ids_RK", (0, 0), 30_000), "expert 30000"),
    "an expert below none": (set_to("ids_RK", (0, 0), -7), "expert -7"),
    "an unknown class": (set_to("class_Q", (0,), 99), "class of a row 99"),
    "a row behind the forward": (set_to("row_Q", (0,), 500), "row of a forward of .* rows 500"),
    "a row behind every forward": (set_to("row_Q", (0,), 2**31 - 1), "row 2147483647"),
    "negative confidences": (set_to("forwards_DX", (0, 1), -5), "rows of confidence_T -5"),
    "fewer confidences than are told": (set_to("forwards_DX", (0, 1), 0), "confidence_T has not the rows"),
    "another dtype": (lambda h, t: t.update(ids_RK=t["ids_RK"].float()), "ids_RK is torch.float32"),
    "another shape": (lambda h, t: t.update(row_Q=t["row_Q"][None]), "row_Q is torch.int32"),
    "classes of fewer rows": (lambda h, t: t.update(class_Q=t["class_Q"][1:].clone()), "different lengths"),
    "weights of fewer rows": (lambda h, t: t.update(weights_RK=t["weights_RK"][1:].clone()), "different shapes"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a decode under a plan."""
    path, model = tmp_path_factory.mktemp("traces") / "good.trace", patched_model()
    with record_trace(model, path):
        epoch_moe.generate(model, PROMPTS, **OPTIONS)
    return path


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_traces_are_refused_by_name(name: str, good: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    change, words = DAMAGED[name]
    with safe_open(good, framework="pt") as file:
        about = json.loads(file.metadata()["epoch_moe.trace"])
    tensors = load_file(good)
    change(about, tensors)
    path = tmp_path / "x.trace"
    save_file(tensors, path, metadata={"epoch_moe.trace": json.dumps(about)})
    with pytest.raises(ValueError, match=f"x.trace is no valid trace: .*{words}"):
        load_trace(path)


def test_a_header_that_is_no_object_is_refused(good: Path, tmp_path: Path) -> None:
    for text in ("[1, 2]", "{", "[" * 100_000):
        save_file(load_file(good), tmp_path / "y.trace", metadata={"epoch_moe.trace": text})
        with pytest.raises(ValueError, match=r"y\.trace is no valid trace"):
            load_trace(tmp_path / "y.trace")
