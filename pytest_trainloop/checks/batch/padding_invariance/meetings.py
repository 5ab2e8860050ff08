"""Where outputs at padded positions meet what stands in the padding of targets, and where they are reduced.

An output meets a target where a loss, a difference or an index takes both: something with weights behind it, and
something made of the batch's values alone. The meeting is in the loss if no weight comes after it. Right losses leave
padded positions out before they are reduced, so that the gradient of their outputs is exactly zero there. The padded
position next to the real ones is not looked at: it may end a text, and be asked for. Where padded positions are not
zero when they are reduced with the real ones, the term of the loss is named that they are in.

Of several padded sequences, one position more or less may give outputs of one the width of another: an output made of
another group alone, or of both where its axes do not say whose positions they are, is not judged under this mask.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import nested
from pytest_trainloop.batches.values import plain, two_valued
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import LOSSES, SUBTRACTIONS
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.checks.batch.padding_invariance.slices import Span
    from pytest_trainloop.recording.events import Place

OWN, OTHER = "own", "other"
SUBTRACTION = "subtraction"
_INDEXED = frozenset({"gather", "take_along_dim", "__getitem__", "index_select"})
_REDUCTIONS = frozenset({"mean", "sum", "nanmean", "nansum", "logsumexp", "norm", "std", "var"})


@dataclass(slots=True, eq=False)
class Meeting:
    """A call in which outputs meet values of the batch, or positions are reduced. ``padded``: outputs at padded
    positions get a gradient there. ``in_the_model``: what it gives is taken up by weights again."""

    op: str
    place: Place
    reduces: bool = False
    padded: bool = False
    in_the_model: bool = False


@dataclass(slots=True)
class _Known:
    """What is known of a tensor: it is made of the batch's values alone, or behind these meetings. ``binary``: of
    zeros and ones, which may be a mask: a target only where a loss takes them as one. ``groups``: made of the sequence
    that is looked at, of others, or of both.
    """

    tensor: weakref.ref[torch.Tensor]
    of_batch: bool = False
    binary: bool = False
    behind: frozenset[Meeting] = field(default_factory=frozenset)
    groups: frozenset[str] = frozenset()


class TargetMeetings(WatchingMode, NoRandomness):
    """Finds the meetings of one run; ``before_item`` is for the run's plan."""

    def __init__(self, span: Span, rows: int, padded: PaddingMask) -> None:
        super().__init__()
        self._span, self._rows, self._time_first = span, rows, padded.grid.batch_dim == 1
        self._group, self._alike = padded, False
        self._known: dict[int, _Known] = {}
        self._met: list[Meeting] = []

    @property
    def found(self) -> list[Meeting]:
        """The meetings and reductions in the loss at which padded positions count, in order."""
        return [m for m in self._met if m.padded and not m.in_the_model]

    def before_item(self, _number: int, item: Any) -> None:
        for path, tensor in nested.paths(item):
            if not plain(tensor):
                continue
            groups = frozenset({OWN} if path in self._group.of else {OTHER} if path in self._group.others else ())
            self._known[id(tensor)] = _Known(weakref.ref(tensor), True, two_valued(tensor), groups=groups)
            sizes = tensor.shape[:1] if self._time_first else tensor.shape[1:]
            self._alike |= OTHER in groups and any(self._span.of(size) for size in sizes)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "backward":
            return NoRandomness.call(self, name, func, args, kwargs)
        name = name_of(func)
        given = list(tensors_in(args, kwargs))
        known = [self._of(t) for t in given]
        meeting: Meeting | None = None
        met: frozenset[Meeting] = frozenset().union(*(k.behind for k in known if k is not None))
        if any(isinstance(t, nn.Parameter) for t in given):
            for one in met:
                one.in_the_model = True
        elif meeting := self._meeting(name, args, given, known):
            args, kwargs = self._hooked(meeting, args, kwargs)
            met |= {meeting}
        out = NoRandomness.call(self, name, func, args, kwargs)
        for one in met:
            if one.reduces and one is meeting and any(self._padded(t) is not None for t in tensors_in(out)):
                one.in_the_model = True  # along another axis
        data = [k for k in known if k is not None and k.of_batch]
        of_batch, binary = bool(data), all(k.binary for k in data)
        groups = frozenset[str]().union(*(k.groups for k in known if k is not None))
        if met or of_batch or groups:
            for made in tensors_in(out):
                from_batch = of_batch and not made.requires_grad
                self._known[id(made)] = _Known(weakref.ref(made), from_batch, binary, met, groups)
        return out

    def _of(self, tensor: torch.Tensor) -> _Known | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _meeting(
        self, name: str, args: tuple[Any, ...], given: list[torch.Tensor], known: list[_Known | None]
    ) -> Meeting | None:
        reduces = name in _REDUCTIONS
        of_batch = [k for k in known if k is not None and k.of_batch]
        meets = (name in SUBTRACTIONS | _INDEXED and not all(k.binary for k in of_batch)) or (
            name in LOSSES and bool(of_batch)
        )
        if not (reduces or meets) or not any(t.requires_grad and self._padded(t) is not None for t in given):
            return None
        if name in _INDEXED and args and isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
            return None  # the batch's values looked up, not the outputs
        meeting = Meeting(SUBTRACTION if name in SUBTRACTIONS else name, here()[0], reduces)
        self._met.append(meeting)
        return meeting

    def _hooked(
        self, meeting: Meeting, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, with outputs whose gradient from this call alone is looked at."""

        def hooked(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                return value
            padded = self._padded(value)
            if padded is None:
                return value
            with self.watch.suspended():
                seen = value.view_as(value)
                if meeting.reduces and not bool(padded(value.detach()).any()):
                    return value

            def look(gradient: torch.Tensor) -> None:
                with self.watch.suspended():
                    meeting.padded |= bool(padded(gradient).any())

            on_gradient(seen, look)
            return seen

        return tuple(hooked(value) for value in args), {key: hooked(value) for key, value in kwargs.items()}

    def _padded(self, tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Reads the padded positions of a tensor by position, but for the one next to the real ones; None for a tensor
        without positions, or with those of another group. Rows and positions may lie on one axis."""
        if not self._is_own(tensor):
            return None
        for axis in (a for a in range(min(2, tensor.dim())) if self._span.of(tensor.shape[a])):
            return lambda values: self._beyond(values.movedim(axis, 0))
        size = tensor.shape[0] if tensor.dim() else 0
        length = size // self._rows
        if size % self._rows or self._span.of(length) is None:
            return None
        rest = tensor.shape[1:]
        if self._time_first:
            return lambda values: self._beyond(values.reshape(length, self._rows, *rest))
        return lambda values: self._beyond(values.reshape(self._rows, length, *rest).movedim(1, 0))

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor by position is one of this group's positions, as far as its axes tell."""
        known = self._of(tensor)
        if known is None or OTHER not in known.groups:
            return True
        rows = tensor.shape[1 if self._time_first and tensor.dim() > 1 else 0] if tensor.dim() else 0
        return OWN in known.groups and not self._alike and rows in (self._rows, self._rows * self._span.total)

    def _beyond(self, values: torch.Tensor) -> torch.Tensor:
        first, last = self._span.of(len(values)) or (0, len(values))
        return torch.cat([values[: max(0, first - 1)].flatten(), values[last + 1 :].flatten()])
