"""What docs/engines.md says about waiting: on fake tensors, whatever reads a value raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import epoch_moe.functional.layer
import epoch_moe.functional.moe
import epoch_moe.plan.packed
from epoch_moe.config import EpochConfig
from epoch_moe.functional import (
    RouterSpec,
    RowKeys,
    RowStore,
    expert_views,
    fresh_rows,
    moe_forward,
    restore_rows,
    route,
    route_rows,
)

L, S, W, H, F_INNER, E, K = 2, 3, 4, 32, 16, 16, 4
SPEC = RouterSpec(kind="sigmoid_group", num_experts=E, top_k=K, n_group=4, topk_group=2)
#         valid, fresh, reuse, stored, restricted, votes, trouble, layers that compile a support
NUMBERS = [12, 5, 7, 2, 3, 3, *[0] * 5, *[0] * L]


@pytest.mark.parametrize(
    "config",
    [
        EpochConfig(),
        EpochConfig.exact(),
        EpochConfig(on_miss="drop", restrict_new=True),
        EpochConfig(on_miss="expand", refresh_interval=None),
    ],
)
@torch.no_grad()
def test_a_warm_forward_waits_once(config: EpochConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (epoch_moe.functional.moe, epoch_moe.functional.layer):  # fake tensors have no addresses to compare
        monkeypatch.setattr(module, "share_memory", lambda a, b: False)
    with FakeTensorMode():
        store = RowStore(config, SPEC, num_layers=L, max_slots=S, window=W, hidden_size=H)
        slot_T = torch.arange(S).repeat_interleave(W)
        keys = RowKeys(slot_T, slot_T + 1, slot_T * 0, torch.arange(W).repeat(S))
        ids_T, live_T = torch.zeros(S * W, dtype=torch.long), torch.zeros(S * W, dtype=torch.bool)
        with pytest.raises(DataDependentOutputException):
            fresh_rows(store, keys, ids_T, live_T)
        monkeypatch.setattr(epoch_moe.plan.packed, "read", lambda numbers: NUMBERS)
        views = expert_views(
            torch.zeros(E, 2 * F_INNER, H, dtype=torch.bfloat16), torch.zeros(E, H, F_INNER, dtype=torch.bfloat16)
        )
        x_TH, out = (torch.zeros(S * W, H, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(2):
            fresh = fresh_rows(store, keys, ids_T, live_T, mask_id=9, changed_T=live_T)
            assert fresh.num_fresh == 5
            for layer in range(L):
                x_RH = fresh.pick(x_TH)
                routing = route_rows(store, layer, fresh, torch.zeros(5, E), torch.zeros(E))
                y_RH = moe_forward(
                    x_RH, routing.ids_TK, routing.weights_TK, views, expert_map=torch.arange(E), backend="grouped"
                )
                restore_rows(store, layer, fresh, y_RH, out=out)
            store.invalidate(slot_T[:3], slot_T[:3])
            store.invalidate(slot_T[:1])
            store.complete(fresh)
        routing, _ = route(x_TH, torch.zeros(E, H), torch.zeros(E), SPEC)
        moe_forward(x_TH, routing.ids_TK, routing.weights_TK, views, expert_range=(0, E), out=out, backend="grouped")
        with pytest.raises(DataDependentOutputException):  # these two do wait
            moe_forward(x_TH, routing.ids_TK, routing.weights_TK, views, backend="loop")
        with pytest.raises(DataDependentOutputException):
            moe_forward(x_TH, routing.ids_TK, routing.weights_TK, views, backend="grouped", workspace=1000)


class NoNumberIsCopied(TorchDispatchMode):
    """`x[i] = number` and `x[indices] = number` copy the number to the device from memory that is not pinned."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[1].dim(), f"a number is copied to a place of {tuple(args[0].shape)}"
        if func is torch.ops.aten.index_put_.default:
            assert args[2].dim(), f"a number is copied to indices of {tuple(args[0].shape)}"
        return func(*args, **(kwargs or {}))


def test_no_number_is_copied_to_the_device() -> None:
    store = RowStore(EpochConfig(), SPEC, num_layers=L, max_slots=S, window=W, hidden_size=H)
    slot_T = torch.arange(S).repeat_interleave(W)
    keys = RowKeys(slot_T, slot_T + 1, slot_T * 0, torch.arange(W).repeat(S))
    ids_T, live_T = torch.zeros(S * W, dtype=torch.long), torch.zeros(S * W, dtype=torch.bool)
    with NoNumberIsCopied():
        fresh = fresh_rows(store, keys, ids_T, live_T)
        store.invalidate(slot_T[:3], slot_T[:3])
        store.invalidate(slot_T[:1])
        for layer in range(L):
            restore_rows(store, layer, fresh, torch.zeros(fresh.num_fresh, H, dtype=torch.bfloat16))
        store.complete(fresh)
        with pytest.raises(AssertionError, match="a number is copied"):
            ids_T[0] = 1
        with pytest.raises(AssertionError, match="a number is copied"):
            ids_T[slot_T] = 1
