"""Whether outputs of a model that predicts the next input can see it, by exact gradients.

See docs/how-it-decides.md#rows-and-positions-by-exact-gradients.

The loss shows that the model predicts the next input: its targets are the inputs one position ahead (or a few), bit for
bit. Then output t may not depend on input t + 1: the gradient must be exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.batch.causality.operations_ahead import (
    OperationAhead,
    attentions,
    first_seeing,
    look_ahead,
)
from pytest_trainloop.gradients.reached import Reached
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CLASS_LOSSES, DISTANCE_LOSSES
from pytest_trainloop.tracing.arguments import bound_arguments
from pytest_trainloop.tracing.forward_pass import grads, weighted_sum
from pytest_trainloop.tracing.provenance_queries import layout
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.tracing.forward_pass import DataInput, ForwardPass
    from pytest_trainloop.tracing.provenance import Node

FEWEST = 12
"""Positions at which targets and later inputs must be equal."""

FARTHEST = 4
"""Positions ahead that are tried, at most."""


@dataclass(frozen=True, slots=True)
class _Targets:
    """The targets of a loss call, with the position of each entry."""

    values: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    shape: tuple[int, int]
    """The numbers of rows and of positions."""
    kept: torch.Tensor
    """Which entries count in the loss."""


@dataclass(slots=True)
class OutputsAhead:
    """What one pass shows of the first loss call whose targets are later inputs and whose outputs see them."""

    closer: bool = False
    """Whether the operations that look ahead are looked for, too."""
    ahead: int = 0
    """By how many positions the targets are ahead of the inputs."""
    length: int = 0
    loss: str = ""
    where: str = ""
    offsets: set[int] = field(default_factory=set)
    """The inputs that outputs depend on, from their own position."""
    other_loss_is_clean: bool = False
    """Whether outputs of another such call do not see the answer."""
    operations: list[OperationAhead] = field(default_factory=list)
    first: OperationAhead | None = None
    attentions: int = 0
    reached: Reached = field(default_factory=Reached)
    """What every output depends on, where outputs are looked at more closely."""
    refused: str = ""
    """Torch's message where no gradient could be taken."""

    @property
    def leaks(self) -> bool:
        """Whether outputs depend on the very inputs that they predict."""
        return self.ahead in self.offsets if self.ahead else False

    def look(self, seen: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge one call of a loss function, unless an earlier one leaks."""
        if name not in CLASS_LOSSES | DISTANCE_LOSSES:
            return
        given = bound_arguments(getattr(F, name), args, kwargs)
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not scores.requires_grad:
            return
        place = here()[0]
        try:
            targets = _targets(name, given, target.detach(), seen.lineage.of(scores))
            if targets is not None:
                self._compare(seen, name, str(place), scores, targets)
        except RuntimeError as error:
            reraise_raised(error)
            self.refused = str(error).partition("\n")[0]

    def _compare(self, seen: ForwardPass, name: str, place: str, scores: torch.Tensor, targets: _Targets) -> None:
        length = targets.shape[1]
        for entered in seen.data_inputs:
            ahead = _ahead(entered, targets)
            if not ahead:
                continue
            by_class = scores.movedim(1, -1) if name in CLASS_LOSSES else scores
            inexact = any(op.name.startswith("fft_") for op in seen.ops)
            offsets = _offsets(entered, by_class, targets, ahead, inexact=inexact)
            self.other_loss_is_clean = self.other_loss_is_clean or ahead not in offsets
            if self.leaks:
                return
            self.ahead, self.length, self.offsets = ahead, length, offsets
            self.loss, self.where = name, place
            if self.leaks and self.closer:
                self.first = first_seeing(seen.ops, entered.leaf, length)
                self.attentions = attentions(seen.ops, length)
                self.operations = list(look_ahead(seen.ops, length))
                self.reached.note(length, partial(_along_positions, entered, by_class, targets))
            return


def _targets(name: str, given: Mapping[str, Any], target: torch.Tensor, source: Node | None) -> _Targets | None:
    """None where the scores come from no one layer over rows and positions, or targets have another shape."""
    at = layout(source)
    if at is None or len(at.leading) != 2:
        return None
    flat, kept = at.position, torch.ones_like(target, dtype=torch.bool)
    if name in CLASS_LOSSES:
        if target.is_floating_point() or given["input"].dim() != target.dim() + 1:
            return None
        flat, kept = flat.select(1, 0), target != given.get("ignore_index", -100)
    if flat.shape != target.shape:
        return None
    row, position = at.coordinates(flat.to(target.device))
    return _Targets(target, row, position, (at.leading[0], at.leading[1]), kept)


def _ahead(entered: DataInput, targets: _Targets) -> int:
    """By how many positions the targets are ahead of the inputs; 0 where they are no inputs, or match in several
    ways."""
    for values in _channels(entered, targets):
        if torch.unique(values).numel() < 4:
            continue
        found = [by for by in range(-1, FARTHEST + 1) if _agree(values, targets, by)]
        if len(found) == 1 and found[0] > 0 and not _rotated(values, targets, found[0]):
            return found[0]
    return 0


def _channels(entered: DataInput, targets: _Targets) -> Iterator[torch.Tensor]:
    """The inputs at each row and position, one channel at a time."""
    floating = targets.values.is_floating_point()
    if entered.ids is not None:
        if tuple(entered.ids.shape) == targets.shape and not floating:
            yield entered.ids.to(targets.values.device)
    elif tuple(entered.leaf.shape[:2]) == targets.shape and floating:
        leaf = entered.leaf.detach().to(targets.values.device)
        yield from [leaf] if leaf.dim() == 2 else leaf.flatten(2).unbind(2)


def _agree(values: torch.Tensor, targets: _Targets, by: int) -> bool:
    later = targets.position + by
    there = targets.kept & (later >= 0) & (later < values.shape[1])
    if int(there.sum()) < FEWEST:
        return False
    return bool((values[targets.row[there], later[there]] == targets.values[there]).all())


def _rotated(values: torch.Tensor, targets: _Targets, by: int) -> bool:
    """Whether the last targets are the first inputs: the task is to rotate a sequence, not to predict what comes
    next."""
    later = targets.position + by
    past = targets.kept & (later >= values.shape[1])
    if not bool(past.any()) or torch.unique(targets.row[past]).numel() < 2:
        return False
    return bool((values[targets.row[past], later[past] % values.shape[1]] == targets.values[past]).all())


def _along_positions(entered: DataInput, scores: torch.Tensor, targets: _Targets, at: int) -> Iterator[torch.Tensor]:
    """The gradient of the outputs at one position, the positions of the inputs first; none where no target counts."""
    there = (targets.position == at) & targets.kept
    (gradient,) = grads(weighted_sum(scores[there]), [entered.leaf]) if bool(there.any()) else (None,)
    if gradient is not None:
        yield gradient.movedim(1, 0)


def _offsets(entered: DataInput, scores: torch.Tensor, targets: _Targets, ahead: int, *, inexact: bool) -> set[int]:
    """The inputs that single outputs depend on, from the output's own position.

    A Fourier transform joins all positions and separates them again up to rounding: 1e3 machine epsilons of the largest
    gradient (as for sums in another order) count as nothing then.
    """
    length, position = entered.leaf.shape[1], targets.position
    asked = sorted({int(p) for p in torch.unique(position[targets.kept]).tolist() if p + ahead < length})
    offsets: set[int] = set()
    for at in sorted({asked[len(asked) * n // 4] for n in (1, 2, 3)} if asked else ()):
        for gradient in _along_positions(entered, scores, targets, at):
            least = ROUNDING * torch.finfo(gradient.dtype).eps * float(gradient.abs().max()) if inexact else 0.0
            nonzero = (gradient.abs() > least).reshape(len(gradient), -1).any(1)
            offsets |= {p - at for p in nonzero.nonzero().flatten().tolist()}
    return offsets
