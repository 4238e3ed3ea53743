"""A checkpoint's folder: where it is, and whether its files are what the model expects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epoch_moe.experts.layouts import LAYOUTS
from epoch_moe.models.config import ModelSizes
from epoch_moe.tensor_files import TensorHeader, is_file, read_json, some

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"
"""Folder of the checkpoints that come with the package."""
CONFIG_NAME = "config.json"
EVERY_FILE = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_ADAPTER_NAME = "adapter_config.json"
_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BESIDE_TOKENIZER = ("special_tokens_map.json", "added_tokens.json")
_QUANTISED = ("quantization_config", "compression_config", "quantization")
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\..*")
_FOREIGN_LAYOUTS = (
    (r"\.mlp\.experts\.(w13_weight|w2_weight)$", "the parameters of a serving engine (w13_weight and w2_weight)"),
    (r"\.mlp\.switch_mlp\.", "MLX experts (switch_mlp)"),
)


def builtin_checkpoints() -> tuple[str, ...]:
    """Names of the checkpoints that come with the package."""
    if not CHECKPOINTS.is_dir():
        return ()
    return tuple(sorted(path.name for path in CHECKPOINTS.iterdir() if (path / "config.json").is_file()))


def quoted(names: Iterable[Any]) -> str:
    """The names in quotes, with commas between them."""
    return ", ".join(map(repr, names))


def locate(
    path_or_id: str | Path, revision: str | None, local_files_only: bool, patterns: Sequence[str] = EVERY_FILE
) -> Path:
    """The folder of a built-in, local or Hub checkpoint; Hub checkpoints are downloaded."""
    name = str(path_or_id)
    builtin = builtin_checkpoints()
    if name in builtin:
        return CHECKPOINTS / name
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{name!r} is a file: expected the checkpoint's folder, {str(path.parent)!r} perhaps")
    parts = name.split("/")
    if isinstance(path_or_id, Path) or len(parts) != 2 or not all(parts) or name[0] in ".~":
        raise FileNotFoundError(
            f"no checkpoint {name!r}: expected a name from the package ({quoted(builtin) or 'this install has none'})"
            ", an existing local folder, or a Hugging Face Hub id 'owner/name'"
        )
    return _download(name, revision, local_files_only, patterns)


def _download(repo_id: str, revision: str | None, local_files_only: bool, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # The usual cache of transformers; Python files are left out, as nothing here would run them.
        folder = snapshot_download(
            repo_id, revision=revision, local_files_only=local_files_only, allow_patterns=list(patterns)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise FileNotFoundError(
            f"could not get {repo_id!r}{at} from the Hugging Face Hub ({type(error).__name__}: {error}). Check the name"
            " and, for a gated model, `hf auth login`; offline, download it elsewhere with "
            f"`hf download {repo_id}` and pass the folder"
        ) from error
    return Path(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder.

    Raises:
        FileNotFoundError: where the folder has none.
        ValueError: where it is no JSON object, or the folder holds an adapter or quantised weights.
    """
    path = folder / CONFIG_NAME
    if is_file(folder / _ADAPTER_NAME):
        raise ValueError(
            f"{folder} holds an adapter ({_ADAPTER_NAME}), which would change the model: merge it into the weights "
            "first, or move its files away and give them to peft"
        )
    if not is_file(path):
        raise FileNotFoundError(
            f"{folder} has no {CONFIG_NAME}: expected a checkpoint's folder, with {CONFIG_NAME} and safetensors files"
        )
    written = read_json(path)
    for key in _QUANTISED:
        if written.get(key):
            raise ValueError(
                f"{path} says that the weights are quantised ({key}={str(written[key])[:100]}): expected bfloat16, "
                "float16 or float32 weights; load the unquantised checkpoint"
            )
    return written


def check_sizes(
    folder: Path, headers: Mapping[str, TensorHeader], sizes: ModelSizes, mask_token_id: int | None
) -> None:
    """Compare the configuration's sizes with the tensors', before anything of these sizes is built.

    Raises:
        ValueError: naming the key of `config.json` and the tensor that says otherwise.
    """

    def check(key: str, value: int, found: int, where: str) -> None:
        if value != found:
            raise ValueError(
                f"{folder / CONFIG_NAME} has {key}={value}, and the weights say {found} ({where}): check that "
                f"{CONFIG_NAME} and the weights belong together"
            )

    layers = {match[1] for key in headers if (match := _LAYER.fullmatch(key))}
    check("num_hidden_layers", sizes.layers, len(layers), "layers that the files hold")
    for key, header in headers.items():
        if len(header.shape) == 2 and key.endswith(("word_embeddings.weight", "embed_tokens.weight")):
            check("vocab_size", sizes.vocab, header.shape[0], f"{key} in {header.file}")
            check("hidden_size", sizes.hidden, header.shape[1], f"{key} in {header.file}")
        if len(header.shape) == 2 and key.endswith(".mlp.gate.weight"):
            check("num_experts", sizes.experts, header.shape[0], f"{key} in {header.file}")
    if mask_token_id is not None and mask_token_id >= sizes.vocab:
        raise ValueError(
            f"{folder / CONFIG_NAME} has mask_token_id={mask_token_id}: expected an id in 0..{sizes.vocab - 1} "
            f"(vocab_size={sizes.vocab})"
        )


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the folder's tokenizer files; none where it has no tokenizer.

    Raises:
        ValueError: one is damaged, or `tokenizer_config.json` names a file to read instead.
    """
    found = [name for name in _TOKENIZER_NAMES if is_file(folder / name)]
    if not found:
        return []
    found += [name for name in _BESIDE_TOKENIZER if is_file(folder / name)]
    read = {name: read_json(folder / name) for name in found if name.endswith(".json")}
    for key, value in read.get("tokenizer_config.json", {}).items():
        if key.endswith("_file") and value is not None:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'} has {key}={str(value)[:100]!r}: a tokenizer's files are those of "
                "its folder; remove the key"
            )
    return found


def check_keys(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    expected: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """Compare a checkpoint's tensors with what the model expects.

    Args:
        folder: for messages.
        headers: the checkpoint's tensors.
        expected: shapes by state-dict key.
        optional: keys that the checkpoint may lack.

    Raises:
        ValueError: naming a known foreign layout of the experts, or the first keys that are missing, unexpected or
            of another shape.
    """
    for pattern, layout in _FOREIGN_LAYOUTS:
        if foreign := [key for key in headers if re.search(pattern, key)]:
            raise ValueError(
                f"{folder} stores {layout}: {some(foreign)}. Supported on disk: "
                f"{', '.join(known.in_files for known in LAYOUTS.values())}; load the checkpoint that it was made from"
            )
    optional = set(optional)
    missing = expected.keys() - headers.keys() - optional
    unexpected = {key for key in headers.keys() - expected.keys() if not key.endswith("rotary_emb.inv_freq")}
    reshaped = {
        f"{key} {list(headers[key].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in headers and headers[key].shape != tuple(shape)
    }
    parts = [
        f"{len(names)} {what}: {some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    if parts:
        raise ValueError(
            f"the tensors in {folder} do not fit its {CONFIG_NAME} ({len(expected)} expected): {'; '.join(parts)}. "
            f"Check that {CONFIG_NAME} and the weights belong together"
        )
