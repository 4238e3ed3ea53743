"""LLaDA2.2's routing under a plan: pools of whole routing blocks, whatever is padded, cached or reused."""

from __future__ import annotations

import pytest
import torch
from decode import Inputs, check_fresh_rows, dense, make_decode, patched_model, plain_model, planned, plant_nan
from helpers import additive, relative_error

from epoch_moe.config import EpochConfig
from epoch_moe.plan.context import BlockPlanContext

NAME, POOL, MASK_ID = "llada2_2_routing", 8, 125


def left_padded(starts: list[int], seq_len: int) -> tuple[Inputs, list[Inputs]]:
    """A batch in which sequences start anywhere, and each sequence alone without its padding."""
    ids_BS = torch.randint(0, 120, (len(starts), seq_len))
    ids_BS[:, -5:] = MASK_ID
    slot_S, start_B1 = torch.arange(seq_len), torch.tensor(starts)[:, None]
    valid_BS, position_BS = slot_S >= start_B1, (slot_S - start_B1).clamp_min(0)
    block_BS = position_BS // POOL
    sees_BSS = (block_BS[:, None, :] <= block_BS[:, :, None]) & (valid_BS[:, None, :] | ~valid_BS[:, :, None])
    batch = Inputs(ids_BS, valid_BS, 0, additive(sees_BSS[:, None]), position_BS)
    alone = [
        Inputs(
            ids_BS[b : b + 1, start:],
            valid_BS[b : b + 1, start:],
            0,
            batch.mask[b : b + 1, :, start:, start:],
            position_BS[b : b + 1, start:],
        )
        for b, start in enumerate(starts)
    ]
    return batch, alone


@pytest.mark.parametrize("config", [None, EpochConfig.exact(), EpochConfig()], ids=["dense", "exact", "default"])
@torch.no_grad()
def test_pools_follow_positions_and_padding_does_not_vote(config: EpochConfig | None) -> None:
    starts = [0, 3, 8, 13]
    batch, alone = left_padded(starts, 27)
    plain, model = plain_model(NAME), patched_model(NAME)
    context = BlockPlanContext(model._epoch_moe, config)
    with (
        context.block(batch=len(starts), window=27),
        context.iteration(batch.ids_BS, mask_id=MASK_ID, valid_BS=batch.valid_BS),
    ):
        logits_BSV = batch.run(model)
    for b, (start, inputs) in enumerate(zip(starts, alone, strict=True)):
        assert relative_error(logits_BSV[b : b + 1, start:], inputs.run(plain)) < 1e-5
    # The padding does change what a model that knows nothing of it computes.
    assert relative_error(batch.run(plain)[3:, 13:], alone[3].run(plain)) > 1e-3


@pytest.mark.parametrize("interval", [None, 3])
def test_fresh_rows_are_exact_given_their_inputs(interval: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable rows vote with what they are now: a fresh row's pool is that of a dense layer on the same input."""
    checked = check_fresh_rows(monkeypatch)
    decode = make_decode(4, prefix=8, all_valid=True).without_leads()
    assert len(list(planned(patched_model(NAME), decode, EpochConfig(refresh_interval=interval)))) == 7
    assert len(checked) == 14 and min(checked) < max(checked)


def test_stable_rows_keep_what_an_earlier_pool_gave_them() -> None:
    """Reuse is approximate here too, and a refresh makes it exact again."""
    decode, drift = make_decode(5, prefix=8, all_valid=True, edits=False).without_leads(), 0.0
    expected = dense(plain_model(NAME), decode)
    results = planned(patched_model(NAME), decode, EpochConfig(refresh_interval=3))
    for number, (logits, want) in enumerate(zip(results, expected, strict=True)):
        error = relative_error(logits, want)
        if number % 3 == 0:
            assert error < 1e-5
        drift = max(drift, error)
    assert drift > 1e-4


@pytest.mark.parametrize("config", [EpochConfig(), EpochConfig(refresh_interval=None)], ids=str)
def test_invalid_cache_entries_are_never_read(config: EpochConfig, request: pytest.FixtureRequest) -> None:
    for seed in range(3):
        decode = make_decode(seed, prefix=8).without_leads()
        clean = list(planned(patched_model(NAME), decode, config))
        model = patched_model(NAME)
        if seed == 0:
            request.getfixturevalue("poisoned_empty")
        results = planned(model, decode, config, between=plant_nan)
        for inputs, logits, want in zip(decode.forwards, results, clean, strict=True):
            assert torch.equal(logits[inputs.valid_BS], want[inputs.valid_BS])
            assert not logits[inputs.valid_BS].isnan().any()


def test_pools_must_not_straddle() -> None:
    context = BlockPlanContext(patched_model(NAME)._epoch_moe, EpochConfig())
    ids_BS = torch.zeros(1, 20, dtype=torch.long)
    with (
        context.block(batch=1, window=8),
        pytest.raises(ValueError, match=r"lead=12.*routing blocks of 8.*multiple of 8"),
        context.iteration(ids_BS, mask_id=MASK_ID, lead=12),
    ):
        raise AssertionError("entered")
    with pytest.raises(ValueError, match=r"prefix=12 with prefix_constant=True.*routing blocks of 8"):
        context.begin_block(batch=1, window=20, prefix=12, prefix_constant=True)
    with context.block(batch=1, window=20, prefix=12):
        pass
    other = BlockPlanContext(patched_model("llada2")._epoch_moe, EpochConfig())
    with other.block(batch=1, window=20, prefix=12, prefix_constant=True):
        pass
