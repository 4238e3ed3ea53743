"""End ids of generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import GOLDEN
from transformers import AutoModelForCausalLM, GenerationConfig

import epoch_moe
from epoch_moe.inspection import describe_checkpoint
from epoch_moe.models import load_model, register_auto_classes
from epoch_moe.residency.config import ResidencyConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
PROMPT = torch.tensor([[5, 9, 2, 77, 31]])
SETTINGS = {"gen_length": 12, "block_length": 4, "steps": 12}


@pytest.fixture(params=["llada2", "llada_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / request.param / name, folder)
    return folder


def answer(model: object) -> list[int]:
    loop = epoch_moe.decoding.loop_of(model)  # type: ignore[arg-type]
    return loop(model, PROMPT, **SETTINGS).answers[0].tolist()  # type: ignore[no-any-return]


def write(folder: Path, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)


def test_they_end_an_answer(checkpoint: Path, tmp_path: Path) -> None:
    whole = answer(load_model(checkpoint)[0])
    config_eos = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    assert len(whole) == 12 and describe_checkpoint(checkpoint)["eos_token_id"] == config_eos
    stop = whole[3]
    want = whole[: whole.index(stop) + 1]
    for eos in ([124, stop], stop):
        write(checkpoint, {"eos_token_id": eos, "pad_token_id": 71})
        model, _ = load_model(checkpoint)
        assert model.generation_config.eos_token_id == eos == describe_checkpoint(checkpoint)["eos_token_id"]
        assert answer(model) == want
    model.save_pretrained(tmp_path / "saved")
    register_auto_classes()
    for again in (
        load_model(tmp_path / "saved")[0],
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
        load_model(checkpoint, residency=ResidencyConfig(budget=0.5))[0],
    ):
        assert again.generation_config.eos_token_id == stop and answer(again) == want
    model.generation_config.eos_token_id = 124
    assert answer(model) == whole
    model.generation_config = GenerationConfig()
    model.config.eos_token_id = stop
    assert answer(model) == want
    write(checkpoint, {"eos_token_id": None})
    assert answer(load_model(checkpoint)[0]) == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ([124], "is not valid JSON"),
        ({"eos_token_id": "124"}, "has eos_token_id='124': expected an id in 0..127"),
        ({"eos_token_id": [5, 128]}, r"has eos_token_id=\[5, 128\]: expected an id in 0..127"),
        ({"eos_token_id": True}, "has eos_token_id=True: expected an id"),
        ({"max_new_tokens": -1}, "is no generation configuration"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: object, message: str) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llada2" / name, tmp_path)
    write(tmp_path, content)
    for read in (load_model, describe_checkpoint):
        with pytest.raises(ValueError, match=f"generation_config.json {message}"):
            read(tmp_path)
