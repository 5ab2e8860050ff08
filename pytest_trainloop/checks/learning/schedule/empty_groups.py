"""Groups with a learning rate of their own that a filter by name leaves empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.rate_causes import RATE_CAUSES
from pytest_trainloop.registry import finding_maker
from pytest_trainloop.tracing.handed_names import HandedNames
from pytest_trainloop.tracing.unmatched_names import unmatched_names
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Optimizer, Record
    from pytest_trainloop.runs.evidence import Evidence

found = finding_maker(RATE_CAUSES)


def empty_groups(evidence: Evidence) -> Iterator[Finding]:
    """Patterns that put parameters into an empty group, once they are answered yes for them."""
    for optimizer in evidence.run().optimizers:
        empty = _empty(optimizer)
        others = {rate for number, rate in enumerate(optimizer.first_lrs) if number not in empty}
        if not others or others.issuperset(empty.values()):
            continue  # such as the group without decay of a model without biases
        record = evidence.shared(HandedNames.of).record
        held = [] if record is None else [n for n in _groups(record, optimizer) if not record.declared_frozen(n)]
        rates: list[float] = []

        def moved(answered: Record, names: Sequence[str], optimizer: Optimizer = optimizer) -> bool:
            groups, empty = _groups(answered, optimizer), _empty(optimizer)
            rates.extend(empty[groups[name]] for name in names if groups.get(name) in empty)  # noqa: B023
            return all(groups.get(name) in empty for name in names)

        for one in unmatched_names(evidence, held, moved):
            if one.nearly:  # a model need not have what is listed (odd: a_rate_for_a_part_that_the_model_has_not)
                facts = {"patterns": some(one.patterns), "asked": one.asked, "rate": rates[-1], "other": max(others)}
                yield found("group_left_empty", one.place, one.nearly, level="advice", repair=one.repair, **facts)


def _empty(optimizer: Optimizer) -> dict[int, float]:
    """The rates of the groups that hold nothing, by number."""
    return {n: rate for n, rate in enumerate(optimizer.first_lrs) if n not in optimizer.groups}


def _groups(record: Record, optimizer: Optimizer) -> dict[str, int]:
    """The group of each parameter that the optimizer of this number holds in another run."""
    same = (o for o in record.optimizers if o.index == optimizer.index)
    return {record.name(i): group for o in same for i, group in zip(o.parameters, o.groups, strict=True)}
