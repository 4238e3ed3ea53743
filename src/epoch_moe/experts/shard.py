"""One rank's part of a layer's experts: the others' parameters are given up.

Shape suffixes: E experts of the layer, F expert inner size, H hidden.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from epoch_moe.experts.layouts import LAYOUTS, LayoutName
from epoch_moe.experts.weights import ExpertWeights


class LocalExperts(nn.ModuleList):
    """Some of a layer's experts, under the names that they have in the whole layer.

    Indexing goes by position: ``experts[0]`` is the first one here, whatever its number. `state_dict` has the numbers.

    Args:
        experts: all of the layer's.
        kept: numbers of those that stay.

    Attributes:
        kept: as given.
        total: experts of the whole layer.
    """

    def __init__(self, experts: nn.ModuleList, kept: range):
        super().__init__()
        self.kept, self.total = kept, len(experts)
        for number in kept:
            self._modules[str(number)] = experts[number]

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


def keep_experts(block: nn.Module, layout: LayoutName, attribute: str, kept: range) -> None:
    """Reduce a block's routed experts to ``kept`` and free the others.

    Parameters that stay move to memory of their own: they may be views of one tensor with those that go.

    Args:
        block: an MoE block of the model.
        layout: how it holds its experts.
        attribute: name of its experts' module (per-expert and stacked layouts).
        kept: numbers of the experts that stay; all of them on the second call.

    Raises:
        ValueError: the block has been reduced to other experts before.
    """
    experts = LAYOUTS[layout].holder(block, attribute)
    if LAYOUTS[layout].each:
        if isinstance(experts, LocalExperts):
            if experts.kept != kept:
                raise ValueError(
                    f"the block holds experts {experts.kept.start} to {experts.kept.stop - 1} only: expected "
                    f"{kept.start} to {kept.stop - 1}; load the model anew for another group of ranks"
                )
            return
        experts = LocalExperts(experts, kept)
        setattr(block, attribute, experts)
        for param in experts.parameters():
            if param.device.type != "meta":
                param.data = param.data.clone()
    else:
        for param in LAYOUTS[layout](experts).params():
            if param.shape[0] != len(kept):
                param.data = param.data[kept.start : kept.stop].clone()
    if isinstance(block.__dict__.get("_weights"), ExpertWeights):
        block.__dict__["_weights"] = ExpertWeights(experts, layout)  # the old ones hold on to the other experts
