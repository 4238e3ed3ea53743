"""Kernel launches of a forward, counted without a GPU: every torch op that is no view is one, by the part it stands in.

Ops of `epoch_moe.kernels` count as many launches as their implementation makes; `KERNEL_LAUNCHES` says how many, and
`tests/test_launches.py` compares it with what the implementations do.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias",
        "_unsafe_view", "is_same_size", "sym_size", "_local_scalar_dense",
    )
)  # fmt: skip
"""Ops that launch nothing, beside views."""


def _worklist(args: Sequence[Any]) -> int:
    return 1 if args[0].numel() <= 512 else 3


def _compact(args: Sequence[Any]) -> int:
    return 1 if args[0].numel() <= 4096 else 2


KERNEL_LAUNCHES: dict[str, Callable[[Sequence[Any]], int]] = {
    "epoch_moe::compact": _compact,
    "epoch_moe::worklist": _worklist,
    "epoch_moe::route": lambda args: 1,
    "epoch_moe::grouped_mlp": lambda args: 2,
    "epoch_moe::combine_restore": lambda args: 1,
    "epoch_moe::combine": lambda args: 1,
    "epoch_moe::tally": lambda args: 1,
    "epoch_moe::norm_rotate": lambda args: 1,
    "epoch_moe::compile_support": lambda args: 11 if args[3] is None else 12,
}

PARTS: tuple[tuple[str, str, str], ...] = (
    # file (end of its path), function or "", part; the innermost frame that is named here decides
    ("block.py", "compute_shared", "shared"),
    ("block.py", "compute", "shared"),
    ("models/layers.py", "rotate", "rotary"),
    ("models/layers.py", "rope_tables", "rotary"),
    ("plan/counters.py", "", "counters"),
    ("routing.py", "", "router"),
    ("plan/", "", "plan"),
    ("experts/", "", "experts"),
    ("kernels/norm_rotate", "", "norms"),
    ("kernels/", "", "experts"),
    ("freshlane/", "", "experts"),
    ("worklist.py", "", "experts"),
)
"""Rules for library files; `Attention`, `RMSNorm` and the shared expert are told by their object."""


def part_of_caller() -> str:
    """The part of a model that the op under way belongs to, from the frames that called it."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        at = file.rfind("/epoch_moe/")
        if at >= 0:
            inside, name = file[at + len("/epoch_moe/") :], frame.f_code.co_name
            owner = type(frame.f_locals.get("self")).__name__
            if owner == "RMSNorm":
                return "norms"
            for path, function, part in PARTS:
                if inside.startswith(path) and function in ("", name):
                    return part
            if owner.endswith("Attention") or inside == "decoding/kv_cache.py":
                return "attention"
        frame = frame.f_back  # type: ignore[assignment]
    return "model"


class LaunchCounter(TorchDispatchMode):
    """Counts launches within it, per part and per op.

    Attributes:
        parts: launches of each part.
        ops: launches of each op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Launches."""
        return sum(self.parts.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the op, and run it."""
        name = func._schema.name
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and name not in FREE and not name.startswith("prim"):
            launches = KERNEL_LAUNCHES.get(name, lambda args: 1)(args)
            self.parts[part_of_caller()] += launches
            self.ops[name] += launches
        return func(*args, **(kwargs or {}))
