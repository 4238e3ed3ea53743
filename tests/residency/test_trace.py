"""Traces: recorded from decodes, written, read back, the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import GOLDEN
from safetensors.torch import save_file

import epoch_moe
from epoch_moe import EpochConfig, ResidencyConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.residency.demand import Demand, RowClass
from epoch_moe.residency.trace import Trace, TraceRecorder, load_trace, record_trace

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
    assert model._epoch_moe.slot.tracer is None
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
    policy = model._epoch_moe.residency.policy
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
    assert len(load_trace(tmp_path / "c.trace").forwards) == 1 and model._epoch_moe.slot.tracer is None


def test_what_cannot_be_recorded_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patch"), record_trace(plain_model(), tmp_path / "d.trace"):
        pass
    model = patched_model()
    with pytest.raises(ValueError, match="folder does not exist"), record_trace(model, tmp_path / "no" / "d.trace"):
        pass
    with record_trace(model, tmp_path / "d.trace"):
        with pytest.raises(ValueError, match="already"), record_trace(model, tmp_path / "e.trace"):
            pass
        assert model._epoch_moe.slot.tracer is not None
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
    for layer in range(3):
        recorder.add_layer(layer, None, None, torch.tensor([[0], [layer]]), torch.ones(2, 1))
    from safetensors import safe_open

    recorder.trace.save(tmp_path / "f.trace")
    with safe_open(tmp_path / "f.trace", framework="pt") as file:
        assert file.get_tensor("row_Q").numel() == 2 and file.get_tensor("ids_RK").shape[0] == 6
    assert_same(load_trace(tmp_path / "f.trace"), recorder.trace)
