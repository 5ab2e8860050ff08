"""Nested structures of tensors: what they hold, by path, and the same with other leaves."""

from __future__ import annotations

import copy as _copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest: mappings (HF ``BatchEncoding``, ``ModelOutput``), sequences, named tuples, dataclasses,
    objects with attributes."""
    seen: set[int] = set()
    todo: list[Any] = [nest]
    while todo:
        value = todo.pop(0)
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and not isinstance(value, NO_NEST):
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
    elif id(value) not in above and not isinstance(value, NO_NEST):
        for key, child in named_children(value):
            yield from _paths(child, (*path, key), above | {id(value)})


def shown(path: Path) -> str:
    """A path as it is written in code: ``encoder.ids[0]``, ``batch[1]``."""
    text = ""
    for key in path:
        text += f"{'' if text else 'batch'}[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text or "the batch"


def last_name(path: Path) -> str:
    """The last key or attribute on a path that is a name; empty where there are numbers only."""
    return next((key for key in reversed(path) if isinstance(key, str)), "")


def replaced(nest: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """A fresh copy of a nest with other tensors in the place of some, by ``id``; types and keys stay."""
    return _copy.deepcopy(nest, dict(new))


NO_NEST = (str, bytes, int, float, complex, type(None), type, torch.nn.Module)
"""What holds no part of a batch."""


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
    if isinstance(value, (*NO_NEST, torch.Tensor, set, frozenset)) or id(value) in above:
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
