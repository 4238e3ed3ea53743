"""What stands for experts that are not in memory: shape, dtype and device, and no values.

Who asks what the weights look like may do so. What reads, copies, converts or writes such a tensor gets an error that
says where the values are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class AbsentTensor(Tensor):
    """A tensor whose values are elsewhere.

    Args:
        like: gives shape, dtype and device.
        error: makes the error of every use of the values.
    """

    error: Callable[[], Exception]

    @staticmethod
    def __new__(cls, like: Tensor, error: Callable[[], Exception]) -> AbsentTensor:
        """A tensor without memory."""
        made: AbsentTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.error = error
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refused."""
        raise next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)).error()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype})"
