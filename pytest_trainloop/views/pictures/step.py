"""The calls of one step, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.views.loop_facts.step import Windows, blocks, first_calls
from pytest_trainloop.views.pictures.picture import Call, Picture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.report_inputs import ReportInputs

MOST_WITHOUT_STEP = 12
"""Calls that are drawn where no step ends them."""

MOST_CALLS = 60
"""Calls that are drawn."""


def one_step(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The calls from one step to the next, of the commonest kind."""
    windows = Windows.of(facts)
    most = windows.kinds[0][0] if windows.kinds else tuple(first_calls(facts)[:MOST_WITHOUT_STEP])
    if not most:
        return
    calls = [
        Call(lane=call.name, where=facts.where(call.place), code=call.place.code, block=number, times=times)
        for number, (block, times) in enumerate(blocks(most))
        for call in block
    ]
    last = next((c for c in reversed(calls) if c.lane.startswith("step")), calls[-1])
    yield Picture(
        key="one_step",
        kind="calls",
        title="The calls of one step" if windows.kinds else "The first calls",
        look="Gradients are cleared before backward or behind the step, and clipped between these two; a schedule is "
        "called behind the step.",
        of=f"the watched run; {windows.same if windows.kinds else 'no optimizer stepped'}",
        checks=("step_order", "grad_scaler", "train_mode", "schedule", "accumulation_equivalence"),
        where=last.where,
        calls=tuple(calls[:MOST_CALLS]),
        note=f"{MOST_CALLS} of {len(calls)} calls" if len(calls) > MOST_CALLS else "",
    )
