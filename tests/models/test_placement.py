"""`load_model(device_map=...)`: the same model, every part of it somewhere, and nothing offloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import load_golden

import epoch_moe
from epoch_moe.models import load_model, placement

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
FOLDER = load_golden("llada2").folder
LAYERS = {f"model.layers.{layer}": "cpu:0" for layer in range(3)}
REST = {"model.word_embeddings": "cpu", "model.norm": "cpu", "lm_head": "cpu"}


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, LAYERS | REST])
def test_the_same_model_patched_and_not(device_map: Any) -> None:
    ids = load_golden("llada2").forward["input_ids"]
    plain, model = load_model(FOLDER)[0], load_model(FOLDER, device_map=device_map)[0]
    assert model.hf_device_map and {parameter.device.type for parameter in model.parameters()} <= {"cpu", "cuda"}
    with torch.no_grad():
        want = plain(ids).logits
        assert torch.equal(model(ids).logits.cpu(), want)
        assert epoch_moe.patch(model, "dense").moved_bytes == 0
        assert torch.equal(model(ids).logits.cpu(), want)


def test_tensors_go_where_the_module_around_them_goes() -> None:
    cpu, there = torch.device("cpu"), torch.device("meta")
    places = {"": cpu, "model.layers.1": there}
    for path, want in (("model.layers.1.mlp.gate.weight", there), ("model.layers.10.mlp", cpu), ("lm_head", cpu)):
        assert placement.device_of(places, path) == want


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        (3, "device_map=3: expected 'auto', or a dictionary"),
        ("balanced", "device_map='balanced': expected 'auto'"),
        ({}, "device_map={}: expected 'auto'"),
        ({"model.layer.0": "cpu"}, "device_map names 'model.layer.0': expected paths of modules"),
        ({"": "cpu", "model.layers.1.mlp": "cpu"}, r"names 'model.layers.1.mlp': .*layers in one piece"),
        ({"": "disk"}, "device='disk': expected 'cpu'"),
        ({"": "meta"}, "device='meta' holds no weights"),
        ({"": 99}, "device='cuda:99'.*sees"),
        (LAYERS, r"device_map is not whole: .*lm_head"),
    ],
)
def test_wrong_maps_are_refused_by_name(device_map: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(FOLDER, device_map=device_map)


def test_what_else_says_where_weights_lie_is_refused() -> None:
    for name, value in (("device", "cpu"), ("residency", epoch_moe.ResidencyConfig(budget=0.5))):
        with pytest.raises(ValueError, match=f"device_map and {name} both say where weights lie"):
            load_model(FOLDER, device_map="auto", **{name: value})


@pytest.mark.parametrize("left", ["cpu", "disk"])
def test_auto_never_offloads(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "infer_auto_device_map", lambda *args, **kwargs: {"model": 0, "lm_head": left})
    with pytest.raises(ValueError, match=r"device_map='auto': the weights do not fit.*residency="):
        load_model(FOLDER, device_map="auto")
