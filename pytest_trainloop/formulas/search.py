"""The search for textbook forms among the values of a slice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.formulas.cut import Arguments, Cut
from pytest_trainloop.formulas.fit import fits
from pytest_trainloop.formulas.roles import plays
from pytest_trainloop.recording.torch_names import CASTS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_trainloop.formulas.form import Form, Reading, Variant
    from pytest_trainloop.tracing.loss_slice import Slice, Value

MOST_ARGUMENTS = 10
"""Values that are tried for one argument, the nearest to the value first."""

MOST_VALUES = 60
"""Values of a slice for which forms are sought."""

LARGEST = 1 << 16
"""Entries of an argument up to which forms are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A form agrees with a value."""

    form: Form
    variant: Variant
    cut: Cut
    reading: Reading
    numbers: dict[str, float]

    @property
    def inside(self) -> set[int]:
        """The values between the arguments and the value."""
        calls = self.cut.slice.calls
        return {n for c in self.cut.between for n in calls[c].outputs} - {self.cut.number}


def matches(found: Slice, forms: Sequence[Form]) -> Iterator[Match]:
    """The forms that agree with values of a slice, from its root down: for each value a right one, else one with a
    mistake. Nothing is sought inside of a right one."""
    cuts: dict[Any, Any] = {}
    explained: set[int] = set()
    left: list[int] = []
    for number in _values(found):
        if number in explained:
            continue
        match = _first(found, number, forms, cuts, wrong=False)
        if match is None:
            left.append(number)
            continue
        explained |= match.inside
        yield match
    for number in left:
        if number not in explained:
            match = _first(found, number, forms, cuts, wrong=True)
            if match is not None:
                explained |= match.inside
                yield match


def _values(found: Slice) -> list[int]:
    """The learned values that calls of the slice made, from the root down."""
    made = [(c.number, n) for c in found.calls for n in c.outputs if found.values[n].requires_grad]
    needed = found.ancestors(found.root)
    return [n for _, n in sorted(made, reverse=True) if n in needed][:MOST_VALUES]


def _first(found: Slice, number: int, forms: Sequence[Form], cuts: dict[Any, Any], *, wrong: bool) -> Match | None:
    call = found.call_of(number)
    for form in forms:
        if call is None or call.name not in form.ops:
            continue
        variants = [v for v in form.variants if (v.mistake is not None) <= wrong]
        for cut in _cuts(found, number, form, cuts):
            for variant in (v for v in variants if _suits(v, cut)):
                for coefficients, numbers in fits(form, variant, cut):
                    reading = variant.read(coefficients)
                    if reading is None or ((reading.mistake is not None) and not wrong):
                        continue
                    if not variant.holds(cut, numbers):
                        continue
                    return Match(form, variant, cut, reading, numbers)
    return None


def _cuts(found: Slice, number: int, form: Form, cuts: dict[Any, Any]) -> Iterator[Cut]:
    """The ways to take values of the slice as the arguments of a form."""
    names = {c.name for n in found.ancestors(number) if (c := found.call_of(n)) is not None}
    if not all(names & needed for needed in form.needs):
        return
    ordered = _nearest(found, number)
    choices = [[v for v in ordered if plays(v, a)][:MOST_ARGUMENTS] for a in form.arguments]
    for chosen in _products(choices):
        numbers = tuple(v.number for v in chosen)
        if len(set(numbers)) < len(numbers) or not _separates(found, number, numbers):
            continue
        cut = _cut(found, number, numbers, cuts)
        if all(cut.ops & needed for needed in form.needs) and _suits(form, cut):
            yield cut


def _suits(way: Form | Variant, cut: Cut) -> bool:
    try:
        return way.suits(cut)
    except (RuntimeError, IndexError, ValueError):  # arguments of other shapes than the form's
        return False


def _cut(found: Slice, number: int, numbers: tuple[int, ...], cuts: dict[Any, Any]) -> Cut:
    given = cuts.setdefault(numbers, Arguments(found, numbers))
    cut: Cut = cuts.setdefault((number, numbers), Cut(found, number, given))
    return cut


def _products(choices: Sequence[Sequence[Value]]) -> Iterator[tuple[Value, ...]]:
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _products(choices[1:]):
            yield (first, *rest)


def _nearest(found: Slice, number: int) -> list[Value]:
    """What a value was computed from, the nearest first. Of values that only differ by a reshape the nearest stands for
    all."""
    order = {n: (c.number, n) for c in found.calls for n in c.outputs}
    before = sorted(found.ancestors(number) - {number}, key=lambda n: order.get(n, (-1, -n)), reverse=True)
    readers = Counter(n for c in found.calls for n in set(c.inputs))
    left_out: set[int] = set()
    kept: list[Value] = []
    for n in before:
        value = found.values[n]
        call = found.call_of(n)
        if call is not None and call.name in VIEWS | CASTS and len(call.inputs) == 1:
            source = call.inputs[0]
            if found.values[source].tensor.numel() == value.tensor.numel() and readers[source] == 1:
                left_out.add(source)
        if 1 < value.tensor.numel() <= LARGEST and n not in left_out:
            kept.append(value)
    return kept


def _separates(found: Slice, number: int, arguments: Iterable[int]) -> bool:
    """Whether all that is learned or data reaches the value by way of the arguments, and each of them does."""
    stops, reached = set(arguments), set()
    seen, todo = {number}, [number]
    while todo:
        at = todo.pop()
        if at in stops and at != number:
            reached.add(at)
            continue
        value = found.values[at]
        if value.kind in ("layer", "batch") or (value.kind == "unknown" and value.requires_grad):
            return False
        if value.made_by is not None:
            new = [n for n in found.calls[value.made_by].inputs if n not in seen]
            seen.update(new)
            todo.extend(new)
    return reached == stops
