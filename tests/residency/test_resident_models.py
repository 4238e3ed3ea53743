"""Models with a part of their experts in fast memory: the same tokens, and what a model can still do."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

import epoch_moe
from epoch_moe import EpochConfig, ResidencyConfig, load_model, patch, residency_report, unpatch
from epoch_moe.decoding import loop_of
from epoch_moe.problems import generate_problems
from epoch_moe.residency.experts import ResidentExperts

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from test_stacked_checkpoint import write

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
TINY = ("tiny-llada2", "tiny-llada-moe")
SHORT: dict[str, dict[str, int]] = {
    "tiny-llada2": {"gen_length": 32, "block_length": 32, "steps": 32},
    "tiny-llada-moe": {"gen_length": 16, "block_length": 8, "steps": 8},
}
LONG: dict[str, dict[str, int]] = {
    "tiny-llada2": {"gen_length": 96, "block_length": 32, "steps": 32},
    "tiny-llada-moe": {"gen_length": 32, "block_length": 16, "steps": 32},
}
PLANS: dict[str, EpochConfig] = {"exact": EpochConfig.exact(), "default": EpochConfig()}
NEVER = ResidencyConfig(budget="1MB", miss="compute")
"""Nothing is ever let in: every access misses."""


def prompts(name: str, tokenizer: Any, count: int) -> list[Tensor]:
    problems = generate_problems(count, 3, split="held_out")
    return [torch.tensor([tokenizer(p.prompt, add_special_tokens=False)["input_ids"]]) for p in problems]


@cache
def expected(name: str, plan: str, count: int, long: bool) -> list[list[int]]:
    """Answers with all experts in memory."""
    model, tokenizer = load_model(name)
    patch(model, PLANS[plan])
    return decode(model, prompts(name, tokenizer, count), (LONG if long else SHORT)[name])


def decode(model: Any, ids: list[Tensor], arguments: dict[str, int]) -> list[list[int]]:
    return [loop_of(model)(model, one, **arguments).answers[0].tolist() for one in ids]


def answers(name: str, plan: str, residency: ResidencyConfig, count: int = 1, long: bool = False) -> Any:
    model, tokenizer = load_model(name, residency=residency)
    patch(model, PLANS[plan])
    got = decode(model, prompts(name, tokenizer, count), (LONG if long else SHORT)[name])
    return got, residency_report(model)


@pytest.mark.parametrize(
    ("name", "plan", "residency"),
    [
        ("tiny-llada2", "exact", ResidencyConfig(budget=0.1)),
        ("tiny-llada-moe", "exact", ResidencyConfig(budget=0.1)),
        ("tiny-llada2", "default", ResidencyConfig(budget=0.4)),
        ("tiny-llada-moe", "default", ResidencyConfig(budget="100%", policy="lru")),
        ("tiny-llada2", "exact", ResidencyConfig(budget=0.4, policy="lru")),
        ("tiny-llada-moe", "default", NEVER),
        ("tiny-llada2", "default", ResidencyConfig(budget=0.2, tier="host", drop_cache=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.policy} {value.budget} {value.miss}",
)
def test_tokens_do_not_depend_on_where_experts_lie(name: str, plan: str, residency: ResidencyConfig) -> None:
    got, report = answers(name, plan, residency)
    assert got == expected(name, plan, 1, False)
    assert report.placement.misses > 0
    assert (report.hit_rate == 0) == (residency is NEVER)
    slots = 64 * 0.4 if residency.budget == 0.4 else report.layers[0].slots
    assert report.layers[0].slots == int(slots)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("policy", ["retention", "lru"])
def test_tokens_for_every_policy_and_budget(name: str, plan: str, policy: str) -> None:
    want = expected(name, plan, 3, True)
    for budget in (0.1, 0.2, 0.4, 0.6, 1.0):
        assert answers(name, plan, ResidencyConfig(budget=budget, policy=policy), 3, True)[0] == want, budget
    never = ResidencyConfig(budget="1MB", miss="compute", policy=policy)
    got, report = answers(name, plan, never, 3, True)
    assert got == want and report.hit_rate == 0


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


IDS = torch.arange(48).view(2, 24) % 120


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llada2_2_routing", "per_expert"), ("llada2_2_routing", "fused"), ("llada2_bf16", "stacked"),
        ("llada_moe_shared_bias", "per_expert"), ("llada_moe_shared_bias", "stacked"),
    ],
)  # fmt: skip
def test_every_layout_on_disk(tmp_path: Path, name: str, layout: str) -> None:
    folder = GOLDEN / name if layout == "per_expert" else write(tmp_path, name, layout)
    whole, _ = load_model(folder)
    patch(whole, None)
    model, _ = load_model(folder, residency=ResidencyConfig(budget=0.5))
    patch(model, None)
    want = logits(whole, IDS)
    for _ in range(2):
        assert torch.equal(logits(model, IDS), want)
    assert residency_report(model).as_dict()["file_bytes"] > 0
    # All come back, under the released names.
    unpatch(model)
    assert torch.equal(logits(model, IDS), want)
    want_state, state = whole.state_dict(), model.state_dict()
    assert want_state.keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in want_state.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_dtype_than_the_file(dtype: str) -> None:
    folder = GOLDEN / ("llada2" if dtype == "bfloat16" else "llada2_bf16")
    whole, _ = load_model(folder, dtype=dtype)
    patch(whole, None)
    model, _ = load_model(folder, dtype=dtype, residency=ResidencyConfig(budget=0.5))
    patch(model, None)
    assert next(model.parameters()).dtype == getattr(torch, dtype)
    assert torch.equal(logits(model, IDS), logits(whole, IDS))


def storages(model: Any) -> int:
    here = [t.untyped_storage() for t in model.parameters() if not t.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())


@pytest.mark.parametrize("name", TINY)
def test_patch_uses_the_checkpoint_only_where_it_is_the_model(name: str) -> None:
    model, tokenizer = load_model(name)
    ids = prompts(name, tokenizer, 1)
    report = patch(model, "exact", residency=ResidencyConfig(budget=0.25))
    assert "residency: 16 of 64 experts per layer" in str(report) and "the checkpoint's files" in report.residency
    assert residency_report(model).spilled_bytes == 0
    assert decode(model, ids, SHORT[name]) == expected(name, "exact", 1, False)
    unpatch(model)
    block = next(m for m in model.modules() if hasattr(m, "experts"))
    with torch.no_grad():
        block.experts[5].down_proj.weight[0, 0] = 3.0
        block.experts[5].up_proj.weight[1, 1] = float("nan")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\.\d\.mlp: it holds another expert 5 than the model"):
        patch(model, residency=ResidencyConfig(source=load_folder(name)))
    assert not hasattr(model, "_epoch_moe")
    report = patch(model, residency=ResidencyConfig(budget=0.25))
    spilled = residency_report(model).spilled_bytes
    assert spilled == 64 * residency_report(model).bytes_per_expert and "temporary files" in report.residency
    unpatch(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[k].view(torch.uint8), v.view(torch.uint8)) for k, v in before.items() if v.dim())


def load_folder(name: str) -> Path:
    return Path(epoch_moe.__file__).parent / "checkpoints" / name


def test_memory_is_given_up_and_parameters_come_back_as_they_were() -> None:
    model, _ = load_model("tiny-llada2")
    params, whole = dict(model.named_parameters()), storages(model)
    count = sum(p.numel() for p in params.values())
    report = patch(model, residency=ResidencyConfig(budget=0.25))
    gc.collect()
    left = storages(model)
    assert whole - left == report.expert_bytes
    experts = [m.weights for m in model.modules() if isinstance(getattr(m, "weights", None), ResidentExperts)]
    assert sum(t.nbytes for one in experts for t in (one.fast.gate_up_E2FH, one.fast.down_EHF)) == (
        report.expert_bytes // 4
    )
    # What counts parameters still counts them.
    assert sum(p.numel() for p in model.parameters()) == count
    unpatch(model)
    assert all(a is params[name] for name, a in model.named_parameters())
    assert storages(model) == whole


@pytest.fixture
def resident() -> Any:
    model, _ = load_model(GOLDEN / "llada2", residency=ResidencyConfig(budget=0.5))
    patch(model, None)
    return model


@pytest.fixture
def whole() -> Any:
    model, _ = load_model(GOLDEN / "llada2")
    return model


def test_what_needs_all_experts_is_refused_by_name(resident: Any, whole: Any, tmp_path: Path) -> None:
    want = logits(resident, IDS)
    with pytest.raises(RuntimeError, match=r"mlp \(MoE layer 0\): state_dict.* needs all experts.*unpatch"):
        resident.state_dict()
    with pytest.raises(RuntimeError, match=r"state_dict.* needs all experts"):
        resident.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(resident)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(resident, tmp_path / "model.pt")
    for assign in (False, True):
        with pytest.raises(RuntimeError, match="load_state_dict with experts needs all experts"):
            resident.load_state_dict(whole.state_dict(), strict=False, assign=assign)
    with pytest.raises(RuntimeError, match="no backward pass: run under"):
        resident(IDS)
    assert torch.equal(logits(resident, IDS), want)
    with pytest.raises(RuntimeError, match="meta device"):
        resident.to("meta")


def test_adapters_are_loaded_and_saved_and_half_a_checkpoint_is_not(resident: Any, whole: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = ["query_key_value", "dense"]
    wrapped = get_peft_model(whole, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    patch(whole, None)
    want = logits(whole, IDS)
    wrapped = PeftModel.from_pretrained(resident, tmp_path / "adapter").eval()
    assert torch.equal(logits(resident, IDS), want)
    wrapped.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    for key, value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        assert torch.equal(again.pop(key), value)
    assert not again
    for model in (wrapped, resident, resident.model):
        state = model.state_dict()
        assert "AbsentTensor" in repr(state) and state.keys() >= {name for name, _ in model.named_parameters()}
        for use in (
            lambda state: torch.save(state, tmp_path / "half.pt"),
            lambda state: save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "half.safetensors"),
            copy.deepcopy,
            lambda state: {key: value.cpu() for key, value in state.items()},
        ):
            with pytest.raises(RuntimeError, match=r"value of \S*experts\.0\.\S* in a state_dict needs all experts"):
                use(state)
        assert not (tmp_path / "half.safetensors").exists()
    with pytest.raises(RuntimeError, match="in a state_dict needs all experts"):
        resident.save_pretrained(tmp_path / "half")
    assert not list((tmp_path / "half").glob("*.safetensors"))
    wrapped.unload()
    with pytest.raises(RuntimeError, match="state_dict, and what saves it, needs all experts"):
        resident.state_dict()
    unpatch(resident)
    assert not any("AbsentTensor" in repr(value) for value in resident.state_dict().values())


def test_weights_that_are_here_can_be_loaded(resident: Any, whole: Any) -> None:
    with torch.no_grad():
        for param in whole.parameters():
            param.mul_(1.5) if param.dim() == 1 else None
    others = {key: value for key, value in whole.state_dict().items() if ".experts." not in key}
    result = resident.load_state_dict(others, strict=False)
    assert not result.unexpected_keys and all(".experts." in key for key in result.missing_keys)
    patch(whole, None)
    assert torch.equal(logits(resident, IDS), logits(whole, IDS))
    with pytest.raises(RuntimeError, match="Missing key"):
        resident.load_state_dict(others)


def test_copies_have_fast_memory_of_their_own(resident: Any) -> None:
    want = logits(resident, IDS)
    other = copy.deepcopy(resident)
    ours = [m.weights for m in resident.modules() if isinstance(getattr(m, "weights", None), ResidentExperts)]
    theirs = [m.weights for m in other.modules() if isinstance(getattr(m, "weights", None), ResidentExperts)]
    assert all(a.fast.down_EHF.data_ptr() != b.fast.down_EHF.data_ptr() for a, b in zip(ours, theirs, strict=True))
    assert other._epoch_moe.residency.clock is theirs[0].clock is other._epoch_moe.slot.listener is not ours[0].clock
    for model in (other, resident, other):
        assert torch.equal(logits(model, IDS), want)
    unpatch(other)
    assert torch.equal(logits(other, IDS), want)
    assert torch.equal(logits(resident, IDS), want)
    del resident, ours
    gc.collect()
    assert torch.equal(logits(other, IDS), want)


def test_to_another_dtype_and_back_rounds_as_a_whole_model_does(resident: Any, whole: Any) -> None:
    patch(whole, None)
    for move in (
        lambda m: m.to("cpu"), lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.to(torch.float64),
        lambda m: m.to(torch.float32),
    ):  # fmt: skip
        move(whole), move(resident)
        for _ in range(2):
            assert torch.equal(logits(resident, IDS), logits(whole, IDS))
    unpatch(resident), unpatch(whole)
    want = whole.state_dict()
    assert all(torch.equal(value, want[key]) for key, value in resident.state_dict().items())


def test_a_second_patch_changes_the_plan_only(resident: Any) -> None:
    patch(resident, "exact")
    assert isinstance(next(iter(resident._epoch_moe.blocks.values())).weights, ResidentExperts)
    patch(resident, "exact", residency=ResidencyConfig(budget=0.5))
    with pytest.raises(ValueError, match="patched already: unpatch it first"):
        patch(resident, residency=ResidencyConfig(budget=0.25))
    with pytest.raises(ValueError, match="backend='reference' reads all experts"):
        patch(resident, EpochConfig(backend="reference"))
    with pytest.raises(TypeError, match=r"residency=0\.4: expected a ResidencyConfig"):
        patch(resident, residency=0.4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="load_model reads experts from the checkpoint itself"):
        load_model(GOLDEN / "llada2", residency=ResidencyConfig(source="elsewhere"))


@pytest.mark.parametrize("load", [True, False])
def test_a_budget_below_one_expert_names_the_smallest(load: bool) -> None:
    def run(budget: Any) -> Any:
        if load:
            return load_model(GOLDEN / "llada2", residency=ResidencyConfig(budget=budget))[0]
        model, _ = load_model(GOLDEN / "llada2")
        patch(model, residency=ResidencyConfig(budget=budget))
        return model

    with pytest.raises(ValueError, match="the smallest share is ") as error:
        run(0.01)
    smallest = int(str(error.value).split("from ")[1].split(" bytes")[0])
    with pytest.raises(ValueError, match=f"the smallest budget is {smallest} bytes"):
        run(smallest - 1)
    model = run(smallest)  # no expert stays: slow, and right
    patch(model, None)
    whole, _ = load_model(GOLDEN / "llada2")
    patch(whole, None)
    assert torch.equal(logits(model, IDS), logits(whole, IDS))
    report = residency_report(model)
    assert report.hit_rate == 0 and report.fast_bytes == smallest and report.layers[0].slots == 0


@pytest.mark.parametrize("call", [load_model, lambda name, **options: patch(load_model(name)[0], **options)])
def test_a_budget_that_is_no_configuration_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"residency=0\.4: expected a ResidencyConfig"):
        call("tiny-llada2", residency=0.4)


def test_a_model_without_residency_has_no_report(whole: Any) -> None:
    for prepare in (lambda: None, lambda: patch(whole)):
        prepare()
        with pytest.raises(ValueError, match="has all of its experts in memory"):
            residency_report(whole)


def test_the_report_adds_up_and_shows(resident: Any) -> None:
    logits(resident, IDS)
    report = residency_report(resident)
    total = report.as_dict()
    for name in ("hits", "misses", "loads", "bypassed_pairs", "file_bytes"):
        assert total[name] == sum(layer[name] for layer in total["per_layer"])
    each, reads = report.bytes_per_expert, report.placement
    assert total["file_bytes"] == each * (reads.loads + reads.bypassed)
    text, page = str(report), report._repr_html_()
    for part in ("policy retention", "hit rate", "read from its file"):
        assert part in text and part in page
    assert report.table().column("misses")["all"] == reads.misses
    residency_report(resident, reset=True)
    assert residency_report(resident).placement.demanded == 0 and report.placement.demanded > 0


def test_loops_of_others_and_confidences_reach_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model("tiny-llada2", residency=ResidencyConfig(budget=0.4))
    policy = model._epoch_moe.residency.clock.observer
    seen: list[tuple[Any, Any]] = []
    demands: list[Any] = []
    wrap(monkeypatch, policy, "end_forward", lambda *args: seen.append((*args, None, None)[:2]))
    wrap(monkeypatch, policy, "observe", demands.append)
    ids = prompts("tiny-llada2", tokenizer, 1)
    out = loop_of(model)(model, ids[0], **SHORT["tiny-llada2"])
    assert out.forwards == len(seen)
    for confidence, live in seen[1:]:
        assert confidence.shape == live.shape and live.any()
    numbers = [demand.forward for demand in demands]
    layers = len(model._epoch_moe.blocks)
    assert numbers == sorted(numbers) and len(set(numbers)) == out.forwards == len(numbers) // layers
    assert demands[0].cold and not demands[-1].cold and demands[-1].to_refresh is not None
    # A plain loop: no confidences, and forwards are told apart all the same.
    seen.clear(), demands.clear()
    with torch.no_grad():
        for _ in range(3):
            model(torch.full((1, 32), model.config.mask_token_id))
    assert len({demand.forward for demand in demands}) == 3 and len(seen) == 2


def wrap(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str, also: Callable[..., Any]) -> None:
    original = getattr(thing, name)

    def both(*args: Any) -> Any:
        also(*args)
        return original(*args)

    monkeypatch.setattr(thing, name, both)
