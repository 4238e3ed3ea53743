"""The numbers do not depend on autocast, the default dtype or what was put on a gate: or an error says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers import GOLDEN, relative_rms
from torch import Tensor, nn

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.decoding.sampling import sample_tokens
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.residency.config import ResidencyConfig
from epoch_moe.routing import RouterSpec, route, router_logits

CLASSES: dict[str, Any] = {"llada2": LLaDA2MoeModelLM, "llada_moe": LLaDAMoEModelLM}
FAMILIES = list(CLASSES)
IDS = torch.arange(10).view(1, 10) + 3


@cache
def plain(family: str) -> Any:
    return CLASSES[family].from_pretrained(GOLDEN / family, dtype=torch.float32).eval()


def fresh(family: str) -> Any:
    return copy.deepcopy(plain(family))


def block_of(model: Any) -> Any:
    return model.model.layers[-1].mlp


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def answer(model: Any, **options: Any) -> list[int]:
    """Of a greedy decode."""
    if isinstance(model, LLaDAMoEModelLM):
        options |= {"gen_length": 16, "block_length": 8, "steps": 8}
        return epoch_moe.generate_semi_autoregressive(model, IDS, **options).answers[0].tolist()
    options = {"gen_length": 16, "block_length": 8, "steps": 4} | options
    return epoch_moe.generate(model, IDS, **options).answers[0].tolist()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid_group"])
def test_autocast_leaves_routers_alone(kind: Any) -> None:
    spec = RouterSpec(kind=kind, num_experts=64, top_k=8)
    # Nearly alike, as a block of MASK rows is.
    x_TH, gate_EH = torch.randn(1, 128) + 0.01 * torch.randn(32, 128), 0.05 * torch.randn(64, 128)
    want, scores = route(x_TH, gate_EH, None, spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_TE = router_logits(x_TH, gate_EH, spec)
        got, _ = route(x_TH, gate_EH, None, spec)
    assert torch.equal(logits_TE, scores.logits_TE) and torch.equal(got.ids_TK, want.ids_TK)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_experts_under_autocast_are_what_linear_layers_are(family: str) -> None:
    model = fresh(family)
    experts = copy.deepcopy(block_of(model).experts)
    epoch_moe.patch(model, None)
    block, x_TH = block_of(model), torch.randn(6, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_TH = first(block(x_TH[None]))[0]
        routing, _ = route(x_TH, *block.spec.read_gate(block), block.spec.router)
        rows = [
            sum(experts[int(e)](x) * w for e, w in zip(ids, weights, strict=True))
            for x, ids, weights in zip(x_TH, routing.ids_TK, routing.weights_TK, strict=True)
        ]
        want_TH = torch.stack(rows)
        if block.spec.shared is not None:
            want_TH = want_TH + block.shared_experts(x_TH)
    assert out_TH.dtype == torch.bfloat16
    assert relative_rms(out_TH.float(), want_TH.float()) < 2**-7  # two roundings to bfloat16, in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_loop_runs_under_autocast(family: str, dtype: torch.dtype) -> None:
    model, resident = fresh(family), fresh(family)
    editing = {"editing_threshold": 0.5} if family == "llada2" else {}
    epoch_moe.patch(resident, None, residency=ResidencyConfig(budget=0.5))
    with torch.autocast("cpu", dtype=dtype):
        unpatched = answer(model)
        epoch_moe.patch(model, "exact")
        assert answer(model) == answer(model, plan=None) == answer(resident) == unpatched
        assert answer(model, **editing) == answer(model, plan=None, **editing)
        answer(model, plan=EpochConfig(), **editing)


def test_kernels_under_autocast_compute_in_the_dtype_of_their_weights() -> None:
    model = fresh("llada2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = answer(model, gen_length=8)
        epoch_moe.patch(model, EpochConfig(coverage=None, refresh_interval=1, backend="triton"))
        assert answer(model, gen_length=8) == dense


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(family: str, dtype: torch.dtype) -> None:
    model = fresh(family)
    runs: list[Callable[[], object]] = [
        lambda: answer(model),
        lambda: epoch_moe.patch(model, EpochConfig()) and answer(model),
        lambda: answer(model, temperature=0.7, generator=torch.Generator().manual_seed(3)),
    ]
    if family == "llada2":
        runs.append(lambda: answer(model, editing_threshold=0.5))
    else:
        runs.append(lambda: answer(model, remasking="random", generator=torch.Generator().manual_seed(3)))
    wants = [run() for run in runs]
    epoch_moe.unpatch(model)
    try:
        torch.set_default_dtype(dtype)
        gots = [run() for run in runs]
    finally:
        torch.set_default_dtype(torch.float32)
    assert gots == wants


class LowRank(nn.Linear):
    """What an adapter library puts in the place of a Linear: its weight, and something added."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


def adapter(block: Any) -> None:
    block.gate = LowRank(block.gate)


def hook(block: Any) -> None:
    block.gate.register_forward_hook(lambda module, args, out: out)


def forward(block: Any) -> None:
    block.gate.forward = lambda x: x


def subclass(block: Any) -> None:
    base = type(block.gate)
    block.gate.__class__ = type("Mine", (base,), {"forward": lambda self, x: base.forward(self, x)})


WRAPS = [("llada_moe", adapter), *((family, wrap) for family in FAMILIES for wrap in (hook, forward, subclass))]


@pytest.mark.parametrize(("family", "wrap"), WRAPS)
@torch.no_grad()
def test_what_is_put_on_a_gate_is_refused_before_and_after_patch(family: str, wrap: Callable[[Any], None]) -> None:
    model = fresh(family)
    wrap(block_of(model))
    with pytest.raises(TypeError, match="gate"):
        epoch_moe.patch(model)
    model = fresh(family)
    epoch_moe.patch(model)
    model(IDS)
    wrap(block_of(model))
    with pytest.raises(TypeError, match="gate"):
        model(IDS)


@torch.no_grad()
def test_rows_cached_from_old_weights_are_not_served() -> None:
    """A change within a block: the next forward computes all its rows, and says why."""
    model = fresh("llada2")
    epoch_moe.patch(model, EpochConfig(coverage=None, refresh_interval=None))
    mask_id = model.config.mask_token_id
    ids_BS = torch.cat([IDS, torch.full((1, 6), mask_id)], 1)
    # With how many layers begin anew: a layer compares its own experts, and what else the model has is compared before
    # the first layer, so that all begin anew.
    changes: list[tuple[Callable[[Any], object], int]] = [
        (lambda b: b.experts[1].up_proj.weight.mul_(2), 1),
        (lambda b: setattr(b.experts[2].down_proj.weight, "data", b.experts[2].down_proj.weight.data * 2), 1),
        (lambda b: b.gate.weight.mul_(1.5), len(model._epoch_moe.blocks)),
    ]
    expected = 0
    context, dense = epoch_moe.open_context(model), epoch_moe.open_context(model, None)
    with context.block(batch=1, window=16), dense.block(batch=1, window=16):
        for number, (change, layers) in enumerate([(lambda b: None, 0), *changes]):
            change(block_of(model))
            with context.iteration(ids_BS, mask_id=mask_id):
                got = model.model(ids_BS).last_hidden_state
            with dense.iteration(ids_BS, mask_id=mask_id):
                want = model.model(ids_BS).last_hidden_state
            assert torch.equal(got, want), number
            expected += layers
            assert context.counters.read().fallbacks == ({"version": expected} if expected else {}), number


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_that_are_not_numbers_are_an_error_with_request_and_weight(family: str, temperature: float) -> None:
    model = fresh(family)
    with torch.no_grad():
        block_of(model).gate.weight[1, 2] = float("nan")
    for plan in (None, "default"):
        with pytest.raises(FloatingPointError, match=r"request 0 .* model\.layers\.\d+\.mlp\.gate\.weight holds"):
            answer(model, temperature=temperature)
        if plan is None:
            epoch_moe.patch(model)


def test_only_the_request_that_had_them_is_named() -> None:
    model = fresh("llada2")
    with torch.no_grad():
        model.model.word_embeddings.weight[7] = float("inf")
    with pytest.raises(FloatingPointError, match=r"request 1 .*word_embeddings"):
        epoch_moe.generate(model, [[3, 4, 5], [3, 7, 5]], gen_length=8, block_length=8, steps=4)


def test_a_temperature_next_to_nothing_draws_the_best_token() -> None:
    logits_RV = torch.randn(50, 40)
    tokens_R, confidence_R = sample_tokens(logits_RV, 1e-40)
    assert torch.equal(tokens_R, logits_RV.argmax(-1)) and torch.equal(confidence_R, torch.ones(50))


@pytest.mark.parametrize("value", [-1e-6, float("nan"), "1e-6"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_epsilon_that_breaks_the_norms_is_refused(family: str, value: object) -> None:
    with pytest.raises(ValueError, match="rms_norm_eps="):
        type(plain(family).config)(**(plain(family).config.to_dict() | {"rms_norm_eps": value}))
