"""Our LLaDA-MoE classes against what the released ones computed, and the layouts that configurations describe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_golden, assert_gradients, gradients_of, load_golden, relative_error
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import epoch_moe
from epoch_moe.models import load_model, register_auto_classes
from epoch_moe.models.llada_moe import LLaDAConfig, LLaDAMoEConfig, LLaDAMoEModelLM

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
NAMES = ("llada_moe", "llada_moe_shared_bias", "llada_moe_bf16")


def load(name: str, **kwargs: object) -> LLaDAMoEModelLM:
    return load_model(load_golden(name).folder, **kwargs)[0]


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name.endswith("bf16") else torch.float32


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, attention: str, patched: bool) -> None:
    golden = load_golden(name)
    model = load(name, attn_implementation=attention)
    if patched:
        report = epoch_moe.patch(model, None)
        assert report.family == "llada_moe" and len(report.patched) == len(golden.moe_layers)
    with torch.no_grad():
        logits = model(golden.forward["input_ids"]).logits
    assert logits.dtype == torch.float32
    assert_golden(logits, golden.forward["logits"], dtype_of(name))


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("name", NAMES)
def test_moe_blocks(name: str, patched: bool) -> None:
    golden = load_golden(name)
    model = load(name)
    if patched:
        epoch_moe.patch(model, None)
    for layer in golden.moe_layers:
        with torch.no_grad():
            out = model.model.layers[layer].mlp(golden.forward[f"layer{layer}.moe_in"])
        assert_golden(out, golden.forward[f"layer{layer}.moe_out"], dtype_of(name))


def test_an_adapter_on_the_gate_is_called() -> None:
    """As in the released code: its part shows in the logits, and in the gradients."""
    from peft import LoraConfig, get_peft_model

    model, ids = load("llada_moe"), load_golden("llada_moe").forward["input_ids"]
    before = model(ids).logits.detach()
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["gate"], init_lora_weights=False))
    gates = [layer.mlp.gate for layer in model.model.layers]
    got = wrapped(ids, labels=ids)
    assert relative_error(got.logits.detach(), before) > 1e-3
    got.loss.backward()
    assert all(float(gate.lora_B["default"].weight.grad.abs().max()) > 0 for gate in gates)
    merged = wrapped.merge_and_unload()
    assert relative_error(merged(ids).logits.detach(), got.logits.detach()) < 1e-5


def test_a_padding_mask_hides_padding() -> None:
    golden, model = load_golden("llada_moe"), load("llada_moe")
    ids = golden.forward["input_ids"][:1]
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    with torch.no_grad():
        masked = model(ids, attention_mask=mask).logits[:, 5:]
        alone = model(ids[:, 5:], position_ids=torch.arange(5, ids.shape[1])[None]).logits
        unmasked = model(ids).logits[:, 5:]
    assert relative_error(masked, alone) < 1e-5
    assert relative_error(unmasked, alone) > 1e-2


@pytest.mark.parametrize("model_type", ["llada", "lladamoe"])
def test_both_spellings_of_the_model_type_load(model_type: str, tmp_path: Path) -> None:
    golden = load_golden("llada_moe_shared_bias")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden.folder / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(golden.config | {"model_type": model_type}))
    model, _ = load_model(tmp_path)
    assert type(model) is LLaDAMoEModelLM and model.config.model_type == model_type
    with torch.no_grad():
        assert_golden(model(golden.forward["input_ids"]).logits, golden.forward["logits"], torch.float32)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    assert json.loads((saved / "config.json").read_text())["model_type"] == model_type
    written, stored = load_file(saved / "model.safetensors"), golden.weights
    assert written.keys() == stored.keys() and all(torch.equal(written[k], stored[k]) for k in stored)
    register_auto_classes()
    config = AutoConfig.from_pretrained(saved)
    assert type(config) is (LLaDAConfig if model_type == "llada" else LLaDAMoEConfig)
    assert type(AutoModelForCausalLM.from_pretrained(saved)) is LLaDAMoEModelLM


def test_the_released_sizes_are_the_defaults() -> None:
    config = LLaDAMoEConfig()
    with torch.device("meta"):
        model = LLaDAMoEModelLM(config)
    assert sum(p.numel() for p in model.parameters()) == 7_356_880_896
    assert len(model.state_dict()) == 3_219
    assert config.sizes().moe_layers == tuple(range(16)) and config.sizes().head_dim == 128


def test_config_json_keeps_the_released_keys(tmp_path: Path) -> None:
    golden = load_golden("llada_moe")
    LLaDAMoEConfig.from_pretrained(golden.folder).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written.get(key) for key in golden.config} == golden.config
    assert "rope_parameters" not in written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid': expected 'softmax'"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True: expected False"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5: expected 1"),
        ({"router_num_group": 8}, "router_num_group=8"),
        ({"moe_layer_freq": [1, 1]}, r"moe_layer_freq=\[1, 1\].*each of the 16 layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 2050}, "hidden_size=2050"),
        ({"num_experts_per_tok": 65}, "top_k"),
    ],
)
def test_settings_that_do_not_exist_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLaDAMoEConfig(**change)  # type: ignore[arg-type]


def test_values_are_clipped_where_the_configuration_says_so() -> None:
    golden = load_golden("llada_moe")
    with torch.no_grad():
        clipped = load_model(golden.folder)[0]
        clipped.config.clip_qkv = 1e-6  # next to nothing is left of values: attention adds nothing
        dead = load_model(golden.folder)[0]
        for layer in dead.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        ids = golden.forward["input_ids"]
        assert relative_error(clipped(ids).logits, dead(ids).logits) < 1e-4
        assert relative_error(load("llada_moe")(ids).logits, dead(ids).logits) > 1e-2


def test_gradients_reach_experts_and_gate_patched_and_not() -> None:
    golden = load_golden("llada_moe_shared_bias")
    plain, patched, exact = (load("llada_moe_shared_bias").train() for _ in range(3))
    epoch_moe.patch(patched, None)
    ids = golden.forward["input_ids"]
    for model in (plain, patched, exact.double()):
        model(ids, labels=ids).loss.backward()
    assert_gradients(gradients_of(patched), gradients_of(plain), gradients_of(exact))
    for name, parameter in plain.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) or "experts." in name, name
