"""What stands for experts that are not all here: shape, dtype and device, and no values.

Who asks what weights look like may do so: libraries that load or save adapters read the names in the whole model's
`state_dict`, and a block's weights say their shapes. What reads, copies, converts or writes such a tensor would compute
with nothing, or make half a checkpoint, and gets an error that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from epoch_moe.experts.views import ExpertViews


class AbsentTensor(Tensor):
    """A tensor whose values are elsewhere.

    Args:
        shape, dtype, device: what it says of itself; it is contiguous.
        error: what every use of the values is told.
    """

    error: str

    @staticmethod
    def __new__(  # noqa: D102
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, error: str
    ) -> AbsentTensor:
        made: AbsentTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.error = error
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refused."""
        raise RuntimeError(next(leaf.error for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self.error)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def absent_views(
    num_experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device, error: str
) -> ExpertViews:
    """Fused experts ``[E,2F,H]`` and ``[E,H,F]`` without values, see `AbsentTensor`."""
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    return ExpertViews.fused(*(AbsentTensor(shape, dtype, device, error) for shape in shapes))
