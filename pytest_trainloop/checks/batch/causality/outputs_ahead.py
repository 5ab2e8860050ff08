"""Whether outputs of a model that is to tell the next input can see it, by exact gradients.

See docs/how-it-decides.md#rows-and-positions-by-exact-gradients.

That it is to tell the next input is read off the loss: its targets are the inputs one position on (or a few), bit for
bit. Then output t may not depend on input t + 1: the gradient must be exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.batch.causality.operations_ahead import Ahead, attentions, first_seeing, look_ahead
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CLASS_LOSSES, DISTANCE_LOSSES
from pytest_trainloop.tracing.arguments import bound_arguments
from pytest_trainloop.tracing.forward_pass import slopes, weighed
from pytest_trainloop.tracing.provenance_queries import layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.tracing.forward_pass import Entry, Pass
    from pytest_trainloop.tracing.provenance import Node

FEWEST = 12
"""Positions at which targets and later inputs must be equal."""

FARTHEST = 4
"""Positions ahead that are looked for."""


@dataclass(frozen=True, slots=True)
class _LossCall:
    """A call of a loss function: its arguments by name, the user's line, and what its input was computed by."""

    name: str
    given: Mapping[str, Any]
    place: Place
    node: Node | None


@dataclass(slots=True)
class Future:
    """What one pass showed: the loss call whose targets are later inputs (``ahead`` positions on, of ``length``), and
    the offsets of the inputs that its outputs depend on; ``honest`` tells that some other such call's do not see the
    answer. ``closer`` asks for the operations that look ahead, too."""

    closer: bool = False
    ahead: int = 0
    length: int = 0
    loss: str = ""
    where: str = ""
    offsets: set[int] = field(default_factory=set)
    honest: bool = False
    looking: list[Ahead] = field(default_factory=list)
    first: Ahead | None = None
    attentions: int = 0
    refused: str = ""

    @property
    def leaks(self) -> bool:
        """Whether outputs depend on the very inputs that they are to tell."""
        return self.ahead in self.offsets if self.ahead else False

    def look(self, seen: Pass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge one call of a loss function, unless an earlier one was enough."""
        if name not in CLASS_LOSSES | DISTANCE_LOSSES:
            return
        given = bound_arguments(getattr(F, name), args, kwargs)
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not scores.requires_grad:
            return
        place = here(4)[0]
        call = _LossCall(name, given, place, seen.lineage.of(scores))
        try:
            self._compared(seen, call, scores, target.detach())
        except RuntimeError as error:
            self.refused = str(error).partition("\n")[0]

    def _compared(self, seen: Pass, call: _LossCall, scores: torch.Tensor, target: torch.Tensor) -> None:
        at = _positions(call, scores, target)
        if at is None:
            return
        row, position, shape, kept = at
        for entry in seen.entries:
            found = _ahead(entry, target, row, position, shape, kept)
            if found:
                inexact = any(op.name.startswith("fft_") for op in seen.ops)
                offsets = _felt(entry, call.name, scores, position, kept, found, inexact)
                self.honest = self.honest or found not in offsets
                if self.leaks:
                    return
                self.ahead, self.length, self.offsets = found, shape[1], offsets
                self.loss, self.where = call.name, str(call.place)
                if self.leaks and self.closer:
                    self.first = first_seeing(seen.ops, entry.leaf, shape[1])
                    self.attentions = attentions(seen.ops, shape[1])
                    self.looking = list(look_ahead(seen.ops, shape[1]))
                return


def _positions(
    call: _LossCall, scores: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], torch.Tensor] | None:
    """Row and position of each entry of the targets, the numbers of both, and which entries count."""
    at = layout(call.node)
    if at is None or len(at.leading) != 2:
        return None
    if call.name in CLASS_LOSSES:
        if target.is_floating_point() or scores.dim() != target.dim() + 1:
            return None
        flat = at.position.select(1, 0)
    else:
        flat = at.position
    if flat.shape != target.shape:
        return None
    row, position = at.coordinates(flat.to(target.device))
    ignored = call.given.get("ignore_index", -100)
    kept = target != ignored if call.name in CLASS_LOSSES else torch.ones_like(target, dtype=torch.bool)
    return row, position, (at.leading[0], at.leading[1]), kept


def _ahead(
    entry: Entry,
    target: torch.Tensor,
    row: torch.Tensor,
    position: torch.Tensor,
    shape: tuple[int, int],
    kept: torch.Tensor,
) -> int:
    """How many positions on the inputs are the targets; 0 where they are not, or are as well in another way."""
    for values in _values(entry, shape, target):
        if torch.unique(values).numel() < 4:
            continue
        found = [s for s in range(-1, FARTHEST + 1) if _agree(values, target, row, position, kept, s)]
        if len(found) == 1 and found[0] > 0 and not _wraps(values, target, row, position, kept, found[0]):
            return found[0]
    return 0


def _values(entry: Entry, shape: tuple[int, int], target: torch.Tensor) -> Iterator[torch.Tensor]:
    """What came in at each row and position, one channel at a time."""
    if entry.ids is not None:
        if tuple(entry.ids.shape) == shape and not target.is_floating_point():
            yield entry.ids
    elif tuple(entry.leaf.shape[:2]) == shape and target.is_floating_point():
        leaf = entry.leaf.detach()
        yield from [leaf] if leaf.dim() == 2 else leaf.flatten(2).unbind(2)


def _agree(
    values: torch.Tensor, target: torch.Tensor, row: torch.Tensor, position: torch.Tensor, kept: torch.Tensor, by: int
) -> bool:
    there = kept & (position + by >= 0) & (position + by < values.shape[1])
    if int(there.sum()) < FEWEST:
        return False
    return bool((values[row[there], position[there] + by] == target[there]).all())


def _wraps(
    values: torch.Tensor, target: torch.Tensor, row: torch.Tensor, position: torch.Tensor, kept: torch.Tensor, by: int
) -> bool:
    """Whether the last targets are the first inputs: a task of moving a whole sequence round, not of telling what comes
    next."""
    past = kept & (position + by >= values.shape[1])
    if not bool(past.any()) or torch.unique(row[past]).numel() < 2:
        return False
    return bool((values[row[past], (position[past] + by) % values.shape[1]] == target[past]).all())


def _felt(
    entry: Entry,
    name: str,
    scores: torch.Tensor,
    position: torch.Tensor,
    kept: torch.Tensor,
    ahead: int,
    inexact: bool,
) -> set[int]:
    """The offsets, from an output's own position, of the inputs that it depends on. A Fourier transform joins all
    positions and parts them again up to rounding: 1e3 machine epsilons of the largest gradient (as for sums in another
    order) count as nothing then."""
    length = entry.leaf.shape[1]
    asked = sorted({int(p) for p in torch.unique(position[kept]).tolist() if p + ahead < length})
    offsets: set[int] = set()
    for at in sorted({asked[len(asked) * n // 4] for n in (1, 2, 3)} if asked else ()):
        chosen = (position == at) & kept
        picked = scores.movedim(1, -1)[chosen] if name in CLASS_LOSSES else scores[chosen]
        (slope,) = slopes(weighed(picked), [entry.leaf])
        if slope is not None:
            least = ROUNDING * torch.finfo(slope.dtype).eps * float(slope.abs().max()) if inexact else 0.0
            felt = (slope.abs() > least).reshape(*slope.shape[:2], -1).any(2).any(0)
            offsets |= {p - at for p in felt.nonzero().flatten().tolist()}
    return offsets
