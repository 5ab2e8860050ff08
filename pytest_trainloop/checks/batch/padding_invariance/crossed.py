"""Whether one sequence is read under the mask of another of the same width.

The positions of a sequence that are padding by its own mask and real by the other's change the gradient when they hold
other values, and those that are padding by both do not: then the other's mask says what is read. Under its own mask
none of them would, and under no mask all.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.grids import Leaf, leaves
from pytest_trainloop.batches.padding_hints import is_label
from pytest_trainloop.batches.values import plain
from pytest_trainloop.checks.batch.padding_invariance.comparison import BOUNDS
from pytest_trainloop.gradients.compare import agreement
from pytest_trainloop.gradients.vectors import Gradient, vectors
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns
    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.events import Place

OWN, OTHER = "own", "other"


@dataclass(frozen=True, slots=True)
class Crossed:
    """The group ``name`` whose mask another is read under, how far that changes its gradient, and the call that takes
    both."""

    name: str
    difference: float
    op: str
    place: Place | None


def mask_of_another(runs: PaddingRuns) -> Crossed | None:
    """The group whose mask says what is read of this one's padding, if one does: three runs, and one that finds the
    call."""
    own = runs.padded
    for other in runs.beside:
        read, unread = own.mask & ~other.mask, own.mask & other.mask
        if other.side != own.side or not (bool(read.any()) and bool(unread.any())):
            continue
        if not bool((other.mask & ~own.mask).any()):
            continue  # never the longer one: both may be of one series, of which this one is known for a shorter time
        as_is, same = (runs.with_values(functools.partial(other_values, cells=c)) for c in (own.mask & False, unread))
        if not same or _differ(as_is, same) > runs.bound:
            continue
        apart = _differ(as_is, runs.with_values(functools.partial(other_values, cells=read)))
        if apart > BOUNDS["float32"]:
            found = Crossing(own, other)
            runs.watched(found, found.before_item)
            return Crossed(other.name, apart, found.op, found.place)
    return None


def _differ(one: dict[int, Gradient], other: dict[int, Gradient]) -> float:
    return max((agreement(*vectors([one[o], other[o]])).difference for o in one if o in other), default=0.0)


def other_values(batch: Any, padded: PaddingMask, cells: torch.Tensor) -> Any:
    """The batch with the row's own real values in these cells (rows, positions) of the group's inputs."""
    changed = {leaf.path for leaf in leaves(batch) if leaf.path in padded.of and _is_input(leaf)}
    source = _real_positions(padded)

    def filled(path: Path, value: torch.Tensor) -> torch.Tensor:
        if path not in changed:
            return value
        leaf = Leaf(path, value).under(padded.grid)
        out = value.detach().clone()
        made = Leaf(path, out, leaf.row, leaf.time).cells
        rows = torch.arange(len(source), device=out.device)[:, None].expand(source.shape)
        real = made[rows, source.to(out.device)]
        made[cells.to(out.device)] = real[cells.to(out.device)]
        return out

    return nested.mapped(nested.copy(batch), filled, lambda value: isinstance(value, torch.Tensor) and plain(value))


def _is_input(leaf: Leaf) -> bool:
    return not leaf.two_valued and not is_label(leaf, None)


def _real_positions(padded: PaddingMask) -> torch.Tensor:
    """For each cell a real position of its row, one after the other."""
    place = torch.arange(padded.grid.length)[None]
    lengths = torch.tensor(padded.lengths)[:, None]
    first = padded.grid.length - lengths if padded.side == "left" else torch.zeros_like(lengths)
    found: torch.Tensor = first + place % lengths.clamp(min=1)
    return found.clamp(max=padded.grid.length - 1)


class Crossing(WatchingMode, NoRandomness):
    """Finds the first call that takes what is made of one group's inputs beside what is made of another's mask or
    lengths; ``before_item`` is for the run's plan."""

    def __init__(self, own: PaddingMask, other: PaddingMask) -> None:
        super().__init__()
        self._own, self._other = own, other
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[str]]] = {}
        self.op, self.place = "", None  # type: tuple[str, Place | None]

    def before_item(self, _number: int, item: Any) -> None:
        for leaf in leaves(item):
            groups = {OWN} if leaf.path in self._own.of and _is_input(leaf) else set()
            groups |= {OTHER} if leaf.path in self._other.by else set()
            self._known[id(leaf.tensor)] = weakref.ref(leaf.tensor), frozenset(groups)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = NoRandomness.call(self, name, func, args, kwargs)
        given = [self._of(t) for t in tensors_in(args, kwargs)]
        if self.place is None and frozenset({OWN}) in given and frozenset({OTHER}) in given:
            self.op, self.place = name_of(func), here()[0]
        groups = frozenset[str]().union(*given)
        if groups:
            self._known |= {id(t): (weakref.ref(t), groups) for t in tensors_in(out)}
        return out

    def _of(self, tensor: torch.Tensor) -> frozenset[str]:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else frozenset()
