"""Whether the target of an episode's last step depends on the observation after it, which begins another episode.

Targets are values that meet the model's outputs in the loss, one for each row, and change with the rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop import nested
from pytest_trainloop.batches.episodes import Transitions, read_transitions
from pytest_trainloop.checks.batch.segment_independence.example import example_batch
from pytest_trainloop.checks.batch.segment_independence.step_values import StepRuns, StepValues

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class PastTheEnd:
    """The target of row ``row``, at which an episode ends, depends on what comes after. ``inverted``: those of other
    rows do not; else the flags are read by no target."""

    row: int
    inverted: bool
    place: str
    transitions: Transitions


def past_the_end(evidence: Evidence) -> tuple[Transitions | None, PastTheEnd | None]:
    """The transitions of the example batch, and a target that goes on past the end of an episode."""
    batch = evidence.shared(example_batch)
    found = read_transitions(batch)
    if found is None:
        return None, None
    tensors = {path: t.detach() for path, t in nested.paths(batch)}
    runs = StepRuns(evidence, batch, found.ends.shape, found.flags[0])
    base = runs.with_values({})
    if base is None or not base.read:
        return found, None
    after = runs.with_values({found.after: tensors[found.after].roll(1, 0)})
    ends = found.ends.flatten()
    for number in base.read:
        moved = _changed(base, after, number, found)
        if moved is None or not bool(moved[ends].all()):
            continue
        inverted = not bool(moved[~ends].any())
        rewarded = _changed(base, runs.with_values({found.rewards: tensors[found.rewards] + 1.0}), number, found)
        if rewarded is None or not bool(rewarded[ends].any()):
            continue
        flipped = runs.with_values({path: _flipped(tensors[path]) for path in found.flags})
        read = _changed(base, flipped, number, found)
        if read is not None and bool(read.any()) == inverted:
            place = base.found[number].place
            return found, PastTheEnd(int(ends.nonzero()[0]), inverted, place, found)
    return found, None


def _flipped(flags: torch.Tensor) -> torch.Tensor:
    return (flags == 0).to(flags.dtype)


def _changed(base: StepValues, other: StepValues | None, number: int, found: Transitions) -> torch.Tensor | None:
    """Which rows of a value are other in a second run; None where the runs differ in what is computed."""
    if other is None or [v.name for v in base.found] != [v.name for v in other.found]:
        return None
    one, two = base.found[number].values, other.found[number].values
    if one.numel() != found.ends.numel() or one.shape != two.shape:
        return None
    return one.flatten() != two.flatten()
