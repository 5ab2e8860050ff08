"""Samples of tensors, taken on their device and read once, after the run: no synchronisation while the loop runs."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import TYPE_CHECKING

import torch
from torch import nn

from pytest_trainloop.recording.events import TensorSample
from pytest_trainloop.recording.sample_store import Store
from pytest_trainloop.recording.shards import is_whole, local
from pytest_trainloop.recording.torch_internals import has_values, past_dispatch_modes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.sample_store import Kept

ENTRIES = 64
"""Sampled entries of a tensor: they change when it does, and are linear in it."""


_ORDERED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.bool}
)
_NORMED = frozenset({torch.complex64, torch.complex128})


WAITING = 64
"""Samples on a CPU that are copied to the store together."""


class Reader:
    """Collects device scalars and samples; ``resolve`` reads them, with a few transfers in all."""

    def __init__(self) -> None:
        self._entries, self._numbers = Store(), Store()
        self._samples: list[tuple[TensorSample, Kept, Kept | None]] = []
        self._waiting: list[tuple[TensorSample, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._scalars: list[tuple[Callable[[float], None], Kept]] = []
        self._lock = threading.RLock()  # a stop that strikes as a block is left leaves it held

    def sample(self, tensor: torch.Tensor) -> TensorSample:
        """The tensor's peak and sample as they are now; of a ``DTensor`` those of this process' part."""
        tensor = local(tensor)
        sample = TensorSample(sparse=tensor.layout is torch.sparse_coo)
        if not readable(tensor):
            return sample
        past = past_dispatch_modes()
        try:
            values = _dense(tensor.detach())
            if values.numel() == 0:
                sample.peak = 0.0
            elif values.is_cpu and values.dtype in _ORDERED:
                waiting = (sample, spaced(values).clone(), *torch.aminmax(values))
                with self._lock:  # another thread may be about to keep those that wait
                    self._waiting.append(waiting)
                    if len(self._waiting) >= WAITING:
                        self._keep_waiting()
            else:
                entries = spaced(values)
                with self._lock:
                    self._samples.append((sample, self._entries.keep(entries), self._extremes(values, entries)))
        finally:
            del past
        return sample

    def _keep_waiting(self) -> None:
        """Copy the samples that wait to the store: some dozens together, in half the time."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for dtype in {entries.dtype for _, entries, _, _ in waiting}:
                same_dtype = [one for one in waiting if one[1].dtype == dtype]
                kept = self._entries.keep_all([entries for _, entries, _, _ in same_dtype])
                extremes = self._numbers.keep_pairs([number for one in same_dtype for number in one[2:]])
                self._samples += zip((one[0] for one in same_dtype), kept, extremes, strict=True)

    def sample_entries(self, tensor: torch.Tensor) -> TensorSample:
        """A sample without its peak: enough to see a change, at a third of the cost."""
        sample = TensorSample()
        values = _dense(local(tensor).detach())
        if values.numel():
            with self._lock:
                self._samples.append((sample, self._entries.keep(spaced(values)), None))
        return sample

    def scalar(self, tensor: torch.Tensor, use: Callable[[float], None]) -> None:
        """Call ``use`` with the value of a one-element tensor when it is read, if it ``has_values`` here."""
        whole, tensor = is_whole(tensor), local(tensor)
        if whole and has_values(tensor):
            with self._lock:
                self._scalars.append((use, self._numbers.keep(tensor.detach().reshape(1))))

    def _extremes(self, values: torch.Tensor, entries: torch.Tensor) -> Kept:
        """The least and the largest entry; of the sampled ones only where torch cannot order the dtype (float8).

        One pass without a copy: the infinity norm takes twenty times as long on a CPU.
        """
        if values.dtype in _ORDERED:
            room, kept = self._numbers.room(values, 2)
            torch.aminmax(values, out=(room[0], room[1]))
            return kept
        if values.is_complex():
            wide = values if values.dtype in _NORMED else entries.to(torch.complex128)
            return self._numbers.keep(wide.abs().amax().reshape(1))
        return self._numbers.keep(entries.to(torch.float64).abs().amax().reshape(1))

    def resolve(self) -> None:
        """Read everything that is pending."""
        with self._lock:
            self._keep_waiting()
            entries, numbers = self._entries.take_samples(), self._numbers.take_floats()
            samples, self._samples = self._samples, []
            scalars, self._scalars = self._scalars, []
        seen: dict[bytes, bytes] = {}  # the bytes before, in and after a step are often the same
        for sample, sampled, extremes in samples:
            chunk, sample.nonfinite = entries(sampled)
            sample.raw = seen.setdefault(chunk, chunk)
            if extremes is not None:
                sample.peak = max(map(abs, numbers(extremes)))
        for use, kept in scalars:
            use(numbers(kept)[0])


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has entries of its own: not lazy, not on the meta device, not inside a functorch transform, not
    a wrapper around other tensors, not one whose memory was given back (FSDP2's gathered weights, between uses)."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not nn.Parameter:
        wraps = hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if wraps or nn.parameter.is_lazy(tensor):
            return False
    return has_values(tensor) and not _given_back(tensor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of numbers, any other as it is. Torch gives no view of one that is only marked as
    conjugated (``torch.conj``, as between two Fourier transforms): it is computed."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The entries of a dense tensor as bytes in the order of their indices. A single entry counts as contiguous
    whatever its stride is, and torch views no such stride as bytes."""
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The same bytes as a Python object. ``Tensor.numpy()`` is not there for all: torch does not install numpy."""
    plain = as_bytes(tensor.detach().cpu())
    return ctypes.string_at(plain.data_ptr(), plain.numel())


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape; none where its parts are of several sizes, and torch gives it none."""
    return () if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def _given_back(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, which all views of it share; 0 where it has none of its own."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if not plain or nn.parameter.is_lazy(tensor) or tensor.numel() == 0:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper of a library's own, without a storage
        return 0


def spaced(values: torch.Tensor) -> torch.Tensor:
    """All of up to 128 entries, at most 64 of more, at even spacing: a view where the layout allows."""
    count = values.numel()
    spacing = _spacing(count)
    if values.is_quantized:
        values = values.int_repr()
    if values.is_contiguous() and not (values.is_conj() or values.is_neg()):
        return values.as_strided((-(-count // spacing),), (spacing,))
    return _flat(values)[::spacing]


def places(count: int) -> range:
    """The places of the entries that ``spaced`` takes of so many."""
    return range(0, count, _spacing(count))


@functools.lru_cache(maxsize=4096)
def _spacing(count: int) -> int:
    """The least spacing that leaves few enough entries and shares no factor with the count: one that does can run down
    a single column, whose input may always be zero."""
    spacing = 1 if count <= 2 * ENTRIES else -(-count // ENTRIES)
    while math.gcd(spacing, count) > 1:
        spacing += 1
    return spacing


def _flat(values: torch.Tensor) -> torch.Tensor:
    """All entries in memory order where that takes no copy, else in index order."""
    if not values.is_contiguous() and values.dim() > 1:
        order = sorted(range(values.dim()), key=values.stride, reverse=True)
        values = values.permute(order)
    return values.reshape(-1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
