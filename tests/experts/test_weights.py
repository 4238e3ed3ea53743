"""ExpertViews storage: views, not copies; stacked again when the alias breaks; gradients per expert."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_accurate
from torch import Tensor, nn

from epoch_moe.experts.layouts import PROJECTIONS
from epoch_moe.experts.run import run_experts
from epoch_moe.experts.weights import ExpertWeights

E, H, INNER = 5, 16, 12


class Expert(nn.Module):
    def __init__(self, hidden: int = H, inner: int = INNER, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, experts: int = E, hidden: int = H, inner: int = INNER):
        super().__init__()
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(experts))
        self.weights = ExpertWeights(self.experts)


def values_of(block: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in block.state_dict().items()}


def assert_aliased(block: Block) -> None:
    """Each parameter lies at its place in the stacked tensors and holds the same numbers."""
    stacked = block.weights.ensure()
    inner = stacked.down_EHF.shape[2]
    assert block.weights.is_stacked()
    for index, expert in enumerate(block.experts):
        for weight, slot in (
            (expert.gate_proj.weight, stacked.gate_up_E2FH[index, :inner]),
            (expert.up_proj.weight, stacked.gate_up_E2FH[index, inner:]),
            (expert.down_proj.weight, stacked.down_EHF[index]),
        ):
            assert weight.data_ptr() == slot.data_ptr()
            assert torch.equal(weight, slot)


def reference(block: Block, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Plain autograd through the per-expert modules."""
    rows = []
    for row in range(x_RH.shape[0]):
        terms = [block.experts[int(e)](x_RH[row]) * weights_RK[row, k] for k, e in enumerate(ids_RK[row]) if e >= 0]
        rows.append(torch.stack(terms).sum(0) if terms else torch.zeros_like(x_RH[row]))
    return torch.stack(rows)


def plain_gradients(block: Block, ids_RK: Tensor, leaves: list[Tensor], upstream_RH: Tensor) -> list[Tensor]:
    """Of `leaves`: x, weights and the block's parameters."""
    found = torch.autograd.grad(reference(block, leaves[0], ids_RK, leaves[1]), leaves, upstream_RH, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("shape", [(5, 16, 12), (1, 8, 4), (3, 37, 23), (7, 5, 3)])
def test_first_use_makes_views(shape: tuple[int, int, int], poisoned_empty: None) -> None:
    block = Block(*shape)
    before = values_of(block)
    params = dict(block.named_parameters())
    assert not block.weights.is_stacked()
    assert_aliased(block)
    assert block.state_dict().keys() == before.keys()
    for key, value in block.state_dict().items():
        assert torch.equal(value, before[key])
    for name, parameter in block.named_parameters():
        assert parameter is params[name]  # optimizers keep working


def test_writes_go_both_ways() -> None:
    block = Block()
    stacked = block.weights.ensure()
    with torch.no_grad():
        block.experts[2].up_proj.weight.fill_(3.0)
    assert (stacked.gate_up_E2FH[2, INNER:] == 3.0).all()
    stacked.down_EHF[1] = 4.0
    assert (block.experts[1].down_proj.weight == 4.0).all()
    block.load_state_dict({key: torch.full_like(value, 5.0) for key, value in block.state_dict().items()})
    assert (stacked.gate_up_E2FH == 5.0).all()
    assert block.weights.ensure() is stacked


def test_no_second_copy_of_the_weights() -> None:
    block = Block()
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    block.weights.ensure()
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*block.parameters(), block.weights.ensure().gate_up_E2FH, block.weights.ensure().down_EHF)
    }
    assert len(storages) == 2
    assert sum(storages.values()) == size
    differentiable = block.weights.differentiable()
    assert {differentiable.gate_up_E2FH.data_ptr(), differentiable.down_EHF.data_ptr()} == set(storages)
    assert block.weights.ensure().bytes_per_expert * E == size


def to_bf16(block: Block) -> Block:
    return block.to(torch.bfloat16)


def assign(block: Block) -> Block:
    block.load_state_dict({key: value.clone() for key, value in block.state_dict().items()}, assign=True)
    return block


def replace_one(block: Block) -> Block:
    block.experts[3].up_proj.weight = nn.Parameter(torch.randn(INNER, H))
    return block


def swap_data(block: Block) -> Block:
    block.experts[0].down_proj.weight.data = torch.randn(H, INNER)
    return block


BREAKS: dict[str, Callable[[Block], Block]] = {
    "to": to_bf16,
    "deepcopy": copy.deepcopy,
    "pickle": lambda block: pickle.loads(pickle.dumps(block)),
    "assign": assign,
    "new_parameter": replace_one,
    "new_data": swap_data,
}


@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS.keys())
def test_a_broken_alias_is_stacked_again(change: Callable[[Block], Block]) -> None:
    block = Block()
    block.weights.ensure()
    original = values_of(block)
    other = change(block)
    assert not other.weights.is_stacked()
    expected = values_of(other)
    assert_aliased(other)
    for key, value in other.state_dict().items():
        assert torch.equal(value, expected[key])
    if other is not block:  # the copy shares nothing with its origin
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert_aliased(block)
        assert all(torch.equal(value, original[key]) for key, value in block.state_dict().items())


def test_pickle_holds_the_weights_once() -> None:
    block = Block(8, 64, 32)
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    block.weights.ensure()
    # A view drags its whole storage into a pickle; torch.save of the module stores each storage once.
    import io

    buffer = io.BytesIO()
    torch.save(block, buffer)
    assert buffer.tell() < 1.3 * size


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("empty", [False, True])
def test_gradients_equal_plain_autograd(backend: str, empty: bool, poisoned_empty: None) -> None:
    block = Block()
    x_RH = torch.randn(9, H, requires_grad=True)
    ids_RK = torch.rand(9, E - 1).argsort(-1)[:, :3]  # the last expert gets nothing
    if empty:
        ids_RK = ids_RK.masked_fill(torch.rand(9, 3) < 0.4, -1)
    weights_RK = torch.rand(9, 3, requires_grad=True)
    upstream = torch.randn(9, H)
    leaves = [x_RH, weights_RK, *block.parameters()]
    wanted = plain_gradients(block, ids_RK, leaves, upstream)
    exact = copy.deepcopy(block).double()
    inputs = [leaf.detach().double().requires_grad_() for leaf in leaves[:2]]
    exactly = plain_gradients(exact, ids_RK, [*inputs, *exact.parameters()], upstream.double())
    stacked = block.weights.differentiable()
    run_experts(x_RH, ids_RK, weights_RK, stacked, backend).backward(upstream)  # type: ignore[arg-type]
    for leaf, want, exact_grad in zip(leaves, wanted, exactly, strict=True):
        assert leaf.grad is not None
        assert_as_accurate(leaf.grad, want, exact_grad)
    assert (block.experts[E - 1].up_proj.weight.grad == 0).all()


def test_gradients_in_fp64_by_gradcheck() -> None:
    block = Block(3, 5, 4).double()
    ids_RK, weights_RK = torch.tensor([[0, 2], [1, -1]]), torch.rand(2, 2, dtype=torch.float64)

    def f(x_RH: Tensor, *params: Tensor) -> Tensor:
        return run_experts(x_RH, ids_RK, weights_RK, block.weights.differentiable(), "loop")

    block.weights.ensure()
    x_RH = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    # The combine is fp32 by design, hence the loose tolerance.
    assert torch.autograd.gradcheck(f, (x_RH, *block.parameters()), eps=1e-2, atol=1e-3, rtol=1e-2)


def test_frozen_experts_and_optimizer_steps() -> None:
    block = Block()
    block.experts[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=0.1)
    before = values_of(block)
    x_RH, ids_RK = torch.randn(4, H), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]])
    out = run_experts(x_RH, ids_RK, torch.ones(4, 2), block.weights.differentiable(), "grouped")
    out.pow(2).sum().backward()
    optimizer.step()
    assert block.experts[0].up_proj.weight.grad is None
    assert torch.equal(block.experts[0].up_proj.weight, before["experts.0.up_proj.weight"])
    assert not torch.equal(block.experts[1].up_proj.weight, before["experts.1.up_proj.weight"])
    assert_aliased(block)  # a step keeps the alias: the next forward sees the new weights


def replaced(block: Block) -> None:
    up = block.experts[2].up_proj
    up.weight = nn.Parameter(up.weight.detach() * 3)


def with_other_data(block: Block) -> None:
    old = block.experts[4].down_proj.weight.data  # kept alive: what is counted must not be who holds the storage
    block.experts[4].down_proj.weight.data = old * 3
    block.old = old


def written_in_place(block: Block) -> None:
    with torch.no_grad():
        block.experts[0].gate_proj.weight.mul_(3)


def loaded_with_assign(block: Block) -> None:
    block.load_state_dict({k: v * 3 for k, v in block.state_dict().items()}, assign=True)


def of_another_expert(block: Block) -> None:
    block.experts[1] = copy.deepcopy(block.experts[0])


@pytest.mark.parametrize("change", [replaced, with_other_data, written_in_place, loaded_with_assign, of_another_expert])
def test_the_next_use_has_the_new_weights(change: Callable[[Block], None]) -> None:
    block = Block()
    stacked, version = block.weights.ensure(), block.weights.version
    assert block.weights.ensure() is stacked and block.weights.version == version
    change(block)
    block.weights.ensure()
    assert block.weights.version != version
    assert_aliased(block)


def add_hook(block: Block) -> None:
    block.experts[3].up_proj.register_forward_hook(lambda *args: None)


def add_expert_hook(block: Block) -> None:
    block.experts[3].register_forward_pre_hook(lambda *args: None)


def replace_forward(block: Block) -> None:
    block.experts[3].down_proj.forward = lambda x: x


def parametrize(block: Block) -> None:
    nn.utils.parametrizations.weight_norm(block.experts[3].gate_proj)


@pytest.mark.parametrize("wrap", [add_hook, add_expert_hook, replace_forward, parametrize])
def test_what_would_never_run_is_refused_by_name(wrap: Callable[[Block], None]) -> None:
    block = Block()
    stacked = block.weights.ensure()
    wrap(block)
    with pytest.raises(TypeError, match=r"experts\[3\]"):
        block.weights.ensure()
    with pytest.raises(TypeError, match=r"experts\[3\]"):  # and again: nothing serves the old weights
        block.weights.differentiable()
    assert stacked.down_EHF.isfinite().all()


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_weights_that_cannot_be_stacked(projection: str) -> None:
    def broken(change: Callable[[nn.Linear], object]) -> ExpertWeights:
        block = Block()
        change(getattr(block.experts[3], projection))
        return block.weights

    where = rf"experts\[3\].{projection}"
    with pytest.raises(TypeError, match=where + r".weight is torch.bfloat16 on cpu, experts\[0\].gate_proj.weight is"):
        broken(lambda linear: linear.bfloat16()).ensure()
    with pytest.raises(TypeError, match=where + ".*meta"):
        broken(lambda linear: linear.to("meta")).ensure()
    with pytest.raises(TypeError, match=where + " has a bias"):
        broken(lambda linear: setattr(linear, "bias", nn.Parameter(torch.zeros(linear.out_features)))).ensure()
    with pytest.raises(TypeError, match=where + ".weight is Tensor: expected a plain nn.Parameter"):

        def as_tensor(linear: nn.Linear) -> None:
            weight = linear.weight.detach()
            del linear.weight
            linear.weight = weight

        broken(as_tensor).ensure()
    with pytest.raises(ValueError, match=where + r".weight has shape \(3, 3\)"):
        broken(lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(3, 3)))).ensure()


def test_a_failed_restack_leaves_the_weights_alone() -> None:
    block = Block()
    block.weights.ensure()
    block.experts[3].up_proj.weight = nn.Parameter(torch.zeros(3, 3))
    before = values_of(block)
    with pytest.raises(ValueError, match=r"experts\[3\].up_proj.weight has shape \(3, 3\): expected \(12, 16\)"):
        block.weights.ensure()
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())


def test_stacking_in_inference_mode_can_still_train() -> None:
    block = Block()
    with torch.inference_mode():
        block.weights.ensure()
    x_RH, ids_RK = torch.randn(4, H), torch.tensor([[0], [1], [2], [3]])
    run_experts(x_RH, ids_RK, torch.ones(4, 1), block.weights.differentiable(), "grouped").sum().backward()
    assert block.experts[0].up_proj.weight.grad is not None
