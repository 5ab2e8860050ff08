"""What a walk ends at: a leaf with its path, its kind and the component that it belongs to; and when two values are the
same."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_trainloop.recording.shards import local

Kind = Literal[
    "weight",
    "gradient",
    "mode",
    "requires_grad",
    "buffer",
    "optimizer_state",
    "group_value",
    "scheduler",
    "scaler",
    "scalar",
    "tensor",
    "array",
    "generator",
    "length",
    "hooks",
    "switch",
    "reference",
]
"""A ``length`` is the number of entries of a container, and put back as its entries in their order. A ``reference`` is
a slot that holds an object with a path of its own; its value is that path."""

ROOTS = ("model", "optimizer", "scheduler", "scaler", "fit", "step", "evaluate", "save", "load", "batches", "loss")
"""Where walks begin, in this order."""

ROUNDING_UNITS = 1e4
"""Two floating values are the same within so many rounding units of the coarser dtype, relative to the largest
entry."""

ROUNDING_UNITS_OF_HALVES = 8.0
"""The same for dtypes of 16 bits, of which 1e4 units are more than the value itself: a swap by interpolation rounds
three times, each by half a unit of what may be twice as large."""


PIECE = 2**20
"""Entries that are compared at once: in float64, with half a dozen results in between."""


def tolerance(dtype: torch.dtype) -> float:
    """How much floating values of this dtype or a finer one may differ and still be the same, relative to the largest
    entry. Not at all in 8 bits, which values are only converted to."""
    info = torch.finfo(dtype)
    if info.bits == 8:
        return 0.0
    return (ROUNDING_UNITS_OF_HALVES if info.bits == 16 else ROUNDING_UNITS) * info.eps


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that can be read, copied and written.

    ``path`` is what a reader can type (``model.head.weight``, ``optimizer.state[head.weight]['exp_avg']``,
    ``ema.shadow['w']``); ``component`` names what is put back or carried over together (``weights of model``,
    ``optimizer.state``, ``ema.shadow``); ``reached_from`` holds those of ``ROOTS`` from which it can be reached.
    ``persistent`` is False for a buffer that the state dict leaves out.
    """

    path: str
    kind: Kind
    component: str
    reached_from: frozenset[str]
    persistent: bool = True


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of leaves are the same: bits, or within ``tolerance`` where they are floating."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, numpy.ndarray) and isinstance(b, numpy.ndarray):
        return _same_arrays(a, b)
    if isinstance(a, (torch.Tensor, Mapping)) or isinstance(b, (torch.Tensor, Mapping)):
        return isinstance(a, Mapping) and isinstance(b, Mapping) and _same_mappings(a, b)
    if isinstance(a, float) and isinstance(b, float):
        return _close(a, b, torch.float64)
    if type(a) is not type(b):
        return bool(isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, Set):
        return bool(a == b)
    return a is b or _equal(a, b)


def _same_mappings(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = local(a), local(b)
    if a.shape != b.shape or a.layout != b.layout:
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not (a.is_floating_point() or a.is_complex()) or not (b.is_floating_point() or b.is_complex()):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if a.dtype == b.dtype and torch.equal(a, b):
        return True
    coarser = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    distance = scale = 0.0
    for x, y in zip(*(torch.split(t.reshape(-1), PIECE) for t in (a, b)), strict=True):
        x, y = x.to(wide), y.to(wide)
        finite = torch.isfinite(x) & torch.isfinite(y)
        if not bool(torch.eq(x, y).logical_or(torch.isnan(x) & torch.isnan(y)).logical_or(finite).all()):
            return False
        if bool(finite.any()):
            distance = max(distance, float((x - y).abs()[finite].max()))
            scale = max(scale, float(x.abs()[finite].max()), float(y.abs()[finite].max()))
    return distance <= tolerance(coarser) * scale


def _same_arrays(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind in "fc":
        return _same_tensors(torch.from_numpy(a.astype("c16")), torch.from_numpy(b.astype("c16"))) or bool(
            a.tobytes() == b.tobytes()
        )
    return bool(a.tobytes() == b.tobytes()) if a.dtype.kind != "O" else _equal(a.tolist(), b.tolist())


def _close(a: float, b: float, dtype: torch.dtype) -> bool:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    if not (math.isfinite(a) and math.isfinite(b)):
        return False
    return abs(a - b) <= tolerance(dtype) * max(abs(a), abs(b))


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # of comparing two objects of the project's, which may have no answer
        return False
