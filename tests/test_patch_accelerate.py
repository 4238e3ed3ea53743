"""accelerate's hooks and `patch`: which stay, which are refused, before and after.

The model calls its experts as modules, as the released code does, so that hooks on them run before it is patched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from helpers import assert_as_accurate, relative_error
from released_block import H, Stack
from torch import Tensor, nn

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.plan.context import BlockPlanContext

PATHS = ["layers.0.mlp", "layers.1.mlp"]
ON_CPU = {"layers.0": "cpu", "layers.1": "cpu"}
X = torch.randn(2, 7, H, generator=torch.Generator().manual_seed(3))
Check = Callable[[nn.Module], None]


@pytest.fixture
def model() -> Stack:
    return Stack().eval()


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    return model(X)


@pytest.fixture
def check(model: Stack) -> Check:
    """Fails where a model computes something else than `model` did at the beginning of the test."""
    with torch.no_grad():
        want, exact = run(model), copy.deepcopy(model).double()(X.double())
    return lambda other: assert_as_accurate(run(other), want, exact)


def dispatched(model: nn.Module) -> nn.Module:
    """As `device_map` puts a model on devices without offloading: hooks on every module that has weights."""
    dispatch_model(model, ON_CPU, force_hooks=True)
    assert all("_hf_hook" in model.get_submodule(path).__dict__ for path in PATHS)
    assert "_hf_hook" in model.get_submodule(f"{PATHS[0]}.experts.3.up_proj").__dict__
    return model


def test_hooks_that_only_move_inputs_stay(model: Stack, check: Check) -> None:
    dispatched(model)
    originals = [model.get_submodule(path) for path in PATHS]
    forwards = [block.forward for block in originals]
    report = epoch_moe.patch(model)
    assert report.patched == PATHS
    check(model)
    for path, original in zip(PATHS, originals, strict=True):
        hook = model.get_submodule(path)._hf_hook
        assert isinstance(hook, AlignDevicesHook) and hook is not original._hf_hook
        assert hook.execution_device == original._hf_hook.execution_device
    epoch_moe.unpatch(model)
    assert [model.get_submodule(path) for path in PATHS] == originals
    assert [block.forward for block in originals] == forwards
    check(model)


def test_the_hook_of_a_block_runs_while_it_is_patched(model: Stack) -> None:
    dispatched(model)
    epoch_moe.patch(model)
    moved: list[torch.device] = []
    block = model.get_submodule(PATHS[0])
    pre = block._hf_hook.pre_forward
    block._hf_hook.pre_forward = lambda module, *args, **kwargs: (  # what it gets, and what it makes of it
        moved.append(args[0].device),
        pre(module, *args, **kwargs),
    )[1]
    run(model)
    assert moved == [X.device]


def test_a_plan_on_a_dispatched_model(model: Stack) -> None:
    plain = copy.deepcopy(model)
    outs = []
    for m in (plain, dispatched(model)):
        epoch_moe.patch(m, EpochConfig(coverage=0.5, refresh_interval=None))
        context, ids = BlockPlanContext(m._epoch_moe, m._epoch_moe.config), torch.full((2, 7), 9)
        with torch.no_grad(), context.block(batch=2, window=7):
            for step in range(3):
                with context.iteration(ids, mask_id=9):
                    outs.append(m(X))
                ids[:, step] = 1
        assert 0 < context.counters.read().rows < 3 * 2 * 14
    assert all(torch.equal(a, b) for a, b in zip(outs[:3], outs[3:], strict=True))


def test_removing_the_hooks_while_patched_removes_them_for_good(model: Stack, check: Check) -> None:
    dispatched(model)
    originals = [model.get_submodule(path) for path in PATHS]
    epoch_moe.patch(model)
    remove_hook_from_submodules(model)
    check(model)
    epoch_moe.unpatch(model)
    assert all("_hf_hook" not in block.__dict__ for block in originals)
    check(model)
    epoch_moe.patch(model)  # what accelerate left in the modules' dictionaries is no obstacle
    epoch_moe.unpatch(model)


def test_hooks_added_after_patching_work_and_must_go_before_unpatching(model: Stack, check: Check) -> None:
    epoch_moe.patch(model)
    dispatched(model)
    check(model)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp got an accelerate hook \(AlignDevicesHook\) after patch"):
        epoch_moe.unpatch(model)
    check(model)
    remove_hook_from_submodules(model)
    epoch_moe.unpatch(model)
    check(model)


@pytest.mark.parametrize("treat", ["deepcopy", "bf16"])
def test_a_dispatched_patched_model_can_be_copied_and_cast(model: Stack, check: Check, treat: str) -> None:
    want = run(model)
    dispatched(model)
    epoch_moe.patch(model)
    model.__dict__.pop("to", None)  # accelerate warns there
    other = copy.deepcopy(model) if treat == "deepcopy" else model.to(torch.bfloat16).float()
    for undo in (lambda: epoch_moe.unpatch(other), lambda: None):
        if treat == "deepcopy":
            check(other)
        else:
            assert relative_error(run(other), want) < 5e-2
        undo()


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_are_refused_and_the_remedy_works(
    model: Stack, check: Check, where: str, tmp_path: Path
) -> None:
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert model.get_submodule(f"{PATHS[0]}.experts.0.up_proj").weight.is_meta
    for _ in range(2):
        with pytest.raises(TypeError, match=r"layers\.0\.mlp cannot be patched: accelerate offloads the weights of"):
            epoch_moe.patch(model)
        assert not hasattr(model, "_epoch_moe")
        check(model)
    remove_hook_from_submodules(model)  # as the message says
    epoch_moe.patch(model)
    check(model)


def test_layers_that_are_not_offloaded_can_be_patched(model: Stack, check: Check, tmp_path: Path) -> None:
    """`device_map` with some layers on disk."""
    dispatch_model(model, {"layers.0": "cpu", "layers.1": "disk"}, offload_dir=tmp_path)
    with pytest.raises(TypeError, match=r"layers\.1\.mlp cannot be patched: accelerate offloads"):
        epoch_moe.patch(model)
    report = epoch_moe.patch(model, strict=False)
    assert report.patched == PATHS[:1] and list(report.skipped) == PATHS[1:]
    check(model)
    epoch_moe.unpatch(model)
    check(model)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloading_a_patched_model_fails_by_name(model: Stack, check: Check, where: str, tmp_path: Path) -> None:
    epoch_moe.patch(model)
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"experts\[0\]\.gate_proj\.weight is on the meta device.*accelerate"):
        run(model)
    with pytest.raises(TypeError, match="meta device"):
        BlockPlanContext(model._epoch_moe, EpochConfig())  # type: ignore[arg-type]
    remove_hook_from_submodules(model)
    check(model)
    epoch_moe.unpatch(model)


class Recorder(ModelHook):
    """A hook of somebody's own."""


@pytest.mark.parametrize("where", ["", ".gate", ".experts.2", ".experts.2.up_proj"])
@pytest.mark.parametrize("sequential", [False, True])
def test_other_hooks_are_refused_by_name(model: Stack, where: str, sequential: bool) -> None:
    hook = SequentialHook(AlignDevicesHook(), Recorder()) if sequential else Recorder()
    add_hook_to_module(model.get_submodule(PATHS[0] + where), hook)
    with pytest.raises(TypeError, match=rf"{where[1:] or 'the block'} has accelerate's Recorder, which would not run"):
        epoch_moe.patch(model)
    remove_hook_from_submodules(model)
    epoch_moe.patch(model)


def test_hooks_on_the_shared_expert_keep_running(model: Stack) -> None:
    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            calls.append(module)
            return args, kwargs

    add_hook_to_module(model.get_submodule(f"{PATHS[0]}.shared_experts"), Counting())
    epoch_moe.patch(model)
    run(model)
    assert len(calls) == 1
