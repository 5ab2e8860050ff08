"""The way of a walk: what is declared first, then what the loop's functions keep."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.torch_internals import no_dispatch_modes, no_torch_function
from pytest_trainloop.runs.reachable_state.entering import Entering
from pytest_trainloop.runs.reachable_state.graph import Graph, module_path
from pytest_trainloop.runs.reachable_state.leaves import ROOTS, Leaf
from pytest_trainloop.runs.reachable_state.slots import MISSING, OfCell, Place, switches
from pytest_trainloop.runs.reachable_state.value_kinds import is_plain, sort_of, sort_of_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.declare.loop import TrainLoop

MOST_OBJECTS = 30_000
"""A walk looks into at most so many objects."""

_DECLARED = ROOTS[:4]


@dataclass(slots=True)
class Walked:
    """What a walk has found: leaves and all other places by path, the paths of the objects by ``id``, and what was cut
    off."""

    loop: TrainLoop
    leaves: Mapping[str, Leaf]
    places: Mapping[str, Place]
    objects: Mapping[int, str]
    cut: str
    graph: Graph
    """Keeps the objects alive, so that no ``id`` is used again."""


def walk(loop: TrainLoop, most: int = MOST_OBJECTS) -> Walked:
    """Look through at most ``most`` objects that a loop can reach."""
    graph = Graph()
    for path, slot in switches():  # as they are where the walk is called
        graph.add(Place(path, slot, slot.get(), kind="switch", component=path))
    with quiet():
        _Walk(graph, most).over(loop)
    return Walked(loop, dict(graph.leaves()), graph.places, graph.names, "; ".join(graph.shortened.values()), graph)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without gradients, and past every mode: none of the loop's or of ours sees what is done here."""
    with torch.no_grad(), no_torch_function(), no_dispatch_modes():
        yield


class _Walk:
    def __init__(self, graph: Graph, most: int) -> None:
        self.graph, self.most = graph, most
        self.entering = Entering(graph)
        self.entered = 0

    def over(self, loop: TrainLoop) -> None:
        for prefix, module in loop.modules.items():
            path = module_path(loop.model, prefix)
            self._begin("model", module, path)
            self._name_parameters(path, prefix)
        for name in _DECLARED[1:]:
            self._begin(name, getattr(loop, name), name)
        functions = {name: getattr(loop, name) for name in ROOTS if name not in _DECLARED}
        for function in functions.values():
            self._name_variables(function)
        waiting = list(self.graph.queue)
        self.graph.queue.clear()
        for name, function in functions.items():
            self._begin(name, function, name)
        self.graph.queue.extend(waiting)  # what a function has a variable for goes by the variable's name
        self._to_the_end()

    def _name_parameters(self, path: str, prefix: str) -> None:
        for place in self.graph.places.values():
            if place.kind == "weight" and place.path.startswith(f"{path}."):
                name = place.path[len(path) + 1 :]
                self.graph.parameters.setdefault(id(place.value), f"{prefix}.{name}" if prefix else name)

    def _name_variables(self, function: Any) -> None:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
            value = OfCell(cell).get()
            if value is not MISSING and name != "self":
                self.graph.variable_names.setdefault(id(value), name)

    def _begin(self, root: str, given: Any, path: str) -> None:
        sort = sort_of_root(given)
        if is_plain(given) or sort in ("opaque", "ours"):
            return
        graph = self.graph
        known = id(given) in graph.known
        place = Place(path, None, given, component=path, node=graph.node(given, path))
        graph.roots.append((place.node, root))
        if known:
            return
        if root not in _DECLARED and sort in ("function", "method", "partial"):
            place.path = f"<{root}>"
        else:
            if root not in _DECLARED:
                place.path = place.component = graph.variable_names.get(id(given)) or type(given).__name__
                graph.names[id(given)] = place.path
            graph.add(place)
        graph.queue.append(place)
        if root in _DECLARED:
            self._to_the_end(only_declared=True)

    def _to_the_end(self, *, only_declared: bool = False) -> None:
        """Enter what is waiting, in order of distance."""
        queue, later = self.graph.queue, []
        while queue:
            place = queue.popleft()
            if only_declared and place.waits:
                later.append(place)
                continue
            if self.entered >= self.most:
                self.graph.shortened[""] = f"only the nearest {self.most} objects were looked at"
                break
            self.entered += sort_of(place.value) not in ("module", "tensor")
            self.entering.enter(place)
        queue.extend(later)
