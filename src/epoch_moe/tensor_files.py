"""Headers of safetensors files and checkpoint folders: what tensors there are, and which bytes they take.

No tensor is read. A missing or truncated shard otherwise shows late and far from its cause, or, as keys that stay
randomly initialised, not at all.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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


def is_file(path: Path) -> bool:
    """Whether there is a file of this name.

    Raises:
        ValueError: something else has the name, or the system does not say.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is a folder, a device or a pipe: expected a file")
    return True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file holds none, or cannot be read.
    """
    if not is_file(path):
        raise ValueError(f"there is no {path}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        content = path.read_bytes().decode("utf-8")
        parsed = json.loads(content, object_pairs_hook=unique, parse_constant=refuse)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download or write it again") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} is not valid JSON: it holds a {type(parsed).__name__}, expected an object")
    return parsed


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Tensor headers of one safetensors file, after the library has checked that they describe it without a gap.

    Raises:
        ValueError: for a truncated or damaged file, a Git LFS pointer, a file that is no safetensors file or cannot be
            read, or a tensor that is stored in another dtype than those of `STORED_DTYPES`.
    """
    if not is_file(path):
        raise ValueError(f"there is no {path}")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ValueError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
            with safe_open(path, framework="pt"):
                entries = json.loads(file.read(length))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged: {error} (it has {size} bytes); download it again") from error
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in STORED_DTYPES:
            raise ValueError(
                f"{path} stores {name} as {entry['dtype']}: expected weights in {', '.join(STORED_DTYPES)}; load the "
                "unquantised checkpoint"
            )
    return {
        name: TensorHeader(
            entry["dtype"], tuple(entry["shape"]), path.name, *(8 + length + at for at in entry["data_offsets"])
        )
        for name, entry in entries.items()
    }


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    index_path = folder / INDEX_NAME
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index_path} has no usable 'weight_map' (tensor name -> file name): download it again")
    shards = sorted(set(weight_map.values()))
    foreign = [name for name in shards if os.path.basename(name) != name]
    if foreign:
        raise ValueError(f"{index_path} names files outside its folder ({some(foreign)}): expected plain file names")
    missing = [name for name in shards if not is_file(folder / name)]
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
            f"{len(lost)} tensors are not in the shard that {index_path} says: {some(where)}; shards and index belong "
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
    if is_file(folder / WEIGHTS_NAME):
        return read_header(folder / WEIGHTS_NAME)
    if is_file(folder / INDEX_NAME):
        return _read_shards(folder)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"; it has {some(others)}: convert those to safetensors" if others else ""
    raise FileNotFoundError(f"{folder} has no weights: expected {WEIGHTS_NAME} or {INDEX_NAME} with its shards{found}")
