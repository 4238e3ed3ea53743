"""What a block plan promises to leave unchanged, on the golden checkpoints with random decodes, edits and re-masks."""

from __future__ import annotations

import pytest
import torch
from decode import (
    LAYOUTS,
    Inputs,
    check_fresh_rows,
    dense,
    make_decode,
    moe_blocks,
    patched_model,
    plain_model,
    planned,
    plant_nan,
)
from helpers import relative_error
from torch import Tensor

from epoch_moe.config import EpochConfig

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def assert_same(actual: Tensor, expected: Tensor, inputs: Inputs, tolerance: float = 1e-5) -> None:
    rows = inputs.valid_BS
    if rows.any():
        assert relative_error(actual[rows], expected[rows]) <= tolerance


@layouts
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_experts_and_a_refresh_every_time_is_dense(layout: str, seed: int) -> None:
    decode = make_decode(seed, **LAYOUTS[layout])  # type: ignore[arg-type]
    expected = dense(plain_model(), decode)
    for inputs, logits, want in zip(
        decode.forwards, planned(patched_model(), decode, EpochConfig.exact()), expected, strict=True
    ):
        assert_same(logits, want, inputs)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("coverage", [None, 0.5])
def test_the_block_pool_router_is_left_alone(seed: int, coverage: float | None) -> None:
    # No support is compiled, whatever `coverage` says.
    decode = make_decode(seed, prefix=8, all_valid=True).without_leads()
    model = patched_model("llada2_2_routing")
    expected = dense(plain_model("llada2_2_routing"), decode)
    config = EpochConfig(coverage=coverage, refresh_interval=1)
    for inputs, logits, want in zip(decode.forwards, planned(model, decode, config), expected, strict=True):
        assert_same(logits, want, inputs)


@layouts
@pytest.mark.parametrize("config", [EpochConfig(), EpochConfig.paper(), EpochConfig(coverage=None)], ids=str)
def test_cold_passes_are_dense(layout: str, config: EpochConfig) -> None:
    for seed in range(3):
        decode = make_decode(seed, forwards=1, **LAYOUTS[layout])  # type: ignore[arg-type]
        (logits,) = planned(patched_model(), decode, config)
        assert_same(logits, dense(plain_model(), decode)[0], decode.forwards[0])


@layouts
def test_refreshes_are_dense_and_other_forwards_are_not(layout: str) -> None:
    drift = 0.0
    for seed in range(3):
        decode = make_decode(seed, forwards=8, **LAYOUTS[layout])  # type: ignore[arg-type]
        expected = dense(plain_model(), decode)
        results = planned(patched_model(), decode, EpochConfig(coverage=None, refresh_interval=3))
        for number, (inputs, logits) in enumerate(zip(decode.forwards, results, strict=True)):
            if number % 3 == 0:
                assert_same(logits, expected[number], inputs)
            elif inputs.valid_BS.any():
                drift = max(drift, relative_error(logits[inputs.valid_BS], expected[number][inputs.valid_BS]))
    assert drift > 1e-4  # reuse does change something, or the comparison above proves nothing


@layouts
@pytest.mark.parametrize("config", [EpochConfig(), EpochConfig(coverage=None, refresh_interval=None)], ids=str)
def test_uninitialised_memory_is_never_read(
    layout: str, config: EpochConfig, request: pytest.FixtureRequest
) -> None:
    for seed in range(2):
        decode = make_decode(seed, **LAYOUTS[layout])  # type: ignore[arg-type]
        clean = list(planned(patched_model(), decode, config))
        model = patched_model()
        if seed == 0:
            request.getfixturevalue("poisoned_empty")
        for inputs, logits, want in zip(
            decode.forwards, planned(model, decode, config, between=plant_nan), clean, strict=True
        ):
            assert torch.equal(logits[inputs.valid_BS], want[inputs.valid_BS])
            assert not logits[inputs.valid_BS].isnan().any()


@pytest.mark.parametrize("interval", [None, 3])
def test_fresh_rows_are_exact_given_their_inputs(interval: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check_fresh_rows(monkeypatch)
    decode = make_decode(4, prefix=6)
    config = EpochConfig(coverage=None, refresh_interval=interval)
    assert len(list(planned(patched_model(), decode, config))) == 7
    assert len(checked) == 14 and min(checked) < max(checked)


@layouts
@pytest.mark.parametrize("changes", [{}, {"support_scope": "batch"}, {"restrict_new": True}], ids=str)
def test_expand_is_all_experts(layout: str, changes: dict[str, object]) -> None:
    for seed in range(2):
        decode = make_decode(seed, **LAYOUTS[layout])  # type: ignore[arg-type]
        every = planned(patched_model(), decode, EpochConfig(coverage=None, refresh_interval=3))
        config = EpochConfig(coverage=0.3, on_miss="expand", refresh_interval=3, **changes)  # type: ignore[arg-type]
        for logits, want in zip(planned(patched_model(), decode, config), every, strict=True):
            assert torch.equal(logits, want)


@pytest.mark.parametrize("on_miss", ["reselect", "drop", "expand"])
@pytest.mark.parametrize("layout", ["window", "drifting-prefix"])
def test_a_sequence_does_not_depend_on_its_batch_mates(layout: str, on_miss: str) -> None:
    decode = make_decode(11, batch=3, **LAYOUTS[layout])  # type: ignore[arg-type]
    config = EpochConfig(coverage=0.7, coverage_floor=0.65, on_miss=on_miss, refresh_interval=3)  # type: ignore[arg-type]
    model = patched_model()
    together = list(planned(model, decode, config))
    for b in range(3):
        for number, alone in enumerate(planned(model, decode.one(b), config)):
            assert_same(together[number][b : b + 1], alone, decode.forwards[number].one(b))


def test_an_emptied_forward_runs() -> None:
    """Every sequence finished, or every row stable: no fresh row at all."""
    decode = make_decode(0, all_valid=True, edits=False)
    for inputs in decode.forwards:
        inputs.ids_BS.clamp_max_(7)  # no MASK, so nothing is ever live
        inputs.ids_BS[:] = decode.forwards[0].ids_BS[0, 0]
    decode.forwards = [f for f in decode.forwards if f.lead == decode.forwards[-1].lead][-1:] * 3
    decode.forwards[2] = Inputs(**(vars(decode.forwards[2]) | {"valid_BS": decode.forwards[2].valid_BS & False}))
    model = patched_model()
    first, second, third = planned(model, decode, EpochConfig())
    assert_same(second, first, decode.forwards[0])
    assert third.isfinite().all()
    assert len(moe_blocks(model)) == 2
