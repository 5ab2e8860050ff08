"""The uninterrupted run against the resumed one: what must hold before anything can be said of the two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.resume_equivalence.diagnosis import facts, untied
from pytest_trainloop.checks.state.resume_equivalence.facts import Fact, shown
from pytest_trainloop.checks.state.resume_equivalence.rounding import rounded
from pytest_trainloop.checks.state.resume_equivalence.runs import RENEWABLE_KINDS, Renewed, Resumed, Uninterrupted
from pytest_trainloop.checks.state.two_courses import TwoCourses, two_courses
from pytest_trainloop.errors import CannotDecide, UsageError
from pytest_trainloop.knobs import nearest
from pytest_trainloop.runs.halves import halves, no_halves
from pytest_trainloop.whose import present
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.runs.evidence import Evidence

_TOUCHED = ("weight", "buffer", "mode", "requires_grad", "optimizer_state", "group_value")
"""Kinds that save must leave as they are, where training goes on with them."""

_ELSEWHERE = (
    "OSError",
    "FileNotFoundError",
    "PermissionError",
    "ImportError",
    "ModuleNotFoundError",
    "ConnectionError",
)


class Reported:
    """What was reported of one loop."""

    def __init__(self, _evidence: Evidence) -> None:
        self.courses: TwoCourses | None = None
        """The resumed run beside the uninterrupted one; None where nothing differs, or one of them raised."""


def compared(evidence: Evidence) -> Iterator[tuple[Fact, Uninterrupted]]:
    """The facts, each with the uninterrupted run that it was seen against.

    Raises ``CannotDecide``, ``Unreliable``, and ``UsageError`` for names in ``renews`` that nothing has.
    """
    a, b, renewed = _both(evidence)
    try:
        if a.unreadable:
            raise CannotDecide(a.unreadable)
        if a.save_error is not None:
            _require_own(a.save_error, "save")
            yield Fact("save_raises", ("save()",), raised=a.save_error), a
            return
        a.require_two_halves()
        b = present(b, "the resumed run")
        changed = _changed_by_save(a)
        if changed is not None:
            yield changed, a
        elif b.load_error is not None:
            _require_written(a, b, b.load_error)
            if not b.unopened:
                _require_own(b.load_error, "load")
            apart = list(untied(a, b))  # an optimizer over one weight more does not take the state of one over less
            names = f"save wrote {some(a.checkpoint.files())}, load opens {b.unopened}" if b.unopened else ""
            for fact in apart or [Fact("load_raises", ("load()",), raised=b.load_error, detail=names)]:
                yield fact, a
        else:
            for fact in facts(a, b, renewed):
                evidence.shared(Reported).courses = two_courses(b.ended.made, a.ended.made, both_begin=False)
                yield fact, a
            if found := rounded(evidence):
                yield Fact("weights_rounded", found[1], detail=found[0]), a
    finally:
        a.checkpoint.remove()


def _both(evidence: Evidence) -> tuple[Uninterrupted, Resumed | None, Renewed]:
    """In float64, where no scaler is used; in the loop's own precision where anything raises in float64."""
    scaled = any(call.enabled for call in evidence.run().scaler_calls())
    for double in (False,) if scaled else (True, False):
        a = Uninterrupted(evidence, double=double)
        raised = _stopped(a)
        b, renewed = None, Renewed()
        if not raised:
            renewed = _renewed(evidence, a)
            b = Resumed(a, renewed=renewed)
            if b.unopened and a.checkpoint.files():  # the project may put the ending there itself
                other = Uninterrupted(evidence, double=double, bare=True)
                resumed = Resumed(other, renewed=renewed) if not _stopped(other) else None
                if resumed is not None and not resumed.unopened:
                    a, b, other = other, resumed, a
                other.checkpoint.remove()
            raised = b.load_error is not None or b.ended.raised is not None
        if not raised or not double:
            break
        a.checkpoint.remove()
    return a, b, renewed


def _stopped(a: Uninterrupted) -> bool:
    made = a.ended.made
    return (
        bool(a.unreadable)
        or a.save_error is not None
        or a.ended.raised is not None
        or not (made.end and made.steps[-1])
    )


def _require_written(a: Uninterrupted, b: Resumed, raised: Raised) -> None:
    """Raise ``CannotDecide`` where ``load`` finds nothing since ``save`` wrote elsewhere, or under a longer name."""
    given, files = a.checkpoint.given, a.checkpoint.files()
    if given is None or raised.kind not in ("OSError", "FileNotFoundError"):
        return
    if not files:
        raise CannotDecide(
            f"save wrote nothing into the folder that it is given, and load raised {raised.summary}; let save write to "
            "the path that it is given, and load read it"
        )
    if b.unopened == given.name and all(name.startswith(f"{given.name}.") for name in files):
        raise CannotDecide(
            f"save wrote {some(files)} where it was given {given.name}, and load raised {raised.summary}; declare a "
            "load that is given the same path and puts the same ending there"
        )


def _require_own(raised: Raised, function: str) -> None:
    """Raise ``CannotDecide`` for what is not in the project's hands here."""
    if raised.kind in _ELSEWHERE:
        raise CannotDecide(
            f"{function} raised {raised.summary}; let {function} use the path that it is given: save(path) and "
            "load(path)"
        )


def _renewed(evidence: Evidence, a: Uninterrupted) -> Renewed:
    names = tuple(evidence.declared("renews") or ())
    for name in names:
        if name in RENEWABLE_KINDS:
            continue
        if not any(Renewed((name,)).covers(path, leaf.kind) for path, leaf in a.saved.leaves.items()):
            known = [*RENEWABLE_KINDS, *(path for path in a.saved.places if not path.startswith("len("))]
            raise UsageError(f"TrainLoop.renews names {name!r}, which nothing has; {nearest(name, known)}")
    return Renewed(names)


def _changed_by_save(a: Uninterrupted) -> Fact | None:
    """What save left changed, where training goes on otherwise for it."""
    touched = [d for d in a.changed_by_save if d.leaf.kind in _TOUCHED]
    if not touched:
        return None
    without = a.evidence.shared(no_halves)
    if without.double != a.double:
        without = halves(a.evidence, double=a.double)
    if not a.ended.made.differ(without.end, without.end.keys() & a.ended.made.end.keys()):
        return None
    paths = {d.leaf.path for d in touched}
    healed = Uninterrupted(a.evidence, double=a.double, put_back=paths)
    healed.checkpoint.remove()
    if healed.ended.made.differ(without.end, without.end.keys() & healed.ended.made.end.keys()):
        raise CannotDecide("training goes on otherwise after save() than without it, for what cannot be put back")
    names = tuple(shown(d.leaf.path, a) for d in touched)
    return Fact("save_changes", names, differences=tuple(touched))
