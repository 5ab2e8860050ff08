"""Whether a model that is to tell the next input sees it, in training or in evaluation, and through what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.checks.batch.causality.operations_ahead import KINDS, Ahead, Kind, changes
from pytest_trainloop.checks.batch.causality.outputs_ahead import Future
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.tracing.forward_pass import Pass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.forward_pass import Change

Mode = Literal["training", "evaluation"]


@dataclass(frozen=True, slots=True)
class Leak:
    """Targets are the inputs ``ahead`` positions on, and outputs see the inputs at ``offsets`` from their own, in these
    ``modes``; what lets them is of this ``kind`` (None: not found); ``attentions`` is how many products join positions.
    ``confirmed``: without these operations nothing leaks; ``honest``: outputs of another loss see no answer."""

    ahead: int
    length: int
    offsets: tuple[int, ...]
    modes: tuple[Mode, ...]
    loss: str
    loss_place: str
    kind: Kind | None
    looking: tuple[Ahead, ...]
    attentions: int
    confirmed: bool
    honest: bool


class Causality:
    """The passes behind ``causality``."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._opens = True

    def leak(self) -> Leak | None:
        """What lets outputs see the inputs that they are to tell, if something does. Raises ``CannotDecide`` where no
        loss compares outputs with later inputs."""
        training = self._once("training")
        if not training.ahead:
            _refuse(training)
        evaluation = self._once("evaluation")
        by_mode: dict[Mode, Future] = {"training": training, "evaluation": evaluation}
        modes = tuple(mode for mode, found in by_mode.items() if found.leaks)
        if not modes:
            if training.refused:
                raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {training.refused}")
            return None
        found = self._once(modes[0], closer=True)
        kind, looking, confirmed = self._why(modes[0], found)
        return Leak(
            found.ahead, found.length, tuple(sorted(found.offsets)), modes, found.loss, found.where,
            kind, tuple(looking), found.attentions, confirmed, found.honest,
        )  # fmt: skip

    def _why(self, mode: Mode, found: Future) -> tuple[Kind | None, list[Ahead], bool]:
        """The kind of operation without which nothing leaks; else the first that sees later inputs."""
        for kind in KINDS:
            looking = [a for a in found.looking if a.kind == kind]
            if kind == "attention":
                looking = [a for a in found.looking if a.kind in ("attention", "softmax")]
            if looking:
                without = self._once(mode, changes=changes(looking, found.length))
                if without.ahead and not without.leaks and not without.refused:
                    return kind, looking, True
        return (found.first.kind, [found.first], False) if found.first is not None else (None, [], False)

    def _once(self, mode: Mode, *, closer: bool = False, changes: Mapping[int, Change] | None = None) -> Future:
        found = Future(closer=closer)
        for opens in (True, False) if self._opens else (False,):
            given: dict[str, Any] = {"evaluating": mode == "evaluation", "opens": opens, "changes": changes or {}}
            seen = Pass(at_loss=found.look, **given)
            record = self._run(seen.plan(self._plan))
            if found.ahead or record.raised is None or changes:
                break  # a model may refuse inputs that require a gradient
            self._opens = False
        return found


def _refuse(found: Future) -> None:
    if found.refused:
        raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {found.refused}")
    raise CannotDecide("no loss of this loop compares outputs with inputs at later positions")
