"""Modules whose weights are read while their forward is never called: what would that lose?

A stacked layer calls neither its experts nor its gate. So whatever would run inside them (an adapter, a hook, another
forward, dequantisation) is refused by name, when the weights are stacked and on every forward after.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def replaced_forward(module: nn.Module) -> str:
    """What somebody other than accelerate has put in place of a module's own forward, or ''."""
    forward = module.__dict__.get("_old_forward" if "_hf_hook" in module.__dict__ else "forward")
    # Removing an accelerate hook leaves the module's own bound forward in its dictionary.
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return "" if forward is None or own else repr(forward)


def check_calls(where: str, module: nn.Module) -> None:
    """Refuse what has been put around a module's own forward.

    Raises:
        TypeError: naming it.
    """
    if replaced := replaced_forward(module):
        raise TypeError(f"{where}.forward was replaced by {replaced}, which would never run: remove it first")
    if module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(f"{where} has forward hooks, which would no longer run: remove them first")


def check_linear(where: str, module: Any) -> None:
    """Refuse what is not exactly a linear layer without bias.

    Raises:
        TypeError: naming what it is.
    """
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not plain or module._modules:
        raise TypeError(
            f"{where} is {qualified(module)}, not nn.Linear with its own forward: quantised, hooked, adapter-wrapped "
            "or otherwise replaced layers are not supported here. Dequantise, merge or remove what wraps them first"
        )
    check_calls(where, module)
    if module.bias is not None:
        raise TypeError(f"{where} has a bias: the LLaDA family's gates and experts have none")


def check_router(where: str, module: Any) -> None:
    """Refuse what is not a family's own router class: one forward, a weight and an expert bias.

    Raises:
        TypeError: naming what it is.
    """
    forwards = [cls for cls in type(module).__mro__ if "forward" in cls.__dict__ and cls is not nn.Module]
    tensors = {**module._parameters, **module._buffers}
    extra = {name for name, value in tensors.items() if value is not None} - {"weight", "expert_bias"}
    if len(forwards) != 1 or module._modules or extra:
        found = ", ".join([*sorted(extra), *module._modules]) or "a forward over another one's"
        raise TypeError(
            f"{where} is {qualified(module)} with {found}: expected the model's own router, whose weight and "
            "expert_bias say all. Merge or remove what wraps it first"
        )
    check_calls(where, module)


def qualified(thing: object) -> str:
    """The class of something, with the module that it comes from."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
