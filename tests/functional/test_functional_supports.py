"""`supports`, and what the functional package needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import load_golden

import epoch_moe.functional
from epoch_moe.config import EpochConfig
from epoch_moe.functional import RouterSpec, router_spec, supports
from epoch_moe.models.llada2 import LLaDA2MoeConfig

MINI = {
    "model_type": "llada2_moe",
    "hidden_act": "silu",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
}
LLADA_MOE = {"model_type": "lladamoe", "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": None}


@pytest.mark.parametrize("as_object", [False, True])
def test_models_that_can_be_served(as_object: bool) -> None:
    for config, want in (
        (
            MINI,
            RouterSpec(
                kind="sigmoid_group", num_experts=256, top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5
            ),
        ),
        (LLADA_MOE, RouterSpec(kind="softmax", num_experts=64, top_k=8)),
        ({**LLADA_MOE, "model_type": "llada"}, RouterSpec(kind="softmax", num_experts=64, top_k=8)),
    ):
        given = SimpleNamespace(**config) if as_object else config
        assert supports(given) == (True, "") and router_spec(given) == want
        assert supports(want) == (True, "")
    for name in ("llada2", "llada2_1", "llada_moe", "llada_moe_shared_bias"):
        assert supports(load_golden(name).config) == (True, "")


def test_the_library_s_own_configuration_says_the_same() -> None:
    config = LLaDA2MoeConfig(**load_golden("llada2").config)
    assert supports(config) == (True, "") and router_spec(config) == config.router_spec()
    assert router_spec(config.to_dict()) == config.router_spec()
    pooled = LLaDA2MoeConfig(**load_golden("llada2_2_routing").config)
    assert router_spec(pooled) == pooled.router_spec()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe': expected one of 'llada2_moe'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected 'silu'"),
        ({"score_function": "softmax"}, "score_function='softmax': expected 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False: expected True"),
        ({"num_experts": None}, "num_experts=None: expected a whole number, as a llada2_moe model's"),
        ({"n_group": "8"}, "n_group='8'"),
        ({"n_group": 7}, "num_experts=256 must be a multiple of n_group=7"),
        ({"num_experts_per_tok": 300}, "top_k=300 must lie in 1..num_experts=256"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor=None: expected a number"),
        ({"quantization_config": {"bits": 4}}, "quantised experts are not supported"),
        ({"expert_capacity": 48, "block_size": 32}, "'block_pool' (LLaDA2.2) picks experts from the scores of whole"),
        ({"expert_capacity": 48}, "block_size=None"),
    ],
)
def test_models_that_cannot_be_served_get_a_reason(change: dict[str, object], reason: str) -> None:
    config = {**MINI, **change}
    for given in (config, SimpleNamespace(**config)):
        able, why = supports(given)
        assert not able and reason in why


def test_settings() -> None:
    assert supports(EpochConfig()) == supports(EpochConfig.exact()) == (True, "")
    able, why = supports(EpochConfig.paper())
    assert not able and "support_scope='batch'" in why and "single slot" in why
    assert supports(EpochConfig.paper(support_scope="sequence")) == (True, "")
    for odd in (None, 3, "llada2_moe", []):
        assert not supports(odd)[0]
    assert supports({**LLADA_MOE, "router_num_group": 4}) == (False, "router_num_group=4: expected 1")


def test_every_public_name_is_there() -> None:
    assert all(hasattr(epoch_moe.functional, name) for name in epoch_moe.functional.__all__)
