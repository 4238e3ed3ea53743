"""`Clock`: which forward a layer is in, what it asks of its experts there, and who is told.

Shape suffixes: B sequences, S rows per sequence, R rows, K top-k.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.plan.slot import DenseForward
from epoch_moe.residency.demand import Demand, others, rows_of
from epoch_moe.residency.policies import Observer


@dataclass
class _Seen:
    """A forward that layers have been in: its number, and the fields of `Demand` by the rows that a layer computes."""

    number: int
    rows: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


class Clock:
    """Makes a `Demand` of what each layer routes to and tells it, and the end of each forward, to an observer.

    Layers that run in several threads take turns (`turn`).

    Args:
        observer: is told: a policy, a recorder.
        num_layers: MoE layers of the model.
        num_experts: of each layer, on this rank.
    """

    def __init__(self, observer: Observer, num_layers: int, num_experts: int):
        self.observer, self.num_layers, self.num_experts = observer, num_layers, num_experts
        self._start()

    def _start(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()
        self._known: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
        self._latest: _Seen | None = None
        self._number = 0
        self._ended = True
        self._bare_layer, self._bare_rows = self.num_layers, -1

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        new = Clock(copy.deepcopy(self.observer, memo), self.num_layers, self.num_experts)
        new._number = self._number
        return new

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time. In a forked process the lock is a new one: nobody there can hold the old."""
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock:
            yield

    def observe(
        self,
        layer: int,
        ids_RK: Tensor,
        weights_RK: Tensor,
        forward: ForwardPlan | DenseForward | None,
        known_rows: bool = True,
    ) -> Demand:
        """What a layer asks of its experts, told to the observer unless it asks for none.

        Args:
            layer: its place among the MoE layers.
            ids_RK: int64, experts of each row; -1 = none, or another rank's.
            weights_RK: their routing weights.
            forward: under way; None: the model's own function, outside of a context.
            known_rows: the rows are those of ``forward``, and not another rank's.
        """
        num_rows, seen = ids_RK.shape[0], self._enter(layer, forward)
        if forward is None:
            cold, self._bare_rows = num_rows != self._bare_rows, num_rows
        else:
            cold = forward.cold
        if not known_rows:
            rows = others(torch.full((num_rows,), -1))
        else:
            # Layers that compute the same rows share what is said of them.
            same = forward.layer_rows.get(layer) if isinstance(forward, ForwardPlan) else None
            key = (num_rows, id(same))
            if key not in seen.rows:
                seen.rows[key] = rows_of(forward, layer, num_rows)
            rows = seen.rows[key]
        demand = Demand(
            layer=layer,
            forward=seen.number,
            cold=cold,
            ids_RK=ids_RK.detach().to("cpu", torch.int64),
            weights_RK=weights_RK.detach().to("cpu", torch.float32),
            num_experts=self.num_experts,
            **rows,
        )
        if demand.experts:
            self.observer.observe(demand)
        return demand

    def _enter(self, layer: int, forward: ForwardPlan | DenseForward | None) -> _Seen:
        """The forward that a layer is in: a new one, or one that other layers have been in."""
        if forward is None:
            # Nothing tells forwards without a context apart but the order of their layers.
            seen = None if layer <= self._bare_layer else self._latest
            self._bare_layer = layer
        else:
            seen = self._known.get(forward)
            self._bare_layer = self.num_layers
        if seen is None:
            if not self._ended:
                self.observer.end_forward()
            self._number += 1
            self._ended = False
            seen = _Seen(self._number)
            if forward is not None:
                self._known[forward] = seen
        self._latest = seen
        return seen

    def end_forward(self, forward: ForwardPlan | DenseForward, confidence_BS: Tensor | None) -> None:
        """A forward has ended: give the observer its rows' token probabilities, see `Observer.end_forward`."""
        with self.turn():
            seen = self._known.get(forward)
            if self._ended or seen is None or seen is not self._latest:
                return  # no layer computed anything, or another thread's forward came in between
            self._ended = True
            if isinstance(forward, ForwardPlan):
                live_T, rows = forward.classes.live_T.cpu(), forward.ids_BS.numel()
            else:
                live_T, rows = None, forward.shape.numel()
            confidence_T = None
            if confidence_BS is not None and confidence_BS.numel() == rows:
                confidence_T = confidence_BS.detach().reshape(-1).to("cpu", torch.float32)
            self.observer.end_forward(confidence_T, live_T)
