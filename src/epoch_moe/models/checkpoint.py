"""Is a checkpoint what the model expects? Its configuration, and names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from epoch_moe.tensor_files import TensorHeader, read_json, some

CONFIG_NAME = "config.json"
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
    return read_json(path)


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
                f"{folder} stores {layout}: {some(foreign)}. Supported on disk: {_LAYOUTS}; {advice}"
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
