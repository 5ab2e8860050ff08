"""Which Python objects hold the graphs of earlier steps."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.state.memory_growth.names import referrers
from pytest_trainloop.ours import holds_alone, is_ours
from pytest_trainloop.recording.torch_internals import function_class, saved_values_overwritten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_trainloop.checks.state.memory_growth.names import Names
    from pytest_trainloop.recording.graphs import Graphs

How = Literal["running_sum", "kept_tensors", "held_outside_python"]

MOST_LEVELS = 6
"""Objects between a container and the tensors in it."""

MOST_NODES = 500_000

_CONTEXT = torch.autograd.function.BackwardCFunction


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
        contexts = [o for o in gc.get_objects() if issubclass(type(o), _CONTEXT)]
        self.contexts = [context for context in contexts if self.marked(context)]

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

    def some_of_them(self) -> list[tuple[Any, int]]:
        """The others that reach some, and the contexts of custom functions, each with its windows."""
        return [
            *((tensor, bits) for tensor, bits in self.tensors if 0 < bits < self.full),
            *((context, self._of(context)) for context in self.contexts),
        ]

    @property
    def lists(self) -> tuple[Any, ...]:
        """What refers to tensors and contexts here, and is none of the project's."""
        return (self._known, self.tensors, self.contexts, *self.tensors)


def find(reached: Reached, names: Names) -> list[Holder]:
    """What holds the graphs of these windows: the tensors that hold all of them, and the containers that do."""
    found = [_running_sum(whole, names)] if (whole := reached.all_of_them()) else []
    containers = _containers(reached, names)
    if containers is None:
        return found
    found += containers
    if not found:
        found.append(_outside_python(reached))
    return found


def _running_sum(whole: list[torch.Tensor], names: Names) -> Holder:
    """The tensor that the others were computed from: of those with a name the one with the smallest graph.

    Graphs save tensors too, so that earlier values of the sum may be among them; these have no names.
    """
    below = {id(t): len(_below(_made_by(t))) for t in whole}
    ordered = sorted(whole, key=lambda t: (not names.is_local(t), below[id(t)]))
    asked = sorted({id(t): t for t in (*ordered[:4], *ordered[-4:])}.values(), key=lambda t: below[id(t)])
    named = [(name, t) for t in asked if (name := names.of(t))] or [("", asked[0])]
    name, tensor = named[0]
    return Holder("running_sum", name, "Tensor", len(whole), None, _made_by(tensor))


def _below(node: Any) -> set[Any]:
    seen = {node}
    nodes = [node]
    while nodes and len(seen) < MOST_NODES:
        for following, _ in nodes.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return seen


def _containers(reached: Reached, names: Names) -> list[Holder] | None:
    """The innermost containers that hold a tensor of every window; None where none does but what is this package's."""
    items: dict[int, tuple[Any, int]] = {id(value): (value, bits) for value, bits in reached.some_of_them()}
    some = next((_node_of(value) for value, _ in items.values()), None)
    count, ours = len(items), 0
    for _ in range(MOST_LEVELS):
        if not items:
            break
        above: dict[int, tuple[Any, int]] = {}
        values = [value for value, _ in items.values()]
        for holder in referrers(values, (id(items), *map(id, items.values()), *map(id, reached.lists))):
            if isinstance(holder, (FrameType, ModuleType)):
                continue
            bits = 0
            for value in gc.get_referents(holder):
                bits |= items[id(value)][1] if id(value) in items else 0
            if is_ours(holder):
                ours |= bits
            elif bits:
                above[id(holder)] = (holder, bits)
        made = (id(items), id(above), id(values), *map(id, above.values()), *map(id, reached.lists))
        whole = [holder for holder, bits in above.values() if bits == reached.full and not holds_alone(holder, made)]
        if whole:
            return [_holder_of(holder, count, some, names) for holder in _named_first(whole, names)[:2]]
        items = above
    return None if ours == reached.full else []


def _named_first(holders: list[Any], names: Names) -> list[Any]:
    """Containers of the project's; what has no name is a part of what has one."""
    named = [holder for holder in holders if isinstance(holder, (list, deque, dict, set, tuple)) and names.of(holder)]
    return named or holders[:1]


def _holder_of(holder: Any, count: int, some: Any, names: Names) -> Holder:
    bounded = holder.maxlen if isinstance(holder, deque) else None
    return Holder("kept_tensors", names.of(holder), type(holder).__name__, count, bounded, some)


def _outside_python(reached: Reached) -> Holder:
    """A custom function whose context is alive, or what made a tensor that nothing in Python refers to."""
    contexts, some = reached.contexts, reached.some_of_them()
    if contexts:
        name = (function_class(contexts[0]) or type(contexts[0])).__name__
        return Holder("held_outside_python", name, "autograd.Function", len(contexts), None, contexts[0])
    made_by = _node_of(some[0][0]) if some else None
    return Holder("held_outside_python", "", type(made_by).__name__ if some else "", len(some), None, made_by)


def _node_of(value: Any) -> Any:
    return _made_by(value) if isinstance(value, torch.Tensor) else value


def tensors_with_history() -> list[tuple[torch.Tensor, Any]]:
    """The tensors that Python holds and that were computed, each with the node that made it."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [(tensor, node) for tensor in tensors if (node := _made_by(tensor)) is not None]


def _made_by(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was written to
        return None
