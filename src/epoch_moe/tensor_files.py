"""Headers of safetensors files and checkpoint folders: what tensors there are, and which bytes they take.

No tensor is read. A missing or truncated shard otherwise shows late and far from its cause, or, as keys that stay
randomly initialised, not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Floating-point dtypes by their names in safetensors headers."""
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHOWN = 3


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors header says of one tensor.

    Attributes:
        dtype: safetensors name, such as ``"BF16"``.
        shape: sizes.
        file: name of the file that holds it.
        start, end: bytes of the file that it takes.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


def some(names: Iterable[str]) -> str:
    """The first few names, with a count of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file holds none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download or write it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected a JSON object")
    return content


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Tensor headers of one safetensors file, after checking its size.

    Raises:
        ValueError: for a truncated file, a Git LFS pointer, or a file that is no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise ValueError(
                f"{path} is truncated or no safetensors file: {size} bytes hold no complete header; download it again"
            )
        try:
            entries = json.loads(file.read(length))
            spans = {name: entry for name, entry in entries.items() if name != "__metadata__"}
            end = 8 + length + max((int(entry["data_offsets"][1]) for entry in spans.values()), default=0)
            headers = {
                name: TensorHeader(
                    entry["dtype"],
                    tuple(int(n) for n in entry["shape"]),
                    path.name,
                    *(8 + length + int(place) for place in entry["data_offsets"]),
                )
                for name, entry in spans.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} has an unreadable safetensors header ({error}): download it again") from error
    if size != end:
        state = "truncated" if size < end else "longer than its header says"
        raise ValueError(f"{path} is {state}: {size} bytes, its header describes {end}; download it again")
    return headers


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    index_path = folder / INDEX_NAME
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index_path} has no usable 'weight_map' (tensor name -> file name): download it again")
    shards = sorted(set(weight_map.values()))
    foreign = [name for name in shards if os.path.basename(name) != name]
    if foreign:
        raise ValueError(f"{index_path} names files outside its folder ({some(foreign)}): expected plain file names")
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(shards)} shards that {INDEX_NAME} lists: {some(missing)}; "
            "download them (an interrupted download leaves such folders)"
        )
    headers: dict[str, TensorHeader] = {}
    for name in shards:
        headers |= read_header(folder / name)
    lost = [key for key, shard in weight_map.items() if key not in headers or headers[key].file != shard]
    if lost:
        where = {f"{key} (in {weight_map[key]})" for key in lost}
        raise ValueError(
            f"{len(lost)} tensors are not in the shard that {INDEX_NAME} says: {some(where)}; shards and index belong "
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
    found = f"; it has {some(others)}: convert those to safetensors" if others else ""
    raise FileNotFoundError(f"{folder} has no weights: expected {WEIGHTS_NAME} or {INDEX_NAME} with its shards{found}")
