"""Why an MoE block cannot be patched, or a patched one cannot be given back: found before anything is changed.

A patched block reads the weights of its gate and experts and never calls these modules. So whatever would have run
inside them (hooks, adapters, dequantisation, offloading) must not be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from epoch_moe.experts.bypassed import check_calls, replaced_forward
from epoch_moe.experts.layouts import LAYOUTS, check_tensors
from epoch_moe.patching.find import module_at
from epoch_moe.patching.state import PatchState
from epoch_moe.spec import BlockSpec

_UNDO_HOOKS = "accelerate.hooks.remove_hook_from_submodules(model)"


def refusal(path: str, module: nn.Module, spec: BlockSpec) -> str:
    """Why a block cannot be patched, or ''."""
    if path == "":
        return "it is the model itself, not a layer of one"
    for name, child in module.named_modules():
        if name and spec.shared and (name == spec.shared or name.startswith(f"{spec.shared}.")):
            continue  # called as before
        reason = _hooks_on(name, child)
        if reason:
            return reason
    try:
        spec.read_gate(module)
        check_tensors([(spec.gate_weight, module.get_parameter(spec.gate_weight))])
        LAYOUTS[spec.layout](spec.holder(module)).check()
        spec.check(module)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _hooks_on(name: str, module: nn.Module) -> str:
    """What on the block (name '') or on a module inside it would no longer run."""
    where = name or "the block"
    for hook in accelerate_hooks(module):
        if type(hook).__name__ != "AlignDevicesHook":
            return f"{where} has accelerate's {type(hook).__name__}, which would not run: {_UNDO_HOOKS} removes it"
        if hook.offload:
            return (
                f"accelerate offloads the weights of {where} (device_map with 'cpu' or 'disk'), and a patched block "
                "computes from weights that stay in place: load the model without offloading, or bring them back with "
                f"{_UNDO_HOOKS}"
            )
    if not name and (replaced := replaced_forward(module)):
        return f"its forward was replaced by {replaced}, which a patch would drop"
    if name:
        try:
            check_calls(name, module)
        except TypeError as error:
            return str(error)
    return ""


def accelerate_hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks that accelerate has put around a module's forward."""
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def giving_back(model: nn.Module, state: PatchState) -> None:
    """Refuse to undo a patch under somebody's wrapper, or of experts that are no longer here.

    Raises:
        RuntimeError: names what is in the way.
    """
    if state.ep is not None:
        raise RuntimeError(
            f"the experts of {type(model).__name__} are split over {state.ep.ranks.world} ranks, and those of other "
            "ranks are no longer here: load the model anew"
        )
    if state.generate is not None and model.__dict__.get("generate") not in (None, state.generate):
        raise RuntimeError(
            f"generate was replaced by {model.__dict__['generate']!r} after patch(): undo that first, then unpatch"
        )
    for path, block in state.blocks.items():
        current = module_at(model, path)
        if current is not block:
            raise RuntimeError(
                f"{path} is now a {type(current).__name__}, not the block that patch() put there: undo that wrapper "
                "first, then unpatch"
            )
        hook = block.__dict__.get("_hf_hook")
        if hook is not None and hook is not state.device_hooks.get(path):
            raise RuntimeError(
                f"{path} got an accelerate hook ({', '.join(type(h).__name__ for h in accelerate_hooks(block))}) after "
                "patch(): undo that first with accelerate.hooks.remove_hook_from_submodules(model), then unpatch"
            )
        if replaced := replaced_forward(block):
            raise RuntimeError(
                f"{path}.forward was replaced by {replaced} after patch(): undo that first, then unpatch"
            )
