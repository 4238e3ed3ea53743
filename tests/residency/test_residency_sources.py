"""Experts in files: what is read, and what happens to a file that changes under us."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from epoch_moe.residency.sources import Buffers, FileSource, HostSource, ResidencyError, TensorFile, find_parts

E, F, H = 4, 8, 16
PREFIX = "model.layers.3.mlp"
LAYOUTS = ["per_expert", "stacked", "fused"]


def weights(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(E, 2 * F, H).to(dtype), torch.randn(E, H, F).to(dtype)


def write(path: Path, layout: str, gate_up: Tensor, down: Tensor) -> None:
    """A checkpoint's file with one layer, and something before and behind it."""
    gate, up = (part.contiguous() for part in gate_up.split(F, dim=1))
    tensors = {"lm_head.weight": torch.randn(3, 5), "model.layers.4.mlp.gate.weight": torch.randn(7)}
    if layout == "fused":
        tensors |= {f"{PREFIX}.w1": gate_up, f"{PREFIX}.w2": down}
    elif layout == "stacked":
        names = ("gate_proj", "up_proj", "down_proj")
        tensors |= {f"{PREFIX}.experts.{name}": t for name, t in zip(names, (gate, up, down), strict=True)}
    else:
        for expert in range(E):
            for name, t in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                tensors[f"{PREFIX}.experts.{expert}.{name}.weight"] = t[expert].contiguous()
    save_file(tensors, path)


def source(path: Path, experts: range = range(E), **options: bool) -> FileSource:
    file = TensorFile(path, **options)
    found = find_parts(file.headers, {path.name: file}, PREFIX, experts, F, H)
    assert found is not None
    return FileSource(*found, Buffers(F, H))


def read(found: FileSource | HostSource, expert: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    buffers = torch.full((2 * F, H), float("nan"), dtype=dtype), torch.full((H, F), float("nan"), dtype=dtype)
    found.read(expert, *buffers)
    return buffers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_gives_the_experts_as_they_are(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    gate_up, down = weights(dtype)
    write(tmp_path / "a.safetensors", layout, gate_up, down)
    found = source(tmp_path / "a.safetensors", drop_cache=True)
    for expert in (2, 0, 3, 1):
        got = read(found, expert, dtype)
        assert torch.equal(got[0], gate_up[expert]) and torch.equal(got[1], down[expert])
    assert found.read(1, *read(found, 0, dtype)) == 3 * F * H * dtype.itemsize
    part = source(tmp_path / "a.safetensors", range(2, 4))  # one rank's
    assert torch.equal(read(part, 1, dtype)[1], down[3])


def test_another_dtype_goes_through_buffers(tmp_path: Path) -> None:
    gate_up, down = weights()
    write(tmp_path / "a.safetensors", "per_expert", gate_up, down)
    file = TensorFile(tmp_path / "a.safetensors")
    found = find_parts(file.headers, {"a.safetensors": file}, PREFIX, range(E), F, H)
    assert found is not None
    buffers_of_all = Buffers(F, H)
    got = read(FileSource(*found, buffers_of_all), 2, torch.bfloat16)
    assert torch.equal(got[0], gate_up[2].bfloat16()) and torch.equal(got[1], down[2].bfloat16())
    # Made bfloat16, then float32 again: the values are bfloat16's.
    got = read(FileSource(*found, buffers_of_all, (torch.bfloat16,)), 2)
    assert torch.equal(got[0], gate_up[2].bfloat16().float()) and torch.equal(got[1], down[2].bfloat16().float())
    steps = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
    got = read(FileSource(*found, buffers_of_all).convert(*steps[0]).convert(*steps[1]), 2)
    assert torch.equal(got[1], down[2].bfloat16().float())
    host = HostSource(gate_up, down).convert(*steps[0]).convert(*steps[1])
    assert torch.equal(read(host, 2)[1], down[2].bfloat16().float())


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    gate_up, down = weights()
    write(tmp_path / "a.safetensors", "fused", gate_up, down)
    file = TensorFile(tmp_path / "a.safetensors")
    files = {"a.safetensors": file}
    assert find_parts(file.headers, files, "model.layers.9.mlp", range(E), F, H) is None
    with pytest.raises(ValueError, match=r"mlp\.w1 has shape \[4, 16, 16\]"):
        find_parts(file.headers, files, PREFIX, range(E), F, 2 * H)
    with pytest.raises(ValueError, match=r"mlp\.w1 has shape \[4, 16, 16\]"):
        find_parts(file.headers, files, PREFIX, range(3, 6), F, H)
    save_file({f"{PREFIX}.w1": gate_up, f"{PREFIX}.w2": down.bfloat16()}, tmp_path / "b.safetensors")
    file = TensorFile(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="several dtypes: BF16, F32"):
        find_parts(file.headers, {"b.safetensors": file}, PREFIX, range(E), F, H)
    save_file({f"{PREFIX}.w1": gate_up}, tmp_path / "c.safetensors")
    file = TensorFile(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"no model\.layers\.3\.mlp\.w2"):
        find_parts(file.headers, {"c.safetensors": file}, PREFIX, range(E), F, H)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - F * H * 4)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"scribble")
    later(path)


def other_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(10)
        file.write(b"XXXX")
    later(path)


def later(path: Path) -> None:
    """The clock of some file systems is coarser than a test."""
    seen = path.stat()
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 10_000_000))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (truncate, r"its size went from \d+ to \d+ bytes"),
        (lengthen, r"its size went from \d+ to \d+ bytes"),
        (overwrite, "it was written to"),
        (other_header, "it was written to"),
    ],
)
def test_a_file_that_changes_under_us_is_an_error(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "a.safetensors"
    write(path, "fused", *weights())
    found = source(path)
    read(found, 3)
    change(path)
    message = rf"cannot read {PREFIX}\.w\d from .*a.safetensors at byte \d+: .*{says}"
    for expert in range(E):  # also those whose bytes are still there
        with pytest.raises(ResidencyError, match=message):
            read(found, expert)


def test_a_file_that_is_replaced_or_removed_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    gate_up, down = weights()
    write(path, "stacked", gate_up, down)
    found = source(path)
    write(tmp_path / "b.safetensors", "stacked", *weights())
    (tmp_path / "b.safetensors").rename(path)
    assert torch.equal(read(found, 1)[0], gate_up[1])
    path.unlink()
    assert torch.equal(read(found, 2)[1], down[2])


def test_a_read_error_names_file_tensor_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write(path, "per_expert", *weights())
    found = source(path)

    def fails(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ResidencyError, match=r"experts\.2\.gate_proj\.weight from .* byte \d+: .*Input/output error"):
        read(found, 2)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    gate_up, down = weights()
    write(path, "fused", gate_up, down)
    found, original = source(path), os.preadv

    def some(fd: int, buffers: list[object], offset: int) -> int:
        (whole,) = buffers
        return original(fd, [memoryview(whole).cast("B")[:37]], offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", some)
    got = read(found, 1)
    assert torch.equal(got[0], gate_up[1]) and torch.equal(got[1], down[1])


def test_experts_in_main_memory() -> None:
    gate_up, down = weights()
    found = HostSource(gate_up, down)
    assert found.in_memory and torch.equal(read(found, 3)[0], gate_up[3])
    assert found.weights(2)[1].data_ptr() == down[2].data_ptr()
