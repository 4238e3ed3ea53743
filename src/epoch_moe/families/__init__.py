"""One file per model family: how its MoE block is recognised and described.

A family is a function ``describe(block) -> BlockSpec | None``: None where the module is no MoE block of that shape.
Blocks are recognised by shape (attributes and tensor shapes), never by importing remote classes, so that a released
remote-code block, a copy of it, and our own class are all the same thing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from epoch_moe.families import llada2, llada_moe
from epoch_moe.spec import BlockSpec

Describe = Callable[[nn.Module], BlockSpec | None]

FAMILIES: dict[str, Describe] = {"llada2": llada2.describe, "llada_moe": llada_moe.describe}
"""Name -> describe, in the order in which they are asked."""

SHAPES: dict[str, str] = {"llada2": llada2.SHAPE, "llada_moe": llada_moe.SHAPE}
"""Name -> what the family looks for, in words, for error messages."""


def describe_block(module: nn.Module) -> BlockSpec | None:
    """The spec of an MoE block of a known family, or None."""
    for describe in FAMILIES.values():
        spec = describe(module)
        if spec is not None:
            return spec
    return None
