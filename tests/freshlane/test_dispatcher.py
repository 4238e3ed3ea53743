"""FreshLaneDispatcher on gloo: against brute force, in both layouts, with exact counts and a fixed capacity."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import collect, run_ranks, start_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epoch_moe
from epoch_moe.experts.run import Backend, run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.freshlane.collectives import ExpertParallelError
from epoch_moe.freshlane.dispatcher import Dispatched, FreshLaneDispatcher
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import build_worklist

HIDDEN, INNER = 8, 6


def experts(num_experts: int) -> ExpertViews:
    generator = torch.Generator().manual_seed(7)
    return ExpertViews.fused(
        torch.randn(num_experts, 2 * INNER, HIDDEN, generator=generator),
        torch.randn(num_experts, HIDDEN, INNER, generator=generator),
    )


def case(seed: int, rank: int, num_experts: int, top_k: int, style: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one rank: their number differs between ranks, and may be 0."""
    rng = random.Random(f"{seed} {rank}")
    rows = {"none": 0, "one rank": 5 if rank == 1 else 0}.get(style, rng.choice([0, 1, 3, 7, 13]))
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x_RH = torch.randn(rows, HIDDEN, generator=generator)
    ids_RK = torch.rand(rows, num_experts, generator=generator).topk(top_k).indices
    if style == "to one rank":
        ids_RK = ids_RK % max(num_experts // 4, 1)
    if style == "empty pairs":
        hole_RK = torch.rand(rows, top_k, generator=generator) < 0.5
        ids_RK = ids_RK.masked_fill(hole_RK, NO_EXPERT)
        ids_RK[:1] = num_experts  # the other spelling of "no expert"
    return x_RH, ids_RK, torch.rand(rows, top_k, generator=generator)


def on_own_experts(
    dispatched: Dispatched, dispatcher: FreshLaneDispatcher, stacked: ExpertViews, backend: Backend = "loop"
) -> Tensor:
    own = slice(dispatcher.first_expert, dispatcher.first_expert + dispatcher.local_experts)
    local = ExpertViews.fused(stacked.gate_up_E2FH[own], stacked.down_EHF[own])
    ids_NK, part = dispatched.ids_NK, (dispatcher.first_expert, dispatcher.num_experts)
    worklist = build_worklist(ids_NK, dispatcher.local_experts, part)
    return run_experts(
        dispatched.x_NH, ids_NK, dispatched.weights_NK, local, backend, worklist, dtype=torch.float32
    )


def expected(x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, stacked: ExpertViews) -> Tensor:
    inside_RK = torch.where(ids_RK >= stacked.down_EHF.shape[0], NO_EXPERT, ids_RK)
    return run_experts(x_RH, inside_RK, weights_RK, stacked, "reference")


STYLES = ("random", "to one rank", "empty pairs", "none", "one rank")
SHAPES = ((8, 3), (4, 1), (4, 4), (16, 16))  # experts, top-k; with 4 ranks also E = ranks and K = E


def sharded_against_brute_force(rank: int) -> int:
    checked = 0
    for num_experts, top_k in SHAPES:
        stacked = experts(num_experts)
        for style in STYLES:
            for seed in range(3):
                x_RH, ids_RK, weights_RK = case(seed, rank, num_experts, top_k, style)
                want = expected(x_RH, ids_RK, weights_RK, stacked)
                results = []
                for capacity in (None, 13):
                    dispatcher = FreshLaneDispatcher(num_experts, dist.group.WORLD, capacity=capacity)
                    dispatched = dispatcher.dispatch(x_RH, ids_RK, weights_RK).wait()
                    y_NH = on_own_experts(dispatched, dispatcher, stacked)
                    y_RH = dispatcher.combine(y_NH, dispatched.handle).wait()
                    torch.testing.assert_close(y_RH, want, rtol=1e-5, atol=1e-5)
                    dispatcher.check_capacity()
                    results.append(y_RH)
                    sent = [
                        {int(i) // dispatcher.local_experts for i in ids if 0 <= i < num_experts} - {rank}
                        for ids in ids_RK.tolist()
                    ]
                    if capacity is None:
                        assert dispatcher.traffic.dispatch_rows == sum(map(len, sent))
                        row_bytes = HIDDEN * 4 + top_k * 8
                        assert dispatcher.traffic.dispatch_bytes == row_bytes * sum(map(len, sent))
                        # A row per destination, each once, and only with the destination's own experts.
                        local_NK = dispatched.ids_NK
                        assert (local_NK < dispatcher.local_experts).all() and (local_NK >= 0).any(dim=1).all()
                assert torch.equal(*results)  # bit for bit
                checked += 1
    return checked


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_rows_against_brute_force(world: int) -> None:
    assert run_ranks(world, sharded_against_brute_force) == [len(SHAPES) * len(STYLES) * 3] * world


def replicated_against_brute_force(rank: int) -> list[Tensor]:
    outputs = []
    for num_experts, top_k in SHAPES:
        stacked = experts(num_experts)
        dispatcher = FreshLaneDispatcher(num_experts, dist.group.WORLD, layout="replicated")
        for style in ("random", "to one rank", "empty pairs", "none"):
            x_RH, ids_RK, weights_RK = case(1, 5, num_experts, top_k, style)  # the same on all ranks
            dispatched = dispatcher.dispatch(x_RH, ids_RK, weights_RK).wait()
            y_NH = on_own_experts(dispatched, dispatcher, stacked)
            y_RH = dispatcher.combine(y_NH, dispatched.handle).wait()
            torch.testing.assert_close(y_RH, expected(x_RH, ids_RK, weights_RK, stacked), rtol=1e-5, atol=1e-5)
            outputs.append(y_RH)
        assert dispatcher.traffic.dispatch_bytes == 0
    return outputs


def test_replicated_rows_against_brute_force() -> None:
    outputs = run_ranks(4, replicated_against_brute_force)
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))  # bit for bit on all ranks


def bits_of_one_process(rank: int) -> None:
    """Products row by row, which no CPU makes depend on the rows beside them: what is left is the order of sums."""
    for dtype in (torch.float32, torch.bfloat16):
        for num_experts, top_k in ((16, 6), (12, 5), (8, 8)):
            whole = experts(num_experts)
            stacked = ExpertViews.fused(whole.gate_up_E2FH.to(dtype), whole.down_EHF.to(dtype))
            for layout in ("sharded", "replicated"):
                x_RH, ids_RK, weights_RK = case(2, rank if layout == "sharded" else 5, num_experts, top_k, "random")
                x_RH = x_RH.to(dtype)
                want_RH = run_experts(x_RH, ids_RK, weights_RK, stacked, "reference")
                dispatcher = FreshLaneDispatcher(num_experts, dist.group.WORLD, layout=layout)
                dispatched = dispatcher.dispatch(x_RH, ids_RK, weights_RK).wait()
                y_NH = on_own_experts(dispatched, dispatcher, stacked, "reference")
                assert torch.equal(dispatcher.combine(y_NH, dispatched.handle).wait(), want_RH), (num_experts, layout)


@pytest.mark.parametrize("world", [2, 4])
def test_a_row_has_the_bits_of_one_process(world: int) -> None:
    run_ranks(world, bits_of_one_process)


def waits_of_a_dispatch(rank: int) -> int:
    """How often the host looks at a value of a tensor in one dispatch and combine with exact counts."""
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD)
    waits = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense):
                waits.append(str(func))
            return func(*args, **(kwargs or {}))

    tolist = Tensor.tolist
    Tensor.tolist = lambda self: (waits.append("tolist"), tolist(self))[1]  # type: ignore[method-assign]
    with Spy():
        dispatched = dispatcher.dispatch(*case(1, rank, 8, 3, "random")).wait()
        dispatcher.combine(dispatched.x_NH, dispatched.handle).wait()
    return len(waits)


def test_the_host_waits_once_for_a_dispatch() -> None:
    assert run_ranks(2, waits_of_a_dispatch) == [1, 1]


def outlived_group(rank: int) -> str:
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD)
    group = weakref.ref(dist.group.WORLD)
    inputs = case(1, rank, 8, 3, "random")
    dispatcher.dispatch(*inputs).wait()
    dist.destroy_process_group()
    assert group() is None  # its threads have ended: one that meets the end of the interpreter ends the process
    with pytest.raises(ExpertParallelError) as error:
        dispatcher.dispatch(*inputs)
    return str(error.value)


def test_a_dispatcher_does_not_keep_a_destroyed_group() -> None:
    assert all("has been destroyed" in message for message in run_ranks(2, outlived_group))


def unused_memory_is_not_read(rank: int) -> None:
    """Slots without a row hold zeros, not what lay there; NaN of other ranks' rows stays with them."""
    empty = torch.Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = 255 if self.dtype == torch.uint8 else float("nan") if self.is_floating_point() else -7
        return empty(self, *args, **kwargs).fill_(value)

    torch.Tensor.new_empty = poisoned  # type: ignore[method-assign]
    stacked = experts(8)
    for capacity in (None, 20):
        dispatcher = FreshLaneDispatcher(8, dist.group.WORLD, capacity=capacity)
        x_RH, ids_RK, weights_RK = case(3, rank, 8, 3, "empty pairs")
        if rank == 0:
            x_RH = torch.full_like(x_RH, float("nan"))
        dispatched = dispatcher.dispatch(x_RH, ids_RK, weights_RK).wait()
        y_RH = dispatcher.combine(on_own_experts(dispatched, dispatcher, stacked), dispatched.handle).wait()
        assert (rank == 0 and x_RH.numel() > 0) or not y_RH.isnan().any()


def test_unused_memory_is_not_read() -> None:
    run_ranks(2, unused_memory_is_not_read)


def overflow(rank: int) -> str:
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD, capacity=2)
    rows = 3 if rank == 1 else 2
    ids_RK = torch.zeros(rows, 1, dtype=torch.int64)
    dispatched = dispatcher.dispatch(torch.ones(rows, HIDDEN), ids_RK, torch.ones(rows, 1)).wait()
    dispatcher.combine(torch.zeros_like(dispatched.x_NH), dispatched.handle).wait()
    try:
        dispatcher.check_capacity()
    except RuntimeError as error:
        return str(error)
    dispatcher.check_capacity()
    return ""


def test_rows_beyond_the_capacity_are_an_error_on_their_rank() -> None:
    first, second = run_ranks(2, overflow)
    assert first == "" and "capacity=2 rows of rank 1" in second


def half_precision(rank: int) -> None:
    x_RH = (torch.arange(3 * HIDDEN).view(3, HIDDEN) + 100 * rank).bfloat16()
    ids_RK = torch.tensor([[0, 7], [7, 3], [4, NO_EXPERT]])
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD)
    dispatched = dispatcher.dispatch(x_RH, ids_RK, torch.rand(3, 2)).wait()
    assert dispatched.x_NH.dtype == torch.bfloat16
    copies = dispatcher.combine(dispatched.x_NH.float(), dispatched.handle).wait()
    owners = torch.tensor([[2.0], [2.0], [1.0]])
    assert copies.dtype == torch.bfloat16 and torch.equal(copies.float(), (x_RH.float() * owners).bfloat16().float())


def test_rows_travel_in_their_own_dtype() -> None:
    run_ranks(2, half_precision)


def disagree(rank: int) -> str:
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD)
    dispatcher.ranks.agree({"model": "a", "layout": "sharded"})
    try:
        dispatcher.ranks.agree({"model": "a", "refresh_interval": str(5 + rank % 2)})
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_are_told_about_what() -> None:
    for message in run_ranks(2, disagree):
        assert "disagree on refresh_interval: rank 0: 5; rank 1: 6" in message


def die_in_the_exchange(rank: int) -> Any:
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD)
    x_RH, ids_RK, weights_RK = case(0, 3, 8, 3, "random")
    for step in range(20):
        if rank == 1 and step == 3:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        dispatched = dispatcher.dispatch(x_RH, ids_RK, weights_RK, name=f"layer {step}").wait()
        dispatcher.combine(dispatched.x_NH, dispatched.handle).wait()


def test_a_rank_that_dies_is_an_error_that_names_the_layer() -> None:
    results = collect(*start_ranks(2, die_in_the_exchange))
    assert results[1][0] == "lost"
    kind, (name, message, _) = results[0]
    assert kind == "error" and name == "ExpertParallelError"
    assert "layer 3" in message and "failed on rank 0" in message


def refusals(rank: int) -> list[str]:
    messages = []
    for arguments in (
        {"num_experts": 9, "group": dist.group.WORLD},
        {"num_experts": 8, "group": "ranks"},
        {"num_experts": 0},
        {"num_experts": 8, "group": None},
        {"num_experts": 8, "layout": "local", "group": dist.group.WORLD},
        {"num_experts": 8, "layout": "local", "capacity": 4},
        {"num_experts": 8, "group": dist.group.WORLD, "layout": "rows"},
        {"num_experts": 8, "group": dist.group.WORLD, "capacity": 0},
        {"num_experts": 8, "group": dist.group.WORLD, "layout": "replicated", "capacity": 4},
    ):
        with pytest.raises(ValueError) as error:
            FreshLaneDispatcher(**arguments)  # type: ignore[arg-type]
        messages.append(str(error.value))
    dispatcher = FreshLaneDispatcher(8, dist.group.WORLD)
    for x_RH, ids_RK, weights_RK in (
        (torch.ones(2, HIDDEN), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)),
        (torch.ones(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)),
        (torch.ones(2, HIDDEN), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2).double()),
        (torch.ones(2, HIDDEN, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)),
    ):
        with pytest.raises(ValueError) as error:
            dispatcher.dispatch(x_RH, ids_RK, weights_RK)
        messages.append(str(error.value))
    return messages


def test_bad_input_is_refused_with_its_value() -> None:
    wanted = (
        "9 experts cannot be split evenly over 2 ranks", "group='ranks'", "num_experts=0", "explicit process group",
        "layout='local' with a process group", "capacity=4 with layout='local'", "layout='rows'", "capacity=0",
        "capacity=4 with layout='replicated'", "(3, 2)", "torch.int32", "torch.float64", "x_RH is torch.int64",
    )  # fmt: skip
    for messages in run_ranks(2, refusals):
        assert len(messages) == len(wanted)
        assert all(word in message for word, message in zip(wanted, messages, strict=True)), messages


def alone(rank: int, layout: str) -> None:
    """The module by its public name, and experts that know nothing of this library."""
    group = None if layout == "local" else dist.group.WORLD
    dispatcher = epoch_moe.FreshLaneDispatcher(8, group, layout=layout)  # type: ignore[arg-type]
    assert not list(dispatcher.parameters()) and "experts=8" in repr(dispatcher)
    stacked = experts(8)
    own_eHH = (stacked.down_EHF @ stacked.gate_up_E2FH[:, :INNER])[dispatcher.range.first :][: dispatcher.range.count]
    calls = []

    def linear(arrived: Dispatched) -> Tensor:
        calls.append(arrived.x_NH.shape[0])
        assert (arrived.ids_NK >= NO_EXPERT).all() and (arrived.weights_NK[arrived.ids_NK == NO_EXPERT] == 0).all()
        y_NKH = torch.einsum("nh,nkgh->nkg", arrived.x_NH, own_eHH[arrived.ids_NK])
        return (y_NKH * arrived.weights_NK.unsqueeze(-1)).sum(dim=1)

    for style in STYLES:
        x_RH, ids_RK, weights_RK = case(3, rank if layout == "sharded" else 5, 8, 3, style)
        y_RH = dispatcher(x_RH, ids_RK, weights_RK, linear)
        all_EHH = (stacked.down_EHF @ stacked.gate_up_E2FH[:, :INNER]).double()
        want_RH = torch.zeros(x_RH.shape, dtype=torch.float64)
        for row, (ids, weights) in enumerate(zip(ids_RK.tolist(), weights_RK.tolist(), strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                if 0 <= expert < 8:
                    want_RH[row] += weight * (all_EHH[expert] @ x_RH[row].double())
        torch.testing.assert_close(y_RH.double(), want_RH, rtol=1e-5, atol=1e-4)
    assert len(calls) == len(STYLES)  # also where no row arrived

    arguments = torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"y_NH is torch.float32 \(1, 8\) .*expected floating point \[\d, hidden\]"):
        dispatcher(*arguments, lambda arrived: torch.ones(1, HIDDEN))
    with pytest.raises(ValueError, match="y_NH=None: expected a tensor"):
        dispatcher(*arguments, lambda arrived: None)
    with pytest.raises(ValueError, match="experts=3: expected a function"):
        dispatcher(*arguments, 3)  # type: ignore[arg-type]
    x_RH = arguments[0].requires_grad_()
    if group is not None:
        with pytest.raises(RuntimeError, match="no backward pass: run under"):
            dispatcher(*arguments, linear)
        own_eHH.requires_grad_()
        with pytest.raises(RuntimeError, match="no backward pass: run under"):
            dispatcher(x_RH.detach(), *arguments[1:], linear)
        with torch.no_grad():
            assert dispatcher(*arguments, linear).shape == (2, HIDDEN)
    else:
        dispatcher(*arguments, linear).sum().backward()
        torch.testing.assert_close(x_RH.grad, own_eHH[0].sum(dim=0).expand(2, HIDDEN))


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_the_module_works_alone_on_a_group(layout: str) -> None:
    run_ranks(2, alone, layout)


def test_the_module_works_alone_in_one_process() -> None:
    alone(0, "local")
