"""Masks, cache, outputs, dtypes and training of the LLaDA2 classes."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import warnings

import pytest
import torch
from helpers import additive, block_causal, load_golden, relative_error
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from epoch_moe.models import load_model
from epoch_moe.models.layers import attention_bias
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
CACHE_FIELD = "cache" if "cache" in {f.name for f in dataclasses.fields(MoeModelOutputWithPast)} else "past_key_values"
MASK_ID = 125


def tiny_config(**changes: object) -> LLaDA2MoeConfig:
    return LLaDA2MoeConfig(**(load_golden("llada2").config | changes))


@pytest.fixture
def model() -> LLaDA2MoeModelLM:
    return load_model(load_golden("llada2").folder)[0]


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 120, (2, 24))


def logits_of(model: LLaDA2MoeModelLM, ids: Tensor, **kwargs: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


# ------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_mask_is_bidirectional(model: LLaDA2MoeModelLM, ids: Tensor, attention: str) -> None:
    model.set_attn_implementation(attention)
    logits = logits_of(model, ids)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 120
    assert (logits_of(model, changed)[:, 0] - logits[:, 0]).abs().max() > 1e-4  # the first row sees the last
    everything = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    for mask in (everything, additive(everything), torch.ones(2, 24), torch.ones(2, 24, dtype=torch.long)):
        assert relative_error(logits_of(model, ids, attention_mask=mask), logits) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_padding_on_the_right_is_as_if_dropped(
    model: LLaDA2MoeModelLM, ids: Tensor, attention: str, dtype: torch.dtype
) -> None:
    model.set_attn_implementation(attention)
    mask = torch.ones(2, 24)
    mask[1, 17:] = 0
    logits = logits_of(model, ids, attention_mask=mask.to(dtype))
    assert relative_error(logits[1, :17], logits_of(model, ids[1:, :17])[0]) < 1e-5
    assert relative_error(logits[0], logits_of(model, ids[:1])[0]) < 1e-5


def test_padding_on_the_left_is_as_if_dropped(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert relative_error(logits[1, 7:], logits_of(model, ids[1:, 7:])[0]) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("heads", [1, 4])
def test_bool_mask_equals_additive_mask(model: LLaDA2MoeModelLM, ids: Tensor, attention: str, heads: int) -> None:
    model.set_attn_implementation(attention)
    mask = block_causal(24, 8).repeat(2, heads, 1, 1)
    mask[1, :, :, :3] = False
    mask |= torch.eye(24, dtype=torch.bool)
    by_bool = logits_of(model, ids, attention_mask=mask)
    assert torch.equal(by_bool, logits_of(model, ids, attention_mask=additive(mask)))
    lowest = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert relative_error(logits_of(model, ids, attention_mask=lowest), by_bool) < 1e-5
    assert relative_error(by_bool, logits_of(model, ids)) > 1e-3


def test_block_causal_mask_hides_later_blocks(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    changed = ids.clone()
    changed[:, 16:] = MASK_ID
    mask = block_causal(24, 8)
    before, after = (logits_of(model, x, attention_mask=mask) for x in (ids, changed))
    assert relative_error(after[:, :16], before[:, :16]) < 1e-5
    assert relative_error(after[:, 16:], before[:, 16:]) > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bool", "additive", "padding", "bf16"])
def test_rows_that_see_nothing_stay_finite(model: LLaDA2MoeModelLM, ids: Tensor, attention: str, kind: str) -> None:
    model.set_attn_implementation(attention)
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    mask[1, :, :, :5] = False
    mask[1, :, :5] = False  # the padding rows themselves
    given: Tensor = {
        "bool": mask,
        "additive": additive(mask),
        "padding": torch.tensor([[1] * 24, [0] * 24]),
        # A "lowest value" mask made in fp32 becomes -inf everywhere once it is rounded to bf16.
        "bf16": torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min),
    }[kind]
    if kind == "bf16":
        model = model.to(torch.bfloat16)
    logits = logits_of(model, ids, attention_mask=given)
    assert torch.isfinite(logits).all()
    if kind in ("bool", "additive"):
        positions = torch.arange(5, 24)[None]
        alone = logits_of(model, ids[1:, 5:], position_ids=positions)
        assert relative_error(logits[1:, 5:], alone) < 1e-5


def test_eager_equals_sdpa(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    mask = block_causal(24, 8)
    model.set_attn_implementation("sdpa")
    sdpa = logits_of(model, ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert relative_error(logits_of(model, ids, attention_mask=mask), sdpa) < 1e-5


@pytest.mark.parametrize(
    ("mask", "quoted"),
    [
        (torch.ones(2, 23), r"\(2, 23\).*\[2, 24\]"),
        (torch.ones(24), r"\(24,\)"),
        (torch.ones(2, 24, 24, dtype=torch.bool), r"\(2, 24, 24\)"),
        (torch.ones(3, 1, 24, 24, dtype=torch.bool), r"\(3, 1, 24, 24\)"),
        (torch.ones(2, 1, 24, 23, dtype=torch.bool), r"\(2, 1, 24, 23\)"),
        (torch.ones(2, 1, 8, 24, dtype=torch.bool), r"\(2, 1, 8, 24\)"),
        (torch.ones(2, 3, 24, 24, dtype=torch.bool), r"\(2, 3, 24, 24\).*4, 24, 24"),
        (torch.ones(2, 1, 24, 24, dtype=torch.long), r"torch.int64.*mask.bool\(\)"),
        (torch.ones(2, 1, 24, 24), r"holds 1.0.*mask.bool\(\)"),
        (torch.full((2, 24), -1e9), r"holds -1000000000.0.*1 \(real\) and 0 \(padding\)"),
        (torch.full((2, 24), 2), r"holds 2"),
    ],
)
def test_wrong_masks_are_refused_with_their_value(
    model: LLaDA2MoeModelLM, ids: Tensor, mask: Tensor, quoted: str
) -> None:
    with pytest.raises(ValueError, match=quoted):
        model(ids, attention_mask=mask)


def test_attention_bias_of_a_broadcast_query() -> None:
    mask = torch.tensor([[[[True, False, True]]]])
    bias = attention_bias(mask, 1, 2, 3, torch.float32)
    assert bias is not None
    expected = torch.tensor([0.0, float("-inf"), 0.0]).expand(1, 1, 2, 3)
    assert torch.equal(bias, expected)


# ------------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_cached_blocks_equal_the_block_causal_forward(
    model: LLaDA2MoeModelLM, ids: Tensor, attention: str, argument: str
) -> None:
    model.set_attn_implementation(attention)
    full = logits_of(model, ids, attention_mask=block_causal(24, 8))
    cache = DynamicCache()
    for start in range(0, 24, 8):
        block = logits_of(model, ids[:, start : start + 8], **{argument: cache})
        assert cache.get_seq_length() == start + 8
        assert relative_error(block, full[:, start : start + 8]) < 1e-5


def test_cached_block_with_explicit_masks_and_positions(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    full = logits_of(model, ids, attention_mask=block_causal(24, 8))
    for mask in (torch.ones(2, 24), torch.zeros(1, 1, 8, 24), torch.ones(2, 1, 1, 24, dtype=torch.bool)):
        cache = DynamicCache()
        logits_of(model, ids[:, :16], past_key_values=cache, attention_mask=block_causal(16, 8))
        positions = torch.arange(16, 24)[None]
        block = logits_of(model, ids[:, 16:], past_key_values=cache, attention_mask=mask, position_ids=positions)
        assert relative_error(block, full[:, 16:]) < 1e-5


def test_use_cache_returns_a_filled_cache(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    with torch.no_grad():
        out = model(ids, use_cache=True)
        assert CACHE_FIELD not in model(ids)
    assert out[CACHE_FIELD].get_seq_length() == 24


def test_wrong_caches_are_refused(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    from transformers.cache_utils import StaticCache

    with pytest.raises(TypeError, match="past_key_values is a tuple: expected a transformers Cache"):
        model(ids, past_key_values=())
    with pytest.raises(TypeError, match=r"StaticCache.*DynamicCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=64))
    with pytest.raises(ValueError, match="not both"):
        model(ids, past_key_values=DynamicCache(), cache=DynamicCache())


# ----------------------------------------------------------------------------------------------------- other inputs


@pytest.mark.parametrize(("bad", "quoted"), [(128, "holds 128: expected ids in 0..127"), (-100, "holds -100")])
def test_ids_out_of_range(model: LLaDA2MoeModelLM, ids: Tensor, bad: int, quoted: str) -> None:
    ids[1, 3] = bad
    with pytest.raises(ValueError, match=quoted):
        model(ids)
    with pytest.raises(ValueError, match=quoted):
        model.model(ids)


def test_other_wrong_inputs(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\(24,\): expected \[batch, positions\]"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"torch.float32: expected int64"):
        model(ids.float())
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=torch.zeros(2, 24, 64))
    with pytest.raises(ValueError, match=r"\(2, 24, 63\).*hidden_size=64"):
        model(inputs_embeds=torch.zeros(2, 24, 63))
    with pytest.raises(ValueError, match=r"\(1, 23\)"):
        model(ids, position_ids=torch.arange(23)[None])
    with pytest.raises(TypeError, match="attention_msk"):
        model(ids, attention_msk=None)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=ids, logits_to_keep=3)


def test_embeddings_in_place_of_ids(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(logits_of(model, None, inputs_embeds=embedded), logits_of(model, ids))


def test_positions_are_relative_and_matter(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    logits = logits_of(model, ids)
    shifted = logits_of(model, ids, position_ids=torch.arange(100, 124)[None])
    stretched = logits_of(model, ids, position_ids=torch.arange(0, 48, 2)[None])
    assert relative_error(shifted, logits) < 1e-4
    assert relative_error(stretched, logits) > 1e-2


@pytest.mark.parametrize("name", ["llada2", "llada2_2_routing"])
def test_no_sequences(name: str) -> None:
    model = load_model(load_golden(name).folder)[0]
    assert logits_of(model, torch.zeros(0, 8, dtype=torch.long)).shape == (0, 8, 128)


# ------------------------------------------------------------------------------------------------------------ outputs


def test_outputs_on_request(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(ids)
        out = model(ids, output_hidden_states=True, output_router_logits=True, output_attentions=True)
    assert plain.hidden_states is plain.attentions is plain.router_logits is None
    assert len(out.hidden_states) == 4
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(ids))
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert len(out.router_logits) == 2
    assert out.router_logits[0].shape == (2, 24, 16)
    assert len(out.attentions) == 3
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 24))


def test_outputs_by_config(ids: Tensor) -> None:
    config = tiny_config(output_hidden_states=True, output_router_logits=True)
    out = LLaDA2MoeModelLM(config)(ids)
    assert len(out.hidden_states) == 4
    assert len(out.router_logits) == 2
    config.return_dict = False
    assert isinstance(LLaDA2MoeModelLM(config)(ids), tuple)


def test_attentions_need_eager(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"has 'sdpa'.*set_attn_implementation\('eager'\)"):
        model(ids, output_attentions=True)


def test_tuples_and_kept_logits(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    logits = logits_of(model, ids)
    with torch.no_grad():
        assert torch.equal(model(ids, return_dict=False)[0], logits)
    torch.testing.assert_close(logits_of(model, ids, logits_to_keep=5), logits[:, -5:])
    torch.testing.assert_close(logits_of(model, ids, logits_to_keep=torch.tensor([3, 1])), logits[:, [3, 1]])


def test_normal_use_warns_of_nothing(ids: Tensor, caplog: pytest.LogCaptureFixture, tmp_path: object) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*has no tokenizer files")
            model, _ = load_model(load_golden("llada2").folder)
            with torch.no_grad():
                out = model(ids, use_cache=True)
                model(ids, past_key_values=out[CACHE_FIELD])
                out.to_tuple()
            model.save_pretrained(tmp_path)
            load_model(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


# ----------------------------------------------------------------------------------------------- dtypes, copies, train


@pytest.mark.parametrize("change", ["to", "half", "bfloat16", "double_then_half", "deepcopy", "pickle"])
def test_expert_bias_stays_fp32(change: str) -> None:
    model = LLaDA2MoeModelLM(tiny_config())
    gates = [model.model.layers[i].mlp.gate for i in (1, 2)]
    values = [torch.randn(16) + 1 / 3 for _ in gates]
    for gate, value in zip(gates, values, strict=True):
        gate.expert_bias.copy_(value)
    model = {
        "to": lambda m: m.to(torch.bfloat16),
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "double_then_half": lambda m: m.double().half(),
        "deepcopy": lambda m: copy.deepcopy(m.to(torch.bfloat16)),
        "pickle": lambda m: pickle.loads(pickle.dumps(m.to(torch.bfloat16))),
    }[change](model)
    assert model.lm_head.weight.dtype in (torch.bfloat16, torch.float16)
    for i, value in zip((1, 2), values, strict=True):
        bias = model.model.layers[i].mlp.gate.expert_bias
        assert bias.dtype == torch.float32
        assert torch.equal(bias, value)


@pytest.mark.parametrize("change", ["deepcopy", "pickle", "to_and_back", "assign"])
def test_copies_compute_the_same(model: LLaDA2MoeModelLM, ids: Tensor, change: str) -> None:
    logits = logits_of(model, ids)  # the experts are stacked now
    if change == "deepcopy":
        other = copy.deepcopy(model)
    elif change == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif change == "to_and_back":
        other = model.double().float()
    else:
        other = LLaDA2MoeModelLM(model.config).eval()
        logits_of(other, ids)
        other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert torch.equal(logits_of(other, ids), logits)
    with torch.no_grad():
        other.model.layers[1].mlp.experts[0].up_proj.weight.mul_(3)
    assert not torch.equal(logits_of(other, ids), logits)
    if other is not model:
        assert torch.equal(logits_of(model, ids), logits)


def test_inference_mode_first_then_training(ids: Tensor) -> None:
    model = LLaDA2MoeModelLM(tiny_config())
    with torch.inference_mode():
        model(ids)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[1].mlp.experts[0].up_proj.weight.grad is not None


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradient_checkpointing(ids: Tensor, reentrant: bool | None) -> None:
    model = LLaDA2MoeModelLM(tiny_config()).train()
    model(ids, labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert sum("experts." in name for name in plain) == 2 * 16 * 3 + 2 * 3
    model.zero_grad()
    kwargs = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 renamed the method
        model.gradient_checkpointing_enable(**kwargs)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[1].register_forward_pre_hook(count)  # a recomputation stops before post-hooks
    loss = model(ids, labels=ids).loss
    assert calls == 1
    loss.backward()
    assert calls == 2  # once more for the backward pass
    for name, p in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(p.grad, plain[name])
    with pytest.raises(ValueError, match=r"gradient checkpointing.*K/V twice"):
        model(ids, past_key_values=DynamicCache())


def test_loss_is_at_each_position(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    labels = torch.full_like(ids, -100)
    labels[0, 3] = 7
    with torch.no_grad():
        out = model(ids, labels=labels)
    assert torch.allclose(out.loss, -out.logits[0, 3].log_softmax(-1)[7])


def test_gate_hook_gets_the_released_triple(model: LLaDA2MoeModelLM, ids: Tensor) -> None:
    seen: list[tuple[Tensor, ...]] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _g, _a, out: seen.append(out))
    logits_of(model, ids)
    ((ids_TK, weights_TK, logits_TE),) = seen
    assert ids_TK.dtype == torch.int64
    torch.testing.assert_close(weights_TK.sum(-1), torch.full((48,), 2.5))
    assert logits_TE.shape == (48, 16)
