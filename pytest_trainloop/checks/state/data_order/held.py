"""What callables and loaders hold: data loaders, stored tensors and arrays, lists of records."""

from __future__ import annotations

import collections
import functools
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader

from pytest_trainloop.reach.entering import Entering
from pytest_trainloop.reach.graph import Graph
from pytest_trainloop.reach.slots import Place
from pytest_trainloop.reach.sorts import is_plain, sort_of, sort_of_root
from pytest_trainloop.reach.walker import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 20_000
"""Objects that are entered, at most."""


@dataclass(slots=True)
class Held:
    """What was found, each with the path by which it was reached."""

    loaders: list[tuple[str, Any]] = field(default_factory=list)
    stored: list[tuple[str, Any]] = field(default_factory=list)
    """Tensors, arrays and lists of numbers."""
    records: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    """Lists and deques of anything else."""
    generators: list[str] = field(default_factory=list)
    """Random generators."""
    names: set[str] = field(default_factory=set)
    """The names that the code of functions reads: globals, attributes, methods."""

    @classmethod
    def by(cls, *roots: tuple[str, Any]) -> Held:
        """What these hold, themselves included."""
        found, graph = cls(), Graph()
        with quiet():
            _walk(graph, roots)
            for known, (_node, value) in graph.known.items():
                found._take(graph.names[known], value)
        return found

    def _take(self, path: str, value: Any) -> None:
        sort = sort_of(value)
        if sort == "ours":
            return
        if isinstance(value, types.FunctionType):
            self.names |= _names(value.__code__)
            return
        if isinstance(value, DataLoader):
            self.loaders.append((path, value))
        elif sort in ("tensor", "array"):
            self.stored.append((path, value))
        elif sort == "generator":
            self.generators.append(path)
        elif isinstance(value, (list, collections.deque)) and value:
            numbers = isinstance(value[0], (int, float, np.generic)) and not isinstance(value[0], bool)
            (self.stored if numbers else self.records).append((path, value))


def _walk(graph: Graph, roots: Sequence[tuple[str, Any]]) -> None:
    entering, entered = Entering(graph), 0
    for path, root in roots:
        sort = sort_of_root(root)
        if is_plain(root) or sort in ("opaque", "ours"):
            continue
        named = f"<{path}>" if sort in ("function", "method", "partial") else path
        graph.queue.append(Place(named, None, root, component=named, node=graph.node(root, named)))
    while graph.queue and entered < MOST:
        entering.enter(graph.queue.popleft())
        entered += 1


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)
