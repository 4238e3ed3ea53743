"""A patched model in use: training, checkpointing, threads, exceptions, a hundred cycles, saving."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN, assert_gradients, gradients_of, relative_error
from released_block import H, Stack
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext

IDS = torch.arange(24).view(2, 12) % 120
CLASSES: dict[str, Any] = {"llada2": LLaDA2MoeModelLM, "llada_moe": LLaDAMoEModelLM}
GENERATION = {"gen_length": 16, "block_length": 8, "steps": 8}


@cache
def plain(family: str) -> Any:
    return CLASSES[family].from_pretrained(GOLDEN / family, dtype=torch.float32).eval()


@pytest.fixture(params=list(CLASSES))
def model(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(plain(request.param))


@pytest.fixture
def llada2() -> LLaDA2MoeModelLM:
    return copy.deepcopy(plain("llada2"))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


# --- training -----------------------------------------------------------------------------------------------------


def checkpointed(model: Any, reentrant: bool | None) -> dict[str, Tensor]:
    """Gradients of one step, with or without gradient checkpointing."""
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.get_input_embeddings().weight.requires_grad_()  # reentrant checkpointing needs an input with gradient
    model(IDS, labels=IDS).loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_with_and_without_checkpointing_are_the_originals(model: Any, reentrant: bool | None) -> None:
    want, exact = checkpointed(copy.deepcopy(model), None), checkpointed(copy.deepcopy(model).double(), None)
    epoch_moe.patch(model)
    got = checkpointed(model, reentrant)
    assert sum("experts" in name for name in got) > 40
    assert_gradients(got, want, exact)


def test_training_steps_are_the_originals() -> None:
    """On the released contract, whose training path is another one than its inference path."""
    torch.manual_seed(2)
    plain_model = Stack().train()
    model = copy.deepcopy(plain_model)
    epoch_moe.patch(model)
    x = torch.randn(2, 9, H)
    for m in (plain_model, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
        for _ in range(4):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert relative_error(model(x), plain_model(x)) < 1e-4


@torch.no_grad()
def test_a_plan_in_training_mode_is_refused(model: Any) -> None:
    epoch_moe.patch(model)
    model.train()
    context = BlockPlanContext(model._epoch_moe, EpochConfig())
    with (
        pytest.raises(RuntimeError, match=r"training mode: call model\.eval\(\)"),
        context.block(batch=2, window=12),
        context.iteration(IDS, mask_id=125),
    ):
        model(IDS)
    model.eval()
    with context.block(batch=2, window=12), context.iteration(IDS, mask_id=125):
        model(IDS)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_plan_with_gradients_is_refused(frozen: bool) -> None:
    """Also where only the parameters want gradients, which hidden states from elsewhere do not show."""
    model = Stack().eval().requires_grad_(not frozen)
    epoch_moe.patch(model)
    context = BlockPlanContext(model._epoch_moe, EpochConfig())  # type: ignore[arg-type]
    ids, x = torch.zeros(1, 4, dtype=torch.int64), torch.randn(1, 4, H)

    def forward(x: Tensor) -> Tensor:
        with context.block(batch=1, window=4), context.iteration(ids, mask_id=9):
            return model(x)

    refused = pytest.raises(RuntimeError, match=r"gradients are required.*torch\.no_grad\(\), or train without a plan")
    if frozen:
        forward(x)
        with refused:
            forward(x.requires_grad_())
    else:
        with refused:
            forward(x)
        with torch.no_grad():
            forward(x)


# --- memory -------------------------------------------------------------------------------------------------------


def live_tensors() -> tuple[int, int, int]:
    """How many tensors are alive, in how many storages, of how many bytes."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]  # isinstance would ask proxies
    # What compiled code of other tests leaves behind has no memory; sparse tensors are of tests of arguments.
    tensors = [t for t in tensors if not issubclass(type(t), (FakeTensor, FunctionalTensor))]
    tensors = [t for t in tensors if t.layout == torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), len(storages), sum(storages.values())


def separate(model: nn.Module) -> nn.Module:
    """Every weight in its own storage, as a released checkpoint is loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@torch.no_grad()
def test_patched_and_unpatched_a_hundred_times(model: Any) -> None:
    separate(model)
    want, before = logits(model), live_tensors()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = live_tensors()
    moved, midway = [], []
    for cycle in range(100):
        moved.append(epoch_moe.patch(model, "exact").moved_bytes)
        if cycle % 25 == 0:
            assert relative_error(logits(model), want) < 1e-6
            midway.append(live_tensors())
        epoch_moe.unpatch(model)
    assert len(set(midway)) == 1 and midway[0][2] < 1.001 * before[2]  # counters, but no weights
    after = live_tensors()
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2], (before, after)
    assert sum(moved[1:]) == 0  # what the first patch has stacked stays where it is
    assert torch.equal(logits(model), want)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_new_weights_leave_no_old_ones_behind(llada2: LLaDA2MoeModelLM) -> None:
    epoch_moe.patch(llada2, None)
    before = live_tensors()
    new = {key: value + 0.01 for key, value in llada2.state_dict().items()}
    llada2.load_state_dict(new, assign=True)
    del new
    assert live_tensors()[2] <= before[2]  # at once, not at the next forward
    llada2.to(torch.float64)
    assert live_tensors()[2] <= 2 * before[2]
    llada2.to(torch.float32)
    logits(llada2)
    assert live_tensors()[2] <= before[2]


# --- threads and exceptions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["exact", "default"])
def test_two_threads_on_one_model_give_what_each_gives_alone(llada2: LLaDA2MoeModelLM, preset: str) -> None:
    epoch_moe.patch(separate(llada2), preset)
    prompts = [IDS[:1, :8], IDS[1:, :9] + 3]
    alone = [epoch_moe.generate(llada2, prompt, **GENERATION) for prompt in prompts]
    llada2.load_state_dict({k: v.clone() for k, v in llada2.state_dict().items()}, assign=True)  # both must stack
    start, outs, errors = threading.Barrier(2), {}, []

    def work(index: int) -> None:
        try:
            start.wait(timeout=60)
            outs[index] = [epoch_moe.generate(llada2, prompts[index], **GENERATION) for _ in range(3)]
        except BaseException as error:  # it must fail the test, not the thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert not errors and len(outs) == 2
    for index in range(2):
        for out in outs[index]:
            assert torch.equal(out.sequences, alone[index].sequences)
            assert out.counters.read() == alone[index].counters.read()  # and no row of the other was counted


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_exception_inside_a_block_leaves_the_model_dense_and_clean(llada2: LLaDA2MoeModelLM, after: int) -> None:
    epoch_moe.patch(llada2)
    dense = logits(llada2)
    want = epoch_moe.generate(llada2, IDS[:, :8], **GENERATION)
    calls = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise Broken

    handle = llada2.model.layers[2].mlp.shared_experts.register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        epoch_moe.generate(llada2, IDS[:, :8], **GENERATION)
    assert llada2._epoch_moe.slot.active is None
    assert torch.equal(logits(llada2), dense)
    handle.remove()
    again = epoch_moe.generate(llada2, IDS[:, :8], **GENERATION)
    assert torch.equal(again.sequences, want.sequences) and again.counters.read() == want.counters.read()
    epoch_moe.unpatch(llada2)


# --- saving -------------------------------------------------------------------------------------------------------


def saved_by_transformers(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def saved_by_safetensors(model: Any, folder: Path) -> dict[str, Tensor]:
    save_file(model.state_dict(), folder / "all.safetensors")
    return load_file(folder / "all.safetensors")


def saved_by_torch(model: Any, folder: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), folder / "all.pt")
    return torch.load(folder / "all.pt")


@pytest.mark.parametrize("save", [saved_by_transformers, saved_by_safetensors, saved_by_torch])
def test_saved_as_if_it_were_not_patched(
    model: Any, save: Callable[[Any, Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    want = {key: value.clone() for key, value in model.state_dict().items()}
    epoch_moe.patch(model)
    logits(model)
    saved = save(model, tmp_path)
    assert saved.keys() == want.keys() and all(torch.equal(saved[key], value) for key, value in want.items())
    size = sum(file.stat().st_size for file in tmp_path.iterdir() if file.suffix in (".safetensors", ".pt"))
    assert size < 1.5 * sum(value.nbytes for value in want.values())  # each weight once
    again = type(model)(model.config).eval()
    again.load_state_dict(saved)
    epoch_moe.unpatch(model)
    assert torch.equal(logits(again), logits(model))


def test_safetensors_save_model_refuses_views_and_the_remedy_works(model: Any, tmp_path: Path) -> None:
    epoch_moe.patch(model)
    with pytest.raises(RuntimeError, match="None is covering the entire storage"):
        save_model(model, str(tmp_path / "model.safetensors"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert all(torch.equal(model.state_dict()[k], v) for k, v in load_file(tmp_path / "model.safetensors").items())
