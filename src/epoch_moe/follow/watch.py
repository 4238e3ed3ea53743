"""Is a model still the one that it was at the forward before? Reused rows of another model would be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry

from epoch_moe.block import EpochMoEBlock
from epoch_moe.experts.layouts import LAYOUTS

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_SAMPLES = 8  # along each dimension of a tensor
_OF_AN_EXPERT = 2  # of these there are thousands


class Watch:
    """What can be seen of a model without reading its weights and, where asked for, a sample of these.

    Seen: modules, parameters and buffers (identity, address, version), forward hooks, whatever is an attribute of a
    module (mode, an adapter's name, scaling and state), autocast. The sample finds what bumps no version: writes
    through ``.data`` or numpy, unless they miss all of a tensor's sampled elements. It waits for the device. Not seen:
    what a hook keeps for itself. Modules of routed experts are left out: nobody calls them, and every layer compares
    the addresses and versions of its own on every forward.

    Asked on every forward: so it compares dictionaries, in C, and walks over tensors only.

    Args:
        module: the base model.
        sampled: the experts' tensors ``[E,...]``, to sample these and all others; None: no sample. With one, tensors
            of inference mode, which do not say when they change, are never the same.
    """

    def __init__(self, module: nn.Module, sampled: Sequence[Tensor] | None = None):
        called = list(_called(module))
        self._dicts: list[dict[Any, Any]] = [
            registry._global_forward_hooks, registry._global_forward_pre_hooks,
            *(each for m in called for each in (m._modules, m._parameters, m._buffers, m._forward_hooks,
                                                m._forward_pre_hooks, vars(m))),
        ]  # fmt: skip
        self._dicts_then = list(map(dict, self._dicts))
        attributes = (v for m in called for name, v in vars(m).items() if name not in _INTERNAL)
        self._containers = [v for v in attributes if isinstance(v, (Tensor, dict, list, tuple, set))]
        held = chain.from_iterable((*m._parameters.values(), *m._buffers.values()) for m in called)
        self._tensors = [t for t in held if t is not None]
        self._strict = sampled is not None
        self._versioned = [t for t in self._tensors if self._strict or not t.is_inference()]
        self._views = [_some(t) for t in self._tensors if self._strict and _has_memory(t)]
        self._seen, self._sample = self._look(), self._read(sampled)

    def changed(self, sampled: Sequence[Tensor] | None = None) -> bool:
        """Whether the model is another one than when this was made; ``sampled``: its experts' tensors now."""
        try:
            if self._dicts != self._dicts_then or self._look() != self._seen:
                return True
        except RuntimeError:
            return True  # a tensor in the place of another one
        now = self._read(sampled)
        return len(now) != len(self._sample) or not all(map(_equal, now, self._sample))

    def _look(self) -> object:
        try:
            return (
                list(map(Tensor.data_ptr, self._tensors)),
                [t._version for t in self._versioned],
                list(map(_plain, self._containers)),
                [(torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in ("cpu", "cuda")],
            )
        except RuntimeError:
            return object() if self._strict else None  # tensors that do not say when they change, or where they are

    def _read(self, sampled: Sequence[Tensor] | None) -> list[Tensor]:
        """The sampled elements, one tensor for each device and dtype."""
        groups: dict[object, list[Tensor]] = {}
        for view in (*self._views, *map(_some_of_experts, sampled or ())):
            groups.setdefault((view.device, view.dtype), []).append(view.reshape(-1))
        return list(map(torch.cat, groups.values()))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, without those of routed experts; some more than once."""
    yield module
    own = LAYOUTS[module.spec.layout].below(module.spec.experts) if isinstance(module, EpochMoEBlock) else ()
    for name, child in module._modules.items():
        if child is not None and name not in own:
            yield from _called(child)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _some(tensor: Tensor) -> Tensor:
    """A view of few elements along each dimension."""
    return tensor.detach()[tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)]


def _some_of_experts(tensor: Tensor) -> Tensor:
    """A view of few elements of each expert of ``[E,...]``."""
    steps = [1, *(max(1, size // _OF_AN_EXPERT) for size in tensor.shape[1:])]
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
