"""Every forward of the golden runs of the released loops, on a patched model that is told nothing."""

from __future__ import annotations

import pytest
import torch
from helpers import GOLDEN, relative_error, relative_rms
from replay import MASK_ID, golden_calls, patched_model, plain_model, replay, report

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM

FP32 = [(folder, run) for folder in ("llada2", "llada2_1") for run in range(3)]


@pytest.mark.parametrize(("folder", "run"), FP32)
def test_exact_settings_are_dense_on_every_forward(folder: str, run: int) -> None:
    _, calls = golden_calls(folder, run)
    model = patched_model(folder)
    epoch_moe.patch(model, "exact")
    for logits, want in zip(replay(model, calls), replay(plain_model(folder), calls), strict=True):
        assert relative_error(logits, want) < 1e-5
    got = report(model)
    assert got.work.fallbacks == {} and "dense" not in got.kinds
    assert got.work.forwards == len(calls) == sum(got.kinds.values())
    widths = [call.ids_BS.shape[1] for call in calls]
    assert got.kinds["request"] == 1 and got.kinds["request"] + got.kinds.get("block", 0) == len(set(widths))
    assert got.work.rows == got.work.dense_rows  # nothing is reused: exact whatever happens between two forwards


@pytest.mark.parametrize("run", range(3))
def test_exact_settings_in_bf16(run: int) -> None:
    _, calls = golden_calls("llada2_bf16", run, torch.bfloat16)
    plain, model = (LLaDA2MoeModelLM.from_pretrained(GOLDEN / "llada2_bf16").eval() for _ in range(2))
    epoch_moe.patch(model, "exact")
    for logits, want in zip(replay(model, calls), replay(plain, calls), strict=True):
        assert relative_rms(logits, want) < 2e-2
    assert report(model).work.fallbacks == {}


@pytest.mark.parametrize("editing", [None, False])
@pytest.mark.parametrize(("folder", "run"), FP32)
def test_the_default_plan_saves_rows_and_mostly_agrees(folder: str, run: int, editing: bool | None) -> None:
    _, calls = golden_calls(folder, run)
    model = patched_model(folder)
    epoch_moe.patch(model, EpochConfig())
    committed = same = 0
    for call, after, logits in zip(calls, calls[1:], replay(model, calls, editing=editing), strict=False):
        now_BS = after.ids_BS[:, : call.ids_BS.shape[1]]
        new_BS = (call.ids_BS == MASK_ID) & (now_BS != MASK_ID)
        committed += int(new_BS.sum())
        same += int((logits.argmax(-1) == now_BS)[new_BS].sum())
    got = report(model)
    assert set(got.work.fallbacks) <= {"shortfall"}
    assert got.work.rows < 0.5 * got.work.dense_rows
    assert committed > 15 and same / committed > 0.9, f"{same} of {committed} committed tokens are those of dense"
