"""One step of a fresh loop in which the code that divides its weights gets other answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.tracing.handed_names import HandedNames, one_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_trainloop.checks.learning.weight_decay_groups.claimed_class import ClaimedClass
    from pytest_trainloop.checks.learning.weight_decay_groups.skip_lists import SkipLists
    from pytest_trainloop.runs.evidence import Evidence

_NO_KIND = "part"
"""A segment that names no kind of layer."""


class Trial:
    """The decay of each parameter in that step; None where the loop does not take the answers."""

    def __init__(self, evidence: Evidence, given: HandedNames | ClaimedClass | SkipLists | None = None) -> None:
        self.names = given if isinstance(given, HandedNames) else HandedNames()
        if given is None:
            self.names = evidence.shared(HandedNames.of)
            record = self.names.record
        else:
            record = self.names.run(evidence) if given is self.names else one_step(evidence, given.watching)
        self.decays: dict[str, float] | None = None
        if record is not None:
            self.decays = {
                record.name(index): optimizer.weight_decays[group]
                for optimizer in record.optimizers
                for index, group in zip(optimizer.parameters, optimizer.groups, strict=True)
            }

    def kept_from_decay(self, weights: Iterable[str]) -> tuple[str, ...]:
        """Those of these weights that stand in groups without decay."""
        decays = self.decays
        return () if decays is None else tuple(name for name in weights if decays.get(name, 1.0) == 0)


def renamed(evidence: Evidence, first: Trial, weights: Iterable[str], how: Callable[[str], str]) -> tuple[str, ...]:
    """Those of these weights that do not decay once ``named_parameters()`` gives them other names."""
    weights = tuple(weights)
    names = {number: how(first.names.given[number]) for number in sorted(first.names.numbers(weights))}
    return Trial(evidence, HandedNames(renamed=names)).kept_from_decay(weights) if names else ()


def with_segment(segment: str) -> Callable[[str], str]:
    """Puts a segment in front of the last: "ln_1.weight" becomes "ln_1.LayerNorm.weight"."""

    def named(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return ".".join(filter(None, (path, segment, leaf)))

    return named


def kept_by_segment(evidence: Evidence, first: Trial, weights: Iterable[str], segment: str) -> tuple[str, ...]:
    """Those of these weights that a group without decay holds if their names have this segment, and does not if they
    have any other: whole names that are listed for decay are found under no other."""
    weights = tuple(weights)
    kept = renamed(evidence, first, weights, with_segment(segment))
    if not kept:
        return ()
    listed = renamed(evidence, first, weights, with_segment(_NO_KIND))
    return tuple(name for name in kept if name not in listed)


def kept_by_end(evidence: Evidence, first: Trial, weights: Iterable[str], segments: int) -> tuple[str, ...]:
    """Those of these weights that a group without decay holds if their names are the last segments alone, and does not
    if another one stands before these; without their first segment where ``segments`` is 0."""
    weights = tuple(weights)

    def end(name: str) -> str:
        parts = name.split(".")
        return ".".join((parts[-segments:] if segments else parts[1:]) or parts)

    kept = renamed(evidence, first, weights, end)
    if not kept:
        return ()
    listed = renamed(evidence, first, weights, lambda name: f"{_NO_KIND}.{end(name)}")
    return tuple(name for name in kept if name not in listed)
