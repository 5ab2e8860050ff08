"""One step of a fresh loop in which the code that divides its weights gets other answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.weight_decay_groups.handed_names import HandedNames
from pytest_trainloop.errors import CannotDecide, TrainLoopError

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
        given = HandedNames() if given is None else given
        more: dict[str, Any] = {"contexts": given.contexts} if isinstance(given, HandedNames) else {}
        self.names = given if isinstance(given, HandedNames) else HandedNames()
        self.decays: dict[str, float] | None = None
        try:
            record = evidence.rerun(around=given.watching, enough=lambda r: r.rounds >= 1, may_raise=True, **more)
        except (TrainLoopError, CannotDecide):
            return
        if record.raised is None:
            self.decays = {
                record.name(index): optimizer.weight_decays[group]
                for optimizer in record.optimizers
                for index, group in zip(optimizer.parameters, optimizer.groups, strict=True)
            }

    def kept_from_decay(self, weights: Iterable[str]) -> tuple[str, ...]:
        """Those of these weights that stand in groups without decay."""
        decays = self.decays
        return () if decays is None else tuple(name for name in weights if decays.get(name, 1.0) == 0)

    def numbers(self, weights: Iterable[str]) -> list[int]:
        """The numbers of the names that these parameters were handed out by."""
        wanted = set(weights)
        return [number for number, name in enumerate(self.names.parameters) if name in wanted]


def renamed(evidence: Evidence, first: Trial, weights: Iterable[str], how: Callable[[str], str]) -> tuple[str, ...]:
    """Those of these weights that do not decay once ``named_parameters()`` gives them other names."""
    weights = tuple(weights)
    names = {number: how(first.names.given[number]) for number in first.numbers(weights)}
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
