"""Which of the components that differ after ``load`` change what training does next.

Everything that differs is carried over into the resumed run: it must end as the uninterrupted one then. Then everything
but one component is carried over: where it ends elsewhere, that component is lost and matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.runs.halves import same_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from pytest_trainloop.checks.state.resume_equivalence.runs import Renewed, Uninterrupted
    from pytest_trainloop.reach.snapshot import Difference

OTHER_INPUTS = (
    "the resumed run was handed other inputs by a data stream of the loop's own; let fit take its data from the "
    "batches that it is given"
)

ONE_BY_ONE = 6
"""So many components are left out one by one; of more, halves of them at once."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A component that is not what it was, or several of which any one would do."""

    names: tuple[str, ...]
    differences: tuple[Difference, ...]
    unequal: tuple[str, ...] = ()
    """Weights and buffers that end elsewhere for it alone."""

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(d.leaf.kind for d in self.differences)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(d.leaf.path for d in self.differences)


def candidates(b: Resumed, renewed: Renewed) -> dict[str, tuple[Difference, ...]]:
    """What differs after ``load``, by component: not what is declared to begin anew or set for resuming alone, nor what
    the loop's data alone lead to (how far they have come is no part of a checkpoint here)."""
    found: dict[str, list[Difference]] = {}
    for difference in b.lost:
        leaf = difference.leaf
        if renewed.covers(leaf.path, leaf.kind) or leaf.path in b.set_alike or leaf.reached_from == {"batches"}:
            continue
        found.setdefault(leaf.component, []).append(difference)
    return {name: tuple(differences) for name, differences in found.items()}


def what_matters(a: Uninterrupted, b: Resumed, renewed: Renewed) -> list[Lost]:
    """The components whose loss makes the resumed run end elsewhere, each shown by a run of its own.

    Raises ``CannotDecide`` where the run ends elsewhere although all of them are carried over, and ``Unreliable`` where
    it does not repeat.
    """
    found = candidates(b, renewed)
    everything = {d.leaf.path for differences in found.values() for d in differences}
    whole = Resumed(a, everything, renewed=renewed)
    if whole.unequal():
        raise _undecided(a, b, whole, renewed)

    def without(names: Collection[str]) -> list[str]:
        left_out = {d.leaf.path for name in names for d in found[name]}
        return Resumed(a, everything - left_out, renewed=renewed).unequal()

    def lost(names: tuple[str, ...], unequal: list[str]) -> Lost:
        return Lost(names, tuple(d for name in names for d in found[name]), tuple(unequal))

    def among(names: tuple[str, ...], unequal: list[str]) -> list[Lost]:
        """The components of a group whose loss matters; all together where none does alone."""
        if len(names) == 1:
            return [lost(names, unequal)]
        size = 1 if len(names) <= ONE_BY_ONE else -(-len(names) // 2)
        parts = [names[i : i + size] for i in range(0, len(names), size)]
        ended = [(part, without(part)) for part in parts]
        inside = [one for part, unequal in ended if unequal for one in among(part, unequal)]
        return inside or [lost(names, unequal)]

    return among(tuple(found), b.unequal())


def _undecided(a: Uninterrupted, b: Resumed, whole: Resumed, renewed: Renewed) -> Exception:
    again = Resumed(a, renewed=renewed)
    first, second = b.ended.made.end, again.ended.made.end
    if b.unequal() != ["fit"] and any(not same_tensor(first[n], second.get(n)) for n in first):
        return Unreliable("two runs resumed from one checkpoint under one seed differ: determinism= tells what does")
    mine, other = a.ended.half.inputs, whole.ended.half.inputs
    if mine is not None and other is not None and not _same(mine, other):
        return CannotDecide(OTHER_INPUTS)
    names = whole.unequal()
    what = "it raises" if names == ["fit"] else f"{names[0]} is the first to differ"
    cut = f" ({a.cut})" if a.cut else ""
    return CannotDecide(
        f"the resumed run differs although everything that could be reached was carried over{cut}: {what}; is "
        "there state at module level, in a closure of a library, or outside of the process?"
    )


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_tensor, a, b))
