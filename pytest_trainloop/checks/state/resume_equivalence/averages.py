"""What only evaluation reads: averages of the weights, and what they are made by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.state.resume_equivalence.components import candidates
from pytest_trainloop.checks.state.resume_equivalence.facts import Fact, as_weights, saved_as, shown
from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed
from pytest_trainloop.reach.leaves import same_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.state.resume_equivalence.runs import Renewed, Uninterrupted
    from pytest_trainloop.finding import Level
    from pytest_trainloop.reach.snapshot import Difference

_STATES = ("tensor", "weight", "buffer", "array")


def averages(a: Uninterrupted, b: Resumed, renewed: Renewed, found: Sequence[Fact]) -> Iterator[Fact]:
    """Tensors that training moves, that no weight depends on, and that begin anew: shown by ``evaluate``, or advice.

    That ``evaluate`` returns the same shows nothing: an accuracy over few rows is often equal.
    """
    known = {name for fact in found for name in fact.component.split(" and ")}
    left = candidates(b, renewed)
    moving = {n: d for n, d in left.items() if n not in known and _moves(a, b, d)}
    if not moving:
        return
    everything = {d.leaf.path for differences in left.values() for d in differences}
    offers = "evaluate" in a.evidence.offers
    whole = Resumed(a, everything, renewed=renewed, steps=False, evaluate=True).numbers if offers else []
    for name, differences in moving.items():
        own = [d for d in differences if d.leaf.kind == "buffer" and not d.leaf.persistent]
        names = tuple(shown(d.leaf.path, a) for d in differences)
        held = saved_as(a, differences)
        detail = ""
        if whole:
            without = everything - {d.leaf.path for d in differences}
            other = Resumed(a, without, renewed=renewed, steps=False, evaluate=True).numbers
            if other and not _same_result(whole, other):
                cause = "buffer_lost" if own else "average_lost"
                detail = _other_numbers(whole, other)
                yield Fact(cause, names, component=name, differences=differences, detail=detail, saved_as=held)
                continue
            detail = f"evaluate() gives {other[0]:.6g} with and without it" if other else ""
        if as_weights(a, differences) and not own:
            yield Fact("average_lost", names, "advice", name, differences=differences, detail=detail, saved_as=held)


def _moves(a: Uninterrupted, b: Resumed, differences: Sequence[Difference]) -> bool:
    """Whether training made it, goes on moving it, and it is no copy of the weights at some moment."""
    end, other = a.ended.half.end, b.ended.half.end
    if end is None or not any(d.leaf.kind in _STATES for d in differences):
        return False
    weights = [a.saved.value(p) for p in a.paths.values() if p in a.saved.leaves]
    for d in differences:
        path = d.leaf.path
        if d.leaf.kind not in _STATES or not isinstance(d.before, torch.Tensor) or d.before.numel() <= 1:
            continue
        made = path not in b.built.leaves or not same_value(b.built.value(path), d.before)
        goes_on = path in end.leaves and not same_value(end.value(path), d.before)
        apart = other is not None and path in other.leaves and not same_value(other.value(path), end.value(path))
        if made and goes_on and apart and not any(same_value(w, d.before) for w in weights if w is not None):
            return True
    return False


def _same_result(one: list[float], other: list[float]) -> bool:
    return same_value(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))


def _other_numbers(whole: list[float], other: list[float]) -> str:
    """The number of ``evaluate`` that changes most, relative to its size."""
    if len(whole) != len(other):
        return f"evaluate() gives {len(other)} numbers in place of {len(whole)}"
    at = max(range(len(whole)), key=lambda i: abs(whole[i] - other[i]) / max(abs(whole[i]), abs(other[i]), 1e-300))
    which = f" (number {at + 1} of the {len(whole)} that it returns)" if len(whole) > 1 else ""
    return f"evaluate() gives {other[at]:.6g} in place of {whole[at]:.6g}{which}"


def steered(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Fact]:
    """Values that no weight depends on, and without which an average that was restored goes elsewhere: the number of
    its updates, by which its decay begins anew."""
    left = candidates(b, renewed)
    apart = _averages_apart(a, b, {d.leaf.path for differences in left.values() for d in differences})
    scalars = {n: d for n, d in left.items() if any(x.leaf.kind in ("scalar", "buffer") and _as_built(b, x) for x in d)}
    if not apart or not scalars:
        return
    everything = {d.leaf.path for differences in left.values() for d in differences}
    if apart & _averages_apart(a, Resumed(a, everything, renewed=renewed), set()):
        return
    read = any("evaluate" in a.saved.leaves[path].reached_from for path in apart)
    for name, differences in scalars.items():
        without = everything - {d.leaf.path for d in differences}
        ends = apart & _averages_apart(a, Resumed(a, without, renewed=renewed), set())
        if ends:
            kinds = {d.leaf.kind for d in differences}
            names = tuple(shown(d.leaf.path, a) for d in differences)
            cause = "buffer_lost" if "buffer" in kinds else "counter_lost"
            level: Level = "fault" if read else "advice"
            yield Fact(cause, names, level, name, tuple(sorted(ends)), differences=differences)


def _averages_apart(a: Uninterrupted, b: Resumed, lost: set[str]) -> set[str]:
    """Paths of what looks like an average, is as it was saved after ``load``, and ends elsewhere."""
    mine, other = a.ended.half.end, b.ended.half.end
    if mine is None or other is None:
        return set()
    shapes = {v.shape for v in a.values().values() if v.numel() > 1}
    declared = set(a.paths.values())
    return {
        path
        for path, leaf in mine.leaves.items()
        if leaf.kind in ("weight", "buffer", "tensor") and path not in declared and path not in lost
        and path in other.leaves and path in a.saved.leaves
        and isinstance(before := mine.value(path), torch.Tensor) and before.shape in shapes
        and not same_value(before, other.value(path))
    }  # fmt: skip


def _as_built(b: Resumed, difference: Difference) -> bool:
    path = difference.leaf.path
    return path in b.built.leaves and same_value(b.built.value(path), difference.after)
