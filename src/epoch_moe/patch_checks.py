"""Why an MoE block cannot be patched, or a patched one cannot be given back: found before anything is changed.

A patched block reads the weights of its gate and experts and never calls these modules. So whatever would have run
inside them (hooks, adapters, dequantisation, offloading) must not be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from epoch_moe.block import BlockSpec
from epoch_moe.checks import MOST, flag, in_vocabulary, module, whole
from epoch_moe.experts.bypassed import check_calls, replaced_forward
from epoch_moe.experts.layouts import check_tensors
from epoch_moe.experts.weights import ExpertWeights

_UNDO_HOOKS = "accelerate.hooks.remove_hook_from_submodules(model)"


def check_hints(model: Any, mask_token_id: Any, block_length: Any, editing: Any) -> None:
    """What a user says of a foreign loop, compared with what the model has."""
    config = getattr(module("model", model), "config", None)
    if mask_token_id is not None:
        vocab_size = getattr(config, "vocab_size", MOST)
        in_vocabulary("mask_token_id", mask_token_id, vocab_size)
    if block_length is not None:
        context = getattr(config, "max_position_embeddings", MOST)
        whole("block_length", block_length, "positions of a block, in the model's context", least=1, most=context)
    if editing is not None:
        flag("editing", editing)


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
        ExpertWeights(spec.holder(module), spec.layout).check()
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
