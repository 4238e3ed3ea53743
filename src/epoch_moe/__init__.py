"""Drop-in mixture-of-experts layers and block plans for diffusion language models.

Public names are imported on first use, so that `import epoch_moe` costs little, and what needs transformers loads it
only when asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BlockPlanContext": "epoch_moe.plan.context",
    "BlockSpec": "epoch_moe.spec",
    "EpochConfig": "epoch_moe.config",
    "EpochMoEBlock": "epoch_moe.block",
    "FreshLaneDispatcher": "epoch_moe.freshlane.dispatcher",
    "PatchReport": "epoch_moe.patching.report",
    "ResidencyConfig": "epoch_moe.residency.config",
    "RouterSpec": "epoch_moe.routing",
    "following": "epoch_moe.follow.scope",
    "generate": "epoch_moe.decoding",
    "generate_semi_autoregressive": "epoch_moe.decoding",
    "in_step": "epoch_moe.plan.ranks",
    "load_model": "epoch_moe.models",
    "open_context": "epoch_moe.plan.context",
    "patch": "epoch_moe.patching.apply",
    "patched": "epoch_moe.patching.apply",
    "plan_report": "epoch_moe.follow.scope",
    "register_auto_classes": "epoch_moe.models",
    "residency_report": "epoch_moe.residency.report",
    "unpatch": "epoch_moe.patching.apply",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from epoch_moe.block import EpochMoEBlock
    from epoch_moe.config import EpochConfig
    from epoch_moe.decoding import generate, generate_semi_autoregressive
    from epoch_moe.follow.scope import following, plan_report
    from epoch_moe.freshlane.dispatcher import FreshLaneDispatcher
    from epoch_moe.models import load_model, register_auto_classes
    from epoch_moe.patching.apply import patch, patched, unpatch
    from epoch_moe.patching.report import PatchReport
    from epoch_moe.plan.context import BlockPlanContext, open_context
    from epoch_moe.plan.ranks import in_step
    from epoch_moe.residency.config import ResidencyConfig
    from epoch_moe.residency.report import residency_report
    from epoch_moe.routing import RouterSpec
    from epoch_moe.spec import BlockSpec


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'epoch_moe' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
