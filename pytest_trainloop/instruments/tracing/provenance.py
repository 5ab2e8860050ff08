"""What each tensor of a step was computed by: the calls of torch's functions, as nodes without the tensors."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.instruments.tracing.arguments import is_dense
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import readable, shape_of
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.recording.torch_names import (
    AUTOGRAD_CALLS,
    CASTS,
    CONSTANT_ATTRIBUTES,
    IN_PLACE_OPERATORS,
    INDEXING,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

    Replay = Callable[[torch.Tensor], torch.Tensor]

MOST_NODES = 50_000
"""Nodes that are kept between two steps."""

_UNSEEN = AUTOGRAD_CALLS | {"item", "tolist", "numpy"}


@dataclass(slots=True, eq=False)
class Node:
    """One tensor: the ``op`` that made it ("" for one that came from outside), the nodes it was made of, its shape, and
    the plain numbers among the arguments. ``value`` is that of a single number. ``replay`` makes the same move with
    another tensor of the parent's shape, where the operation only moves entries."""

    op: str
    parents: tuple[Node, ...] = ()
    shape: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    place: Place | None = None
    replay: Replay | None = field(default=None, repr=False)
    cast: bool = False
    history: bool = False
    parameter: bool = False
    floating: bool = True
    value: float = math.nan

    @property
    def moves(self) -> bool:
        """Whether it only moves or casts entries."""
        return self.cast or self.replay is not None


class Lineage:
    """Nodes by tensor, for the time until the next optimizer step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Node]] = {}

    def forget(self) -> None:
        self._known.clear()

    def of(self, tensor: torch.Tensor) -> Node:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return Node(
            "",
            shape=shape_of(tensor),
            value=_value(tensor),
            history=tensor.requires_grad,
            parameter=isinstance(tensor, nn.Parameter),
            floating=tensor.is_floating_point(),
        )

    def adopt(self, tensor: torch.Tensor) -> None:
        """Let what is made of this tensor be followed back to it: its node's ``op`` is "batch"."""
        node = Node("batch", shape=shape_of(tensor), floating=tensor.is_floating_point())
        self._known[id(tensor)] = (weakref.ref(tensor), node)

    def before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, ...]:
        """The nodes of what a call is given, as they are before it (it may write in place)."""
        return () if name in _UNSEEN else tuple(self.of(t) for t in tensors_in(args, kwargs))

    def note(
        self,
        watch: Watch,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parents: tuple[Node, ...],
        out: Any,
    ) -> None:
        if name in _UNSEEN or len(self._known) > MOST_NODES:
            return
        if name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
            out = args[0] if args else out
            name = name.strip("_").removeprefix("i") if name in IN_PLACE_OPERATORS else name.rstrip("_")
        for number, result in enumerate(tensors_in(out)):
            node = self._node(watch, func, name, args, kwargs, parents, result, number)
            self._known[id(result)] = (weakref.ref(result), node)

    def _node(
        self,
        watch: Watch,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parents: tuple[Node, ...],
        result: torch.Tensor,
        number: int,
    ) -> Node:
        node = Node(
            name,
            parents=parents,
            shape=shape_of(result),
            numbers=tuple(float(v) for v in args if isinstance(v, (int, float)) and not isinstance(v, bool)),
            history=result.requires_grad,
            floating=result.is_floating_point(),
            cast=name in CASTS,
            value=_value(result),
        )
        if name == "contiguous":
            node.replay = _as_it_is
        elif name in VIEWS or name in INDEXING:
            node.replay = _replay(func, args, kwargs, number)
        elif name == "detach" or (node.floating and not node.history and any(p.history for p in parents)):
            node.place = here()[0]  # where the history ends
        elif not node.floating and result.dim() == 1 and not node.moves:
            node.place = here()[0]  # lengths, and what else is counted of each row
        return node


def name_of(func: Callable[..., Any]) -> str:
    """The function's name; of a property the attribute's."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


def _as_it_is(other: torch.Tensor) -> torch.Tensor:
    return other


def _value(tensor: torch.Tensor) -> float:
    plain = tensor.numel() == 1 and not tensor.is_complex() and is_dense(tensor) and readable(tensor)
    return float(tensor.detach()) if plain else math.nan


def _replay(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Replay | None:
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    # without their history: what waits here must not keep the graph of a step that is over
    rest, named = tree_map(_plain, args[1:]), tree_map(_plain, kwargs)
    copying: dict[str, Callable[..., Any]] = {"view": torch.Tensor.reshape, "view_as": torch.Tensor.reshape_as}
    move = copying.get(getattr(func, "__name__", ""), func)  # the numbers may lie otherwise in memory

    def again(other: torch.Tensor) -> torch.Tensor:
        """The same move; indices follow to the device of what is moved."""

        def moved(value: Any) -> Any:
            return value.to(other.device) if isinstance(value, torch.Tensor) else value

        out = move(other, *tree_map(moved, rest), **tree_map(moved, named))
        return next(t for i, t in enumerate(tensors_in(out)) if i == number)

    return again


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@functools.cache
def watched(name: str) -> bool:
    """Whether a call of this name makes tensors of others, as far as lineage goes."""
    return name not in CONSTANT_ATTRIBUTES
