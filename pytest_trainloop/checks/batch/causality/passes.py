"""Whether a model that predicts the next input sees it, in training or in evaluation, and through what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_trainloop.checks.batch.causality.operations_ahead import KINDS, Kind, OperationAhead, replacements
from pytest_trainloop.checks.batch.causality.outputs_ahead import OutputsAhead
from pytest_trainloop.errors import CannotDecide, DoesNotApply
from pytest_trainloop.gradients.reached import Reached
from pytest_trainloop.tracing.forward_pass import ForwardPass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.forward_pass import Replacement

Mode = Literal["training", "evaluation"]


@dataclass(frozen=True, slots=True)
class Leak:
    """Outputs that depend on the inputs that they predict."""

    ahead: int
    """By how many positions the targets are ahead of the inputs."""
    length: int
    offsets: tuple[int, ...]
    """The inputs that outputs depend on, from their own position."""
    modes: tuple[Mode, ...]
    loss: str
    loss_place: str
    kind: Kind | None
    """The kind of operation that looks ahead; None where it was not found."""
    operations: tuple[OperationAhead, ...]
    attentions: int
    """How many products join positions."""
    confirmed: bool
    """Whether nothing leaks without these operations."""
    other_loss_is_clean: bool
    """Whether outputs of another such loss do not see the answer."""


class _Blame(NamedTuple):
    kind: Kind | None
    operations: tuple[OperationAhead, ...]
    confirmed: bool


class CausalPasses:
    """The passes behind ``causality``."""

    def __init__(self, evidence: Evidence) -> None:
        self._plan, self._evidence = evidence.plan(), evidence
        self._open_inputs = True
        self.reached = Reached()
        """Which inputs each output depends on, where outputs see what they predict."""

    def leak(self) -> Leak | None:
        """What lets outputs see the inputs that they predict, if something does. Raises ``CannotDecide`` where no loss
        compares outputs with later inputs."""
        training = self._once("training")
        if not training.ahead:
            _refuse(training)
        evaluation = self._once("evaluation")
        by_mode: dict[Mode, OutputsAhead] = {"training": training, "evaluation": evaluation}
        modes = tuple(mode for mode, found in by_mode.items() if found.leaks)
        if not modes:
            if training.refused:
                raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {training.refused}")
            return None
        found = self._once(modes[0], closer=True)
        self.reached = found.reached
        kind, operations, confirmed = self._why(modes[0], found)
        return Leak(
            ahead=found.ahead,
            length=found.length,
            offsets=tuple(sorted(found.offsets)),
            modes=modes,
            loss=found.loss,
            loss_place=found.where,
            kind=kind,
            operations=operations,
            attentions=found.attentions,
            confirmed=confirmed,
            other_loss_is_clean=found.other_loss_is_clean,
        )

    def _why(self, mode: Mode, found: OutputsAhead) -> _Blame:
        """The kind of operation without which nothing leaks; else the first that sees later inputs."""
        for kind in KINDS:
            kinds = ("attention", "softmax") if kind == "attention" else (kind,)
            operations = tuple(a for a in found.operations if a.kind in kinds)
            if operations:
                without = self._once(mode, replacements=replacements(operations, found.length))
                if without.ahead and not without.leaks and not without.refused:
                    return _Blame(kind, operations, confirmed=True)
        first = found.first
        return _Blame(first.kind if first else None, (first,) if first else (), confirmed=False)

    def _once(
        self, mode: Mode, *, closer: bool = False, replacements: Mapping[int, Replacement] | None = None
    ) -> OutputsAhead:
        found = OutputsAhead(closer=closer)
        for open_inputs in (True, False) if self._open_inputs else (False,):
            seen = ForwardPass(
                at_loss=found.look,
                eval_mode=mode == "evaluation",
                open_inputs=open_inputs,
                replacements=replacements or {},
            )
            plan = seen.plan(self._plan)
            record = self._evidence.rerun(plan)
            if found.ahead or record.raised is None or replacements:
                return found
            self._open_inputs = False  # a model may refuse inputs that require a gradient
        self._evidence.require_returned(plan, record)
        return found


def _refuse(found: OutputsAhead) -> None:
    if found.refused:
        raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {found.refused}")
    raise DoesNotApply("no loss function of torch is called with the next tokens as targets")
