"""Gradients that were handed over by hand once, and are consumed again and again."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import GradWrite
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Backward, Step
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.gradient_ledger import Ledger

LEAST_STEPS = 3

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "every_param_moves")


def kept_gradients(record: Record, ledger: Ledger) -> Iterator[tuple[Finding, set[int]]]:
    """Optimizers whose steps consume one and the same gradient, which nobody writes in between, while the backward
    passes before each step bring others to other tensors (the weights that these are masters of)."""
    again: dict[int, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for meal in ledger.meals:
        if not meal.repeated or meal.stale is None or meal.parameter not in ledger.by_hand:
            continue
        if not _written(record, meal.parameter, meal.stale, meal.step) and _others_came(record, meal.stale, meal.step):
            again[meal.step.optimizer][meal.parameter].append(meal.step)
    for index, by_parameter in again.items():
        found = {i: steps for i, steps in by_parameter.items() if len(steps) >= LEAST_STEPS}
        if found:
            yield _finding(record, found), {index}


def _written(record: Record, parameter: int, since: Step, until: Step) -> bool:
    return any(since.at < w.at < until.at and parameter in w.parameters for w in record.of(GradWrite))


def _others_came(record: Record, since: Step, until: Step) -> bool:
    """Whether the backward passes before the two steps brought different gradients."""
    before = [b for b in record.backwards() if b.at < since.at]
    between = [b for b in record.backwards() if since.at < b.at < until.at]
    return bool(before and between) and _differ(before[-1], between[-1])


def _differ(one: Backward, other: Backward) -> bool:
    return any(
        not a.incoming.same(b.incoming)
        for index, arrived in one.arrivals.items()
        for a, b in zip(arrived, other.arrivals.get(index, ()), strict=False)
    )


def _finding(record: Record, found: dict[int, list[Step]]) -> Finding:
    names = record.names(found)
    write = next((w for w in record.of(GradWrite) if w.assigns and set(w.parameters) & set(found)), None)
    count = max(len(steps) for steps in found.values())
    return Finding(
        cause="gradient_kept",
        summary=f"{some(names)} {be(names)} stepped with the gradient of an earlier batch over and over",
        measured=f"{count} steps consumed what the step before had consumed",
        shown_by=(
            "the gradient consumed is bit-identical, nobody writes it between the steps, and the backward passes "
            "between them bring others"
        ),
        culprits=names,
        where=str(write.place if write else next(iter(found.values()))[0].place),
        repair="hand the new gradient over before every step (master.grad = p.grad.float())",
        explains=CONSEQUENCES,
    )
