"""`moe_forward` and the layouts of expert weights, against a loop in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error, relative_rms
from torch import Tensor, nn

from epoch_moe.experts.run import Backend
from epoch_moe.experts.views import ExpertViews
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.functional import NO_EXPERT, RouterSpec, moe_forward, route
from epoch_moe.functional.views import GateUp, expert_views

H, F_INNER, E, K, T = 32, 16, 7, 3, 11
BACKENDS: tuple[Backend, ...] = ("auto", "grouped", "loop", "reference")
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def make_weights(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (
        (torch.randn(E, 2 * F_INNER, H) / H**0.5).to(dtype),
        (torch.randn(E, H, F_INNER) / F_INNER**0.5).to(dtype),
    )


def make_inputs(rows: int = T, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = torch.rand(rows, E).argsort(-1)[:, :K]
    return torch.randn(rows, H).to(dtype), ids_TK, torch.rand(rows, K)


def oracle(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Weighted sum of experts in fp64; ids that are no expert add nothing."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < down.shape[0]:
                gate, up = (gate_up[expert].double() @ x_TH[row].double()).chunk(2)
                out_TH[row] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out_TH


# -------------------------------------------------------------------------------------------------------------- layouts


def _modules(gate_up: Tensor, down: Tensor) -> list[nn.Module]:
    experts = []
    for both, last in zip(gate_up, down, strict=True):
        expert = nn.Module()
        for name, weight in (("gate_proj", both[:F_INNER]), ("up_proj", both[F_INNER:]), ("down_proj", last)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = weight.clone()
            setattr(expert, name, linear)
        experts.append(expert)
    return experts


def _library_views(gate_up: Tensor, down: Tensor) -> tuple[GateUp, list[Tensor]]:
    """The per-expert parameters of a patched model."""
    experts = _modules(gate_up, down)
    ExpertWeights(experts).ensure()
    names = ("gate_proj", "up_proj", "down_proj")
    gates, ups, downs = ([getattr(e, name).weight.data for e in experts] for name in names)
    return (gates, ups), downs


def _padded(weight: Tensor) -> Tensor:
    """The same values in a larger buffer: rows and experts are further apart."""
    buffer = torch.full((weight.shape[0], weight.shape[1] + 2, weight.shape[2] + 8), float("nan"), dtype=weight.dtype)
    view = buffer[:, 1:-1, :-8]
    return view.copy_(weight)


LAYOUTS: dict[str, tuple[str, Callable[[Tensor, Tensor], tuple[GateUp, object]]]] = {
    "fused": ("fused", lambda w13, w2: (w13, w2)),
    "fused_padded": ("fused", lambda w13, w2: (_padded(w13), _padded(w2))),
    "fused_per_expert": ("fused", lambda w13, w2: (list(w13), list(w2))),
    "fused_per_expert_tuple": ("fused", lambda w13, w2: (tuple(w13), tuple(w2))),
    "separate": ("separate", lambda w13, w2: ((w13[:, :F_INNER].clone(), w13[:, F_INNER:].clone()), w2)),
    "separate_padded": ("separate", lambda w13, w2: ((_padded(w13[:, :F_INNER]), _padded(w13[:, F_INNER:])), w2)),
    "separate_per_expert": (
        "separate",
        lambda w13, w2: ((list(w13[:, :F_INNER].clone()), list(w13[:, F_INNER:].clone())), list(w2)),
    ),
    "halves_of_one": ("fused", lambda w13, w2: ((w13[:, :F_INNER], w13[:, F_INNER:]), w2)),
    "library": ("fused", _library_views),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_function(name: str, dtype: torch.dtype) -> None:
    w13, w2 = make_weights(dtype)
    x_TH, ids_TK, weights_TK = make_inputs(dtype=dtype)
    want_TH = oracle(x_TH, ids_TK, weights_TK, w13, w2)
    kind, arrange = LAYOUTS[name]
    gate_up, down = arrange(w13, w2)
    layout = expert_views(gate_up, down)  # type: ignore[arg-type]
    assert layout.kind == kind and layout.num_experts == E
    assert layout.bytes_per_expert == 3 * H * F_INNER * w2.element_size()
    for backend in BACKENDS:
        for args in ((gate_up, down), (layout,)):
            out_TH = moe_forward(x_TH, ids_TK, weights_TK, *args, backend=backend)  # type: ignore[arg-type]
            assert out_TH.dtype == dtype
            if dtype == torch.float32:
                assert relative_error(out_TH, want_TH) < 2e-6, backend
            else:
                assert relative_rms(out_TH, want_TH) < 1e-2, backend


def test_strides_that_grouped_mm_refuses_run_in_a_loop() -> None:
    w13, w2 = make_weights()
    odd = torch.empty(E, 2 * F_INNER, H + 1)[..., :H].copy_(w13)
    x_TH, ids_TK, weights_TK = make_inputs()
    with pytest.raises(ValueError, match=r"weight strides \(1056, 33, 1\).*multiples of 16 bytes"):
        moe_forward(x_TH, ids_TK, weights_TK, odd, w2, backend="grouped")
    flipped = w2.transpose(1, 2).contiguous().transpose(1, 2)
    for w13_, w2_ in ((odd, w2), (w13, flipped)):
        got_TH = moe_forward(x_TH, ids_TK, weights_TK, w13_, w2_)
        assert relative_error(got_TH, oracle(x_TH, ids_TK, weights_TK, w13, w2)) < 2e-6


def _storages(value: object) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return set().union(*(_storages(part) for part in value))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_copies(name: str) -> None:
    gate_up, down = LAYOUTS[name][1](*make_weights())
    layout = expert_views(gate_up, down)  # type: ignore[arg-type]
    assert _storages(layout.projections) == _storages(gate_up) and _storages(layout.down_EHF) == _storages(down)
    # Values that the engine changes in place are the ones that count.
    x_TH, ids_TK, weights_TK = make_inputs()
    before = moe_forward(x_TH, ids_TK, weights_TK, layout)
    (down if isinstance(down, Tensor) else down[0])[:] *= 2  # type: ignore[index]
    assert not torch.equal(moe_forward(x_TH, ids_TK, weights_TK, layout), before)


def test_matrices_that_no_strides_describe_are_refused() -> None:
    w13, w2 = make_weights()
    with pytest.raises(ValueError, match=r"gate_up\[1\] does not lie 1 equal steps.*torch.stack"):
        expert_views([w.clone() for w in w13], w2)
    with pytest.raises(ValueError, match=r"down\[2\] does not lie 2 equal steps"):
        expert_views(w13, [w2[0], w2[1], w2[3]])
    with pytest.raises(ValueError, match=r"down\[1\] does not lie"):
        expert_views(w13, list(w2.flip(0))[::-1])
    with pytest.raises(ValueError, match=r"down\[1\] is torch.float32 \(16, 32\)"):
        expert_views(w13, [w2[0], w2[1].T])
    with pytest.raises(ValueError, match="down is an empty list"):
        expert_views(w13, [])
    with pytest.raises(ValueError, match=r"down has shape \(32, 16\): expected \[experts"):
        expert_views(w13, w2[0])
    with pytest.raises(ValueError, match=r"gate_up\[0\] has shape \(32,\)"):
        expert_views([w13[0, 0]], w2)
    with pytest.raises(ValueError, match="list of tensors that require gradients"):
        expert_views([w.requires_grad_() for w in w13.clone()], w2)


def test_weights_that_do_not_fit_together_are_refused() -> None:
    w13, w2 = make_weights()
    with pytest.raises(ValueError, match=r"fused gate.*\(6, 32, 32\) with down \(7, 32, 16\).*expected \[7, 32, 32\]"):
        expert_views(w13[:-1], w2)
    with pytest.raises(ValueError, match=r"separate gate.*\(7, 32, 32\).*expected \[7, 16, 32\]"):
        expert_views((w13, w13.clone()), w2)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 on cpu, down is torch\.float32"):
        expert_views(w13.bfloat16(), w2)
    with pytest.raises(ValueError, match="quantised experts are not supported"):
        expert_views(w13.to(torch.int8), w2.to(torch.int8))


# ------------------------------------------------------------------------------------------------------ which experts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_no_expert_add_nothing(backend: Backend, dtype: torch.dtype) -> None:
    w13, w2 = make_weights()
    w13[5] = w2[5] = float("nan")  # nobody routes there
    x_TH, ids_TK, weights_TK = make_inputs()
    odd = torch.tensor([-1, -7, E, E + 100, 2**31 - 1])
    ids_TK = torch.where(ids_TK == 5, odd[torch.arange(T) % 5].unsqueeze(1), ids_TK).to(dtype)
    ids_TK[3] = -1
    want_TH = oracle(x_TH, ids_TK, weights_TK, w13, w2)
    weights_TK = weights_TK.masked_fill((ids_TK < 0) | (ids_TK >= E), float("nan"))
    x_TH[3] = float("nan")  # a padding row
    got_TH = moe_forward(x_TH, ids_TK, weights_TK, w13, w2, backend=backend)
    assert relative_error(got_TH, want_TH) < 2e-6 and got_TH[3].eq(0).all()


def test_parts_of_all_ranks_add_up() -> None:
    w13, w2 = make_weights()
    x_TH, ids_TK, weights_TK = make_inputs()
    whole_TH = moe_forward(x_TH, ids_TK, weights_TK, w13, w2)
    cuts = (0, 2, 3, E)
    parts = [
        moe_forward(x_TH, ids_TK, weights_TK, w13[a:b], w2[a:b], expert_range=(a, b))
        for a, b in itertools.pairwise(cuts)
    ]
    assert relative_error(sum(parts), whole_TH) < 1e-6  # type: ignore[arg-type]
    assert not any(relative_error(part, whole_TH) < 0.1 for part in parts)
    # The same split under a map, with experts in any order, and one that nobody holds (out of range either way).
    order = torch.tensor([4, 0, 6, 2])
    where = torch.tensor([1, -1, 3, 4, 0, 99, 2], dtype=torch.int32)
    got_TH = moe_forward(x_TH, ids_TK, weights_TK, w13[order], w2[order], expert_map=where)
    elsewhere = (ids_TK[..., None] == torch.tensor([1, 3, 5])).any(-1)
    want_TH = oracle(x_TH, ids_TK.masked_fill(elsewhere, -1), weights_TK, w13, w2)
    assert relative_error(got_TH, want_TH) < 2e-6
    outside = ids_TK.masked_fill(elsewhere, 12)
    assert torch.equal(moe_forward(x_TH, outside, weights_TK, w13[order], w2[order], expert_map=where), got_TH)


def test_scaling_is_in_the_weights_and_applied_once() -> None:
    w13, w2 = make_weights()
    x_TH, bias_E, gate_EH = torch.randn(T, H), 0.1 * torch.randn(E), torch.randn(E, H)
    spec = RouterSpec(kind="sigmoid_group", num_experts=E, top_k=K, routed_scaling_factor=2.5)
    routing, _ = route(x_TH, gate_EH, bias_E, spec)
    torch.testing.assert_close(routing.weights_TK.sum(-1), torch.full((T,), 2.5))
    got_TH = moe_forward(x_TH, routing.ids_TK, routing.weights_TK, w13, w2)
    assert relative_error(got_TH, oracle(x_TH, routing.ids_TK, routing.weights_TK, w13, w2)) < 2e-6


# -------------------------------------------------------------------------------------------------- out, workspace, ...


@pytest.mark.parametrize("rows", [0, 1, T])
@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_written_in_place(backend: Backend, rows: int) -> None:
    w13, w2 = make_weights()
    x_TH, ids_TK, weights_TK = make_inputs(rows)
    want_TH = moe_forward(x_TH, ids_TK, weights_TK, w13, w2, backend=backend)
    assert want_TH.shape == (rows, H)
    buffer = torch.full((rows + 4, 2 * H), float("nan"))
    out = buffer[2 : rows + 2, :H]
    assert moe_forward(x_TH, ids_TK, weights_TK, w13, w2, out=out, backend=backend) is out
    assert torch.equal(out, want_TH) and buffer[2 : rows + 2, H:].isnan().all() and buffer[:2].isnan().all()


def test_out_that_does_not_fit_is_refused_and_stays() -> None:
    w13, w2 = make_weights()
    x_TH, ids_TK, weights_TK = make_inputs()
    kept = x_TH.clone()
    for out, message in (
        (torch.zeros(T - 1, H), r"out is torch.float32 \(10, 32\).*expected torch.float32 \[11, 32\]"),
        (torch.zeros(T, H).double(), "out is torch.float64"),
        (x_TH, "out shares memory with x_TH"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_forward(x_TH, ids_TK, weights_TK, w13, w2, out=out)
    assert torch.equal(x_TH, kept)
    buffer = torch.zeros(2 * T, H)
    buffer[:T] = x_TH
    with pytest.raises(ValueError, match="shares memory with x_TH"):
        moe_forward(buffer[:T], ids_TK, weights_TK, w13, w2, out=buffer[1 : T + 1])
    neighbour = moe_forward(buffer[:T], ids_TK, weights_TK, w13, w2, out=buffer[T:])
    assert torch.equal(neighbour, moe_forward(x_TH, ids_TK, weights_TK, w13, w2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["grouped", "loop", "reference"])
@pytest.mark.parametrize("rows", [0, 1, 64])
def test_a_workspace_changes_no_bit(backend: Backend, rows: int, dtype: torch.dtype) -> None:
    w13, w2 = make_weights(dtype)
    x_TH, ids_TK, weights_TK = make_inputs(rows, dtype)
    ids_TK = ids_TK.masked_fill(torch.rand(rows, K) < 0.2, NO_EXPERT)
    for layout in (expert_views(w13, w2), expert_views((w13[:, :F_INNER].clone(), w13[:, F_INNER:].clone()), w2)):
        want_TH = moe_forward(x_TH, ids_TK, weights_TK, layout, backend=backend)
        for workspace in (0, 1000, 10_000, 10**9):
            got_TH = moe_forward(x_TH, ids_TK, weights_TK, layout, backend=backend, workspace=workspace)
            assert torch.equal(got_TH, want_TH), workspace


@pytest.mark.parametrize("backend", ["grouped", "loop"])
def test_a_workspace_bounds_what_is_allocated(backend: Backend) -> None:
    """The largest tensor beside the pairs' outputs, seen through every operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            held = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                fresh = isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in held
                if fresh and tensor.is_floating_point() and tensor.shape not in ((rows * K, H), (rows, H)):
                    Largest.bytes = max(Largest.bytes, tensor.numel() * tensor.element_size())
            return out

    rows, budget = 512, 40_000
    w13, w2 = make_weights()
    x_TH, ids_TK, weights_TK = make_inputs(rows)
    with Largest():
        moe_forward(x_TH, ids_TK, weights_TK, w13, w2, backend=backend)
    without, Largest.bytes = Largest.bytes, 0
    with Largest():
        moe_forward(x_TH, ids_TK, weights_TK, w13, w2, backend=backend, workspace=budget)
    one_expert = int(torch.bincount(ids_TK.flatten()).max()) * 2 * F_INNER * 4
    assert 0 < Largest.bytes <= max(budget, one_expert) < without


def test_gradients_flow_without_out() -> None:
    w13, w2 = make_weights(torch.float64)
    x_TH, ids_TK, weights_TK = make_inputs(dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x_TH, weights_TK, w13, w2)]
    moe_forward(x_TH, ids_TK, weights_TK, w13, w2).square().sum().backward()
    got = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    copies = [leaf.detach().requires_grad_() for leaf in leaves]
    x, weights, gate_up, down = copies
    projected = torch.einsum("efh,th->tef", gate_up, x)
    gate, up = projected.chunk(2, dim=-1)
    all_TEH = torch.einsum("ehf,tef->teh", down, F.silu(gate) * up)
    picked = all_TEH.gather(1, ids_TK.unsqueeze(-1).expand(-1, -1, H))
    (picked.float() * weights.unsqueeze(-1)).sum(1).square().sum().backward()
    for mine, copy in zip(got, copies, strict=True):
        assert relative_error(mine, copy.grad) < 1e-5  # type: ignore[arg-type]
    for name, value in (("out", torch.zeros(T, H, dtype=torch.float64)), ("workspace", 100)):
        with pytest.raises(ValueError, match=f"{name}= is not differentiable"):
            moe_forward(x_TH, ids_TK, weights_TK, w13, w2, **{name: value})  # type: ignore[arg-type]


def test_arguments_that_do_not_fit_are_named() -> None:
    w13, w2 = make_weights()
    x_TH, ids_TK, weights_TK = make_inputs()

    def refused(message: str, *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=message):
            moe_forward(*args, **kwargs)  # type: ignore[arg-type]

    refused(r"x_TH is .*\(11, 31\) .*expected torch.float32 \[rows, 32\]", x_TH[:, 1:], ids_TK, weights_TK, w13, w2)
    refused(r"topk_ids_TK is torch.int64 \(10, 3\) .*\[11", x_TH, ids_TK[1:], weights_TK, w13, w2)
    refused("topk_ids_TK is torch.int16", x_TH, ids_TK.short(), weights_TK, w13, w2)
    refused(r"topk_weights_TK is torch.float32 \(11, 2\)", x_TH, ids_TK, weights_TK[:, 1:], w13, w2)
    refused("topk_weights_TK is torch.int64", x_TH, ids_TK, ids_TK, w13, w2)
    refused("x_TH is torch.bfloat16 .*expected torch.float32", x_TH.bfloat16(), ids_TK, weights_TK, w13, w2)
    refused("down is missing", x_TH, ids_TK, weights_TK, w13)
    refused("leave down out", x_TH, ids_TK, weights_TK, expert_views(w13, w2), w2)
    refused(r"expert_range=\(1, 7\) names 6 experts, the weights hold 7",
            x_TH, ids_TK, weights_TK, w13, w2, expert_range=(1, 7))  # fmt: skip
    refused("not both", x_TH, ids_TK, weights_TK, w13, w2, expert_range=(0, E), expert_map=torch.arange(E))
    refused("expert_map is torch.float32", x_TH, ids_TK, weights_TK, w13, w2, expert_map=torch.ones(E))
    refused("workspace=-1", x_TH, ids_TK, weights_TK, w13, w2, workspace=-1)
    refused("backend='fast'", x_TH, ids_TK, weights_TK, w13, w2, backend="fast")
    assert isinstance(expert_views(w13, w2), ExpertViews)
