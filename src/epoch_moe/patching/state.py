"""`PatchState`: what a patch leaves on a model, and the hooks that go with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from epoch_moe.block import EpochMoEBlock
from epoch_moe.follow.scope import FollowedGenerate, Following
from epoch_moe.follow.watch import Watch
from epoch_moe.freshlane.expert_parallel import ExpertParallel
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.patched import ATTRIBUTE, Patched, inner_model
from epoch_moe.residency.state import Residency


@dataclass
class PatchState(Patched):
    """What a patch leaves on the model, under ``model._epoch_moe``: its layers, and what is needed to undo it.

    Attributes:
        blocks: module path -> block.
        ep: the ranks that the experts are split over; None: all are here.
        hooks: handles to remove on `unpatch`.
        device_hooks: module path -> accelerate hook that the block took over from the original.
        following: the scopes in which loops that open no plan themselves are followed.
        generate: what makes calls of the model's own ``generate`` such scopes; None where it has none.
        residency: which experts are in fast memory; None: all.
    """

    blocks: dict[str, EpochMoEBlock]
    ep: ExpertParallel | None = None
    hooks: list[Any] = field(default_factory=list)
    device_hooks: dict[str, Any] = field(default_factory=dict)
    following: Following | None = None
    generate: FollowedGenerate | None = None
    residency: Residency | None = None

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook of the base model, under a plan.

        A forward that asks for router logits runs dense, and rows that another model computed are not reused.
        """
        asked = kwargs.get("output_router_logits")
        if asked is None:
            asked = getattr(getattr(module, "config", None), "output_router_logits", False)
        active = self.slot.active
        if active is not None:
            active.wants_router = bool(asked)
        if isinstance(active, ForwardPlan) and not torch.compiler.is_compiling():
            active.look_at_model(partial(Watch, module))

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """`load_state_dict(assign=True)` replaces parameters: their old storage must not live on beside the new one."""
        for block in self.blocks.values():
            block.weights.release()

    def before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse the `state_dict` of a model that lacks experts: it would be half a checkpoint.

        Within a wrapper's, and where there are adapters, it is read for the adapters' names: see `AbsentTensor`.
        """
        if prefix or getattr(module, "peft_config", None):
            return
        for block in self.blocks.values():
            if error := block.incomplete("state_dict, and what saves it,"):
                raise error


def state_of(model: nn.Module) -> PatchState | None:
    """What a patch left on this very model, or on the one in its peft wrapper."""
    # Not through getattr: wrappers pass it on to the model inside, whose module paths are not theirs.
    return inner_model(model).__dict__.get(ATTRIBUTE)
