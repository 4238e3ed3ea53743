"""One layer's resident experts: the bits of all experts in memory, whatever lies where."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epoch_moe.experts.run import run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.residency import loader
from epoch_moe.residency.attach import attach, detach
from epoch_moe.residency.config import ResidencyConfig
from epoch_moe.residency.experts import ResidentExperts
from epoch_moe.residency.sources import ResidencyError

E, F, H = 12, 32, 64


def run(experts: ResidentExperts, x: Tensor, ids: Tensor, weights: Tensor, backend: str) -> Tensor:
    return experts.compute(x, ids, weights, experts.ensure(), backend=backend)[0]  # type: ignore[arg-type]



class Experts(nn.Module):
    """Stacked parameters, as dFactory holds them."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        for name, shape in (("gate_proj", (E, F, H)), ("up_proj", (E, F, H)), ("down_proj", (E, H, F))):
            self.register_parameter(name, nn.Parameter((torch.randn(shape) / shape[-1] ** 0.5).to(dtype)))


class Layer:
    """What `attach` needs of a block."""

    def __init__(self, dtype: torch.dtype):
        self.module = Experts(dtype)
        self.weights: Any = ExpertWeights(self.module, "stacked")
        stacked = self.weights.ensure()
        self.all = ExpertViews.fused(stacked.gate_up_E2FH.detach().clone(), stacked.down_EHF.detach().clone())


def resident(tmp_path: Path, dtype: torch.dtype = torch.float32, layers: int = 1, **config: Any) -> list[Layer]:
    made = [Layer(dtype) for _ in range(layers)]
    blocks = {f"layers.{n}.mlp": layer for n, layer in enumerate(made)}
    attach(ResidencyConfig(spill_dir=tmp_path, **config), blocks, None, None)
    return made


def routing(rows: int, top_k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.rand(rows, E, generator=generator).argsort(dim=1)[:, :top_k]
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return ids, torch.rand(rows, top_k, generator=generator)


def slots_of(count: int) -> dict[str, Any]:
    """A budget in bytes for so many fp32 or bf16 experts beside the two buffers."""
    return {"budget": 3 * F * H * 4 * (2 + count)}


def memory_of(experts: ResidentExperts) -> tuple[int, ...]:
    buffers = loader.passing(experts.loader.buffers, experts.dtype, experts.device)
    return experts.fast.down_EHF.data_ptr(), *(buffer[0].data_ptr() for buffer in buffers)


@pytest.mark.parametrize("policy", ["retention", "lru"])
@pytest.mark.parametrize("slots", [0, 1, 5, E])
@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.usefixtures("poisoned_empty")
def test_every_placement_gives_the_same_bits(tmp_path: Path, policy: str, slots: int, top_k: int) -> None:
    (layer,) = resident(tmp_path, policy=policy, **slots_of(slots))
    experts = layer.weights
    assert experts.placement.slots == slots
    storage = memory_of(experts)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for rows in (13, 1, 0, 13, 13, 7):
            x = torch.randn(rows, H, generator=generator)
            ids, weights = routing(rows, top_k, generator)
            for backend in ("grouped", "loop"):
                expected = run_experts(x, ids, weights, layer.all, backend)  # type: ignore[arg-type]
                assert torch.equal(run(experts, x, ids, weights, backend), expected)
    counts = experts.placement.counts
    assert counts.demanded == counts.hits + counts.misses > 0
    assert (counts.hits == 0) == (slots == 0)
    # Whatever moved, nothing was allocated for it.
    assert storage == memory_of(experts)


@pytest.mark.parametrize("options", [{"tier": "host"}, {"miss": "compute"}, {"drop_cache": True}])
@pytest.mark.parametrize(("dtype", "ahead"), [(torch.float32, 0), (torch.bfloat16, 10**9)])
def test_other_ways_to_the_same_bits(
    tmp_path: Path, options: dict[str, Any], dtype: torch.dtype, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", ahead)  # read by the thread, and without it
    (layer,) = resident(tmp_path, dtype, budget=0.5, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(9, H, generator=generator).to(dtype)
            ids, weights = routing(9, 4, generator)
            expected = run_experts(x, ids, weights, layer.all, "grouped")
            assert torch.equal(run(layer.weights, x, ids, weights, "auto"), expected)
    counts = layer.weights.counts
    assert (counts.file_bytes > 0) == ("tier" not in options)
    assert (layer.weights.placement.counts.loads == 0) == (options.get("miss") == "compute")


def test_all_rows_at_one_expert_and_no_pair_at_all(tmp_path: Path) -> None:
    (layer,) = resident(tmp_path, budget=0.1)
    x = torch.randn(11, H)
    with torch.no_grad():
        for ids in (torch.full((11, 1), 7), torch.full((11, 2), -1)):
            weights = torch.rand(ids.shape)
            expected = run_experts(x, ids, weights, layer.all, "grouped")
            assert torch.equal(run(layer.weights, x, ids, weights, "auto"), expected)


def test_a_read_that_fails_ends_the_forward_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer,) = resident(tmp_path, **slots_of(4))
    x, weights = torch.randn(6, H), torch.rand(6, 4)
    ids = torch.arange(24).view(6, 4) % E
    first = ids % 4
    original, calls = os.preadv, []

    def third_fails(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) >= 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    with torch.no_grad():
        for ahead in (0, 10**9):
            monkeypatch.setattr(loader, "READ_AHEAD_BYTES", ahead)
            monkeypatch.setattr(os, "preadv", third_fails)
            calls.clear()
            layer.weights.placement.forget(range(E))
            with pytest.raises(ResidencyError, match="Input/output error"):
                run(layer.weights, x, first, weights, "auto")
            assert layer.weights.placement.resident == [0]  # what had arrived
            monkeypatch.setattr(os, "preadv", original)
            for wanted in (first, ids):
                expected = run_experts(x, wanted, weights, layer.all, "grouped")
                assert torch.equal(run(layer.weights, x, wanted, weights, "auto"), expected)


def test_what_stands_for_all_experts_has_no_values_to_compute_with(tmp_path: Path) -> None:
    (layer,) = resident(tmp_path, torch.bfloat16, budget=0.5)
    ensured = layer.weights.ensure()
    for there, absent in zip(
        (layer.all.gate_up_E2FH, layer.all.down_EHF), (ensured.gate_up_E2FH, ensured.down_EHF), strict=True
    ):
        assert (absent.shape, absent.dtype, absent.device) == (there.shape, there.dtype, there.device)
        for use in (torch.unique, torch.clone, lambda t: t[0], lambda t: t @ t.mT, lambda t: t.float(), Tensor.sum):
            with pytest.raises(RuntimeError, match=r"layers\.0\.mlp .* needs all experts in memory, and 6 of 12 are"):
                use(absent)
    assert ensured.bytes_per_expert == layer.all.bytes_per_expert
    assert layer.weights.outline() is ensured


def test_gradients_and_foreign_backends_are_refused(tmp_path: Path) -> None:
    (layer,) = resident(tmp_path, budget=0.5)
    x, ids, weights = torch.randn(2, H, requires_grad=True), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp .*no backward pass"):
        run(layer.weights, x, ids, weights, "auto")
    with torch.no_grad(), pytest.raises(ValueError, match="backend='reference' reads all experts"):
        run(layer.weights, x, ids, weights, "reference")


def test_parameters_leave_and_come_back(tmp_path: Path) -> None:
    layers = [Layer(torch.float32) for _ in range(2)]
    before = [list(layer.module.parameters()) for layer in layers]
    blocks = {f"layers.{n}.mlp": layer for n, layer in enumerate(layers)}
    whole = [layer.weights for layer in layers]
    state = attach(ResidencyConfig(spill_dir=tmp_path), blocks, None, None)
    assert not list(tmp_path.iterdir()), "the file's name goes at once, its contents with the process"
    assert state.spilled == 2 * 3 * E * F * H * 4
    for layer, params in zip(layers, before, strict=True):
        assert isinstance(layer.weights, ResidentExperts)
        assert all(p.is_meta and p.shape == (E, *p.shape[1:]) for p in layer.module.parameters())
        assert all(p.untyped_storage().nbytes() == 0 for p in params)
    detach(state, layers)
    for layer, params, weights in zip(layers, before, whole, strict=True):
        assert all(a is b for a, b in zip(layer.module.parameters(), params, strict=True))
        assert layer.weights is weights
        assert torch.equal(layer.module.down_proj, layer.all.down_EHF)
        weights.ensure()
        assert weights.moved_bytes == 0, "the parameters lie where grouped products want them"


def test_no_room_to_spill_leaves_everything_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(torch.float32) for _ in range(2)]
    blocks = {f"layers.{n}.mlp": layer for n, layer in enumerate(layers)}
    calls: list[int] = []

    def usage(path: object) -> Any:
        calls.append(1)
        return type("Usage", (), {"free": 10**12 if len(calls) < 2 else 17})

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(OSError, match=r"0\.00 GB left and layers\.1\.mlp takes"):
        attach(ResidencyConfig(spill_dir=tmp_path), blocks, None, None)
    for layer in layers:
        assert isinstance(layer.weights, ExpertWeights)
        assert torch.equal(layer.weights.ensure().down_EHF, layer.all.down_EHF)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        attach(ResidencyConfig(spill_dir=tmp_path / "absent"), blocks, None, None)


def test_layers_of_other_sizes_are_refused(tmp_path: Path) -> None:
    small, large = Layer(torch.float32), Layer(torch.float32)
    large.module.gate_proj = nn.Parameter(torch.randn(E + 1, F, H))
    with pytest.raises(ValueError, match="equally many experts of one size"):
        attach(ResidencyConfig(spill_dir=tmp_path), {"a": small, "b": large}, None, None)
