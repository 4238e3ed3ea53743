"""Headers of safetensors files: what tensors there are, and which bytes they take. No tensor is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
