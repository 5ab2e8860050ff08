"""Batches as nested structures of tensors: walk, copy, take rows, refuse what is no batch."""

from __future__ import annotations

from pytest_trainloop.declare.nested.given import (
    copy,
    describe,
    is_named,
    require_batch,
    require_names,
    without_tensors,
)
from pytest_trainloop.declare.nested.rows import is_of_rows, knows_its_rows, lists_of_rows, rows, take
from pytest_trainloop.declare.nested.walk import (
    Path,
    children,
    last_name,
    mapped,
    named_children,
    paths,
    replaced,
    shown,
    tensors,
)

__all__ = [
    "Path",
    "children",
    "copy",
    "describe",
    "is_named",
    "is_of_rows",
    "knows_its_rows",
    "last_name",
    "lists_of_rows",
    "mapped",
    "named_children",
    "paths",
    "replaced",
    "require_batch",
    "require_names",
    "rows",
    "shown",
    "take",
    "tensors",
    "without_tensors",
]
