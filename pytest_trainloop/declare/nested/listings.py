"""Lists of rows, as opposed to lists of columns: texts, samples, images with their boxes, sequences of different
lengths.

A list of columns holds tensors that each have all rows: inputs and labels, several views, the layers of a cache. What
both could be is taken for columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare.nested.walk import NO_NEST, children, named_children, paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IMAGE_DIMS = 3
"""Of one row at most: tensors with more dimensions are batches."""

SURE = 4
"""Batches of different sizes in one list are at most three: labelled ones, and two views of unlabelled ones."""


def is_sequence(value: Any) -> bool:
    """Whether a value is a list or a tuple, and no named one."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def outermost(batch: Any) -> Iterator[Sequence[Any]]:
    """The lists and tuples in a batch that lie in no other; the batch itself left out."""
    seen: set[int] = {id(batch)}
    todo = [] if isinstance(batch, (*NO_NEST, torch.Tensor)) else children(batch)
    while todo:
        value = todo.pop(0)
        if id(value) in seen or isinstance(value, (*NO_NEST, torch.Tensor)) or hasattr(value, "__array__"):
            continue
        seen.add(id(value))
        if is_sequence(value):
            yield value
        else:
            todo.extend(children(value))


def is_listing(batch: Any) -> bool:
    """Whether a batch is a list of its rows: samples, texts, tensors of different sizes."""
    if not is_sequence(batch) or not batch:
        return False
    if hold_rows([batch]):
        return True
    plain = isinstance(batch, list) and not any(_has_data(entry) for entry in batch)
    kinds = {_kind(entry) for entry in batch}
    return plain and len(kinds) == 1 and not kinds & {"number", "none"}


def hold_rows(listings: Sequence[Sequence[Any]]) -> bool:
    """Whether lists of equal length hold rows beyond doubt: entries of one structure, and tensors in them that cannot
    be columns, since they share no number of rows."""
    if not listings or not listings[0] or any(len(s) == 1 and isinstance(s[0], list) for s in listings):
        return False
    if any(len({_kind(entry) for entry in listing}) > 1 for listing in listings):
        return False
    held = [[(path, t) for listing in listings for path, t in paths(listing[i])] for i in range(len(listings[0]))]
    found = [tensor for entry in held for _, tensor in entry]
    if not found or any(t.is_nested or t.dim() > IMAGE_DIMS for t in found):
        return False
    if all(isinstance(listing[0], torch.Tensor) for listing in listings):
        return any(_uneven(listing) for listing in listings)
    if any(not _has_data(listing[0]) for listing in listings):  # a text or a number for each
        return not all(t.dim() == 2 for t in found)
    if any(not tensor.dim() for tensor in found):
        return True
    sizes = [{len(tensor) for _, tensor in entry} for entry in held]
    if any(len(own) > 1 for own in sizes):
        return True
    if all(len(entry) == 1 for entry in held) and any(_plain_in(listing[0]) for listing in listings):
        return True
    ids = all(t.dim() == 1 for t in found) and any("ids" in str(path[-1:]) for path, _ in held[0])
    return ids or (len(set.union(*sizes)) > 1 and not any(isinstance(listing[0], tuple) for listing in listings))


def _uneven(listing: Sequence[Any]) -> bool:
    """Whether tensors differ in their first size, and are no batches of different sizes."""
    sizes, dims = [len(t) if t.dim() else 0 for t in listing], listing[0].dim()
    if not dims or len(set(sizes)) < 2:
        return False
    return dims == 1 or len(sizes) >= SURE or len(set(sizes)) > 2


def _plain_in(entry: Any) -> bool:
    """Whether a record holds a number or a text next to its tensors."""
    if isinstance(entry, (*NO_NEST, torch.Tensor)):
        return False
    return any(isinstance(child, (str, int, float)) for child in children(entry))


def _has_data(value: Any) -> bool:
    """Whether there is a tensor or an array in a value."""
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return True
    return not isinstance(value, NO_NEST) and any(_has_data(child) for child in children(value))


def _kind(value: Any, depth: int = 6) -> object:
    """The structure of an entry: what entries that are rows have in common."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.dim())
    if isinstance(value, (bool, int, float, complex)):
        return "number"
    if value is None:
        return "none"
    if isinstance(value, NO_NEST) or not depth:
        return type(value)
    if hasattr(value, "__array__"):
        return ("array", getattr(value, "ndim", 0))
    if isinstance(value, list):
        return ("list", frozenset(_kind(v, depth - 1) for v in value))
    held = named_children(value)
    return type(value), tuple((str(key), _kind(v, depth - 1)) for key, v in held)
