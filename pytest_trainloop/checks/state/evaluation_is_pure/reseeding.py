"""Evaluation that leaves a global generator in one state, whatever it was before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.evaluation_is_pure.generators import generator_of
from pytest_trainloop.runs.halves import halves

if TYPE_CHECKING:
    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Interposed, Seen
    from pytest_trainloop.finding import Level
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.halves import Halves

OTHER = 10
"""Added to the seed at the cut: no half of a run has this seed."""


@dataclass(frozen=True, slots=True)
class Reseeding:
    """Evaluation seeds a global generator."""

    which: str
    level: Level
    constant: bool
    """Whether the seed is the same at every step."""
    call: str
    where: str
    measured: str
    shown_by: str


def reseeding(
    evidence: Evidence, interposed: Interposed, reference: Halves, first: Seen, other: Seen | None
) -> Reseeding | None:
    """What ``evaluate()`` does to the global generators, from what two runs saw at different steps.

    A fault where training differs between two random states at the cut, and no longer does once ``evaluate()`` is
    called there, by a seed that is the same at every step.
    """
    candidates = [name for name in first.entering if first.entering[name] != first.leaving[name]]
    if not candidates or not (first.seeded or _alike(candidates, first, other)):
        return None
    again = interposed.up_to_cut().run(cut_seed=OTHER).seen
    which = _alike(candidates, first, again)
    if not which:
        return None
    constant = bool(_alike(which, first, other))
    name = which[0]
    call, place = next(((c, p) for c, p in reversed(first.seeded) if generator_of(c) == name), ("evaluate()", None))
    measured = f"two states of {name} before evaluate() give one and the same state after it"
    found = Reseeding(name, "advice", constant, call, str(place) if place is not None else "", measured, "")
    if not constant:
        return _with(found, "advice", "another step gives another state: the seed follows the step or the epoch")
    trained = reference.trained()
    apart = halves(evidence, double=reference.double, cut_seed=OTHER).differ(reference.end, trained)
    if not apart:
        return _with(
            found, "advice", "training draws no random numbers here, or seeds itself: nothing depends on it yet"
        )
    pair = [interposed.run(cut_seed=seed, seed_after=False).halves for seed in (0, OTHER)]
    if pair[0].differ(pair[1].end, trained):
        return _with(found, "advice", "training still differs between the two: it draws from another generator as well")
    return _with(
        found,
        "fault",
        f"without evaluate() training differs between the two states ({apart[0]}); with it training is the same, and "
        "another step gives that state too",
    )


def _with(found: Reseeding, level: Level, shown_by: str) -> Reseeding:
    return Reseeding(found.which, level, found.constant, found.call, found.where, found.measured, shown_by)


def _alike(names: list[str], first: Seen, other: Seen | None) -> list[str]:
    """Generators that two evaluations leave alike although they found them in different states."""
    if other is None:
        return []
    return [
        name
        for name in names
        if first.entering[name] != other.entering.get(name) and first.leaving[name] == other.leaving.get(name)
    ]
