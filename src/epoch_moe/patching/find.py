"""Which modules of a model are MoE blocks of a known family, and where they are."""

from __future__ import annotations

from torch import nn

from epoch_moe.block import EpochMoEBlock
from epoch_moe.families import SHAPES, describe_block
from epoch_moe.spec import BlockSpec


def blocks_in(model: nn.Module) -> tuple[dict[str, tuple[nn.Module, BlockSpec]], dict[str, str]]:
    """Module path -> block and how it is built; and module path -> why a block is none to patch."""
    found: dict[str, tuple[nn.Module, BlockSpec]] = {}
    skipped: dict[str, str] = {}
    seen: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, EpochMoEBlock):
            skipped[path] = "is patched already, through another model object that shares it"
            continue
        spec = describe_block(module)
        if spec is None:
            continue
        if id(module) in seen:
            skipped[path] = f"is the same module as {seen[id(module)]}"
            continue
        seen[id(module)] = path
        found[path] = (module, spec)
    return found, skipped


def none_found(model: nn.Module, skipped: dict[str, str]) -> ValueError:
    """The error of a model without a block to patch."""
    if skipped:
        reasons = "; ".join(f"{path} {reason}" for path, reason in skipped.items())
        return ValueError(f"{type(model).__name__} has no MoE block left to patch: {reasons}")
    looked_for = "; ".join(f"{name}: {shape}" for name, shape in SHAPES.items())
    kinds = sorted({type(module).__name__ for module in model.modules()})
    return ValueError(
        f"{type(model).__name__} has no MoE block that epoch_moe knows. It looked for {looked_for}. Module classes "
        f"here: {', '.join(kinds[:20])}. Pass strict=False to leave such a model alone"
    )


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, or the last one on the way there, where somebody replaced one of them."""
    module: nn.Module = model
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return module
        module = child
    return module


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the one at a path, and its name there."""
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name
