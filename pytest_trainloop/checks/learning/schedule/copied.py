"""Rates that are written to a copy of the groups, which no step reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import numbers
from pytest_trainloop.finding import Finding
from pytest_trainloop.records.learning_rates import rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import CopiedRates
    from pytest_trainloop.runs.evidence import Evidence


def rate_written_to_copy(evidence: Evidence) -> Iterator[Finding]:
    """Groups of ``state_dict()`` that get a rate, while the optimizer keeps its own.

    One that is edited to be saved is read after that, by what saves it. Where it is not saved this time it might be at
    another: a fault is what nobody can save, since the dict of all groups is gone when the rate is written, or what
    makes a schedule of the copies while the optimizer's rate is one number.
    """
    record = evidence.run()
    for index in dict.fromkeys(copy.optimizer for copy in record.copied_rates):
        copies = [copy for copy in record.copied_rates if copy.optimizer == index]
        own = [r for r in rates(record) if r.optimizer == index]
        if not own:
            continue
        alone, lines = _unread(evidence)
        if evidence.repeatable and not lines:
            continue
        still = all(r.constant for r in own)
        scheduled = still and len({copy.written for copy in copies}) > 1
        stays = "stays at" if still else "is"
        certain = alone or (scheduled and evidence.repeatable)
        if not certain and (len(copies) < 2 or not still):
            continue
        yield Finding(
            cause="rate_written_to_copy",
            level="fault" if certain else "advice",
            summary=(
                f"a rate is written to the groups of state_dict(), which are copies: the rate of "
                f"{record.optimizers[index].kind} {stays} {numbers(own[0].known)}"
            ),
            measured=(
                f"{_set_to(copies)}; the optimizer is at {numbers(own[0].known)}"
                + (f"; written at {lines[0]}" if lines else "")
            ),
            shown_by=(
                "no copy is loaded, saved or read after that"
                + (", and the dict that held the groups is gone when they are written" if alone else "")
            ),
            culprits=("state_dict()",),
            where=str(copies[0].place),
        )


def _unread(evidence: Evidence) -> tuple[bool, list[str]]:
    """Whether copies that nobody reads were written when the dict that held them was gone, and the lines that did."""
    if not evidence.repeatable:
        return False, []
    from pytest_trainloop.tracing.copied_groups import CopiedGroups

    found = evidence.shared(CopiedGroups.of)
    unread = [w for w in found.written if not w.used] if found.seen else []
    return any(w.alone for w in unread), [w.line for w in unread]


def _set_to(copies: Sequence[CopiedRates]) -> str:
    first, last = copies[0].written[0], copies[-1].written[0]
    values = f"{first:g}" if first == last else f"{first:g} ... {last:g}"
    return f"the copy was set to {values}" if len(copies) == 1 else f"the {len(copies)} copies were set to {values}"
