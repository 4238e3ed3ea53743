"""`patch`, `unpatch`, `patched` on the golden LLaDA2 checkpoint."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN, assert_gradients, gradients_of, relative_error
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import epoch_moe
from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.plan.context import BlockPlanContext

PATHS = ["model.layers.1.mlp", "model.layers.2.mlp"]
IDS = torch.arange(24).view(2, 12) % 120


@lru_cache(maxsize=1)
def loaded() -> LLaDA2MoeModelLM:
    return LLaDA2MoeModelLM.from_pretrained(GOLDEN / "llada2", dtype=torch.float32).eval()


@pytest.fixture
def model() -> LLaDA2MoeModelLM:
    return copy.deepcopy(loaded())


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


@pytest.fixture
def want() -> Tensor:
    return logits(loaded())


def storages(model: nn.Module) -> dict[int, int]:
    """Address -> bytes of every storage that the model's tensors lie in."""
    tensors = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def moe_modules(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(path) for path in PATHS]


def separate(model: nn.Module) -> nn.Module:
    """As a released checkpoint is loaded: every weight in its own storage, and no stacking of the block's own."""
    for module in moe_modules(model):
        for parameter in module.experts.parameters():  # type: ignore[union-attr]
            parameter.data = parameter.data.clone()
        module._weights = types.SimpleNamespace(release=lambda: None)  # type: ignore[assignment]
    return model


def is_patched(model: nn.Module) -> bool:
    return any(isinstance(m, EpochMoEBlock) for m in model.modules()) or hasattr(model, "_epoch_moe")


# --- in and out ---------------------------------------------------------------------------------------------------


def test_patching_changes_no_key_value_or_result(model: LLaDA2MoeModelLM, want: Tensor) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    names = [name for name, _ in model.named_modules()]
    report = epoch_moe.patch(model)
    assert [type(m) for m in moe_modules(model)] == [EpochMoEBlock] * 2
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [name for name, _ in model.named_modules()] == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(logits(model), want)
    assert report.patched == PATHS and report.skipped == {} and not report.updated
    assert (report.family, report.dtype, report.config) == ("llada2", "float32", EpochConfig())
    assert report.expert_bytes == 2 * 16 * 3 * 64 * 32 * 4
    assert "patched 2 MoE layers (llada2)" in str(report) and "coverage=0.95" in str(report)


def test_unpatching_gives_the_same_objects_back(model: LLaDA2MoeModelLM, want: Tensor) -> None:
    originals = moe_modules(model)
    base_hooks = dict(model.model._forward_pre_hooks)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    epoch_moe.patch(model)
    epoch_moe.unpatch(model)
    assert all(a is b for a, b in zip(moe_modules(model), originals, strict=True))
    assert not is_patched(model) and dict(model.model._forward_pre_hooks) == base_hooks
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(logits(model), want)
    with pytest.raises(ValueError, match="LLaDA2MoeModelLM is not patched"):
        epoch_moe.unpatch(model)


def test_no_second_copy_of_the_weights(model: LLaDA2MoeModelLM, monkeypatch: pytest.MonkeyPatch) -> None:
    separate(model)
    before = sum(storages(model).values())
    layer_bytes = 16 * 3 * 64 * 32 * 4
    alive, peak = 0, 0
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        # New memory minus what the experts have given up so far.
        nonlocal alive, peak
        out = empty(*args, **kwargs)
        # Those two have no memory; patch() asks with such weights what a backend takes, and where parameters lie.
        if not isinstance(out, FakeTensor) and not out.is_meta:
            alive += out.untyped_storage().nbytes()
        peak = max(peak, alive - (before - sum(storages(model).values()) if alive else 0))
        return out

    monkeypatch.setattr(torch, "empty", counting)
    report = epoch_moe.patch(model)
    monkeypatch.undo()
    assert sum(storages(model).values()) == before
    assert alive == report.moved_bytes == report.expert_bytes == 2 * layer_bytes
    assert 0 < report.peak_extra_bytes <= layer_bytes
    assert peak <= before + 2 * layer_bytes
    addresses = set(storages(model))
    for block in moe_modules(model):
        for stacked in (block.weights.ensure().gate_up_E2FH, block.weights.ensure().down_EHF):  # type: ignore[union-attr]
            assert stacked.untyped_storage().data_ptr() in addresses
    # What a native block has stacked already is shared.
    again = copy.deepcopy(loaded())
    logits(again)
    assert epoch_moe.patch(again).moved_bytes == 0


def test_a_hundred_cycles_leave_no_trace(model: LLaDA2MoeModelLM) -> None:
    separate(model)
    epoch_moe.patch(model)
    epoch_moe.unpatch(model)
    first = storages(model)
    attributes = [set(m.__dict__) for m in model.modules()]
    for _ in range(100):
        epoch_moe.patch(model)
        epoch_moe.unpatch(model)
    assert sum(storages(model).values()) == sum(first.values()) and len(storages(model)) == len(first)
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert len(model.model._forward_pre_hooks) == 0
    want = loaded().state_dict()
    assert all(torch.equal(value, want[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("backend", ["grouped", "triton", "loop", "reference"])
def test_the_first_patch_takes_any_backend_that_fits(model: LLaDA2MoeModelLM, backend: str) -> None:
    """It asks before anything is stacked: what is asked about must lie as the stacked weights will."""
    report = epoch_moe.patch(model, EpochConfig(backend=backend))  # type: ignore[arg-type]
    assert not report.updated and report.backend == backend


def test_a_second_patch_only_updates_the_configuration(model: LLaDA2MoeModelLM, want: Tensor) -> None:
    epoch_moe.patch(model)
    blocks = moe_modules(model)
    report = epoch_moe.patch(model, EpochConfig(coverage=0.5, backend="loop"))
    assert report.updated and report.patched == PATHS and report.backend == "loop" and report.moved_bytes == 0
    assert all(a is b for a, b in zip(moe_modules(model), blocks, strict=True))
    assert model._epoch_moe.config == EpochConfig(coverage=0.5, backend="loop")
    assert relative_error(logits(model), want) < 1e-6
    assert len(model.model._forward_pre_hooks) == 2 and len(model.model._forward_hooks) == 1
    for name, config in (("exact", EpochConfig.exact()), ("dense", None), (None, None)):
        epoch_moe.patch(model, name)
        assert model._epoch_moe.config == config
    assert "plan: none (dense)" in str(epoch_moe.patch(model, None))
    with pytest.raises(ValueError, match="preset 'fast'"):
        epoch_moe.patch(model, "fast")
    with pytest.raises(TypeError, match="config=3"):
        epoch_moe.patch(model, 3)  # type: ignore[arg-type]


def test_patched_restores_whatever_happens(model: LLaDA2MoeModelLM, want: Tensor) -> None:
    originals = moe_modules(model)
    with epoch_moe.patched(model, "exact") as report:
        assert report.patched == PATHS and torch.equal(logits(model), want)
        with epoch_moe.patched(model, "paper") as inner:
            assert inner.updated and model._epoch_moe.config == EpochConfig.paper()
        assert model._epoch_moe.config == EpochConfig.exact()
        with pytest.raises(KeyError), epoch_moe.patched(model, None):
            raise KeyError("inside")
        assert model._epoch_moe.config == EpochConfig.exact()
    assert not is_patched(model)
    with pytest.raises(KeyError), epoch_moe.patched(model):
        raise KeyError("inside")
    assert not is_patched(model)
    assert all(a is b for a, b in zip(moe_modules(model), originals, strict=True))
    with pytest.raises(ValueError), epoch_moe.patched(model, "fast"):
        pass
    assert not is_patched(model)


# --- refusals -----------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _replace_block(model: LLaDA2MoeModelLM) -> None:
    model.model.layers[2].mlp = Wrapper(model.model.layers[2].mlp)


def _replace_layer(model: LLaDA2MoeModelLM) -> None:
    model.model.layers[2] = Wrapper(model.model.layers[2])


def _replace_forward(model: LLaDA2MoeModelLM) -> None:
    block = model.model.layers[2].mlp
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x), block)


@pytest.mark.parametrize(
    ("wrap", "culprit"),
    [(_replace_block, "Wrapper"), (_replace_layer, "Wrapper"), (_replace_forward, r"\.forward was replaced by <bound")],
)
def test_unpatch_refuses_what_was_wrapped_since(
    model: LLaDA2MoeModelLM, want: Tensor, wrap: Callable[[LLaDA2MoeModelLM], None], culprit: str
) -> None:
    epoch_moe.patch(model)
    first, second = model.model.layers[1].mlp, model.model.layers[2]
    block = second.mlp
    wrap(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"model\.layers\.2\.mlp.*{culprit}"):
            epoch_moe.unpatch(model)
        assert model.model.layers[1].mlp is first and isinstance(first, EpochMoEBlock)  # nothing was undone
        assert relative_error(logits(model), want) < 1e-6
    model.model.layers[2] = second
    second.mlp = block
    block.__dict__.pop("forward", None)
    epoch_moe.unpatch(model)
    assert not is_patched(model)


@pytest.mark.parametrize("where", ["gate", "experts.3", "experts.3.up_proj"])
def test_hooks_that_would_stop_running_are_refused(model: LLaDA2MoeModelLM, want: Tensor, where: str) -> None:
    block = moe_modules(model)[0]
    handle = block.get_submodule(where).register_forward_hook(lambda module, args, out: None)
    with pytest.raises(TypeError, match=rf"mlp cannot be patched: {where} has forward hooks"):
        epoch_moe.patch(model)
    assert not is_patched(model)
    handle.remove()
    epoch_moe.patch(model)
    assert relative_error(logits(model), want) < 1e-5


def test_unknown_models_are_refused_or_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError) as error:
        epoch_moe.patch(model)
    for words in ("Sequential has no MoE block", "`gate` with `weight` [experts, hidden]", "Linear, ReLU", "strict="):
        assert words in str(error.value)
    assert not is_patched(model)
    report = epoch_moe.patch(model, strict=False)
    assert report.patched == [] and report.backend == "none"
    epoch_moe.unpatch(model)


def test_a_shared_or_inner_model_is_refused_with_the_reason(model: LLaDA2MoeModelLM) -> None:
    epoch_moe.patch(model)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp is patched already"):
        epoch_moe.patch(model.model)
    assert not hasattr(model.model, "_epoch_moe")
    block = model._epoch_moe.blocks[PATHS[0]].original
    with pytest.raises(TypeError, match="the model itself"):
        epoch_moe.patch(block)


class Adapter(nn.Module):
    """As LoRA layers are built: the base layer's weight shows as a property."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_A(x).sum(-1, keepdim=True)


class AdapterLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Quantised(nn.Module):
    def __init__(self, like: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(like.weight.shape, dtype=torch.int8), requires_grad=False)


def _replaced(make: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Module], None]:
    def spoil(block: nn.Module) -> None:
        block.experts[5].up_proj = make(block.experts[5].up_proj)  # type: ignore[union-attr, index]

    return spoil


def _meta(block: nn.Module) -> None:
    block.experts.to("meta")  # type: ignore[operator]


def _hooked_forward(block: nn.Module) -> None:
    linear = block.experts[5].up_proj  # type: ignore[union-attr, index]
    linear.forward = lambda x: x @ linear.weight.T


def _int8(block: nn.Module) -> None:
    linear = block.experts[5].up_proj  # type: ignore[union-attr, index]
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)


def _forward(block: nn.Module) -> None:
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x), block)


def _gate_forward(block: nn.Module) -> None:
    block.gate.forward = types.MethodType(lambda self, x: type(self).forward(self, x), block.gate)


def _expert_forward(block: nn.Module) -> None:
    expert = block.experts[3]  # type: ignore[union-attr, index]
    expert.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), expert)


def _gelu(block: nn.Module) -> None:
    for expert in block.experts:  # type: ignore[union-attr]
        expert.act_fn = nn.GELU()


def _half_of_them(block: nn.Module) -> None:
    block.experts[3].half()  # type: ignore[union-attr, index, operator]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_replaced(Adapter), r"experts\[5\]\.up_proj is .*Adapter,"),
        (_replaced(lambda old: AdapterLinear(64, 32, bias=False)), r"experts\[5\]\.up_proj is .*AdapterLinear,"),
        (_replaced(Quantised), r"experts\[5\]\.up_proj is .*Quantised,"),
        (_replaced(lambda old: nn.Linear(64, 33, bias=False)), r"experts\[5\]\.up_proj.* \(33, 64\)"),
        (_replaced(lambda old: nn.Linear(64, 32)), r"experts\[5\]\.up_proj has a bias"),
        (_int8, r"experts\[5\]\.up_proj.weight has dtype torch.int8"),
        (_hooked_forward, r"experts\.5\.up_proj\.forward was replaced by <function"),
        (_expert_forward, r"experts\.3\.forward was replaced by <bound"),
        (_gate_forward, r"gate\.forward was replaced by <bound"),
        (_meta, "meta device"),
        (_half_of_them, r"experts\[3\].*torch.float16"),
        (_forward, "its forward was replaced by"),
        (_gelu, r"the experts' act_fn is GELU"),
    ],
)
def test_experts_that_cannot_be_stacked_are_refused_by_name(
    model: LLaDA2MoeModelLM, spoil: Callable[[nn.Module], None], reason: str
) -> None:
    separate(model)
    spoil(model.model.layers[2].mlp)
    before, originals = storages(model), moe_modules(model)
    with pytest.raises(TypeError, match=rf"model\.layers\.2\.mlp cannot be patched: .*{reason}"):
        epoch_moe.patch(model)
    assert not is_patched(model) and storages(model) == before and moe_modules(model) == originals
    report = epoch_moe.patch(model, strict=False)
    assert report.patched == PATHS[:1] and list(report.skipped) == PATHS[1:]
    assert PATHS[1] in str(report) and model.model.layers[2].mlp is originals[1]
    epoch_moe.unpatch(model)
    assert moe_modules(model) == originals


def test_an_impossible_backend_changes_nothing(model: LLaDA2MoeModelLM) -> None:
    separate(model)
    model.double()  # grouped_mm takes no float64
    before = storages(model)
    with pytest.raises(ValueError, match="backend='grouped'"):
        epoch_moe.patch(model, EpochConfig(backend="grouped"))
    assert not is_patched(model) and storages(model) == before
    epoch_moe.patch(model)
    with pytest.raises(ValueError, match="backend='grouped'"):
        epoch_moe.patch(model, EpochConfig(backend="grouped"))
    assert model._epoch_moe.config == EpochConfig() and model._epoch_moe.blocks[PATHS[0]].backend == "auto"


# --- copies, dtypes, checkpoints ----------------------------------------------------------------------------------


def bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def torch_saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def changed_weights(model: nn.Module) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return {
        key: value + 0.05 * torch.randn(value.shape, generator=gen).to(value.dtype)
        for key, value in model.state_dict().items()
    }


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(changed_weights(model), assign=True)
    return model


def copied_in(model: nn.Module) -> nn.Module:
    model.load_state_dict(changed_weights(model))
    return model


TREATMENTS = [bf16, nn.Module.half, nn.Module.double, copy.deepcopy, pickled, torch_saved, assigned, copied_in]


@pytest.mark.parametrize("treat", TREATMENTS)
def test_treated_like_an_unpatched_model(model: LLaDA2MoeModelLM, treat: Callable[[nn.Module], nn.Module]) -> None:
    plain = treat(copy.deepcopy(model))
    epoch_moe.patch(model)
    model = treat(model)  # type: ignore[assignment]
    assert is_patched(model)
    want = logits(plain)
    tolerance = 1e-5 if want.dtype == torch.float32 and next(plain.parameters()).dtype == torch.float32 else 2e-2
    assert relative_error(logits(model), want) < tolerance
    for got, expected in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert got[0] == expected[0] and got[1].dtype == expected[1].dtype and torch.equal(got[1], expected[1])
    for block in moe_modules(model):
        assert block.gate.expert_bias.dtype == (torch.float64 if treat is nn.Module.double else torch.float32) or (
            block.gate.expert_bias.dtype == torch.float32
        )
    # A plan finds the new storage, and unpatching still works.
    context = BlockPlanContext(model._epoch_moe, EpochConfig.exact())
    with torch.no_grad(), context.block(batch=2, window=12), context.iteration(IDS, mask_id=125):
        assert relative_error(model(IDS).logits, want) < tolerance
    assert context.counters.read().rows == 48
    epoch_moe.unpatch(model)
    assert not is_patched(model) and relative_error(logits(model), want) < tolerance


def test_a_copy_is_independent_of_the_model(model: LLaDA2MoeModelLM, want: Tensor) -> None:
    epoch_moe.patch(model)
    other = copy.deepcopy(model)
    assert other._epoch_moe.slot is not model._epoch_moe.slot
    assert [b is m for b, m in zip(other._epoch_moe.blocks.values(), moe_modules(other), strict=True)] == [True] * 2
    assert all(b.slot is other._epoch_moe.slot for b in other._epoch_moe.blocks.values())
    epoch_moe.unpatch(other)
    assert is_patched(model) and not is_patched(other) and len(model.model._forward_pre_hooks) == 2
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), want)
    assert not set(storages(model)) & set(storages(other))


def test_training_gradients_are_the_originals(model: LLaDA2MoeModelLM) -> None:
    plain, exact = copy.deepcopy(model).train(), copy.deepcopy(model).train().double()
    epoch_moe.patch(model)
    model.train()
    for m in (plain, model, exact):
        m(IDS, labels=IDS).loss.backward()
    assert_gradients(gradients_of(model), gradients_of(plain), gradients_of(exact))


def test_a_saved_patched_model_loads_unpatched(model: LLaDA2MoeModelLM, want: Tensor, tmp_path: Path) -> None:
    epoch_moe.patch(model)
    logits(model)
    model.save_pretrained(tmp_path)
    again = LLaDA2MoeModelLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert not is_patched(again) and torch.equal(logits(again), want)
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) < 1_200_000  # each weight once


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    yield
    assert not is_patched(loaded())


def test_a_notebook_shows_the_report_as_a_table(model: LLaDA2MoeModelLM) -> None:
    report = epoch_moe.patch(model, None)
    page = report._repr_html_()
    assert "MoE layers patched" in page and "none (dense)" in page
    assert f"{report.expert_bytes / 1e6:,.1f} MB in float32" in page
    assert "MoE layers updated" in epoch_moe.patch(model, "exact")._repr_html_()
