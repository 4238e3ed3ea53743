"""Model classes for transformers, without remote code.

`load_model` and `register_auto_classes` are imported on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epoch_moe.models.loading import builtin_checkpoints, load_model, register_auto_classes

__all__ = ["builtin_checkpoints", "load_model", "register_auto_classes"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from epoch_moe.models import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
