"""Every forward of the golden runs of the released loops, on a patched model that is told nothing."""

from __future__ import annotations

import pytest
import torch
from decode import MASK_ID, patched_model, plain_model
from helpers import GOLDEN, relative_error, relative_rms
from replay import BLOCK, golden_calls, replay, report

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
    assert got.work.rows < got.work.dense_rows  # rows before the block cannot change: reused, exactly


@pytest.mark.parametrize("run", range(3))
def test_exact_settings_in_bf16(run: int) -> None:
    _, calls = golden_calls("llada2_bf16", run, torch.bfloat16)
    plain, model = (LLaDA2MoeModelLM.from_pretrained(GOLDEN / "llada2_bf16").eval() for _ in range(2))
    epoch_moe.patch(model, "exact")
    for logits, want in zip(replay(model, calls), replay(plain, calls), strict=True):
        assert relative_rms(logits, want) < 2e-2
    assert report(model).work.fallbacks == {}


@pytest.mark.parametrize(("folder", "run"), FP32)
def test_the_default_plan_saves_rows_and_mostly_agrees(folder: str, run: int) -> None:
    _, calls = golden_calls(folder, run)
    model = patched_model(folder)
    epoch_moe.patch(model, EpochConfig())
    decided = same = 0
    for call, logits, want in zip(calls, replay(model, calls), replay(plain_model(folder), calls), strict=True):
        live = call.ids_BS[:, -BLOCK:] == MASK_ID
        decided += int(live.sum())
        same += int((logits[:, -BLOCK:].argmax(-1) == want[:, -BLOCK:].argmax(-1))[live].sum())
    got = report(model)
    assert set(got.work.fallbacks) <= {"shortfall"}
    assert got.work.rows < 0.9 * got.work.dense_rows
    assert same / decided > 0.5, f"{same} of {decided} tokens are those of dense"
