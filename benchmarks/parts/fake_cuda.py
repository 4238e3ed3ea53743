"""Fake CUDA tensors on a torch that was built without CUDA: shapes, dtypes and devices, but no values.

Whatever would wait for a real device (`.item()`, `nonzero()`, an index by a mask, a number written to one element or at
indices, which comes from memory that is not pinned) raises on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import epoch_moe.patching.refuse
from epoch_moe.experts.layouts import Layout
from epoch_moe.experts.weights import ExpertWeights


class _Indexing(TorchFunctionMode):
    """`x[...]` by its parts: Python's indexing asks for a device guard that only builds with CUDA have."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            return _get(args[0], args[1])
        if func is Tensor.__setitem__:
            _set(*args)
            return None
        if func is Tensor.__invert__:
            return torch.bitwise_not(args[0])
        if func is Tensor.copy_:
            return _copy(args[0], args[1])
        if func in (Tensor.contiguous, Tensor.clone):
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        if func is Tensor.data_ptr:
            return id(args[0].untyped_storage())
        if getattr(func, "__module__", "") == "torch.nn.init" or func in (Tensor.uniform_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]  # initial values, which there are none of
        return func(*args, **kwargs)


def _get(x: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [p for p in parts if not isinstance(p, Tensor)]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        named = sum(p is not None for p in parts) - 1
        parts[at : at + 1] = [slice(None)] * (x.dim() - named)
    dim, indices = 0, []
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
            indices.append(None)
            dim += 1
        elif isinstance(part, slice):
            x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
            indices.append(None)
            dim += 1
        elif isinstance(part, int):
            x = x.select(dim, part)
        else:
            indices.append(part if isinstance(part, Tensor) else torch.tensor(part, device=x.device))
            dim += 1
    if all(i is None for i in indices):
        return x
    return torch.ops.aten.index(x, indices)


def _copy(x: Tensor, value: Tensor) -> Tensor:
    value.expand(x.shape)  # refuses what would not fit; there is nothing to copy
    return x


def _set(x: Tensor, index: Any, value: Any) -> None:
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) for part in parts):
        assert all(isinstance(part, Tensor) for part in parts), "not needed so far"
        assert isinstance(value, Tensor), f"x[indices] = {value} copies the number from the host: use index_fill_"
        x.index_put_(tuple(parts), value)
    elif isinstance(value, Tensor):
        _copy(_get(x, index), value)
    else:
        place = _get(x, index)
        assert place.dim() or not place.is_cuda, f"x[i] = {value} copies the number from the host: use fill_"
        place.fill_(value)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Within it, tensors are fake, and made on CUDA unless another device is named."""
    with FakeTensorMode(), _Indexing(), torch.device("cuda"):
        yield


class Replacements(ExitStack):
    """Attributes replaced until the end of a ``with`` block."""

    def setattr(self, target: object, name: str, value: object) -> None:
        """Replace one."""
        self.enter_context(mock.patch.object(target, name, value))


@contextmanager
def fake_device() -> Iterator[None]:
    """Models made and run within it are on a GPU that is not there."""
    with Replacements() as replace:
        # Fake parameters have no memory to compare or to move, and are no plain parameters.
        replace.setattr(epoch_moe.patching.refuse, "refusal", lambda *args: "")
        replace.setattr(Layout, "check", lambda self: None)
        replace.setattr(
            ExpertWeights, "_gather", lambda self, params, shape, places: torch.empty(shape, dtype=params[0].dtype)
        )
        replace.enter_context(torch.no_grad())
        replace.enter_context(fake_cuda())
        yield
