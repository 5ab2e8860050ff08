"""Which Python objects hold the graphs of earlier steps."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.state.memory_growth.names import referrers
from pytest_trainloop.recording.torch_internals import function_class, saved_values_overwritten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_trainloop.checks.state.memory_growth.names import Names
    from pytest_trainloop.recording.graphs import Graphs

How = Literal["running_sum", "kept_tensors", "held_outside_python"]

MOST_LEVELS = 6
"""Objects between a container and the tensors in it."""

MOST_NODES = 500_000


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds the graphs."""

    how: How
    name: str
    """As the project's code reaches it; empty where no name is known."""
    kind: str
    """The type of the container, the class of the custom function, or "Tensor"."""
    items: int
    """The number of tensors that reach the graphs."""
    bounded: int | None
    """``maxlen`` of the deque."""
    made_by: Any
    """The node that made the tensor, or one of the tensors."""


class Reached:
    """The tensors that Python holds, and which marked windows each reaches through its graph."""

    def __init__(self, graphs: Graphs, windows: Iterable[int]) -> None:
        self._graphs = graphs
        self.full = sum(1 << window for window in windows)
        self._known: dict[Any, int] = {}
        self.tensors = [(tensor, self._of(node)) for tensor, node in tensors_with_history()]

    def _of(self, node: Any) -> int:
        """The windows that a node reaches, as bits."""
        open_nodes = [node]
        while open_nodes and len(self._known) < MOST_NODES:
            at = open_nodes[-1]
            below = [n for n, _ in at.next_functions if n is not None and n not in self._known]
            if at not in self._known and below:
                open_nodes += below
                continue
            open_nodes.pop()
            own = self._graphs.window_of(at)
            bits = 0 if own is None else 1 << own
            for following, _ in at.next_functions:
                bits |= self._known.get(following, 0)
            self._known[at] = bits & self.full
        return self._known.get(node, 0)

    @property
    def nodes(self) -> int:
        """The nodes of these windows that are alive."""
        return sum(map(self.marked, self._known))

    def marked(self, node: Any) -> bool:
        """Whether a node lies in the graph of one of these windows."""
        window = self._graphs.window_of(node)
        return window is not None and bool(self.full >> window & 1)

    @property
    def overwritten(self) -> bool:
        """Whether some node cannot be used again, since what it needs was written to in place after the step."""
        return any(saved_values_overwritten(node) for node in self._known if self.marked(node))

    def all_of_them(self) -> list[torch.Tensor]:
        """The tensors that reach every window."""
        return [tensor for tensor, bits in self.tensors if bits == self.full]

    def some_of_them(self) -> dict[int, int]:
        """The windows of the others, by the identity of the tensor."""
        return {id(tensor): bits for tensor, bits in self.tensors if 0 < bits < self.full}


def find(graphs: Graphs, windows: Iterable[int], names: Names) -> tuple[list[Holder], Reached]:
    """What holds the graphs of these windows: the tensors that hold all of them, and the containers that do."""
    reached = Reached(graphs, windows)
    found = [_running_sum(whole, names)] if (whole := reached.all_of_them()) else []
    found += _containers(reached, names)
    if not found:
        found.append(_outside_python(reached))
    return found, reached


def _running_sum(whole: list[torch.Tensor], names: Names) -> Holder:
    """The tensor that the others were computed from, and of those that share its graph the one with a name."""
    nodes = {id(t): _made_by(t) for t in whole}
    below = {key: _below(node) for key, node in nodes.items()}
    least = min(len(seen) for seen in below.values())
    first = [t for t in whole if len(below[id(t)]) == least]
    named = [(names.of(t), t) for t in first[:4]]
    name, tensor = next(((n, t) for n, t in named if n), named[0])
    return Holder("running_sum", name, "Tensor", len(first), None, nodes[id(tensor)])


def _below(node: Any) -> set[Any]:
    seen = {node}
    nodes = [node]
    while nodes and len(seen) < MOST_NODES:
        for following, _ in nodes.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return seen


def _containers(reached: Reached, names: Names) -> list[Holder]:
    """The innermost containers that hold a tensor of every window."""
    tensors = {id(t): t for t, _ in reached.tensors}
    items: dict[int, tuple[Any, int]] = {key: (tensors[key], bits) for key, bits in reached.some_of_them().items()}
    some = next(iter(items.values()), (None, 0))[0]
    count = len(items)
    for _ in range(MOST_LEVELS):
        if not items:
            return []
        above: dict[int, tuple[Any, int]] = {}
        values = [value for value, _ in items.values()]
        for holder in referrers(values, (id(items), id(tensors), *map(id, items.values()), id(reached.tensors))):
            if isinstance(holder, (FrameType, ModuleType)) or _is_ours(holder, reached):
                continue
            bits = 0
            for value in gc.get_referents(holder):
                bits |= items[id(value)][1] if id(value) in items else 0
            if bits:
                above[id(holder)] = (holder, bits)
        whole = [holder for holder, bits in above.values() if bits == reached.full]
        if whole:
            return [_holder_of(holder, count, some, names) for holder in _named_first(whole, names)[:2]]
        items = above
    return []


def _named_first(holders: list[Any], names: Names) -> list[Any]:
    """Containers of the project's; what has no name is a part of what has one."""
    named = [holder for holder in holders if isinstance(holder, (list, deque, dict, set, tuple)) and names.of(holder)]
    return named or holders[:1]


def _holder_of(holder: Any, count: int, some: Any, names: Names) -> Holder:
    bounded = holder.maxlen if isinstance(holder, deque) else None
    return Holder("kept_tensors", names.of(holder), type(holder).__name__, count, bounded, _made_by(some))


def _is_ours(holder: Any, reached: Reached) -> bool:
    return any(holder is entry for entry in reached.tensors) or type(holder).__module__.startswith("pytest_trainloop")


def _outside_python(reached: Reached) -> Holder:
    """A custom function whose context keeps a tensor, where one is alive; else nothing that Python knows."""
    contexts = [o for o in gc.get_objects() if isinstance(o, torch.autograd.function.BackwardCFunction)]
    kept = [context for context in contexts if reached.marked(context)]
    kind = function_class(kept[0]) if kept else None
    some = reached.some_of_them()
    made_by = next((_made_by(tensor) for tensor, _ in reached.tensors if id(tensor) in some), None)
    if kept:
        name = (kind or type(kept[0])).__name__
        return Holder("held_outside_python", name, "autograd.Function", len(kept), None, None)
    kind_of_node = "" if made_by is None else type(made_by).__name__
    return Holder("held_outside_python", "", kind_of_node, len(some), None, made_by)


def tensors_with_history() -> list[tuple[torch.Tensor, Any]]:
    """The tensors that Python holds and that were computed, each with the node that made it."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [(tensor, node) for tensor in tensors if (node := _made_by(tensor)) is not None]


def _made_by(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was written to
        return None
