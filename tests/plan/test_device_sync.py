"""`backend="triton"`: a model's whole iteration under a plan runs on fake CUDA tensors, so it waits for no device."""

from __future__ import annotations

import pytest
import torch
from helpers import GOLDEN
from parts.fake_cuda import fake_device
from torch._subclasses.fake_tensor import DataDependentOutputException

import epoch_moe
import epoch_moe.plan.forward
import epoch_moe.plan.support
from epoch_moe.config import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.plan.context import BlockPlanContext

CONFIGS = [
    EpochConfig(),
    EpochConfig.exact(),
    EpochConfig.paper(on_miss="drop"),
    EpochConfig(on_miss="expand", refresh_interval=2),
    EpochConfig(drift=0.9, live_drift=0.9, commit="drift"),
]


def iterations(config: EpochConfig, forwards: int = 3, capacity: int | None = None) -> None:
    """The first forwards of two blocks on a fake GPU, also with padding, leads and a bucket."""
    with fake_device():
        model = LLaDA2MoeModelLM(LLaDA2MoeConfig.from_pretrained(GOLDEN / "llada2")).eval()
        assert next(model.parameters()).device.type == "cuda"
        epoch_moe.patch(model, config)
        context = BlockPlanContext(model._epoch_moe, config)
        for block in range(2):
            with context.block(batch=2, window=6, prefix=2, only_live=True):
                assert context.open_plan().compact is not None
                for number in range(forwards):
                    lead = 2 * ((number + block) % 2)
                    ids_BS = torch.zeros(2, lead + 6, dtype=torch.int64)
                    valid_BS = torch.ones(2, lead + 6, dtype=torch.bool)
                    bias, positions = torch.zeros(2, 1, lead + 6, lead + 6), torch.arange(lead + 6).unsqueeze(0)
                    with context.iteration(ids_BS, mask_id=5, valid_BS=valid_BS, lead=lead, capacity=capacity):
                        out = model.model(ids_BS, attention_mask=bias, position_ids=positions).last_hidden_state
                    assert out.device.type == "cuda"
        assert context.counters.forwards == 2 * forwards


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "exact", "paper-drop", "expand", "drift"])
def test_an_iteration_waits_for_no_device(config: EpochConfig) -> None:
    iterations(config)


@pytest.mark.parametrize("place", ["support", "rows"])
def test_a_sync_would_be_noticed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "support":
        honest = epoch_moe.plan.support._per_group

        def looking(value_R: torch.Tensor, *args: object) -> torch.Tensor:
            value_R.sum().item()
            return honest(value_R, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(epoch_moe.plan.support, "_per_group", looking)
    else:
        pad_rows = epoch_moe.plan.forward.pad_rows

        def counting(decision: object, *args: object) -> object:
            decision.fresh_T.sum().item()  # type: ignore[attr-defined]
            return pad_rows(decision, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(epoch_moe.plan.forward, "pad_rows", counting)
    with pytest.raises(DataDependentOutputException):
        iterations(EpochConfig())


def test_a_bucket_is_looked_at_where_the_block_ends() -> None:
    with pytest.raises(DataDependentOutputException):
        iterations(EpochConfig(), capacity=4)
