"""Copies of tensors that take no memory until they are read: the values of a large one lie in a temporary file.

The same values are written once, by whichever copy comes first, and the file is gone with the last copy that needs it.
A small tensor is cloned: its file would cost more than it.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.torch_internals import no_dispatch_modes, no_torch_function

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = 2**18
"""Entries from which on a tensor's values go to a file."""

MOST_OF_A_FILE = 2**28
"""Bytes after which a new file is begun: one is as large as it was at its largest while any of its values is needed."""

PIECE = 2**22
"""Bytes that are written or read at once."""


class _File:
    """A file without a name, which ends with this process however that ends."""

    def __init__(self) -> None:
        self.stream: Any = tempfile.TemporaryFile(prefix="trainloop-", buffering=0)  # noqa: SIM115
        self.size = 0
        self.process = os.getpid()  # one that was forked writes to a file of its own

    def __del__(self) -> None:
        if hasattr(self, "stream"):
            self.stream.close()


class _Values:
    """Bytes in a file."""

    def __init__(self, file: _File, start: int) -> None:
        self.file, self.start = file, start

    def read_into(self, memory: memoryview) -> None:
        done, stream = 0, self.file.stream
        while done < len(memory):
            most, at = min(PIECE, len(memory) - done), self.start + done
            if hasattr(os, "pread"):  # past the position that forked processes share
                piece = os.pread(stream.fileno(), most, at)
            else:
                stream.seek(at)
                piece = stream.read(most)
            if not piece:
                raise OSError("a temporary file of pytest-trainloop was cut off")
            memory[done : done + len(piece)] = piece
            done += len(piece)


_known: weakref.WeakValueDictionary[bytes, _Values] = weakref.WeakValueDictionary()
_files: weakref.WeakSet[_File] = weakref.WeakSet()


class Stored:
    """The values of a tensor in a file, and how they lay in memory."""

    def __init__(self, values: _Values, tensor: torch.Tensor) -> None:
        self._values, self._stride = values, tensor.stride()
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def read(self) -> torch.Tensor:
        """A tensor of its own with these values."""
        with torch.inference_mode(mode=False), torch.no_grad(), no_torch_function(), no_dispatch_modes():
            flat = torch.empty(math.prod(self.shape) * self.dtype.itemsize, dtype=torch.uint8, device="cpu")
            self._values.read_into(_memory(flat))
            return flat.view(self.dtype).as_strided(self.shape, self._stride).to(self.device)

    def is_same(self, other: Stored) -> bool:
        """Whether these are the same bits, in the same order in memory: False leaves it open."""
        mine, others = (self.shape, self.dtype, self._stride), (other.shape, other.dtype, other._stride)
        return self._values is other._values and mine == others


def stored(tensor: torch.Tensor) -> torch.Tensor | Stored:
    """A copy of a tensor. Large ones are ``Stored`` where there is room in the folder for temporary files."""
    if tensor.numel() < LARGE or not _is_plain(tensor):
        return tensor.detach().clone()
    with torch.no_grad(), no_torch_function(), no_dispatch_modes():
        tensor = tensor.detach()
        dense = tensor if is_dense(tensor) else tensor.contiguous()
        flat = dense.as_strided((dense.numel(),), (1,)).cpu()
        memory, digest = _memory(flat), hashlib.sha1(usedforsecurity=False)
        for piece in _pieces(memory):
            digest.update(piece)
        key = digest.digest() + len(memory).to_bytes(8, "big")
        try:
            values = _known.get(key) or _written(memory)
        except OSError:  # no folder for temporary files, or no room there
            return tensor.clone()
        _known[key] = values
        return Stored(values, dense)


def value_of(copy: Any) -> Any:
    """What a copy holds: of a ``Stored`` its tensor, of any other value that value."""
    return copy.read() if isinstance(copy, Stored) else copy


class StoredTensors(Mapping[str, torch.Tensor]):
    """Copies of tensors by name, each read when it is asked for."""

    def __init__(self, copies: Mapping[str, torch.Tensor | Stored]) -> None:
        self.copies = copies

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> StoredTensors:
        return cls({name: stored(tensor) for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = value_of(self.copies[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.copies)

    def __len__(self) -> int:
        return len(self.copies)

    def __contains__(self, name: object) -> bool:
        return name in self.copies


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's entries fill one block of memory, in any order of its axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    odd = tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    return plain and not odd


def _written(memory: memoryview) -> _Values:
    file = next((f for f in _files if f.size < MOST_OF_A_FILE and f.process == os.getpid()), None) or _File()
    start = file.size
    file.stream.seek(start)
    for piece in _pieces(memory):
        while len(piece):
            piece = piece[file.stream.write(piece) :]
    file.size += len(memory)
    _files.add(file)
    return _Values(file, start)


def _memory(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which the caller keeps alive."""
    count = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_char * count).from_address(flat.data_ptr())).cast("B")


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    return (memory[start : start + PIECE] for start in range(0, len(memory), PIECE))
