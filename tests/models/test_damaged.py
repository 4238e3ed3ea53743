"""Damaged and hostile checkpoint folders: loading ends in one ValueError that names the file, and runs nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import load_golden
from safetensors.torch import save_file

import epoch_moe
from epoch_moe.cli import main
from epoch_moe.models import load_model
from epoch_moe.models.loading import CHECKPOINTS, read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"
WRONG_VALUES = (None, True, -1, 10**7, 10**400, 1.5, 1e999, "x", [[None]], {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint in two shards, with a tokenizer and a generation config."""
    golden = load_golden("llada2")
    made = tmp_path / "checkpoint"
    made.mkdir()
    shutil.copy(golden.folder / CONFIG, made)
    names = sorted(golden.weights)
    index = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(names)}
    for shard in set(index.values()):
        save_file({name: golden.weights[name] for name in names if index[name] == shard}, made / shard)
    (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "tiny-llada2" / name, made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return made


def outcome(path: Path) -> str:
    """'' where the checkpoint is read, else the message of the one error that is allowed."""
    messages = []
    for read in (load_model, read_checkpoint):
        try:
            read(path)
            messages.append("")
        except FileNotFoundError as error:
            messages.append(str(error))
        except ValueError as error:
            messages.append(str(error))
    assert all(str(path) in message for message in messages if message), messages
    # What `inspect` refuses, loading refuses too.
    assert messages[0] or not messages[1], messages
    return messages[0]


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + size])
    text = change(entries)
    text = text if isinstance(text, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def mutations(content: bytes, structured: bool) -> Iterator[bytes]:
    rng = random.Random(0)
    for cut in (0, 1, 8, 9, len(content) // 2, len(content) - 1):
        yield content[:cut]
    head = min(len(content), 600)
    for _ in range(8):
        place = rng.randrange(head)
        yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    yield b'{"a":' * 50_000
    yield b"[" * 50_000 + b"]" * 50_000
    yield b"\xff\xfe" + content
    if structured:
        yield content.rstrip()[:-1] + b', "a": 1, "a": 2}'
        yield content.rstrip()[:-1] + b', "a": NaN}'


@pytest.mark.parametrize(
    "name", [CONFIG, INDEX, "model-0.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_damaged_file_is_read_right_or_named(folder: Path, name: str) -> None:
    assert outcome(folder) == ""
    path = folder / name
    content = path.read_bytes()
    refused = 0
    for damaged in mutations(content, name.endswith(".json")):
        path.write_bytes(damaged)
        refused += outcome(folder) != ""
    assert refused >= 8
    path.unlink()
    path.mkdir()
    assert name in outcome(folder)
    path.rmdir()
    os.mkfifo(path)
    assert name in outcome(folder)


def test_a_file_without_permission_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is forbidden to root, so the system's answer is replaced.
    opened = Path.open
    for name in (CONFIG, INDEX, "model-1.safetensors", "tokenizer.json"):

        def refuse(self: Path, *args: Any, name: str = name, **kwargs: Any) -> Any:
            if self.name == name:
                raise PermissionError(13, "Permission denied", str(self))
            return opened(self, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
        assert name in outcome(folder)


def test_values_of_other_types_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of config.json, each value of an index and of a tensor's header, with each wrong value."""
    original = json.loads((folder / CONFIG).read_text())
    for key in original:
        for value in WRONG_VALUES:
            (folder / CONFIG).write_text(json.dumps(original | {key: value}))
            start = time.perf_counter()
            try:
                read_checkpoint(folder)
            except ValueError as error:
                assert str(folder / CONFIG) in str(error) or str(folder) in str(error), (key, value, error)
                if isinstance(value, int) and not isinstance(value, bool) and "_id" not in key:
                    assert key in str(error) or CONFIG in str(error)
            assert time.perf_counter() - start < 20, (key, value)
    (folder / CONFIG).write_text(json.dumps(original))
    index = json.loads((folder / INDEX).read_text())
    for value in (*WRONG_VALUES, "../x.safetensors", "/etc/passwd", "..", "", "a\0b", "x" * 300):
        for changed in ({"weight_map": value}, {"weight_map": index["weight_map"] | {UP: value}}):
            (folder / INDEX).write_text(json.dumps(changed))
            with pytest.raises((ValueError, FileNotFoundError), match=str(folder)):
                read_checkpoint(folder)
    (folder / INDEX).write_text(json.dumps(index))
    shard = folder / index["weight_map"][UP]
    content = shard.read_bytes()
    for key in ("dtype", "shape", "data_offsets"):
        for value in (*WRONG_VALUES, [-8, 0], [0, 8], [8, 0], [2**70, 2**71], [0] * 9):
            edit_header(shard, lambda h, key=key, value=value: h[UP].update({key: value}))
            with pytest.raises(ValueError, match=shard.name):
                read_checkpoint(folder)
            shard.write_bytes(content)
    for value in WRONG_VALUES:
        edit_header(shard, lambda h, value=value: h.update({UP: value}))
        with pytest.raises(ValueError, match=shard.name):
            read_checkpoint(folder)
        shard.write_bytes(content)


@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers", "vocab_size", "hidden_size", "num_labels"])
@pytest.mark.parametrize("value", [10**7, 4096])
def test_sizes_are_compared_before_anything_is_built(
    folder: Path, key: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(folder / CONFIG, **{key: value})
    if key == "num_labels":  # nothing of ours: not read
        assert not hasattr(load_model(folder)[0].config, "id2label") or load_model(folder)[0].config.num_labels == 2
        return
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *args, **kwargs: pytest.fail("something was built"))
    with pytest.raises(ValueError, match=rf"{CONFIG}.*{key}={value}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("dtype", "where"),
    [
        *((dtype, UP) for dtype in (torch.int16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool)),
        (torch.int16, "model.layers.1.mlp.gate.weight"),
        (torch.float8_e4m3fn, "model.layers.1.mlp.gate.expert_bias"),
    ],
)
def test_other_dtypes_are_named_on_every_path(tmp_path: Path, dtype: torch.dtype, where: str) -> None:
    golden = load_golden("llada2")
    shutil.copy(golden.folder / CONFIG, tmp_path)
    save_file(golden.weights | {where: golden.weights[where].to(dtype)}, tmp_path / WEIGHTS)
    for options in ({}, {"dtype": "float32"}, {"residency": epoch_moe.ResidencyConfig()}):
        with pytest.raises(ValueError, match=rf"{WEIGHTS} stores {where} as \w+: expected weights in BF16"):
            load_model(tmp_path, **options)  # type: ignore[arg-type]


def test_stacked_experts_in_another_dtype(tmp_path: Path) -> None:
    golden = load_golden("llada2")
    shutil.copy(golden.folder / CONFIG, tmp_path)
    stacked = torch.zeros(16, 32, 64, dtype=torch.int8)
    save_file(golden.weights | {"model.layers.1.mlp.experts.up_proj": stacked}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"stores model.layers.1.mlp.experts.up_proj as I8"):
        load_model(tmp_path)


def test_an_adapter_in_the_folder_is_refused_on_both_paths(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    for options in ({}, {"residency": epoch_moe.ResidencyConfig()}):
        with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config.json\).*merge it"):
            load_model(folder, **options)  # type: ignore[arg-type]
    assert main(["inspect", str(folder)]) == 2


def test_nothing_that_a_folder_names_runs_or_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"asked for {args} {kwargs}")

    monkeypatch.setattr("builtins.input", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    mark = folder / "ran"
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("evil.py", "custom_generate/generate.py", "__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    evil = {
        "attn_implementation": "evil/kernel",
        "_attn_implementation": "evil/kernel",
        "_attn_implementation_internal": "evil/kernel",
        "experts_implementation": "evil/kernel",
        "_experts_implementation": "evil/kernel",
        "use_kernels": True,
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil/repo--evil.Model"},
        "custom_pipelines": {"x": {"impl": "evil.X"}},
        "configuration_files": ["config.4.0.0.json"],
        "text_config": {"auto_map": {"AutoConfig": "evil.Config"}},
        "base_model_tp_plan": {"layers.*": "colwise"},
    }
    edit_json(folder / CONFIG, **evil)
    model, tokenizer = load_model(folder)
    assert tokenizer("3")["input_ids"] and model.config._attn_implementation == "sdpa"
    assert not set(evil) & set(model.config.to_dict())
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
    )
    message = outcome(folder)
    assert "tokenizer_config.json" in message or int(transformers.__version__.split(".")[0]) >= 5
    edit_json(folder / "tokenizer_config.json", tokenizer_file="/etc/passwd")
    assert "tokenizer_file" in outcome(folder)
    assert not mark.exists()


def test_the_command_line_says_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.json").write_text("{")
    for command in (["inspect", str(folder)], ["generate", "sum 3:", "--model", str(folder)]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "tokenizer.json is not valid JSON" in err
