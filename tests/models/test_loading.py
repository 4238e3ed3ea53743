"""load_model: official layouts, round trips, and checkpoints that are damaged or of another kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import assert_golden, load_golden
from processes import start
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import epoch_moe
from epoch_moe.models import builtin_checkpoints, load_model, loading, register_auto_classes
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModel, LLaDA2MoeModelLM

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
NAMES = ("llada2", "llada2_1", "llada2_2_routing", "llada2_bf16")
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A private copy of a golden checkpoint, in one file."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(load_golden("llada2").folder / name, folder)
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in shards with an index, as released checkpoints come."""
    folder = tmp_path / "sharded"
    load_model(load_golden("llada2").folder)[0].save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def assert_same_model(a: LLaDA2MoeModelLM, b: LLaDA2MoeModelLM) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, value in a.state_dict().items():
        assert value.dtype == b.state_dict()[key].dtype, key
        assert torch.equal(value, b.state_dict()[key]), key
    ids = torch.randint(0, 120, (1, 16))
    with torch.no_grad():
        assert torch.equal(a(ids).logits, b(ids).logits)


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", NAMES)
def test_garbage_in_uninitialised_memory_does_not_reach_the_logits(name: str, poisoned_empty: None) -> None:
    golden = load_golden(name)
    model, _ = load_model(golden.folder)
    assert not model.training
    with torch.no_grad():
        logits = model(golden.forward["input_ids"], attention_mask=golden.mask()).logits
    assert_golden(logits, golden.forward["logits"], model.dtype)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_dtypes(asked: str | torch.dtype, got: torch.dtype) -> None:
    golden = load_golden("llada2")
    model, _ = load_model(golden.folder, dtype=asked)
    assert {p.dtype for p in model.parameters()} == {got}
    assert model.dtype == got
    for layer in golden.moe_layers:
        bias = model.model.layers[layer].mlp.gate.expert_bias
        assert bias.dtype == torch.float32
        assert torch.equal(bias, golden.weights[f"model.layers.{layer}.mlp.gate.expert_bias"])


def test_the_official_mix_of_dtypes(tmp_path: Path) -> None:
    golden = load_golden("llada2_bf16")
    shutil.copy(golden.folder / "config.json", tmp_path)
    weights = dict(golden.weights)
    biases = {key: torch.rand(16) / 3 for key in weights if key.endswith("expert_bias")}
    assert all(not torch.equal(value.bfloat16().float(), value) for value in biases.values())
    save_file(weights | biases, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("auto", "bfloat16", "float16", "float32"):
        state = load_model(tmp_path, dtype=dtype)[0].state_dict()
        assert all(torch.equal(state[key], value) for key, value in biases.items())
    model = load_model(tmp_path)[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in biases.items())


def test_auto_dtype_is_what_the_file_holds(checkpoint: Path) -> None:
    edit_config(checkpoint, dtype="bfloat16")
    assert load_model(checkpoint)[0].dtype == torch.float32
    assert load_model(load_golden("llada2_bf16").folder)[0].dtype == torch.bfloat16


def test_shards_load_like_one_file(sharded: Path) -> None:
    assert_same_model(load_model(sharded)[0], load_model(load_golden("llada2").folder)[0])


@pytest.mark.parametrize(("name", "max_shard_size"), [("llada2", "5GB"), *((name, "150KB") for name in NAMES)])
def test_save_and_load_again(name: str, max_shard_size: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    model, _ = load_model(golden.folder)
    with torch.no_grad():
        model(golden.forward["input_ids"])  # the experts are views of stacked tensors now
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    saved: dict[str, Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        saved |= load_file(path)
    assert saved.keys() == golden.weights.keys()
    for key, value in golden.loaded.items():
        assert saved[key].dtype == value.dtype, key
        assert torch.equal(saved[key], value), key
    config = json.loads((tmp_path / "config.json").read_text())
    assert {k: config.get(k, "absent") for k in golden.config} == golden.config
    assert set(config) - set(golden.config) <= {"transformers_version"}
    assert_same_model(load_model(tmp_path)[0], model)
    register_auto_classes()
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval(), model)


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_model_is_built_once(device_map: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = LLaDA2MoeModelLM.__init__

    def counted(self: LLaDA2MoeModelLM, config: LLaDA2MoeConfig) -> None:
        built.append(config)
        build(self, config)

    monkeypatch.setattr(LLaDA2MoeModelLM, "__init__", counted)
    load_model(load_golden("llada2").folder, device_map=device_map)
    assert len(built) == 1  # of a released model's modules, building takes seconds


def test_auto_classes() -> None:
    register_auto_classes()
    register_auto_classes()
    folder = load_golden("llada2").folder
    assert type(AutoConfig.from_pretrained(folder)) is LLaDA2MoeConfig
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is LLaDA2MoeModelLM
    assert type(AutoModel.from_pretrained(folder)) is LLaDA2MoeModel


def registering() -> None:
    from transformers import CONFIG_MAPPING

    import epoch_moe.models.llada2

    assert "llada2_moe" not in CONFIG_MAPPING
    epoch_moe.models.register_auto_classes()
    assert "llada2_moe" in CONFIG_MAPPING


def test_importing_registers_nothing() -> None:
    process = start(registering)  # this process may have registered before
    process.join()
    assert process.exitcode == 0


def test_remote_code_is_ignored(checkpoint: Path, tmp_path: Path) -> None:
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"})
    (checkpoint / "evil.py").write_text("raise SystemExit('remote code ran')")
    model, _ = load_model(checkpoint)
    assert type(model) is LLaDA2MoeModelLM
    model.save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_tied_embeddings(tmp_path: Path) -> None:
    config = LLaDA2MoeConfig(**(load_golden("llada2").config | {"tie_word_embeddings": True}))
    model = LLaDA2MoeModelLM(config).eval()
    assert model.lm_head.weight is model.model.word_embeddings.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    other, _ = load_model(tmp_path)
    assert other.lm_head.weight is other.model.word_embeddings.weight
    assert_same_model(model, other)


def test_a_checkpoint_without_expert_bias(checkpoint: Path, poisoned_empty: None) -> None:
    edit_weights(checkpoint, lambda w: [w.pop(key) for key in list(w) if key.endswith("expert_bias")])
    with pytest.raises(ValueError, match=r"2 missing: model.layers.1.mlp.gate.expert_bias"):
        load_model(checkpoint)
    edit_config(checkpoint, moe_router_enable_expert_bias=False)
    model, _ = load_model(checkpoint)
    assert all((model.model.layers[i].mlp.gate.expert_bias == 0).all() for i in (1, 2))


def test_rotary_tables_in_the_file_are_ignored(checkpoint: Path) -> None:
    key = "model.layers.0.attention.rotary_emb.inv_freq"
    edit_weights(checkpoint, lambda w: w.update({key: torch.full((4,), 9.0)}))
    assert_same_model(load_model(checkpoint)[0], load_model(load_golden("llada2").folder)[0])


@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 6}, {"first_k_dense_replace": 3}, {"num_hidden_layers": 1}]
)
def test_shapes_of_a_configuration_are_the_models(
    changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LLaDA2MoeConfig(**(load_golden("llada2").config | changes))
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "locate", lambda *args, **kwargs: tmp_path)  # as a Hub checkpoint's JSON files come
    found = loading.read_checkpoint("owner/name")
    want = {key: tuple(tensor.shape) for key, tensor in LLaDA2MoeModelLM(config).state_dict().items()}
    assert not found.stored and {key: header.shape for key, header in found.headers.items()} == want


def test_attention_choice() -> None:
    folder = load_golden("llada2").folder
    assert load_model(folder, attn_implementation="eager")[0].config._attn_implementation == "eager"
    assert load_model(str(folder))[0].config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2'.*'sdpa', 'eager'"):
        load_model(folder, attn_implementation="flash_attention_2")


def test_tokenizer(checkpoint: Path) -> None:
    with pytest.warns(UserWarning, match=r"has no tokenizer files.*returns None"):
        assert load_model(checkpoint)[1] is None
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(WordLevel({"a": 0, "[MASK]": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=plain, mask_token="[MASK]").save_pretrained(checkpoint)
    tokenizer = load_model(checkpoint)[1]
    assert tokenizer.mask_token_id == 1


# --------------------------------------------------------------------------------------------------------------- names


def test_builtin_names(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epoch_moe.models.checkpoint.CHECKPOINTS", checkpoint.parent)
    assert builtin_checkpoints() == ("checkpoint",)
    assert epoch_moe.load_model("checkpoint")[0].config.vocab_size == 128
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 'chekpoint'.*\('checkpoint'\).*'owner/name'"):
        load_model("chekpoint")


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing/folder", "a/b/c", "missing"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no checkpoint '{name}'"):
        load_model(name)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_model(Path("owner/missing"))


def test_a_file_is_no_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is a file: expected the checkpoint's folder"):
        load_model(checkpoint / "model.safetensors")


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"could not get 'owner/name' at revision 'v7'.*hf download owner/name"):
        load_model("owner/name", revision="v7", local_files_only=True)


def test_hub_download(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    import huggingface_hub

    asked: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repo_id: str, **kwargs: object) -> str:
        asked.append((repo_id, kwargs))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    load_model("owner/name", revision="v7")
    ((repo_id, kwargs),) = asked
    assert (repo_id, kwargs["revision"], kwargs["local_files_only"]) == ("owner/name", "v7", False)
    patterns = kwargs["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any("py" in pattern or pattern == "*" for pattern in patterns)


# ------------------------------------------------------------------------------------------------- damaged checkpoints


def test_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks 1 of the \d+ shards.*{gone.name}.*download"):
        load_model(sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -4096])
def test_truncated_shard(sharded: Path, keep: int) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=rf"{shard.name} is truncated.*{len(content[:keep])} bytes.*download it again"):
        load_model(sharded)


def test_truncated_single_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"truncated or damaged.*not fully covered.*{size - 100} bytes"):
        load_model(checkpoint)


def test_files_that_are_no_weights(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull"):
        load_model(checkpoint)
    path.write_bytes(content[:8] + b"x" * (len(content) - 8))
    with pytest.raises(ValueError, match=r"is truncated or damaged.*header"):
        load_model(checkpoint)
    path.write_bytes(content + b"more")
    with pytest.raises(ValueError, match=r"truncated or damaged.*not fully covered"):
        load_model(checkpoint)


def test_index_that_does_not_fit(sharded: Path) -> None:
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    edit_index(sharded, lambda m: m.update({UP: next(s for s in shards if s != m[UP])}))
    with pytest.raises(ValueError, match=rf"1 tensors are not in the shard.*{UP}"):
        load_model(sharded)
    edit_index(sharded, lambda m: m.update({UP: "../elsewhere.safetensors"}))
    with pytest.raises(ValueError, match="outside its folder"):
        load_model(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="no usable 'weight_map'"):
        load_model(sharded)


def test_config_problems(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load_model(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        load_model(checkpoint)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no weights.*pytorch_model.bin: convert"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("changes", "quoted"),
    [
        ({"model_type": "llama"}, r"model_type='llama': expected one of 'llada2_moe'"),
        ({"model_type": None}, r"model_type=None"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config={'quant_method': 'fp8'}"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, r"rope_scaling=.*yarn"),
        ({"score_function": "softmax"}, r"score_function='softmax'"),
        ({"num_experts": 15}, r"num_experts=15 must be a multiple of n_group=4"),
        ({"expert_capacity": 8}, r"expert_capacity=8 and block_size=None"),
        ({"num_attention_heads": 3}, r"num_attention_heads=3"),
    ],
)
def test_other_models(checkpoint: Path, changes: dict[str, object], quoted: str) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(ValueError, match=quoted):
        load_model(checkpoint)


def test_keys_that_do_not_fit(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda w: w.update({"model.extra": w.pop(UP), "lm_head.weight": torch.zeros(127, 64)}))
    with pytest.raises(
        ValueError,
        match=rf"1 missing: {UP}; 1 unexpected: model.extra; 1 of another shape: lm_head.weight \[127, 64\] instead of "
        r"\[128, 64\]",
    ):
        load_model(checkpoint)


def test_many_missing_keys_are_counted(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda w: [w.pop(key) for key in list(w) if ".layers.2.mlp.experts." in key])
    with pytest.raises(ValueError, match=r"48 missing: model.layers.2.*and 45 more"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.layers.1.mlp.experts.w13_weight", "the parameters of a serving engine"),
        ("model.layers.1.mlp.switch_mlp.up_proj.weight", "MLX experts"),
    ],
)
def test_foreign_layouts_are_refused_by_name(checkpoint: Path, key: str, words: str) -> None:
    edit_weights(checkpoint, lambda w: w.update({key: torch.zeros(16, 64, 64)}))
    with pytest.raises(ValueError, match=rf"{words}.*{key}. Supported on disk: .*as released.*dFactory.*dInfer"):
        load_model(checkpoint)


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.float64, "bfloat", 3])
def test_unknown_dtypes(dtype: object) -> None:
    with pytest.raises(ValueError, match=f"dtype={dtype!r}: expected 'auto', 'bfloat16'"):
        load_model(load_golden("llada2").folder, dtype=dtype)  # type: ignore[arg-type]


def test_unknown_devices() -> None:
    folder = load_golden("llada2").folder
    with pytest.raises(ValueError, match="device='gpu': expected 'cpu', 'cuda'"):
        load_model(folder, device="gpu")
    with pytest.raises(ValueError, match="device='meta'"):
        load_model(folder, device="meta")
    with pytest.raises(ValueError, match=r"device='cuda:99': torch .* sees \d+ CUDA devices"):
        load_model(folder, device="cuda:99")
    assert load_model(folder, device=torch.device("cpu"))[0].device.type == "cpu"


# -------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trip(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    config = LLaDA2MoeConfig.from_pretrained(golden.folder)
    for _ in range(2):
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert {k: written.get(k, "absent") for k in golden.config} == golden.config
        config = LLaDA2MoeConfig.from_pretrained(tmp_path)
    assert config.rope_theta == 600000
    assert config.mask_token_id == 125
    assert LLaDA2MoeConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_rope_settings_of_transformers_5_files() -> None:
    rope = {"rope_type": "default", "rope_theta": 3e6, "partial_rotary_factor": 0.25}
    config = LLaDA2MoeConfig(rope_parameters=rope)
    assert (config.rope_theta, config.partial_rotary_factor, config.rope_scaling) == (3e6, 0.25, None)


def test_rope_follows_the_config(checkpoint: Path) -> None:
    ids = torch.randint(0, 120, (1, 16))
    with torch.no_grad():
        before = load_model(checkpoint)[0](ids).logits
        edit_config(checkpoint, rope_theta=50.0)
        assert (load_model(checkpoint)[0](ids).logits - before).abs().max() > 1e-3
