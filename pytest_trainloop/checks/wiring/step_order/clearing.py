"""Calls that clear gradients. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Backward, GradWrite, Step

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record


def cleared_after(record: Record, backward: Backward, parameters: set[int]) -> GradWrite | None:
    """The first write after a backward pass that clears the gradient of one of these parameters."""
    writes = (w for w in record.of(GradWrite) if w.at > backward.at and w.how in ("none", "zero"))
    return next((w for w in writes if parameters & set(w.parameters)), None)


def cleared_elsewhere(record: Record, parameters: set[int], optimizer: int, *, before: int) -> GradWrite | None:
    """A ``zero_grad()`` between steps that clears other parameters than these; None where one clears these.

    It counts if it clears other parameters of the same optimizer, or parameters that no optimizer steps, or if the loop
    calls ``zero_grad()`` on more lines than there are other optimizers.
    """
    first_step = min((s.at for s in record.of(Step)), default=0)
    calls = [w for w in record.of(GradWrite) if w.by == "zero_grad" and first_step < w.at < before]
    if any(parameters & set(w.parameters) for w in calls):
        return None
    partly = [w for w in calls if set(w.parameters) & set(record.optimizers[optimizer].parameters)]
    if partly:
        return partly[-1]
    held = record.held
    last_of_line = list({w.site: w for w in calls}.values())
    stepping = [{o for i in w.parameters for o in held.get(i, ()) if record.optimizers[o].steps} for w in last_of_line]
    unstepped = [w for w, optimizers in zip(last_of_line, stepping, strict=True) if not optimizers]
    if unstepped:
        return unstepped[-1]
    others = {o for w in calls for i in w.parameters for o in held.get(i, ()) if record.optimizers[o].steps}
    return last_of_line[-1] if len(last_of_line) > len(others) else None
