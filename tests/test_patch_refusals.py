"""Experts that `patch` refuses, made by the libraries that make them or, where that takes a GPU, as they make them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import GOLDEN, relative_error
from torch import Tensor, nn

import epoch_moe
from epoch_moe.decoding import loop_of
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM

PATH = "model.layers.2.mlp"
IDS = torch.arange(24).view(2, 12) % 120
CLASSES: dict[str, Any] = {"llada2": LLaDA2MoeModelLM, "llada_moe": LLaDAMoEModelLM}
HIDDEN, INNER = 64, 32
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft's imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@cache
def plain(family: str) -> Any:
    return CLASSES[family].from_pretrained(GOLDEN / family, dtype=torch.float32).eval()


@pytest.fixture(params=list(CLASSES))
def model(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(plain(request.param))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def expert_of(model: nn.Module) -> Any:
    return model.get_submodule(PATH).experts[5]  # type: ignore[union-attr, index]


def assert_refused(model: nn.Module, reason: str) -> None:
    before, modules = dict(model.named_parameters()), dict(model.named_modules())
    with pytest.raises(TypeError, match=rf"{PATH} cannot be patched: .*{reason}"):
        epoch_moe.patch(model, None)
    assert not hasattr(model, "_epoch_moe") and dict(model.named_modules()) == modules
    after = dict(model.named_parameters())
    assert all(after[name] is value for name, value in before.items())
    report = epoch_moe.patch(model, None, strict=False)
    assert PATH in report.skipped and PATH not in report.patched and len(report.patched) >= 1
    epoch_moe.unpatch(model)


def replace_up(make: Callable[[Tensor], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        expert = expert_of(model)
        expert.up_proj = make(expert.up_proj.weight.detach())

    return change


def bnb_4bit(weight: Tensor) -> nn.Module:
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(HIDDEN, INNER, bias=False)
    linear.load_state_dict({"weight": weight})
    linear = linear.to("cpu")
    assert linear.weight.dtype == torch.uint8  # quantised by that
    return linear


def bnb_8bit(weight: Tensor) -> nn.Module:
    import bitsandbytes

    linear = bitsandbytes.nn.Linear8bitLt(HIDDEN, INNER, bias=False, has_fp16_weights=False)
    linear.load_state_dict({"weight": weight})
    linear = linear.to("cpu")
    assert linear.weight.dtype == torch.int8
    return linear


def fp8_linear(weight: Tensor) -> nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    linear = FP8Linear(HIDDEN, INNER, block_size=(16, 16))
    scale = weight.reshape(2, 16, 4, 16).abs().amax((1, 3)) / 448.0
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    linear.weight.data = (weight / spread).to(torch.float8_e4m3fn)
    linear.weight_scale_inv.data = scale
    return linear


class QuantLinear(nn.Module):
    """GPTQ's layer: eight 4-bit weights in an int32, a scale and a zero point per group of inputs, no `weight`."""

    def __init__(self, weight: Tensor, group: int = 32):
        super().__init__()
        out_features, in_features = weight.shape
        grouped = weight.T.reshape(-1, group, out_features)
        scales = (grouped.amax(1) - grouped.amin(1)) / 15
        zeros = (-grouped.amin(1) / scales).round()
        codes = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 15).to(torch.int32)
        shifts = torch.arange(8, dtype=torch.int32) * 4
        packed = (codes.reshape(in_features // 8, 8, out_features) << shifts[None, :, None]).sum(1).to(torch.int32)
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales.half())
        self.register_buffer("qzeros", zeros.to(torch.int32))
        self.register_buffer("g_idx", torch.arange(in_features, dtype=torch.int32) // group)

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(8, dtype=torch.int32) * 4
        codes = ((self.qweight[:, None] >> shifts[None, :, None]) & 15).flatten(0, 1)
        return x @ ((codes - self.qzeros[self.g_idx.long()]) * self.scales[self.g_idx.long()]).to(x.dtype)


class Int8Tensor(Tensor):
    """A tensor subclass that is int8 inside and says it is fp32, as torchao's are."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor):
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = [a.codes * a.scale if isinstance(a, Int8Tensor) else a for a in args]
        return func(*plain, **(kwargs or {}))


def subclass(weight: Tensor) -> nn.Module:
    linear = nn.Linear(HIDDEN, INNER, bias=False)
    linear.weight = nn.Parameter(Int8Tensor(weight), requires_grad=False)
    return linear


def raw_fp8(weight: Tensor) -> nn.Module:
    linear = nn.Linear(HIDDEN, INNER, bias=False)
    linear.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    linear.register_buffer("weight_scale_inv", torch.ones(1))
    return linear


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(replace_up(bnb_4bit), r"experts\[5\]\.up_proj is bitsandbytes\S*\.Linear4bit", id="bnb_4bit"),
        pytest.param(replace_up(bnb_8bit), r"experts\[5\]\.up_proj is bitsandbytes\S*\.Linear8bitLt", id="bnb_8bit"),
        pytest.param(replace_up(QuantLinear), r"experts\[5\]\.up_proj is \S*\.QuantLinear", id="gptq"),
        pytest.param(replace_up(fp8_linear), r"experts\[5\]\.up_proj is transformers\S*\.FP8Linear", id="fp8_linear"),
        pytest.param(replace_up(raw_fp8), r"up_proj.weight has dtype torch.float8_e4m3fn: quantised", id="fp8_weight"),
        pytest.param(replace_up(subclass), r"experts\[5\]\.up_proj\.weight is Int8Tensor", id="tensor_subclass"),
    ],
)
def test_quantised_experts(model: Any, change: Callable[[nn.Module], None], reason: str) -> None:
    change(model)
    assert_refused(model, reason)


def test_the_quantised_stand_ins_are_faithful() -> None:
    """They compute the layer that they replace, as far as their bits allow: what is refused is a working model."""
    weight, x = torch.randn(INNER, HIDDEN), torch.randn(5, HIDDEN)
    want = x @ weight.T
    assert relative_error(QuantLinear(weight)(x), want) < 0.15
    assert relative_error(subclass(weight)(x), want) < 0.02
    assert relative_error(bnb_8bit(weight)(x), want) < 0.05


def test_meta_experts(model: Any) -> None:
    model.get_submodule(PATH).experts.to("meta")
    assert_refused(model, r"experts\[0\]\.gate_proj\.weight is on the meta device: load it first")


def test_a_model_that_was_never_loaded(model: Any) -> None:
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(TypeError, match="is on the meta device"):
        epoch_moe.patch(empty)
    assert epoch_moe.patch(empty, strict=False).patched == []


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


def test_dtensor_experts(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    linear = expert_of(model).up_proj
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    assert_refused(model, r"experts\[5\]\.up_proj\.weight is DTensor: .*full_tensor")
    linear.weight = nn.Parameter(linear.weight.full_tensor().detach())  # as the message says
    epoch_moe.patch(model)


def test_fully_sharded_blocks(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.get_submodule(PATH), mesh=mesh)
    with pytest.raises(TypeError, match=rf"{PATH} cannot be patched: .*"):
        epoch_moe.patch(model)


# --- LoRA ---------------------------------------------------------------------------------------------------------

ATTENTION = {"llada2": ["query_key_value", "dense"], "llada_moe": ["q_proj", "v_proj"]}


def family_of(model: nn.Module) -> str:
    return "llada2" if isinstance(model, LLaDA2MoeModelLM) else "llada_moe"


def with_lora(model: nn.Module, targets: list[str] | str, **kwargs: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=targets, r=2, init_lora_weights=False, **kwargs)  # not zero: it must show
    return get_peft_model(model, config).eval()  # type: ignore[arg-type]


def test_lora_on_experts_is_refused_until_merged(model: Any) -> None:
    before = logits(model)
    wrapped = with_lora(model, r".*experts\.\d+\.up_proj")
    with pytest.raises(TypeError, match=r"experts\[0\]\.up_proj is peft\S*\.Linear, .*merge"):
        epoch_moe.patch(wrapped)
    with pytest.raises(TypeError, match=r"experts\[0\]\.up_proj is peft\S*\.Linear"):
        epoch_moe.patch(model)
    merged = wrapped.merge_and_unload()  # as the message says
    want = logits(copy.deepcopy(merged))
    assert len(epoch_moe.patch(merged, None).patched) >= 2
    assert relative_error(logits(merged), want) < 1e-5 and relative_error(before, want) > 1e-3


def test_lora_on_experts_after_patching_fails_by_name(model: Any) -> None:
    want = logits(model)
    epoch_moe.patch(model, None)
    wrapped = with_lora(model, r".*experts\.\d+\.up_proj")
    with pytest.raises(TypeError, match=r"experts\[0\]\.up_proj is peft\S*\.Linear"):
        logits(wrapped)
    wrapped.unload()
    assert relative_error(logits(model), want) < 1e-6


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora_on_attention_works(model: Any, first: str) -> None:
    plain_model = copy.deepcopy(model)
    torch.manual_seed(1)
    want = logits(with_lora(plain_model, ATTENTION[family_of(model)]))
    if first == "patch":
        epoch_moe.patch(model, None)
    torch.manual_seed(1)
    wrapped = with_lora(model, ATTENTION[family_of(model)])
    if first == "lora":
        assert len(epoch_moe.patch(wrapped, None).patched) >= 2
    assert relative_error(logits(wrapped), want) < 1e-5
    assert relative_error(logits(plain(family_of(model))), want) > 1e-2  # the adapters do something
    epoch_moe.unpatch(wrapped if first == "lora" else model)
    assert relative_error(logits(wrapped), want) < 1e-5


def test_lora_on_attention_trains_through_patched_layers(model: Any) -> None:
    grads = []
    for patch_it in (False, True):
        torch.manual_seed(1)
        wrapped = with_lora(copy.deepcopy(model), ATTENTION[family_of(model)]).train()
        if patch_it:
            epoch_moe.patch(wrapped)
        wrapped(IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and all("lora_" in name for name in grads[0])
    for name, grad in grads[0].items():
        assert relative_error(grads[1][name], grad) < 1e-4, name


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_generating_with_lora_on_attention(model: Any, task_type: str | None) -> None:
    loop, prompt, settings = loop_of(model), IDS[:1, :8], {"gen_length": 16, "block_length": 8, "steps": 8}
    without = loop(model, prompt, **settings, eos_token_id=[]).sequences
    wrapped = with_lora(model, ATTENTION[family_of(model)], task_type=task_type)
    want = loop(wrapped, prompt, **settings, eos_token_id=[]).sequences
    assert torch.equal(loop(wrapped.get_base_model(), prompt, **settings, eos_token_id=[]).sequences, want)
    assert not torch.equal(without, want)
    with wrapped.disable_adapter():
        assert torch.equal(loop(wrapped, prompt, **settings, eos_token_id=[]).sequences, without)
    assert len(epoch_moe.patch(wrapped, "exact").patched) >= 2
    for one in (wrapped, wrapped.get_base_model()):  # the patch is the inner model's, whoever is passed
        got = loop(one, prompt, **settings, eos_token_id=[])
        assert torch.equal(got.sequences, want) and got.counters is not None
    answer = wrapped.generate(prompt, **settings)[0].tolist()  # the class's own: LLaDA-MoE's has the prompt in front
    assert answer[-len(want[0]) :] == want[0, : len(answer)].tolist()
    epoch_moe.unpatch(wrapped)
    assert loop(wrapped, prompt, **settings).counters is None


def test_adapters_that_work_outside_the_layers_are_refused() -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    target = ATTENTION["llada2"]
    activated = LoraConfig(target_modules=target, task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    for config in (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), activated):
        wrapped = get_peft_model(copy.deepcopy(plain("llada2")), config).eval()
        with pytest.raises(ValueError, match=r"adapter 'default' is a \w+Config that works in the forward of peft"):
            epoch_moe.generate(wrapped, IDS[:, :8])
