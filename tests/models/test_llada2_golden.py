"""Our LLaDA2 classes against what the released ones computed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import additive, assert_as_accurate, assert_golden, load_golden
from torch import Tensor

from epoch_moe.models import load_model
from epoch_moe.models.llada2 import LLaDA2MoeModelLM

NAMES = ("llada2", "llada2_1", "llada2_2_routing", "llada2_bf16")
pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")


@cache
def load(name: str, **kwargs: object) -> LLaDA2MoeModelLM:
    """One model for all tests, to be left as it was."""
    return load_model(load_golden(name).folder, **kwargs)[0]


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name.endswith("bf16") else torch.float32


def assert_same_routing(ids_TK: Tensor, weights_TK: Tensor, golden_ids_TK: Tensor, golden_weights_TK: Tensor) -> None:
    """The same set of experts per row, each with the same weight, in whatever order."""
    ids_TK, order = ids_TK.sort(dim=-1)
    golden_ids_TK, golden_order = golden_ids_TK.sort(dim=-1)
    assert torch.equal(ids_TK, golden_ids_TK)
    torch.testing.assert_close(
        weights_TK.gather(1, order), golden_weights_TK.gather(1, golden_order), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask_kind", ["bool", "additive"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, attention: str, mask_kind: str) -> None:
    golden = load_golden(name)
    model = load(name, attn_implementation=attention)
    mask = golden.mask() if mask_kind == "bool" else additive(golden.mask(), dtype_of(name))
    with torch.no_grad():
        logits = model(golden.forward["input_ids"], attention_mask=mask).logits
    assert logits.dtype == torch.float32
    assert_golden(logits, golden.forward["logits"], dtype_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_load_of_any_checkpoint(name: str) -> None:
    golden = load_golden(name)
    model = load(name, dtype="bfloat16")
    with torch.no_grad():
        logits = model(golden.forward["input_ids"], attention_mask=golden.mask()).logits
    if dtype_of(name) == torch.bfloat16:
        assert_golden(logits, golden.forward["logits"], torch.bfloat16)
    else:  # other weights than the golden run's: only coarse agreement can be expected
        agree = (logits.argmax(-1) == golden.forward["logits"].argmax(-1)).float().mean()
        assert agree > 0.8


@pytest.mark.parametrize("name", NAMES)
def test_routing_of_golden_inputs(name: str) -> None:
    golden = load_golden(name)
    model = load(name)
    for layer in golden.moe_layers:
        gate, x_BSH = model.model.layers[layer].mlp.gate, golden.forward[f"layer{layer}.moe_in"]
        ids_TK, weights_TK, logits_TE = gate(x_BSH)
        assert weights_TK.dtype == logits_TE.dtype == torch.float32
        exact_TE = x_BSH.flatten(0, 1).double() @ gate.weight.double().T
        assert_as_accurate(logits_TE, golden.forward[f"layer{layer}.router_logits"], exact_TE)
        assert_same_routing(
            ids_TK,
            weights_TK,
            golden.forward[f"layer{layer}.topk_idx"],
            golden.forward[f"layer{layer}.topk_weight"],
        )


@pytest.mark.parametrize("name", NAMES)
def test_routing_inside_the_forward(name: str) -> None:
    golden = load_golden(name)
    model = load(name)
    seen: dict[int, tuple[Tensor, ...]] = {}
    hooks = [
        model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda _gate, _args, out, layer=layer: seen.__setitem__(layer, out)
        )
        for layer in golden.moe_layers
    ]
    with torch.no_grad():
        model(golden.forward["input_ids"], attention_mask=golden.mask())
    for hook in hooks:
        hook.remove()
    assert sorted(seen) == golden.moe_layers
    for layer, (ids_TK, _, _) in seen.items():
        same = ids_TK.sort(-1).values == golden.forward[f"layer{layer}.topk_idx"].sort(-1).values
        # bf16 attention rounds differently between kernels, which may turn a near-tie in a later layer.
        assert same.all(-1).float().mean() >= (1.0 if dtype_of(name) == torch.float32 else 0.9)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_moe_blocks(name: str, grad: bool, training: bool) -> None:
    golden = load_golden(name)
    model = load(name).train(training)
    for layer in golden.moe_layers:
        with torch.set_grad_enabled(grad):
            out, (logits_BSE, ids_BSK) = model.model.layers[layer].mlp(golden.forward[f"layer{layer}.moe_in"])
        batch, seq_len = golden.forward["input_ids"].shape
        assert logits_BSE.shape == (batch, seq_len, golden.config["num_experts"])
        assert ids_BSK.shape == (batch, seq_len, golden.config["num_experts_per_tok"])
        assert_golden(out, golden.forward[f"layer{layer}.moe_out"], dtype_of(name))
    model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_keys_and_values_are_the_files(name: str) -> None:
    golden = load_golden(name)
    model = load(name)
    state = model.state_dict()
    assert state.keys() == golden.weights.keys()
    for key, value in golden.loaded.items():
        assert state[key].dtype == value.dtype, key
        assert torch.equal(state[key], value), key
