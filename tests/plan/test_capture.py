"""Recorded iterations: a tape in a CUDA graph's place repeats the recorded ops on the recorded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decode import make_decode, patched_model
from parts.device_reference import use_references
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import epoch_moe.models.decoder
from epoch_moe.config import EpochConfig
from epoch_moe.plan.capture import CapturedIterations
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.rules import NO_TOKEN

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@pytest.fixture(autouse=True)
def ids_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own models look at token ids where that costs no sync: on the CPU."""
    monkeypatch.setattr(epoch_moe.models.decoder, "_check_ids", lambda *args: None)


class Tape(TorchDispatchMode):
    """Executes while it records, and refuses what a CUDA graph could not hold: a value read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} reads a value on the host"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @contextmanager
    def record(self) -> Iterator[None]:
        with self:
            yield

    def first(self) -> None:
        """Recording has executed."""

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def decode(config: EpochConfig, capture: bool, capacity: int | None) -> tuple[list[Tensor], list[Tensor], Any, int]:
    """Two blocks of one shape: hidden states and stamps of every forward, work and history, replayed forwards."""
    model = patched_model()
    context = BlockPlanContext(model._epoch_moe, config)
    hidden: list[Tensor] = []
    stamps: list[Tensor] = []
    captured: CapturedIterations | None = None
    mask, positions = torch.ones(1, 1, 8, 8, dtype=torch.bool), torch.arange(8).unsqueeze(0)

    def run(ids_BS: Tensor) -> Tensor:
        return model.model(ids_BS, attention_mask=mask, position_ids=positions).last_hidden_state

    for seed in (1, 2):
        steps = make_decode(seed, batch=2, block=8, forwards=8, all_valid=True).without_leads()
        if capture and captured is None:
            captured = context.capture(run, graph=Tape)
        with torch.no_grad(), context.block(**steps.block_args):  # type: ignore[arg-type]
            for inputs in steps.forwards:
                masks = {"mask_id": 125, "valid_BS": inputs.valid_BS, "capacity": capacity}
                if captured is not None:
                    hidden.append(captured(inputs.ids_BS, **masks).clone())  # type: ignore[arg-type]
                else:
                    with context.iteration(inputs.ids_BS, **masks):  # type: ignore[arg-type]
                        hidden.append(run(inputs.ids_BS))
                plan = context.open_plan()
                assert plan.stamps_M is not None
                stamps.append(plan.stamps_M.clone())
                for layer in plan.layers:  # what holds nothing may hold anything
                    assert layer.cache_MH is not None
                    layer.cache_MH.masked_fill_((plan.stamps_M == NO_TOKEN).view(-1, 1), float("nan"))
    work = (context.counters.read().as_dict(), context.counters.history)
    return hidden, stamps, work, 0 if captured is None else captured.replays


CONFIGS = {
    "default": EpochConfig(backend="triton"),
    "paper": EpochConfig.paper(backend="triton", refresh_interval=3),
    "drop": EpochConfig(backend="triton", on_miss="drop", refresh_interval=2, coverage=0.6),
    "all experts": EpochConfig(backend="triton", coverage=None, refresh_interval=None),
}


@pytest.mark.parametrize("capacity", [None, 16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_replayed_iterations_are_the_ordinary_ones(
    config: EpochConfig, capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_references(monkeypatch)
    same(config, capacity)


@pytest.mark.slow
def test_replayed_kernels_give_the_ordinary_iterations() -> None:
    same(CONFIGS["drop"], None)


def same(config: EpochConfig, capacity: int | None) -> None:
    plain, plain_stamps, plain_work, _ = decode(config, False, capacity)
    replayed, stamps, work, replays = decode(config, True, capacity)
    assert replays >= 6
    for number, (a, b) in enumerate(zip(plain, replayed, strict=True)):
        assert torch.isfinite(b).all() and torch.equal(a, b), number
        assert torch.equal(plain_stamps[number], stamps[number]), number
    assert work == plain_work


def test_a_value_read_on_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    import epoch_moe.plan.support as support

    honest = support._per_group
    monkeypatch.setattr(support, "_per_group", lambda value_R, *args: honest(value_R * value_R.sum().item(), *args))
    with pytest.raises(AssertionError, match="reads a value on the host"):
        decode(CONFIGS["default"], True, None)


def test_a_layer_that_leaves_its_plan_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    model = patched_model()
    context = BlockPlanContext(model._epoch_moe, CONFIGS["all experts"])
    blocks = list(model._epoch_moe.blocks.values())
    ids_BS = torch.zeros(1, 4, dtype=torch.int64)
    captured = context.capture(lambda ids: [block(torch.zeros(1, 4, 64)) for block in (*blocks, blocks[0])], Tape)
    with torch.no_grad(), context.block(batch=1, window=4):
        captured(ids_BS, mask_id=5)
        captured(ids_BS, mask_id=5)
        with pytest.raises(RuntimeError, match="left the plan"):
            captured(ids_BS, mask_id=5)


@pytest.mark.parametrize("how", ["attention", "expert", "expert moved"])
def test_a_replay_never_serves_old_weights(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change in the middle of a block every row is computed, by the weights that there are."""
    use_references(monkeypatch)
    model = patched_model()
    context = BlockPlanContext(model._epoch_moe, CONFIGS["all experts"])
    mask, positions = torch.ones(1, 1, 8, 8, dtype=torch.bool), torch.arange(8).unsqueeze(0)

    def run(ids_BS: Tensor) -> Tensor:
        return model.model(ids_BS, attention_mask=mask, position_ids=positions).last_hidden_state

    captured = context.capture(run, graph=Tape)
    ids_BS = torch.full((1, 8), 125)
    with torch.no_grad(), context.block(batch=1, window=8):
        for number in range(8):
            ids_BS[0, number] = number
            if number == 5:
                first = next(iter(model._epoch_moe.blocks.values()))  # layers before a changed one keep their rows
                attention, expert = model.model.layers[0].attention, first.experts[0]
                weight = (attention.query_key_value if how == "attention" else expert.down_proj).weight
                if how == "expert moved":
                    weight.data = weight * 1.5
                else:
                    weight.mul_(1.5)
            got = captured(ids_BS, mask_id=125).clone()
            if number == 5:
                torch.testing.assert_close(got, run(ids_BS), rtol=1e-4, atol=1e-5)
            if number == 4:
                assert captured.replays == 2
    assert captured.replays == 3, "iterations after the change are recorded anew"


def test_refusals() -> None:
    model = patched_model()

    def run(ids_BS: Tensor) -> Tensor:
        return ids_BS

    with pytest.raises(RuntimeError, match="need a GPU, and the experts are on cpu"):
        BlockPlanContext(model._epoch_moe, EpochConfig(backend="triton")).capture(run)
    with pytest.raises(ValueError, match="no plan"):
        BlockPlanContext(model._epoch_moe, None).capture(run)
    with pytest.raises(RuntimeError, match="record=True"):
        BlockPlanContext(model._epoch_moe, EpochConfig(), record=True).capture(run, Tape)
    context = BlockPlanContext(model._epoch_moe, EpochConfig(backend="loop"))
    captured = context.capture(run, Tape)
    with pytest.raises(RuntimeError, match="no block is open"):
        captured(torch.zeros(1, 4, dtype=torch.int64), mask_id=5)
    with context.block(batch=1, window=4):
        with pytest.raises(RuntimeError, match="lists on the host"):
            captured(torch.zeros(1, 4, dtype=torch.int64), mask_id=5)
        with pytest.raises(RuntimeError, match="before begin_block"):
            context.capture(run, Tape)
