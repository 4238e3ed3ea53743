"""Files that commands, examples and benchmarks write: checked before the work, written in place."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def check_output(path: str | Path, option: str = "") -> Path:
    """The file that a path stands for (what a symlink points to), if it can be written.

    Args:
        path: as it was typed.
        option: that it was typed for, for messages.

    Raises:
        ValueError: it is a folder, a device, a pipe or a socket, or its folder does not exist.
        PermissionError: it, or its folder where it does not exist yet, may not be written.
    """
    name = f"{option} {path}".strip()
    try:
        target = Path(path).expanduser().resolve()
        exists = target.exists()
        regular = target.is_file()
        in_folder = target.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of symlinks, a name too long, a zero byte
        raise ValueError(f"{name!r} is no path of a file: {error}") from error
    if exists and not regular:
        what = "a folder" if target.is_dir() else "a device, a pipe or a socket"
        raise ValueError(f"{name} is {what}: expected the path of a file, new or old")
    if not in_folder:
        raise ValueError(f"{name}: its folder does not exist")
    if not os.access(target if exists else target.parent, os.W_OK if exists else os.W_OK | os.X_OK):
        raise PermissionError(f"{name} cannot be written: no permission for {target if exists else target.parent}")
    return target


def output_file(text: str) -> Path:
    """`check_output` as the ``type`` of an option."""
    try:
        check_output(text)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a file in place: an old one keeps its mode and its other names, and a symlink stays one.

    Raises:
        ValueError, PermissionError: see `check_output`.
        OSError: it could not be written whole, on a full disk for instance; the message names the path. A new file
            is removed then.
    """
    target = check_output(path)
    new = not target.exists()
    try:
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        if new:
            target.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: str | Path | None, result: Any) -> None:
    """Write numbers as JSON and say so; nothing where ``path`` is None.

    Raises:
        ValueError, OSError: see `write_output`; also for NaN and infinity, before anything is written.
    """
    if path is not None:
        write_output(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"written to {path}")
