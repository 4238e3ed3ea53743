"""Is a model still the one that it was at the forward before? Reused rows of another model would be wrong."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry

from epoch_moe.block import EpochMoEBlock

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_SAMPLES = 8  # along each dimension of a tensor


class Watch:
    """What can be seen of a model without reading its weights, and a sample of these.

    Seen: modules, parameters and buffers (identity, address, version), forward hooks, whatever is an attribute of a
    module (mode, an adapter's name, scaling and state), autocast. The sample finds what bumps no version: writes
    through ``.data`` or numpy, unless they miss all of a tensor's sampled elements. Not seen: what a hook keeps for
    itself. Modules of routed experts are never called: of these, addresses (when they were stacked), versions, samples.

    Holds the other tensors, so that no new one can take their addresses, but not the experts': those are large.

    Args:
        module: the base model.
        stacked: its experts' tensors ``[E,...]``.
    """

    def __init__(self, module: nn.Module, stacked: Sequence[Tensor]):
        blocks = [m for m in module.modules() if isinstance(m, EpochMoEBlock) and m.spec.layout != "fused"]
        experts = set(chain.from_iterable(getattr(b, b.spec.experts).modules() for b in blocks))
        called = [m for m in module.modules() if m not in experts]
        self._children = [m._modules for m in called]
        self._tensors = [held for m in called for held in (m._parameters, m._buffers)]
        self._hooks: list[dict[int, Any]] = [
            registry._global_forward_hooks, registry._global_forward_pre_hooks,
            *(hooks for m in called for hooks in (m._forward_hooks, m._forward_pre_hooks)),
        ]  # fmt: skip
        self._attributes = [vars(m) for m in called]
        self._experts = [weakref.ref(p) for m in experts for p in m._parameters.values() if p is not None]
        self._stacked = list(map(weakref.ref, stacked))
        self._views = [_some(t, 0) for t in self._own() if _has_memory(t)]
        self._seen, self._sample = self._look(), self._read(stacked)

    def changed(self, stacked: Sequence[Tensor]) -> bool:
        """Whether the model is another one than when this was made; ``stacked``: its experts' tensors now."""
        if [id(ref()) for ref in self._stacked] != list(map(id, stacked)) or self._look() != self._seen:
            return True
        return not all(map(torch.equal, self._read(stacked), self._sample))

    def _own(self) -> list[Tensor]:
        return [t for t in chain.from_iterable(map(dict.values, self._tensors)) if t is not None]

    def _look(self) -> object:
        try:
            return (
                list(map(id, chain.from_iterable(map(dict.values, self._children)))),
                [(id(t), t.data_ptr(), t._version) for t in self._own()],
                [None if (t := ref()) is None else t._version for ref in self._experts],
                list(chain.from_iterable(self._hooks)),
                [_plain(v) for each in self._attributes for name, v in each.items() if name not in _INTERNAL],
                [(torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in ("cpu", "cuda")],
            )
        except RuntimeError:
            return object()  # tensors of inference mode do not say when they change: never the same

    def _read(self, stacked: Sequence[Tensor]) -> list[Tensor]:
        """The sampled elements, one tensor for each device and dtype."""
        groups: dict[object, list[Tensor]] = {}
        for view in (*self._views, *(_some(t, 1) for t in stacked)):
            groups.setdefault((view.device, view.dtype), []).append(view.reshape(-1))
        return list(map(torch.cat, groups.values()))


def _some(tensor: Tensor, whole: int) -> Tensor:
    """A view of few elements along each dimension but the first ``whole``."""
    steps = [1 if i < whole else max(1, size // _SAMPLES) for i, size in enumerate(tensor.shape)]
    return tensor.detach()[tuple(slice(None, None, step) for step in steps)]


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta"


def _plain(value: Any) -> object:
    """Something to compare an attribute by."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return [(_plain(key), _plain(each)) for key, each in value.items()]
    return list(map(_plain, value)) if isinstance(value, (list, tuple, set)) else id(value)
