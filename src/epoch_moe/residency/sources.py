"""Where experts lie that are not in fast memory: in a file, or in main memory.

Shape suffixes: E experts, F expert inner size, H hidden.

Files are read with `preadv` into memory that exists already. A memory map would do the same with less code, but a file
that is truncated under a map ends the process with SIGBUS; here it ends a forward, with an error that names the file,
the tensor and the place. Reads take their own offset, so processes after a fork, and several models, share a file
without disturbing each other.
"""

from __future__ import annotations

import copy
import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from epoch_moe.experts.layouts import LAYOUTS
from epoch_moe.tensor_files import STORED_DTYPES, TensorHeader, read_header

Buffer = tuple[Tensor, Tensor]
"""One expert's ``[2F,H]`` and ``[H,F]`` in main memory."""


class ResidencyError(RuntimeError):
    """Experts could not be read from where they lie. The forward ends; what is in fast memory stays valid."""


class ExpertSource(Protocol):
    """One layer's experts, all of them.

    Attributes:
        in_memory: whether `weights` gives an expert without reading it from a file.
    """

    in_memory: bool

    def read(self, expert: int, gate_up_2FH: Tensor, down_HF: Tensor) -> int:
        """Write one expert into contiguous CPU tensors; the bytes that were read.

        Raises:
            ResidencyError: it cannot be read.
        """
        ...

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """One expert's ``[2F,H]`` and ``[H,F]`` as they lie in main memory."""
        ...

    def convert(self, before: torch.dtype, after: torch.dtype) -> ExpertSource:
        """The same experts for a model that is made another dtype: their values are those of ``before``."""
        ...


class TensorFile:
    """An open file of experts that notices when it is changed.

    Args:
        path: of a safetensors file.
        drop_cache: have the system forget what was read.
        fd: of a file without headers that is open already, such as a temporary one; ``path`` only names it.

    Attributes:
        headers: its tensors.

    Raises:
        ValueError: no complete safetensors file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, drop_cache: bool = False, fd: int | None = None):
        if not hasattr(os, "preadv"):
            raise OSError("this system has no os.preadv, which reading experts from files needs (Linux, macOS, BSD)")
        self.path, self.drop_cache = path, drop_cache
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) if fd is None else fd
        weakref.finalize(self, os.close, self._fd).atexit = False
        found = os.fstat(self._fd)
        self._size, self._modified = found.st_size, found.st_mtime_ns
        self.headers: dict[str, TensorHeader] = {} if fd is not None else read_header(path)
        # Another file may have taken the name between the two opens, or this one been written to.
        if fd is None and (not os.path.samestat(found, now := os.stat(path)) or now.st_mtime_ns != self._modified):
            raise ResidencyError(f"{path} was replaced while it was opened: try again")

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorFile:
        return self  # nothing in it belongs to one model

    def read(self, key: str, start: int, address: int, size: int) -> None:
        """Read ``size`` bytes of tensor ``key`` at byte ``start`` of the file to a memory address.

        Raises:
            ResidencyError: the file ends before, cannot be read, or is not what it was when it was opened.
        """
        done = 0
        try:
            while done < size:
                # A view of the caller's memory: no bytes object in between.
                rest = (ctypes.c_char * (size - done)).from_address(address + done)
                got = os.preadv(self._fd, [rest], start + done)
                if got == 0:
                    break
                done += got
            found = os.fstat(self._fd)  # after the read: what was written during it counts too
        except OSError as error:
            raise self._error(key, start, str(error)) from error
        if found.st_size != self._size:
            raise self._error(key, start, f"its size went from {self._size} to {found.st_size} bytes")
        if found.st_mtime_ns != self._modified or done < size:
            raise self._error(key, start, "it was written to")
        if self.drop_cache:
            self.forget(start, size)

    def forget(self, start: int = 0, size: int = 0) -> None:
        """Have the system drop cached contents (0 bytes: all); does nothing where it cannot."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_DONTNEED)

    def _error(self, key: str, start: int, what: str) -> ResidencyError:
        return ResidencyError(
            f"cannot read {key} from {self.path} at byte {start}: {what}. The forward was ended, and nothing was "
            "computed with what was read. Bring the file back and load the model anew"
        )


@dataclass(frozen=True)
class Part:
    """A piece of one expert in a file.

    Attributes:
        file, key: where it lies, and the tensor that it belongs to.
        start, size: first byte in the file, and how many.
        down: whether it belongs to the down projection, or to gate and up.
        offset: first byte in the expert's ``[2F,H]`` or ``[H,F]``.
    """

    file: TensorFile
    key: str
    start: int
    size: int
    down: bool
    offset: int


class Buffers:
    """Memory in which experts stay while they pass through, shared by the layers of a model.

    Args:
        inner, hidden: F and H.
    """

    def __init__(self, inner: int, hidden: int):
        self.inner, self.hidden = inner, hidden
        self._made: dict[tuple[str, torch.dtype, bool], Buffer] = {}

    def get(self, use: str, dtype: torch.dtype, pinned: bool = False) -> Buffer:
        """The buffer of this use, uninitialised at first."""
        key = (use, dtype, pinned)
        if key not in self._made:
            where: dict[str, Any] = {"dtype": dtype, "device": "cpu", "pin_memory": pinned}
            with torch.inference_mode(False):  # else it could not be written outside of inference mode
                self._made[key] = (
                    torch.empty(2 * self.inner, self.hidden, **where),
                    torch.empty(self.hidden, self.inner, **where),
                )
        return self._made[key]

    def free(self, use: str, dtype: torch.dtype, pinned: bool) -> None:
        """Give up a buffer."""
        self._made.pop((use, dtype, pinned), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.numel() * t.element_size() for buffer in self._made.values() for t in buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffers:
        new = memo[id(self)] = Buffers(self.inner, self.hidden)
        return new


class FileSource:
    """One layer's experts in safetensors files.

    Args:
        parts_E: the pieces of each expert, see `find_parts`.
        dtype: as stored.
        buffers: shared by the layers; used where ``read`` is asked for another dtype.
        dtypes: conversions that an expert goes through first, in this order (a model that was made bfloat16 and then
            float32 has bfloat16's values in float32).
    """

    in_memory = False

    def __init__(
        self,
        parts_E: Sequence[tuple[Part, ...]],
        dtype: torch.dtype,
        buffers: Buffers,
        dtypes: tuple[torch.dtype, ...] = (),
    ):
        self.parts_E, self.dtype, self.buffers, self.dtypes = parts_E, dtype, buffers, dtypes

    def read(self, expert: int, gate_up_2FH: Tensor, down_HF: Tensor) -> int:
        """See `ExpertSource.read`."""
        targets = (gate_up_2FH, down_HF)
        direct = all(dtype == self.dtype for dtype in (*self.dtypes, gate_up_2FH.dtype))
        if not direct:
            targets = self.buffers.get("stored", self.dtype)
        total = 0
        for part in self.parts_E[expert]:
            target = targets[part.down]
            assert target.is_contiguous() and target.device.type == "cpu"
            part.file.read(part.key, part.start, target.data_ptr() + part.offset, part.size)
            total += part.size
        if not direct:
            for staged, target in zip(targets, (gate_up_2FH, down_HF), strict=True):
                for dtype in self.dtypes:
                    staged = staged.to(dtype)
                target.copy_(staged)
        return total

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """See `ExpertSource.weights`."""
        raise TypeError("experts of a file have to be read")

    def convert(self, before: torch.dtype, after: torch.dtype) -> FileSource:
        """See `ExpertSource.convert`."""
        return FileSource(self.parts_E, self.dtype, self.buffers, (*self.dtypes, before))

    def __deepcopy__(self, memo: dict[int, Any]) -> FileSource:
        return FileSource(self.parts_E, self.dtype, copy.deepcopy(self.buffers, memo), self.dtypes)


class HostSource:
    """One layer's experts in main memory.

    Args:
        gate_up_E2FH, down_EHF: CPU tensors, pinned where the device is a GPU.
    """

    in_memory = True

    def __init__(self, gate_up_E2FH: Tensor, down_EHF: Tensor):
        self.gate_up_E2FH, self.down_EHF = gate_up_E2FH, down_EHF

    def read(self, expert: int, gate_up_2FH: Tensor, down_HF: Tensor) -> int:
        """See `ExpertSource.read`."""
        gate_up, down = self.weights(expert)
        gate_up_2FH.copy_(gate_up)
        down_HF.copy_(down)
        return gate_up.numel() * gate_up.element_size() + down.numel() * down.element_size()

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """See `ExpertSource.weights`."""
        return self.gate_up_E2FH[expert], self.down_EHF[expert]

    def convert(self, before: torch.dtype, after: torch.dtype) -> HostSource:
        """See `ExpertSource.convert`."""
        converted = [t.to(before).to(after) for t in (self.gate_up_E2FH, self.down_EHF)]
        return HostSource(*(t.pin_memory() if self.down_EHF.is_pinned() else t for t in converted))

    def __deepcopy__(self, memo: dict[int, Any]) -> HostSource:
        return self  # only read


def find_parts(
    headers: Mapping[str, TensorHeader],
    files: Mapping[str, TensorFile],
    prefix: str,
    experts: range,
    inner: int,
    hidden: int,
) -> tuple[list[tuple[Part, ...]], torch.dtype] | None:
    """The pieces of one layer's experts in a checkpoint, in any of the three layouts, and their dtype.

    Args:
        headers: of the checkpoint's tensors.
        files: its files by name.
        prefix: path of the MoE block, such as ``model.layers.1.mlp``.
        experts: numbers of the experts that are wanted.
        inner, hidden: F and H.

    Returns:
        None where the checkpoint has no such experts.

    Raises:
        ValueError: it has them in other sizes or dtypes than can be used.
    """
    for layout in LAYOUTS.values():
        keys, period = layout.keys(prefix, experts), len(layout.parts)
        if keys[0] in headers:
            break
    else:
        return None
    gate_up = torch.empty(1, 2 * inner, hidden, device="meta")
    places = layout.places(gate_up, gate_up.new_empty(1, hidden, inner))  # of one expert
    dtypes: set[str] = set()

    def part(key: str, row: int, number: int) -> Part:
        header = headers.get(key)
        if header is None:
            raise ValueError(f"there is no {key} beside the other experts of {prefix}")
        place = places[number]
        shape = tuple(place.shape[-2:])
        count = 1 if layout.each else header.shape[0]
        if header.shape != (shape if layout.each else (count, *shape)) or row >= count:
            expected = [*shape] if layout.each else ["experts", *shape]
            raise ValueError(f"{key} has shape {list(header.shape)}: expected {expected}")
        dtypes.add(header.dtype)
        item = STORED_DTYPES[header.dtype].itemsize
        size = place.numel() * item
        start, offset = header.start + row * size, int(place.storage_offset()) * item
        return Part(files[header.file], key, start, size, number == period - 1, offset)

    parts_E = []
    for index, expert in enumerate(experts):
        own, row = (keys[index * period : (index + 1) * period], 0) if layout.each else (keys, expert)
        parts_E.append(tuple(part(key, row, number) for number, key in enumerate(own)))
    if len(dtypes) != 1:
        raise ValueError(f"experts of {prefix} are stored in several dtypes: {', '.join(sorted(dtypes))}")
    return parts_E, STORED_DTYPES[dtypes.pop()]
