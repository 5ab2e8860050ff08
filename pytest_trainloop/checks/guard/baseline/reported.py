"""The first difference that was reported of one loop, with the two courses, for what is drawn of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.bounds import ROUNDING

if TYPE_CHECKING:
    from pytest_trainloop.baselines.trajectory import Course
    from pytest_trainloop.checks.guard.baseline.first import Comparison, First
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Line:
    """One run: its steps, with the loss and the norm of the gradient of each."""

    losses: dict[int, float]
    norms: dict[int, float]


class Reported:
    """Nothing where training does not differ."""

    def __init__(self, _evidence: Evidence) -> None:
        self.step = 0
        """The step in which the two courses differ first; 0 where they do not."""
        self.kind = ""
        """What differs there: "data", "output", "loss", "gradient", "rate", "update", "buffer"."""
        self.inside = ""
        """The innermost module around the first output that differs that was given what it was given."""
        self.old = self.new = Line({}, {})
        self.apart: dict[str, dict[int, float]] = {}
        """By parameter and step how far the gradients differ, relative to their own size; 0 up to rounding and before
        the first step that differs."""

    def note(self, comparison: Comparison, first: First) -> None:
        """Take the numbers of the first comparison that finds a difference."""
        if self.step:
            return
        self.step, self.kind = first.step.number, first.kind
        self.inside = (first.call.inside or "") if first.call is not None else ""
        self.old, self.new = _line(comparison.old), _line(comparison.new)
        least = ROUNDING * comparison.bounds.eps
        self.apart = {
            name: {step: apart if apart > least and step >= self.step else 0.0 for step, apart in steps.items()}
            for name, steps in comparison.gradients_apart().items()
        }


def _line(course: Course) -> Line:
    return Line(
        {step.number: sum(step.losses) for step in course.steps if step.losses},
        {
            step.number: sum(digest.squares for digest in step.gradients.values()) ** 0.5
            for step in course.steps
            if step.gradients
        },
    )
