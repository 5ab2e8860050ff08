"""Gradients that one pass over the data, or one call of ``fit``, leaves in ``.grad`` for the next. No torch."""

from __future__ import annotations

import ast
import itertools
import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_trainloop.errors import Refused
from pytest_trainloop.records.gradient_ledger import gradient_ledger
from pytest_trainloop.records.windows import left_open

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Backward, Place, Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.batch_stream import Batches
    from pytest_trainloop.runs.evidence import Evidence

ACCUMULATE = 4

WINDOWS = 3
"""Windows of each call of ``fit``, the last one short of a micro-batch: two whole ones show how many a step uses."""


@dataclass(frozen=True, slots=True)
class Leak:
    """A step that uses what was left over beside a whole window."""

    first: Backward
    """The first backward pass that was left over."""
    step: Step
    used: int
    """Backward passes that the step used."""
    window: int
    """The most that any other step used."""
    left: int
    items: int
    """Batches before the boundary."""
    next_call: bool
    """Whether the boundary lies between two calls of ``fit``, and not between two passes inside one."""
    loader: int | None = None
    """The number of batches of the project's own loader, where that leaves some over."""


def condition_of(place: Place) -> str:
    """The innermost ``if`` around a line, as a line of the user's; empty where none is known."""
    lines = linecache.getlines(place.file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return ""
    around = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and n.lineno < place.line <= (n.body[-1].end_lineno or 0)
    ]
    return f"{place.file}:{max(around)}   {lines[max(around) - 1].strip()}" if around else ""


def accumulating(evidence: Evidence) -> Record | None:
    """The watched run with windows of several micro-batches; None where the loop has no knob for it, or does not take
    so many."""
    try:
        return evidence.run(accumulate=ACCUMULATE) if "accumulate" in evidence.knobs else None
    except Refused:
        return None


def leak(evidence: Evidence) -> Leak | None:
    """What the watched run leaves for its next pass over the data, or else for the next call of ``fit``. To be asked
    for by ``evidence.shared``."""
    accumulates = accumulating(evidence)
    record = accumulates or evidence.run()
    found = leaked(record, [*itertools.accumulate(record.passes)][:-1], next_call=False)
    if found is None and evidence.repeatable and left_open(record, gradient_ledger(record)):
        found = _into_next_call(evidence, record, {"accumulate": ACCUMULATE} if accumulates else {})
    if found is None:
        return None
    batches: Any = evidence.fresh_loop().batches if evidence.repeatable else None
    length = len(batches) if hasattr(batches, "dataset") and hasattr(batches, "__len__") else 0
    own = max((len(passes) for _, passes in _windows(evidence.run())), default=1)  # the knob's default, not our 4
    happens = own > 1 and length > own and length % own
    return Leak(**{name: getattr(found, name) for name in Leak.__slots__[:-1]}, loader=length if happens else None)


def leaked(record: Record, boundaries: list[int], *, next_call: bool) -> Leak | None:
    """The first step after one of these numbers of batches, where it uses passes from both sides and more than any
    other step: windows that go on across the boundary use as many as the others."""
    windows = _windows(record)
    crossing = [(w, n) for w in windows for n in boundaries if w[1][0].item <= n < w[1][-1].item]
    others = [len(w[1]) for w in windows if all(w is not c for c, _ in crossing)]
    for (step, passes), items in crossing:
        left = [b for b in passes if b.item <= items]
        regular = len(set(others)) == 1 and len({b.item for b in passes}) == len(passes)
        if regular and len(passes) == others[0] + len(left) and others[0] > len(left):
            return Leak(left[0], step, len(passes), others[0], len(left), items, next_call)
    return None


def _windows(record: Record) -> list[tuple[Step, list[Backward]]]:
    """Each step with the backward passes that it used, those of one line where several lines make some."""
    ledger = gradient_ledger(record)
    windows = []
    last: dict[int, int] = {}
    for step in ledger.steps:
        since, until = last.get(step.optimizer, 0), step.reads[-1].at
        last[step.optimizer] = until
        mine = set(record.optimizers[step.optimizer].parameters)
        used = [b.backward for b in ledger.backwards if since < b.backward.at < until and b.consumed & mine]
        sites = {b.site for b in used}
        passes = max(([b for b in used if b.site == site] for site in sites), key=len, default=[])
        if passes:
            windows.append((step, passes))
    return windows


def _into_next_call(evidence: Evidence, record: Record, knobs: Mapping[str, int]) -> Leak | None:
    """A run with two calls of ``fit``, each over batches that fill all windows but the last."""
    window = max((len(passes) for _, passes in _windows(record)), default=1)
    if window < 2:
        return None
    calls = _TwoCalls(WINDOWS * window - 1)
    again = evidence.rerun(
        evidence.plan(**knobs),
        fit=calls.of,
        prepare=calls.opened,
        count=2 * calls.items,
        read_ahead=None,
        enough=lambda record: False,
        may_raise=True,
    )
    return leaked(again, [calls.items], next_call=True) if calls.came_back else None


class _TwoCalls:
    """What one run does in place of ``fit``: it calls it twice, with ``items`` batches each."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.came_back = False
        """Whether the first call did so by itself, after one pass over its batches."""
        self._rounds: Callable[[], int] = lambda: 0

    def opened(self, watch: Watch) -> None:
        self._rounds = lambda: watch.record.rounds

    def of(self, loop: TrainLoop) -> Callable[[Any], Any]:
        from pytest_trainloop.runs.guard import StopFit
        from pytest_trainloop.runs.run import fit_of

        fit = fit_of(loop)

        def stop() -> NoReturn:
            raise StopFit

        def run(batches: Batches) -> None:
            batches.draw(2 * self.items)
            for number in range(2):
                before = self._rounds()
                part = batches.part(
                    number * self.items,
                    self.items,
                    spent=lambda before=before: self._rounds() >= before + 2 * WINDOWS,  # type: ignore[misc]
                    stepped=lambda before=before: self._rounds() > before,  # type: ignore[misc]
                    stop=stop,
                )
                fit(part)
                self.came_back = self.came_back or batches.taken == self.items
            self._rounds = lambda: 0

        return run
