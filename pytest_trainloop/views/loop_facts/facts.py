"""What the lines of a card are made from: the watched run, one further run, and the verdicts of the checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pytest_trainloop.core.errors import BrokenRun, CannotDecide, TimeRanOut, Unreliable, UsageError, UserCodeError
from pytest_trainloop.views.loop_facts.page import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding, Result
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.views.loop_facts.measured import Measured

T = TypeVar("T")

NOT_SEEN = "none seen"


@dataclass(slots=True)
class Facts:
    """One loop, as the card looks at it."""

    evidence: Evidence
    record: Record
    measured: Measured
    results: Mapping[str, Result] = field(default_factory=dict)
    """By check, those that were run."""
    base: Path = field(default_factory=Path.cwd)
    """The folder that the lines' files are relative to."""
    _why: str = ""

    def where(self, place: Place | str | None) -> str:
        """``file:line`` of a place, or of one as text; empty without one."""
        if not place:
            return ""
        text = place.split("   ")[0] if isinstance(place, str) else f"{place.file}:{place.line}"
        file, _, line = text.rpartition(":")
        if not file or line == "0":
            return ""
        if "site-packages/" in file:  # a virtual environment inside the project shows as one outside of it
            return f"{file.rpartition('site-packages/')[2]}:{line}"
        if self.base != Path.cwd() and (Path.cwd() / file).exists():
            file = Path(os.path.relpath(Path.cwd() / file, self.base)).as_posix()
        return f"{file}:{line}"

    def line_in(self, file: str, place: Place) -> str:
        """The line of a place, with its file where it is another one than ``file``."""
        own, _, line = self.where(place).rpartition(":")
        return line if own == file else f"{own}:{line}"

    def field(self, name: str) -> str:
        """The line that gives a field of the ``TrainLoop``."""
        return self.where(self.measured.fields.get(name, ""))

    def ask(self, kind: Callable[[Evidence], T]) -> T | None:
        """What ``kind`` makes of the evidence, shared with the checks; None where it cannot be made, and ``why`` has
        the reason then."""
        try:
            return self.evidence.shared(kind)
        except (CannotDecide, TimeRanOut, BrokenRun, Unreliable, UsageError, UserCodeError) as reason:
            self._why = str(reason)
            return None

    @property
    def why(self) -> str:
        """Why the last question had no answer."""
        return self._why

    def findings(self, check: str) -> Sequence[Finding]:
        """What a check found, if it was run."""
        result = self.results.get(check)
        return result.findings if result is not None else ()

    def optimizer(self, index: int | None) -> str:
        """How an optimizer is called where there are several: by its class and number, and the modules it trains."""
        if index is None or len(self.stepping) < 2:
            return ""
        own = [self.record.parameters[i].name for i in self.record.optimizers[index].parameters]
        roots = {name.split(".")[0] for name in own}
        others = {
            self.record.parameters[i].name.split(".")[0]
            for other in self.stepping
            if other != index
            for i in self.record.optimizers[other].parameters
        }
        return next(iter(roots)) if len(roots) == 1 and not roots & others else str(self.stepping.index(index))

    @property
    def stepping(self) -> list[int]:
        """The optimizers that made steps, or were given."""
        return [o.index for o in self.record.optimizers if o.steps or o.declared]


def none_seen(label: str, show: str, *, odd: bool = False) -> Line:
    """The line of what is not there, with what would show it."""
    return Line(label=label, text=f"{NOT_SEEN}{f': {show}' if show else ''}{' *' if odd else ''}", odd=odd)
