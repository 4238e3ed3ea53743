"""Kernels are launched on the GPU that holds the tensors, whichever is the current one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import epoch_moe.kernels

FILES = sorted(Path(epoch_moe.kernels.__path__[0]).glob("*.py"))


def launches(source: str) -> list[tuple[str, bool]]:
    """Kernel launches ``name[grid](...)`` of a file: the kernel, and whether it is within ``torch.cuda.device_of``."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.With):
            guarded |= any(ast.unparse(item.context_expr).startswith("torch.cuda.device_of(") for item in node.items)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name.endswith("_kernel"):
                found.append((name, guarded))
        for child in ast.iter_child_nodes(node):
            walk(child, guarded)

    walk(ast.parse(source), False)
    return found


def test_every_launch_is_on_the_tensors_device() -> None:
    found = {name: guarded for path in FILES for name, guarded in launches(path.read_text())}
    assert {"_route_kernel", "rows_kernel", "support_kernel", "feasible_kernel", "restore_kernel"} <= set(found)
    assert len(found) >= 12, found
    assert all(found.values()), [name for name, guarded in found.items() if not guarded]


@pytest.mark.parametrize(
    ("source", "guarded"), [("a_kernel[(1,)](x)", False), ("with torch.cuda.device_of(x):\n  a_kernel[(1,)](x)", True)]
)
def test_launches_are_found(source: str, guarded: bool) -> None:
    assert launches(source) == [("a_kernel", guarded)]
