"""What a walk has found so far: the places by paths as a reader types them, and the objects with what they lead to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.runs.reachable_state.leaves import ROOTS, Leaf
from pytest_trainloop.runs.reachable_state.slots import MISSING, Place
from pytest_trainloop.runs.reachable_state.value_kinds import is_plain, sort_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.runs.reachable_state.leaves import Kind
    from pytest_trainloop.runs.reachable_state.slots import Slot

_REFERRED = frozenset("tensor array generator module optimizer scheduler scaler dict list set object".split())
_IMMEDIATE = ("module", "optimizer", "scheduler", "scaler", "dict", "list", "tuple")


@dataclass
class Graph:
    """An object is a node with the nodes that it leads to; each is entered once."""

    places: dict[str, Place] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """The path of each object that was met, by ``id``."""
    known: dict[int, tuple[int, Any]] = field(default_factory=dict)
    edges: list[list[int]] = field(default_factory=list)
    roots: list[tuple[int, str]] = field(default_factory=list)
    queue: deque[Place] = field(default_factory=deque)
    shortened: dict[str, str] = field(default_factory=dict)
    """What was not entered, in words, by path."""
    parameters: dict[int, str] = field(default_factory=dict)
    """The names of parameters without the name of the model."""
    variables: dict[object, int] = field(default_factory=dict)
    """The nodes of variables, by cell or by globals and name."""
    variable_names: dict[int, str] = field(default_factory=dict)
    """What objects are called in the closures of the loop's functions."""

    def child(
        self,
        path: str,
        slot: Slot,
        value: Any,
        within: Place,
        *,
        component: str = "",
        as_kind: Kind | None = None,
        owner: int = -1,
        waits: bool = False,
    ) -> Place | None:
        """Add the place of a value below another one, and enter it later where there is something to enter."""
        if value is MISSING:
            return None
        owner = within.node if owner < 0 else owner
        variable = self.variable_names.get(id(value), "")
        if variable and path.rpartition(".")[2].startswith("_") and variable not in self.places:
            path = variable  # "trainer", where a module has it as "_trainer"
        place = Place(path, slot, value, component=component or path, node=owner, within=within, as_kind=as_kind)
        if is_plain(value):
            place.kind = as_kind or "scalar"
            return self.add(place)
        sort = sort_of(value)
        if sort in ("opaque", "ours"):
            return self.add(place)
        known = self.known.get(id(value))
        if known is not None:
            self.edges[owner].append(known[0])
            place.node = owner
            place.kind = "reference" if sort in _REFERRED else None
            return self.add(place)
        self.add(place)
        place.node = self.node(value, place.path)
        self.edges[owner].append(place.node)
        if sort in ("tensor", "array", "generator"):
            place.kind = as_kind or ("tensor" if sort == "tensor" else "array" if sort == "array" else "generator")
            if sort == "tensor" and as_kind == "group_value" and within.path.endswith("['params']"):
                place.kind, place.component = "weight", f"weights of {place.component.removesuffix('.param_groups')}"
            if sort == "tensor" and may_train(value):
                self.queue.append(place)
            return place
        if sort == "stream":
            place.kind = "generator"
        place.waits = waits or sort not in _IMMEDIATE
        if sort in ("module", "optimizer"):
            place.as_kind, place.component = None, place.path
        self.queue.append(place)
        return place

    def node(self, thing: Any, path: str) -> int:
        """The node of an object; a new one, named by the path, where it was not met before."""
        known = self.known.get(id(thing))
        if known is not None:
            return known[0]
        self.edges.append([])
        self.known[id(thing)] = (len(self.edges) - 1, thing)
        self.names[id(thing)] = path
        return len(self.edges) - 1

    def add(self, place: Place) -> Place:
        """Keep a place under a path of its own."""
        if place.path in self.places:
            number = 2
            while f"{place.path} ({number})" in self.places:
                number += 1
            place.path = f"{place.path} ({number})"
        self.places[place.path] = place
        return place

    def shorten(self, place: Place, count: int, most: int) -> None:
        if count > most:
            self.shortened[place.path] = f"of the {count} entries of {place.path} the first {most} were looked at"

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        masks = self._masks()
        sets: dict[int, frozenset[str]] = {}
        for path, place in self.places.items():
            if place.kind is None:
                continue
            mask = masks[place.node] if place.node >= 0 else 0
            if mask not in sets:
                sets[mask] = frozenset(root for bit, root in enumerate(ROOTS) if mask >> bit & 1)
            yield path, Leaf(path, place.kind, place.component, sets[mask], place.persistent)

    def _masks(self) -> list[int]:
        """For each node the roots that lead to it, as bits."""
        masks = [0] * len(self.edges)
        todo: list[tuple[int, int]] = [(node, 1 << ROOTS.index(root)) for node, root in self.roots]
        while todo:
            node, bits = todo.pop()
            if masks[node] | bits != masks[node]:
                masks[node] |= bits
                todo.extend((other, masks[node]) for other in self.edges[node])
        return masks


def may_train(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf that has a gradient or may get one."""
    return tensor.is_leaf and (
        tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) or tensor.grad is not None
    )


def module_path(declared: Any, prefix: str) -> str:
    """The path of one of the declared modules: ``model``, ``model[0]``, ``generator`` for an entry of a dict."""
    if not prefix:
        return "model"
    if isinstance(declared, Mapping):
        return prefix if prefix.isidentifier() else f"model[{prefix!r}]"
    return f"model[{prefix}]"


def joined(path: str, name: str) -> str:
    """The path of an attribute."""
    return f"{path}.{name}" if name.isidentifier() or "." not in name else f"{path}[{name!r}]"


def entry_path(path: str, key: Any, shown: str) -> str:
    """The path of an entry: by its key, or by what the key is called where it is an object."""
    return f"{path}[{shown or repr(key)}]"
