"""Batches as nested structures of tensors: walk, copy, take rows, refuse what is no batch."""

from __future__ import annotations

import copy as _copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from pytest_trainloop.errors import UsageError
from pytest_trainloop.wording import some


def tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest: mappings (HF ``BatchEncoding``, ``ModelOutput``), sequences, named tuples, dataclasses,
    objects with attributes."""
    seen: set[int] = set()
    todo: list[Any] = [nest]
    while todo:
        value = todo.pop(0)
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and not isinstance(value, _NO_NEST):
            seen.add(id(value))
            todo.extend(children(value))


Path = tuple[object, ...]
"""Where a tensor is in a nest: keys, indices, names of attributes."""


def paths(nest: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor in a nest with its path, in order; one that occurs twice is yielded twice."""
    yield from _paths(nest, (), set())


def _paths(value: Any, path: Path, above: set[int]) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif id(value) not in above and not isinstance(value, _NO_NEST):
        for key, child in named_children(value):
            yield from _paths(child, (*path, key), above | {id(value)})


def shown(path: Path) -> str:
    """A path as it is written in code: ``encoder.ids[0]``, ``batch[1]``."""
    text = ""
    for key in path:
        text += f"{'' if text else 'batch'}[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text or "the batch"


def replaced(nest: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """A fresh copy of a nest with other tensors in the place of some, by ``id``; types and keys stay."""
    return _copy.deepcopy(nest, dict(new))


_NO_NEST = (str, bytes, int, float, complex, type(None), type, torch.nn.Module)


def children(value: Any) -> list[Any]:
    """What a nest holds one level down."""
    return [child for _, child in named_children(value)]


def named_children(value: Any) -> list[tuple[object, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if _keeps_data(value):
        return list(value.data.items())
    held: list[tuple[object, Any]] = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        held += [(slot, getattr(value, slot, None)) for slot in ([slots] if isinstance(slots, str) else slots)]
    return held


def _keeps_data(value: Any) -> bool:
    """Whether an object that is no mapping keeps its entries in one, as ``data``."""
    other = isinstance(value, (Mapping, list, tuple, set, frozenset)) or dataclasses.is_dataclass(value)
    return not other and isinstance(getattr(value, "data", None), Mapping)


def mapped(nest: Any, change: Callable[[Path, Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """A nest with other leaves: ``change`` maps the path and the value of each to the new one.

    What holds no leaf that changes is shared with the given nest; containers of those that do are new, of the same
    type. Sets stay as they are.
    """
    return _mapped(nest, change, is_leaf, (), set())


def _mapped(
    value: Any, change: Callable[[Path, Any], Any], is_leaf: Callable[[Any], bool], path: Path, above: set[int]
) -> Any:
    if is_leaf(value):
        return change(path, value)
    if isinstance(value, (*_NO_NEST, torch.Tensor, set, frozenset)) or id(value) in above:
        return value
    above = above | {id(value)}
    pairs = [(key, old, _mapped(old, change, is_leaf, (*path, key), above)) for key, old in named_children(value)]
    new = {key: made for key, old, made in pairs if made is not old}
    return _with_children(value, new) if new else value


def _with_children(value: Any, new: Mapping[Any, Any]) -> Any:
    """A shallow copy with some of its ``named_children`` replaced."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(new.get(key, old) for key, old in named_children(value)))
    if isinstance(value, (list, tuple)):
        return type(value)(new.get(place, old) for place, old in enumerate(value))
    made = _copy.copy(value)
    for key, child in new.items():
        if isinstance(made, Mapping):
            made[key] = child  # type: ignore[index]
        elif _keeps_data(made):
            made.data = {**made.data, key: child}
        else:
            object.__setattr__(made, str(key), child)  # also of a frozen dataclass
    return made


def rows(batch: Any, axis: int = 0) -> int:
    """The number of rows of a batch: the size along ``axis`` that most of its tensors share; 0 without such an axis.

    Of several sizes that are equally frequent the first counts. Tensors in a list with one entry for each row are left
    out.
    """
    outside = set(_sizes(batch, axis, lambda value: value is not batch))
    sizes = list(_sizes(batch, axis, lambda value: value is not batch and len(value) in outside and axis == 0))
    return max(dict.fromkeys(sizes), key=sizes.count, default=0)


def _sizes(batch: Any, axis: int, skipped: Callable[[list[Any]], bool]) -> Iterator[int]:
    """The tensors' sizes along the axis, but for those in lists that are skipped, unless these hold columns."""
    seen: set[int] = set()
    todo = [batch]
    while todo:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, _NO_NEST):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not value.is_nested and value.dim() > _least_dims(axis):
                yield value.shape[axis]
        elif not (isinstance(value, list) and skipped(value)) or _of_columns(value, len(value)):
            todo.extend(children(value))


def take(batch: Any, chosen: Sequence[int], axis: int = 0) -> Any:
    """A fresh batch of the chosen rows, in this order; types, keys, dtypes and devices stay.

    What has another size along ``axis`` (class weights, one mask for all) is kept whole. Plain lists and arrays with
    one entry for each row are taken from as well. Raises ``TypeError`` for nested tensors.
    """
    count = rows(batch, axis)
    memo: dict[int, Any] = {}
    kept: list[Any] = []  # an identity may not be used again while it is in the memo
    for leaf in _leaves(batch):
        taken = _taken(leaf, chosen, count, axis)
        if taken is not leaf:
            memo[id(leaf)] = taken
            kept.append(leaf)
    return _copy.deepcopy(batch, memo)


def _least_dims(axis: int) -> int:
    return axis if axis >= 0 else -axis - 1


def _taken(leaf: Any, chosen: Sequence[int], count: int, axis: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            raise TypeError("nested tensors cannot be indexed by row")
        if leaf.dim() <= _least_dims(axis) or leaf.shape[axis] != count:
            return leaf
        fresh = leaf.detach().index_select(axis, torch.tensor(list(chosen), device=leaf.device)).clone()
        return fresh.requires_grad_(leaf.requires_grad)
    if isinstance(leaf, list):
        return [_copy.deepcopy(leaf[i]) for i in chosen]
    return leaf[list(chosen)] if leaf.ndim > _least_dims(axis) and leaf.shape[0] == count and axis == 0 else leaf


def _leaves(batch: Any) -> Iterator[Any]:
    """Tensors, numpy arrays, and lists with as many entries as there are rows."""
    count = rows(batch)
    seen: set[int] = set()
    todo: list[Any] = [batch]
    while todo:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, _NO_NEST):
            continue
        seen.add(id(value))
        listed = isinstance(value, list) and value is not batch and len(value) == count
        array = hasattr(value, "__array__") and hasattr(value, "ndim")
        if isinstance(value, torch.Tensor) or array or (listed and not _of_columns(value, count)):
            yield value
        else:
            todo.extend(children(value))


def lists_of_rows(batch: Any, count: int) -> list[list[Any]]:
    """Lists with one item for each of ``count`` rows."""
    seen: set[int] = set()
    found: list[list[Any]] = []
    todo = [batch]
    while todo:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, (*_NO_NEST, torch.Tensor)):
            continue
        seen.add(id(value))
        if isinstance(value, list) and value is not batch and len(value) == count and not _of_columns(value, count):
            found.append(value)
        else:
            todo.extend(children(value))
    return found


def _of_columns(values: list[Any], count: int) -> bool:
    """Whether a list as long as the batch holds columns, each with all rows, rather than rows."""
    return all(isinstance(v, torch.Tensor) and v.dim() > 0 and v.shape[0] == count for v in values)


def copy(batch: Any, field: str = "batch") -> Any:
    """A fresh copy that shares no tensor with the original; types, keys, dtypes and devices stay."""
    nested = [t for t in tensors(batch) if t.is_nested]  # deepcopy() fails on them
    try:
        return _copy.deepcopy(batch, {id(t): t.detach().clone() for t in nested})
    except Exception as error:
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


def without_tensors(batch: Any) -> str:
    """Why the rows of a batch cannot be told, where it holds other data than tensors (arrays, text); else empty."""
    if any(True for _ in tensors(batch)):
        return ""
    kinds: dict[str, None] = {}
    todo, seen = [batch], set()
    while todo:
        value = todo.pop(0)
        held = [] if isinstance(value, _NO_NEST) or hasattr(value, "__array__") else children(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if held:
            todo.extend(held)
        else:
            kinds[type(value).__name__] = None
    return (
        f"the batch holds no tensors but {some(list(kinds), most=3)}, so that its rows cannot be told: hand over "
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
