"""Batches as they are given: copied, described, refused where they are none."""

from __future__ import annotations

import copy as _copy
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import some
from pytest_trainloop.declare.nested.walk import NO_NEST, Path, children, named_children, paths, shown, tensors


def copy(batch: Any, field: str = "batch") -> Any:
    """A fresh copy that shares no tensor with the original; types, keys, dtypes and devices stay."""
    nested = [t for t in tensors(batch) if t.is_nested]  # deepcopy() fails on them
    try:
        return _copy.deepcopy(batch, {id(t): t.detach().clone() for t in nested})
    except Exception as error:  # how the project's own classes are copied is theirs
        reraise_ours(error)
        if "graph leaves" in str(error):
            raise UsageError(
                f"TrainLoop.{field} holds a tensor with a history; detach it: a batch is data, not a result of the "
                "model"
            ) from error
        raise UsageError(
            f"TrainLoop.{field} cannot be copied ({type(error).__name__}: {error}); a batch of plain data is needed, "
            "since every run gets a fresh copy"
        ) from error


def require_batch(batch: Any, field: str) -> None:
    """Raise ``UsageError`` where the value cannot be a batch."""
    found = list(tensors(batch))
    if not found and not _has_numbers(batch):
        raise UsageError(f"TrainLoop.{field} is {describe(batch)}; a batch with at least one tensor is needed")
    for tensor in found:
        if tensor.is_meta:
            raise UsageError(
                f"TrainLoop.{field} holds a tensor on the meta device, which has no values; a batch with data is needed"
            )
    if found and all(t.numel() == 0 for t in found):
        raise UsageError(f"TrainLoop.{field} is empty: {describe(batch)}; at least one row is needed")


def is_named(path: Path, names: Collection[str]) -> bool:
    """Whether one of these names is that of a tensor: its key, its path as findings show it, or a key above it."""
    return any(name in (shown(path), *(str(key) for key in (*path[:1], *path[-1:]))) for name in names)


def require_names(batches: Sequence[Any], names: Iterable[str], field: str = "") -> None:
    """Raise ``UsageError`` for the first name that no tensor of these batches has; a list next to tensors counts as
    one."""
    there = dict.fromkeys(path for batch in batches for path, _ in paths(batch))
    held = (named_children(batch) for batch in batches if not isinstance(batch, torch.Tensor))
    lists = {str(key) for children in held for key, value in children if isinstance(value, (list, tuple))}
    missing = [name for name in names if name not in lists and not any(is_named(path, [name]) for path in there)]
    if there and missing:
        listed = some([shown(path) for path in there], most=12)
        raise UsageError(f"{field}{': ' if field else ''}the batch has no tensor {missing[0]}: there are {listed}")


def without_tensors(batch: Any) -> str:
    """Why the rows of a batch are not known, where it holds other data than tensors (arrays, text); else empty."""
    if any(True for _ in tensors(batch)):
        return ""
    kinds: dict[str, None] = {}
    todo, seen = [batch], set()
    while todo:
        value = todo.pop(0)
        held = [] if isinstance(value, NO_NEST) or hasattr(value, "__array__") else children(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if held:
            todo.extend(held)
        else:
            kinds[type(value).__name__] = None
    return (
        f"the batch holds no tensors but {some(list(kinds), most=3)}, so that its rows are not known: hand over "
        "tensors (torch.from_numpy, ids in place of text) and convert nothing in fit"
    )


def _has_numbers(batch: Any) -> bool:
    """Whether a batch without tensors still holds data that a loop's collate may turn into tensors (numpy arrays,
    numbers)."""
    if isinstance(batch, (str, bytes, PathLike, type(None), bool, type, torch.nn.Module)) or inspect.isroutine(batch):
        return False
    if isinstance(batch, (int, float)) or hasattr(batch, "__array__"):
        return True
    held = children(batch)
    if not held:  # an object that cannot be looked into may well hold data
        return not isinstance(batch, (Mapping, list, tuple, set, frozenset))
    return any(_has_numbers(child) or isinstance(child, str) for child in held)


def describe(batch: Any) -> str:
    """A batch in a few words."""
    if isinstance(batch, torch.Tensor):
        return f"a {str(batch.dtype).removeprefix('torch.')} tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, str):
        return f"the string {batch[:40]!r}"
    if batch is None or isinstance(batch, (int, float, complex)):
        return repr(batch)
    if isinstance(batch, type) or inspect.isroutine(batch):
        return f"the {'class' if isinstance(batch, type) else 'function'} {getattr(batch, '__name__', batch)}"
    shapes = ["nested" if t.is_nested else str(tuple(t.shape)) for t in tensors(batch)]
    held = f" with tensors of shapes {some(shapes, most=4)}" if shapes else " without tensors"
    name = type(batch).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}{held}"
