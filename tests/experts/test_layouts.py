"""The three ways to hold a layer's experts: same stacked tensors, same gradients, no copy where none is needed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from helpers import assert_as_accurate
from torch import Tensor, nn

from epoch_moe.experts.layouts import LayoutName
from epoch_moe.experts.run import run_experts
from epoch_moe.experts.weights import ExpertWeights

E, H, INNER = 5, 16, 12
LAYOUTS: tuple[LayoutName, ...] = ("per_expert", "stacked", "fused")


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, INNER, bias=False), nn.Linear(H, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, H, bias=False)


class StackedParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(E, INNER, H)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.randn(E, H, INNER))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, 2 * INNER, H)), nn.Parameter(torch.randn(E, H, INNER))


class Holder(nn.Module):
    """Experts of a layout, with weights drawn from the current seed, and their `ExpertWeights`."""

    def __init__(self, layout: LayoutName):
        super().__init__()
        makers: dict[LayoutName, Callable[[], nn.Module]] = {
            "per_expert": lambda: nn.ModuleList(Linears() for _ in range(E)),
            "stacked": StackedParams,
            "fused": Fused,
        }
        self.experts = makers[layout]()
        self.weights = ExpertWeights(self.experts, layout)


def parts(holder: Holder) -> list[tuple[Tensor, Tensor]]:
    """What [E,2F,H] and [E,H,F] must hold, each parameter beside its place."""
    stacked, experts = holder.weights.ensure(), holder.experts
    gate_up, down = stacked.gate_up_E2FH, stacked.down_EHF
    if isinstance(experts, nn.ModuleList):
        return [
            pair
            for i, expert in enumerate(experts)
            for pair in (
                (expert.gate_proj.weight, gate_up[i, :INNER]),
                (expert.up_proj.weight, gate_up[i, INNER:]),
                (expert.down_proj.weight, down[i]),
            )
        ]
    if isinstance(experts, Fused):
        return [(experts.w1, gate_up), (experts.w2, down)]
    return [
        (experts.gate_proj, gate_up[:, :INNER]),
        (experts.up_proj, gate_up[:, INNER:]),
        (experts.down_proj, down),
    ]


def assert_aliased(holder: Holder) -> None:
    for param, place in parts(holder):
        assert param.data_ptr() == place.data_ptr() and torch.equal(param, place)
    assert holder.weights.is_stacked()


def item_bytes(*shape: int) -> int:
    return 4 * torch.Size(shape).numel()


MOVED = {
    "per_expert": item_bytes(E, 3 * INNER, H),
    "stacked": item_bytes(E, 2 * INNER, H),  # the down projections are one tensor already
    "fused": 0,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_become_views_and_keep_their_values(layout: LayoutName, poisoned_empty: None) -> None:
    holder = Holder(layout)
    before = {key: value.clone() for key, value in holder.state_dict().items()}
    params = dict(holder.named_parameters())
    outline = holder.weights.outline()
    assert_aliased(holder)
    after = holder.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert all(param is params[name] for name, param in holder.named_parameters())
    stacked = holder.weights.ensure()
    assert outline.gate_up_E2FH.shape == stacked.gate_up_E2FH.shape == (E, 2 * INNER, H)
    assert outline.down_EHF.shape == stacked.down_EHF.shape == (E, H, INNER)
    assert stacked.gate_up_E2FH.is_contiguous() and stacked.down_EHF.is_contiguous()
    assert outline.gate_up_E2FH.stride() == stacked.gate_up_E2FH.stride()
    assert outline.down_EHF.stride() == stacked.down_EHF.stride()
    assert outline.down_EHF.device == stacked.down_EHF.device and outline.down_EHF.dtype == stacked.down_EHF.dtype
    assert holder.weights.moved_bytes == MOVED[layout]
    assert holder.weights.peak_bytes == (0 if layout == "fused" else item_bytes(E, 2 * INNER, H))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in holder.parameters()}
    assert sum(storages.values()) == item_bytes(E, 3 * INNER, H)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_right_already_is_not_moved(layout: LayoutName) -> None:
    holder = Holder(layout)
    first = holder.weights.ensure()
    again = ExpertWeights(holder.experts, layout)
    second = again.ensure()
    assert again.moved_bytes == again.peak_bytes == 0
    assert second.gate_up_E2FH.data_ptr() == first.gate_up_E2FH.data_ptr()
    assert second.down_EHF.data_ptr() == first.down_EHF.data_ptr()
    # One parameter elsewhere, though with the same values: its half moves, the other stays.
    experts = holder.experts
    param = {"per_expert": lambda: experts[2].down_proj.weight, "stacked": lambda: experts.down_proj}.get(
        layout, lambda: experts.w2
    )()
    param.data = param.data.clone()
    expected = 0 if layout != "per_expert" else item_bytes(E, H, INNER)
    third = again.ensure()
    assert again.moved_bytes == expected and third.gate_up_E2FH.data_ptr() == first.gate_up_E2FH.data_ptr()
    assert third.down_EHF.data_ptr() != first.down_EHF.data_ptr()
    assert_aliased(holder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "change",
    [
        lambda holder: holder.to(torch.bfloat16),
        copy.deepcopy,
        lambda holder: pickle.loads(pickle.dumps(holder)),
        lambda holder: holder.load_state_dict({k: v + 1 for k, v in holder.state_dict().items()}, assign=True)
        and holder,
        lambda holder: holder.load_state_dict({k: v + 1 for k, v in holder.state_dict().items()}) and holder,
    ],
    ids=["to", "deepcopy", "pickle", "assign", "copied_in"],
)
def test_a_broken_alias_is_noticed(layout: LayoutName, change: Callable[[Holder], Holder]) -> None:
    holder = Holder(layout)
    holder.weights.ensure()
    other = change(holder)
    expected = {key: value.clone() for key, value in other.state_dict().items()}
    assert_aliased(other)
    assert all(torch.equal(value, expected[key]) for key, value in other.state_dict().items())
    if other is not holder:
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        assert all(param.abs().sum() > 0 for param in holder.parameters())


def plain_gradients(
    holder: Holder, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, upstream_RH: Tensor
) -> list[Tensor]:
    """Autograd through the parameters where they lie, expert by expert: of x, weights and every parameter."""
    experts = holder.experts
    if isinstance(experts, nn.ModuleList):
        gate, up, down = (list(holder.parameters())[i::3] for i in range(3))
    elif isinstance(experts, Fused):
        gate, up, down = experts.w1[:, :INNER], experts.w1[:, INNER:], experts.w2
    else:
        gate, up, down = experts.gate_proj, experts.up_proj, experts.down_proj
    rows = [
        sum(
            weights_RK[row, slot] * (torch.nn.functional.silu(gate[e] @ x_RH[row]) * (up[e] @ x_RH[row]) @ down[e].T)
            for slot, e in enumerate(ids)
        )
        for row, ids in enumerate(ids_RK.tolist())
    ]
    leaves = [x_RH, weights_RK, *holder.parameters()]
    found = torch.autograd.grad(torch.stack(rows), leaves, upstream_RH, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_gradients_reach_the_parameters(layout: LayoutName, backend: str, poisoned_empty: None) -> None:
    holder = Holder(layout)
    exact = copy.deepcopy(holder).double()
    x_RH = torch.randn(9, H, requires_grad=True)
    ids_RK = torch.rand(9, E - 1).argsort(-1)[:, :3]  # the last expert gets nothing
    weights_RK = torch.rand(9, 3, requires_grad=True)
    upstream = torch.randn(9, H)
    wanted, exactly = (
        plain_gradients(each, x.detach().requires_grad_(), ids_RK, weights.detach().requires_grad_(), up)
        for each, x, weights, up in (
            (holder, x_RH, weights_RK, upstream),
            (exact, x_RH.double(), weights_RK.double(), upstream.double()),
        )
    )
    run_experts(x_RH, ids_RK, weights_RK, holder.weights.differentiable(), backend).backward(upstream)  # type: ignore[arg-type]
    for leaf, want, exact_grad in zip([x_RH, weights_RK, *holder.parameters()], wanted, exactly, strict=True):
        assert leaf.grad is not None
        assert_as_accurate(leaf.grad, want, exact_grad)


def spoilt(layout: LayoutName, change: Callable[[nn.Module], object]) -> ExpertWeights:
    holder = Holder(layout)
    change(holder.experts)
    return holder.weights


def set_param(name: str, value: Tensor) -> Callable[[nn.Module], object]:
    return lambda module: setattr(module, name, nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("stacked", set_param("up_proj", torch.zeros(E, INNER + 1, H)), r"experts\.up_proj has shape \(5, 13, 16\)"),
        ("stacked", set_param("up_proj", torch.zeros(E, INNER, H).bfloat16()), r"experts\.up_proj is torch\.bfloat16"),
        ("stacked", set_param("down_proj", torch.zeros(E, INNER, H)), r"experts\.down_proj has shape \(5, 12, 16\)"),
        ("stacked", lambda m: m.to("meta"), "experts.gate_proj is on the meta device"),
        ("fused", set_param("w1", torch.zeros(E, INNER, H)), r"w1 has shape \(5, 12, 16\): expected \(5, 24, 16\)"),
        ("fused", set_param("w2", torch.zeros(E, H, INNER, dtype=torch.int8)), "w2 has dtype torch.int8"),
        ("fused", lambda m: m.to(torch.float8_e4m3fn), "w1 has dtype torch.float8_e4m3fn: quantised"),
        ("per_expert", lambda m: m.to(torch.float8_e5m2), "weight has dtype torch.float8_e5m2: quantised"),
        (
            "per_expert",
            lambda m: setattr(m[1].up_proj, "weight", m[0].up_proj.weight),
            "two experts share one parameter",
        ),
    ],
)
def test_weights_that_cannot_be_stacked(
    layout: LayoutName, change: Callable[[nn.Module], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        spoilt(layout, change).ensure()
