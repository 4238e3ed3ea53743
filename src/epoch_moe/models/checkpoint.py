"""Looks at a checkpoint folder before a model is built from it: headers only, no tensor is read.

A missing or truncated shard otherwise shows late and far from its cause, or, as keys that stay randomly initialised,
not at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from epoch_moe.tensor_files import TensorHeader, read_header

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHOWN = 3
_LAYOUTS = (
    "mlp.experts.<i>.{gate,up,down}_proj.weight (as released), mlp.experts.{gate,up,down}_proj (dFactory) and mlp.w1, "
    "mlp.w2 (dInfer)"
)
_FOREIGN_LAYOUTS = (
    (
        re.compile(r"\.mlp\.experts\.(w13_weight|w2_weight)$"),
        "the parameters of a serving engine (w13_weight and w2_weight)",
        "load the checkpoint that they were loaded from",
    ),
    (
        re.compile(r"\.mlp\.switch_mlp\."),
        "MLX experts (switch_mlp)",
        "load the checkpoint that they were converted from",
    ),
)


def _some(names: Iterable[str]) -> str:
    """The first few names, with a count of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download or write it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder.

    Raises:
        FileNotFoundError: where the folder has none.
        ValueError: where it is no JSON object.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG_NAME}: expected a checkpoint's folder, with {CONFIG_NAME} and safetensors files"
        )
    return _read_json(path)


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    index_path = folder / INDEX_NAME
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index_path} has no usable 'weight_map' (tensor name -> file name): download it again")
    shards = sorted(set(weight_map.values()))
    foreign = [name for name in shards if os.path.basename(name) != name]
    if foreign:
        raise ValueError(f"{index_path} names files outside its folder ({_some(foreign)}): expected plain file names")
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(shards)} shards that {INDEX_NAME} lists: {_some(missing)}; "
            "download them (an interrupted download leaves such folders)"
        )
    headers: dict[str, TensorHeader] = {}
    for name in shards:
        headers |= read_header(folder / name)
    lost = [key for key, shard in weight_map.items() if key not in headers or headers[key].file != shard]
    if lost:
        where = {f"{key} (in {weight_map[key]})" for key in lost}
        raise ValueError(
            f"{len(lost)} tensors are not in the shard that {INDEX_NAME} says: {_some(where)}; shards and index belong "
            "to different versions, download both again"
        )
    return headers


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of all tensors of a checkpoint folder: one file, or shards with an index.

    Raises:
        FileNotFoundError: for missing weights or shards.
        ValueError: for damaged files, or an index that does not fit the shards.
    """
    # A single file wins over an index, as in transformers.
    if (folder / WEIGHTS_NAME).is_file():
        return read_header(folder / WEIGHTS_NAME)
    if (folder / INDEX_NAME).is_file():
        return _read_shards(folder)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"; it has {_some(others)}: convert those to safetensors" if others else ""
    raise FileNotFoundError(f"{folder} has no weights: expected {WEIGHTS_NAME} or {INDEX_NAME} with its shards{found}")


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
    for pattern, layout, advice in _FOREIGN_LAYOUTS:
        foreign = [key for key in headers if pattern.search(key)]
        if foreign:
            raise ValueError(
                f"{folder} stores {layout}: {_some(foreign)}. Supported on disk: {_LAYOUTS}; {advice}"
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
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    if parts:
        raise ValueError(
            f"the tensors in {folder} do not fit its {CONFIG_NAME} ({len(expected)} expected): {'; '.join(parts)}. "
            f"Check that {CONFIG_NAME} and the weights belong together"
        )
