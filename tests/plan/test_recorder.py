"""What a decode remembers of single forwards: opt-in, bounded, and what the layers really did."""

from __future__ import annotations

import pytest
import torch
from decode import MASK_ID, make_decode, patched_model, plain_model, planned

from epoch_moe.config import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.plan.context import BlockPlanContext, open_context
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.recorder import HISTORY_LENGTH, ExpertRecorder

CONFIG = EpochConfig(coverage=0.6, coverage_floor=0.0, refresh_interval=3, support_scope="batch", least_saving=0.0)


@pytest.fixture
def model() -> LLaDA2MoeModelLM:
    return patched_model()


def test_the_record_adds_up_to_the_counters(model: LLaDA2MoeModelLM) -> None:
    context = BlockPlanContext(model._epoch_moe, CONFIG, record=True)
    list(planned(model, make_decode(6), None, context=context))
    work, history = context.counters.read(), list(context.counters.history)
    pairs_DLE, support_DLE = context.counters.recorder.read()
    assert pairs_DLE.shape == support_DLE.shape == (7, 2, 16)
    top_k = model.config.num_experts_per_tok
    assert pairs_DLE.sum(dim=2).tolist() == [[top_k * entry["fresh"]] * 2 for entry in history]
    for layer, counted in enumerate(work.per_layer):
        assert int(pairs_DLE[:, layer].sum()) == counted.pairs
        assert int((pairs_DLE[:, layer] > 0).sum()) == counted.active_experts
        # One support for the whole batch, so its experts can be counted one by one.
        assert int(support_DLE[:, layer].sum()) == counted.support_experts > 0
        assert int(support_DLE[:, layer].any(dim=1).sum()) == counted.supports
    assert not support_DLE[0].any()  # the cold pass restricts nothing


def test_recording_changes_no_result_and_is_off_by_default(model: LLaDA2MoeModelLM) -> None:
    decode = make_decode(6)
    plain = BlockPlanContext(model._epoch_moe, CONFIG)
    recorded = BlockPlanContext(model._epoch_moe, CONFIG, record=True)
    outputs = [list(planned(model, decode, None, context=context)) for context in (plain, recorded)]
    for left, right in zip(*outputs, strict=True):
        assert torch.equal(left, right)
    assert plain.counters.recorder is None
    assert plain.counters.read() == recorded.counters.read()


def test_only_finished_forwards_under_the_plan_are_kept(model: LLaDA2MoeModelLM) -> None:
    context = BlockPlanContext(model._epoch_moe, CONFIG, record=True)
    ids_BS = torch.tensor([[1, 2, MASK_ID, MASK_ID]])
    blocks = list(model._epoch_moe.blocks.values())
    x_BSH = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with context.prefill(ids_BS):
            blocks[1](x_BSH)
        context.begin_block(batch=1, window=4)
        with pytest.raises(KeyError), context.iteration(ids_BS, mask_id=MASK_ID):
            blocks[1](x_BSH)
            raise KeyError
        with context.block(batch=1, window=4), context.iteration(ids_BS, mask_id=MASK_ID):
            blocks[0](x_BSH)
    pairs_DLE, _ = context.counters.recorder.read()
    assert pairs_DLE.sum(dim=2).tolist() == [[4 * model.config.num_experts_per_tok, 0]]


def test_history_and_record_are_bounded() -> None:
    counters = Counters(1, [8], recorder=ExpertRecorder(1, length=3))
    for number in range(HISTORY_LENGTH + 5):
        counters.add_layer(0, 1, torch.tensor([number, 0]))
        counters.add_history({"forward": number, "rows": 1, "fresh": 1, "live": 1})
    assert len(counters.history) == HISTORY_LENGTH and counters.history[0]["forward"] == 5
    pairs_DLE, _ = counters.recorder.read()
    assert pairs_DLE[:, 0, 0].tolist() == [HISTORY_LENGTH + 2, HISTORY_LENGTH + 3, HISTORY_LENGTH + 4]


def test_nothing_recorded_reads_as_nothing() -> None:
    pairs_DLE, support_DLE = ExpertRecorder(3).read()
    assert pairs_DLE.shape == support_DLE.shape == (0, 3, 0)


def test_layers_with_different_numbers_of_experts_are_refused() -> None:
    recorder = ExpertRecorder(2)
    recorder.add_layer(0, torch.ones(4))
    recorder.add_layer(1, torch.ones(8))
    recorder.end_forward()
    with pytest.raises(ValueError, match=r"\[4, 8\] experts"):
        recorder.read()


def test_there_must_be_a_plan_to_record(model: LLaDA2MoeModelLM) -> None:
    with pytest.raises(ValueError, match="this decode has none"):
        open_context(model, None, record=True)
    with pytest.raises(ValueError, match=r"call epoch_moe\.patch"):
        open_context(plain_model(), record=True)
