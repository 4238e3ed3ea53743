"""Kernel launches per MoE decoder layer cannot creep up, and the counter counts what kernels do."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import launches
import pytest
import torch
from parts.launch_counter import KERNEL_LAUNCHES, LaunchCounter
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from epoch_moe import kernels
from epoch_moe.kernels.atlas import compile_support_device
from epoch_moe.kernels.combine_restore import combine, combine_restore
from epoch_moe.kernels.compaction import compact
from epoch_moe.kernels.grouped_mlp import grouped_mlp
from epoch_moe.kernels.norm_rotate import rms_norm
from epoch_moe.kernels.route import route
from epoch_moe.kernels.tally import tally
from epoch_moe.kernels.tuning import GemmConfig, GroupedMlpConfig
from epoch_moe.kernels.worklist import device_worklist
from epoch_moe.routing import RouterSpec

MOST = {"dense": 42, "exact": 38, "default": 121}
"""Launches of a warm layer of LLaDA2.0-mini at batch 32. A smaller number belongs here as soon as it is true."""


def test_launches_of_a_warm_layer_do_not_grow() -> None:
    rows = launches.launch_table(launches.SHAPES["llada2-mini"], [32], kinds=("warm",))
    assert {row["plan"]: row["layer"] for row in rows} == MOST
    assert all(sum(row["parts"].values()) == row["layer"] for row in rows)


def test_parts_of_a_layer_are_told_apart() -> None:
    with launches.fake_device():
        layer = launches.SHAPES["llada-moe"].model(1).model.layers[0]
        x_BSH = torch.zeros(1, 4, 2048, dtype=torch.bfloat16)
        with LaunchCounter() as counter:
            layer.input_layernorm(x_BSH)
        assert set(counter.parts) == {"norms"}
        with LaunchCounter() as more:
            layer.input_layernorm(x_BSH) + 1
        assert more.parts - counter.parts == {"model": 1}


class Calls(TorchDispatchMode):
    """Keeps the arguments of every op of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("epoch_moe::"):
            self.seen.append((func._schema.name, args))
        return func(*args, **(kwargs or {}))


def run_all_kernels(rows: int) -> None:
    """Every op once, on so many rows."""
    spec = RouterSpec(kind="sigmoid_group", num_experts=8, top_k=2, n_group=4, topk_group=2)
    tile = GemmConfig(16, 16, 16, 1, False, 1)
    logits_RE, count = torch.zeros(rows, 8), torch.zeros(1, dtype=torch.int32)
    x_TH, at_T = torch.zeros(rows, 16), torch.zeros(rows, dtype=torch.int64)
    weights = torch.zeros(8, 16, 16), torch.zeros(8, 16, 16), torch.zeros(8, 16, 16)
    compact(torch.zeros(rows, dtype=torch.bool), rows)
    ids_RK, weights_RK, _ = route(logits_RE, torch.zeros(8), spec, dtype=torch.float32, count=count)
    lists = device_worklist(torch.zeros_like(ids_RK), 8, 16, count)
    pairs_PH = grouped_mlp(x_TH, at_T, lists, *weights, 2, GroupedMlpConfig(16, tile, tile))
    combine(pairs_PH, lists.rank_RK, weights_RK, count)
    combine_restore(pairs_PH, lists.rank_RK, weights_RK, at_T, at_T - 1, torch.zeros(4, 16), torch.empty(rows, 16))
    tally(torch.zeros(8, dtype=torch.int64), count, *torch.zeros(3, dtype=torch.int64))
    rms_norm(x_TH, torch.ones(16), 1e-6)
    votes_GW = torch.ones(rows // 4, 4, dtype=torch.bool)
    for only_G in (None, votes_GW.all(dim=1)):
        compile_support_device(*[logits_RE.view(-1, 4, 8)] * 2, votes_GW, spec, 0.9, 4, only_G)


@pytest.mark.parametrize("rows", [8, 512, 8192])
def test_kernels_launch_what_the_table_says(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def launch(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: launched.append(self.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)  # kernels do nothing but say their names
    with Calls() as calls:
        run_all_kernels(rows)
    modules = [importlib.import_module(f"epoch_moe.kernels.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    ops = {v._qualname: v for m in modules for v in vars(m).values() if isinstance(v, CustomOpDef)}
    assert {name for name, _ in calls.seen} == set(KERNEL_LAUNCHES) and set(KERNEL_LAUNCHES) <= set(ops)
    for name, args in calls.seen:
        launched.clear()
        with LaunchCounter() as counter:
            ops[name]._init_fn(*args)
        assert KERNEL_LAUNCHES[name](args) == counter.total + len(launched), (name, counter.ops, launched)
