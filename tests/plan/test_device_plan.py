"""`backend="triton"`: whole decodes with rows on the device against the lists of the torch backends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decode import make_decode, patched_model, planned, plant_nan
from helpers import relative_error
from parts.device_reference import use_references

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.decoding import loop_of
from epoch_moe.experts.run import pick_backend
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.packed import PaddedRows

CONFIGS = {
    "default": EpochConfig(),
    "exact": EpochConfig.exact(),
    "paper": EpochConfig.paper(),
    "drop": EpochConfig(on_miss="drop", coverage=0.7),
    "expand": EpochConfig(on_miss="expand", coverage=0.5),
    "never refreshed": EpochConfig(coverage=0.8, refresh_interval=None),
    "union": EpochConfig(coverage=1.0, refresh_interval=3),
}


def same_decode(
    name: str, config: EpochConfig, between: Callable[[BlockPlan, int], None] = plant_nan, **shape: int | bool
) -> dict[str, int]:
    """Run a random decode on both forms of rows; what left the plan, by reason."""
    model, decode = patched_model(name), make_decode(3, **shape)  # type: ignore[arg-type]
    contexts = [
        BlockPlanContext(model._epoch_moe, config.replace(backend=backend), record=True)  # type: ignore[arg-type]
        for backend in ("grouped", "triton")
    ]
    runs = zip(*(planned(model, decode, None, between, context) for context in contexts), strict=True)
    for (lists, device), inputs in zip(runs, decode.forwards, strict=True):
        plan = contexts[1].open_plan()
        assert plan.compact is not None and contexts[0].open_plan().compact is None
        assert torch.isfinite(device[inputs.valid_BS]).all()
        assert relative_error(device[inputs.valid_BS], lists[inputs.valid_BS]) < 1e-5
        assert torch.equal(device[inputs.valid_BS].argmax(-1), lists[inputs.valid_BS].argmax(-1))
        for ours, theirs in zip(plan.layers, contexts[0].open_plan().layers, strict=True):
            if ours.support.support_GE is not None:
                assert torch.equal(ours.support.support_GE, theirs.support.support_GE)  # type: ignore[arg-type]
    lists, device = (context.counters.read() for context in contexts)
    assert contexts[0].counters.history == contexts[1].counters.history
    work = [w.as_dict() for w in (lists, device)]
    for layer in (*work[0]["per_layer"], *work[1]["per_layer"], *work):
        coverage = layer.pop("coverage")
        assert coverage is None or 0.0 < coverage <= 1.0
    assert work[0] == work[1]
    assert lists.coverage == pytest.approx(device.coverage, rel=1e-6, nan_ok=True)
    return lists.fallbacks


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("poisoned_empty")
def test_rows_on_the_device_decode_as_lists_do(config: EpochConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    same_decode("llada2", config)


@pytest.mark.parametrize("config", [EpochConfig(), EpochConfig.paper()], ids=["sequence", "batch"])
def test_a_support_that_falls_short_is_compiled_anew(config: EpochConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)

    def spoil(plan: BlockPlan, number: int) -> None:
        plant_nan(plan, number)
        for layer in plan.layers:
            assert layer.support.support_GE is not None
            layer.support.support_GE[:, 4:] = False
            layer.support.holds_all = False

    assert same_decode("llada2", config, spoil)["shortfall"] > 0


@pytest.mark.parametrize("name", ["llada2_1", "llada2_2_routing"])
def test_other_routers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    model, decode = patched_model(name), make_decode(5, block=8).without_leads()
    a, b = (
        list(planned(model, decode, EpochConfig(backend=backend)))  # type: ignore[arg-type]
        for backend in ("grouped", "triton")
    )
    for lists, device, inputs in zip(a, b, decode.forwards, strict=True):
        assert relative_error(device[inputs.valid_BS], lists[inputs.valid_BS]) < 1e-5


def test_the_kernels_decode_a_block() -> None:
    """In Triton's interpreter, which takes most of a second per layer."""
    same_decode("llada2", EpochConfig(coverage=0.5, refresh_interval=None), batch=2, block=4, forwards=3)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("poisoned_empty")
def test_the_kernels_decode_as_lists_do(config: EpochConfig) -> None:
    same_decode("llada2", config)


@pytest.mark.parametrize(
    ("name", "preset"), [("tiny-llada2", "default"), ("tiny-llada2", "paper"), ("tiny-llada-moe", "default")]
)
def test_the_trained_checkpoints_give_the_same_tokens(
    name: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_references(monkeypatch)
    trained_tokens(name, preset)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llada2", "tiny-llada-moe"])
def test_the_kernels_give_the_trained_checkpoints_tokens(name: str) -> None:
    trained_tokens(name, "default")


def trained_tokens(name: str, preset: str) -> None:
    model, tokenizer = epoch_moe.load_model(name)
    model.float()  # in bfloat16 the kernels round once where the torch backends round twice
    epoch_moe.patch(model)
    ids = tokenizer("12 + 34 =", return_tensors="pt").input_ids
    answers = []
    for backend in ("auto", "triton"):
        config = EpochConfig.preset(preset, backend=backend)
        out = loop_of(model)(model, ids, plan=config, gen_length=16, block_length=16, steps=4)
        answers.append((out.sequences.tolist(), out.counters.read().pairs, out.forwards))
    assert answers[0] == answers[1]


def test_too_many_fresh_rows_are_an_error_where_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    model = patched_model()
    context = BlockPlanContext(model._epoch_moe, EpochConfig(backend="triton", refresh_interval=None))
    decode = make_decode(1, batch=2, block=8, forwards=4, all_valid=True, edits=False).without_leads()

    def run(capacity: int) -> None:
        with context.block(**decode.block_args), torch.no_grad():  # type: ignore[arg-type]
            for inputs in decode.forwards:
                with context.iteration(inputs.ids_BS, mask_id=125, capacity=capacity):
                    inputs.run(model)
                    rows = context._patched.slot.active.rows  # type: ignore[union-attr]
                    assert isinstance(rows, PaddedRows)

    run(16)
    with pytest.raises(RuntimeError, match="fresh rows more than its capacity"):
        run(1)
    run(16)  # the next block is a new one


def test_triton_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched_model()
    block = next(iter(model._epoch_moe.blocks.values()))
    x_RH = torch.zeros(3, model.config.hidden_size, requires_grad=True)
    stacked = block.weights.ensure()
    assert pick_backend("triton", stacked) == "triton" and pick_backend("auto", stacked) == "grouped"
    with pytest.raises(ValueError, match="no backward pass"):
        pick_backend("triton", stacked, x_RH)
    with pytest.raises(ValueError, match="workspace"):
        pick_backend("triton", stacked, workspace=1)
    with pytest.raises(ValueError, match="wrong in bfloat16: load the model in float32"):
        pick_backend("triton", next(iter(patched_model().bfloat16()._epoch_moe.blocks.values())).weights.ensure())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        pick_backend("triton", stacked)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        epoch_moe.patch(model, EpochConfig(backend="triton"))
