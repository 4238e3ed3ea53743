"""load_model of stacked (dFactory) and fused (dInfer) experts: same model, no second copy, as strict as elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import load_golden
from safetensors.torch import load_file, save_file
from torch import Tensor

import epoch_moe
from epoch_moe.inspection import describe_checkpoint, inspection_text
from epoch_moe.models import load_model
from epoch_moe.models import stacked_checkpoint as loader

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
NAMES = ("llada2", "llada2_bf16", "llada2_2_routing", "llada_moe", "llada_moe_shared_bias")
CASES = [(name, layout) for name in NAMES for layout in ("stacked", "fused")]
EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def convert(weights: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """A released checkpoint's tensors in another layout."""
    out = {key: value for key, value in weights.items() if not EXPERT.fullmatch(key)}
    blocks = {match[1] for key in weights if (match := EXPERT.fullmatch(key))}
    for prefix in blocks:
        count = sum(key.startswith(f"{prefix}.experts.") for key in weights) // 3
        gate, up, down = (
            torch.stack([weights[f"{prefix}.experts.{e}.{name}_proj.weight"] for e in range(count)])
            for name in ("gate", "up", "down")
        )
        if layout == "stacked":
            out |= {f"{prefix}.experts.{n}_proj": t for n, t in (("gate", gate), ("up", up), ("down", down))}
        else:
            out |= {f"{prefix}.w1": torch.cat([gate, up], dim=1), f"{prefix}.w2": down}
    return out


def write(folder: Path, name: str, layout: str, change: Callable[[dict[str, Tensor]], object] | None = None) -> Path:
    """A golden checkpoint in ``layout``, in two shards with an index as training code writes it."""
    golden = load_golden(name)
    folder.mkdir(exist_ok=True)
    config = dict(golden.config)
    if layout == "stacked" and config["model_type"] == "llada2_moe":
        config["model_type"] = "llada2_moe_veomni"
    (folder / "config.json").write_text(json.dumps(config))
    weights = convert(golden.weights, layout)
    if change is not None:
        change(weights)
    keys = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": keys[::2], "model-00002-of-00002.safetensors": keys[1::2]}
    for file, names in parts.items():
        save_file({key: weights[key].contiguous() for key in names}, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, names in parts.items() for key in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12) % 120).logits


def expert_storages(model: Any) -> dict[int, int]:
    params = [p for name, p in model.named_parameters() if EXPERT.fullmatch(name)]
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in params}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_same_model_as_from_the_released_layout(
    name: str, layout: str, tmp_path: Path, poisoned_empty: None
) -> None:
    released, _ = load_model(load_golden(name).folder)
    model, _ = load_model(write(tmp_path, name, layout))
    assert type(model) is type(released) and not model.training
    assert model.config.model_type == released.config.model_type
    got, want = model.state_dict(), released.state_dict()
    assert list(got) == list(want)
    for key, value in want.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(logits(model), logits(released))


@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_experts_lie_in_stacked_storage_from_the_start(layout: str, tmp_path: Path) -> None:
    model, _ = load_model(write(tmp_path, "llada2", layout))
    size = 16 * 3 * 64 * 32 * 4
    assert sorted(expert_storages(model).values()) == sorted([size * 2 // 3, size // 3] * 2)
    before = expert_storages(model)
    report = epoch_moe.patch(model, None)
    logits(model)
    assert report.moved_bytes == 0 and report.peak_extra_bytes == 0 and expert_storages(model) == before


@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_one_layer_at_a_time(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than one tensor of the file is held beside what the model already has."""
    import weakref

    folder = write(tmp_path, "llada2", layout)
    open_file, held, most = loader.safe_open, [], 0

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any):
            self.file = open_file(*args, **kwargs)

        def __enter__(self) -> Counting:
            self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def get_tensor(self, key: str) -> Tensor:
            nonlocal most
            tensor = self.file.get_tensor(key)
            held.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in held))
            return tensor

    monkeypatch.setattr(loader, "safe_open", Counting)
    load_model(folder)
    assert len(held) > 20 and most == 1


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_dtypes(layout: str, dtype: str, expected: torch.dtype, tmp_path: Path) -> None:
    model, _ = load_model(write(tmp_path, "llada2", layout), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {expected} == {model.dtype}
    released = load_golden("llada2").weights
    for layer in (1, 2):
        bias = model.model.layers[layer].mlp.gate.expert_bias
        assert bias.dtype == torch.float32
        assert torch.equal(bias, released[f"model.layers.{layer}.mlp.gate.expert_bias"])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_saving_writes_the_released_layout(name: str, layout: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    model, _ = load_model(write(tmp_path / "in", name, layout))
    epoch_moe.patch(model, None)
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == golden.weights.keys()
    assert all(torch.equal(saved[key], value) for key, value in golden.loaded.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == golden.config["model_type"]
    assert torch.equal(logits(load_model(tmp_path / "out")[0]), logits(model))


@pytest.mark.parametrize(("name", "layout"), [("llada2", "stacked"), ("llada_moe", "fused")])
def test_inspect(name: str, layout: str, tmp_path: Path) -> None:
    folder = write(tmp_path, name, layout)
    result, released = describe_checkpoint(folder), describe_checkpoint(load_golden(name).folder)
    changed = {"checkpoint", "tensors", "expert_layout", "moved_bytes", "peak_extra_bytes", "stored_dtypes"}
    assert {k: v for k, v in result.items() if k not in changed} == {
        k: v for k, v in released.items() if k not in changed
    }
    assert result["expert_layout"] == layout and result["moved_bytes"] == result["peak_extra_bytes"] == 0
    assert released["expert_layout"] == "per_expert" and released["moved_bytes"] == released["expert_bytes"] > 0
    assert {"stacked": "stacked by projection", "fused": "fused into w1 and w2"}[layout] in inspection_text(result)


# ------------------------------------------------------------------------------------------------------------- damage

W1, UP = "model.layers.1.mlp.w1", "model.layers.1.mlp.experts.up_proj"


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("fused", lambda w: w.pop(W1), rf"1 missing: {W1}"),
        ("stacked", lambda w: w.pop(UP), rf"1 missing: {UP}"),
        ("fused", lambda w: w.update({W1: w[W1][:, 1:]}), rf"{W1} \[16, 63, 64\] instead of \[16, 64, 64\]"),
        ("stacked", lambda w: w.update({UP: w[UP][1:]}), rf"{UP} \[15, 32, 64\] instead of \[16, 32, 64\]"),
        ("fused", lambda w: w.update({UP: torch.zeros(16, 32, 64)}), r"missing: .*down_proj.* unexpected: .*w1"),
        ("stacked", lambda w: w.update({"model.extra": torch.zeros(1)}), "1 unexpected: model.extra"),
        ("stacked", lambda w: w.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (
            "stacked",
            lambda w: w.update({"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(32, 64)}),
            r"1 unexpected: model.layers.1.mlp.experts.0.up_proj.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    layout: str, change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "llada2", layout, change)
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    with pytest.raises(ValueError, match=message):
        describe_checkpoint(folder)


@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_a_truncated_or_missing_shard(layout: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "llada2", layout)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{shard.name} is truncated"):
        load_model(folder)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="lacks 1 of the 2 shards"):
        load_model(folder)


def test_a_single_file_without_expert_bias_or_head(tmp_path: Path) -> None:
    golden = load_golden("llada2")
    weights = convert(golden.weights, "fused")
    for key in [k for k in weights if k.endswith("expert_bias")] + ["lm_head.weight"]:
        del weights[key]
    save_file(weights, tmp_path / "model.safetensors")
    config = golden.config | {"tie_word_embeddings": True, "moe_router_enable_expert_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(tmp_path)
    assert model.lm_head.weight is model.model.word_embeddings.weight
    assert torch.equal(model.lm_head.weight, golden.weights["model.word_embeddings.weight"])
    assert all((model.model.layers[i].mlp.gate.expert_bias == 0).all() for i in (1, 2))


def test_the_training_name_with_released_tensors(tmp_path: Path) -> None:
    golden = load_golden("llada2")
    shutil.copy(golden.folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(golden.config | {"model_type": "llada2_moe_veomni"}))
    model, _ = load_model(tmp_path)
    assert model.config.model_type == "llada2_moe"
    assert torch.equal(logits(model), logits(load_model(golden.folder)[0]))
