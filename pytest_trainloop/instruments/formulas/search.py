"""The search for textbook forms among the values of a slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.instruments.formulas.cut import Arguments, Cut
from pytest_trainloop.instruments.formulas.fit import fits
from pytest_trainloop.instruments.formulas.roles import plays
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, Ref
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    CLAMPS,
    DIVISIONS,
    MULTIPLICATIONS,
    NEGATIONS,
    SUBTRACTIONS,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from pytest_trainloop.instruments.formulas.form import Form, Reading, Variant
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice, Value

MOST_ARGUMENTS = 16
"""Values that are tried for one argument, the nearest to the value first."""

MOST_OF_THREE = 10
"""The same for forms of three arguments and more."""

MOST_VALUES = 60
"""Values of a slice for which forms are sought."""

LARGEST = 1 << 15
"""Entries of an argument up to which forms are tried."""

MOST_WORK = 1500
"""Variants of forms that are tried in one slice, each with its arguments."""

UNIT = 1 << 12
"""Entries of an argument that make a variant cost twice as much."""

_AFFINE = ADDITIONS | SUBTRACTIONS | NEGATIONS | MULTIPLICATIONS | DIVISIONS

Fit = tuple[dict[str, float], dict[str, float]]
Ruled = dict[Hashable, set[tuple[int, int, bool]]]
"""By the structure of a slice: its values and the forms that none of them agrees with."""


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


def matches(found: Slice, forms: Sequence[Form], known: Ruled | None = None) -> Iterator[Match]:
    """The forms that agree with values of a slice, from its root down: for each value a right one, else one with a
    mistake. Nothing is sought inside of a right one.

    ``known`` keeps what was ruled out between slices: the same calls in a later step are not tried again.
    """
    search = _Search(found, forms, set() if known is None else known.setdefault(_structure(found), set()))
    explained: set[int] = set()
    left: list[int] = []
    for number in _values(found):
        if number in explained:
            continue
        match = search.first(number, wrong=False)
        if match is None:
            left.append(number)
            continue
        explained |= match.inside
        yield match
    for number in left:
        if number not in explained:
            match = search.first(number, wrong=True)
            if match is not None:
                explained |= match.inside
                yield match


def _structure(found: Slice) -> Hashable:
    """What two slices share that make the same calls on values of the same shapes."""
    calls = tuple((c.name, c.place.line, c.inputs, c.outputs, c.numbers) for c in found.calls)
    return calls, tuple((v.kind, v.tensor.shape, v.tensor.dtype) for v in found.values)


def _values(found: Slice) -> list[int]:
    """The learned values that calls of the slice made, from the root down."""
    made = [(c.number, n) for c in found.calls for n in c.outputs if found.values[n].requires_grad]
    needed = found.ancestors(found.root)
    real = [n for _, n in sorted(made, reverse=True) if n in needed and not found.values[n].tensor.is_complex()]
    return real[:MOST_VALUES]


@dataclass(slots=True, eq=False)
class _Known:
    """What was made of the values of one slice."""

    given: dict[tuple[int, ...], Arguments] = field(default_factory=dict)
    cuts: dict[tuple[int, tuple[int, ...]], Cut] = field(default_factory=dict)
    separates: dict[tuple[int, frozenset[int]], bool] = field(default_factory=dict)
    before: dict[int, tuple[frozenset[str], list[Value]]] = field(default_factory=dict)
    """For a value the functions before it, and what it was computed from, the nearest first."""


@dataclass(slots=True, eq=False)
class _Search:
    """What was tried for the values of one slice."""

    found: Slice
    forms: Sequence[Form]
    ruled_out: set[tuple[int, int, bool]]
    """Value, form and pass where all fits were determined and none agrees, in this slice or another of its kind."""
    known: _Known = field(default_factory=_Known)
    tried: dict[tuple[Cut, int], tuple[Fit, ...]] = field(default_factory=dict)
    without: set[tuple[int, int, bool]] = field(default_factory=set)
    """Value, form and pass where a sum with constants or a multiple of the value was tried: so would it be."""
    left: float = MOST_WORK
    """The work that may still be spent. Without any, nothing more is said: a right form may not have been tried."""

    def first(self, number: int, *, wrong: bool) -> Match | None:
        """The first form that agrees with a value: a right one, or (``wrong``) any."""
        call = self.found.call_of(number)
        before = _source(self.found, number)
        for place, form in enumerate(self.forms):
            key = number, place, wrong
            if call is None or call.name not in form.ops:
                continue
            if key not in self.ruled_out and key not in self.without:
                match, sure = self._form(number, form, wrong=wrong)
                if match is not None:
                    return match
                if sure:
                    self.ruled_out.add(key)
            if before is not None:
                self.without.add((before, place, wrong))
        return None

    def _form(self, number: int, form: Form, *, wrong: bool) -> tuple[Match | None, bool]:
        """The first variant of a form that agrees, and whether none surely does."""
        variants = [v for v in form.variants if (v.mistake is not None) <= wrong]
        sure = True
        for cut in _cuts(self.found, number, form, self.known):
            for variant in variants:
                if self.left <= 0:
                    return None, False
                if not _suits(variant, cut):
                    sure = False
                    continue
                for coefficients, numbers in self._fits(form, variant, cut):
                    reading = variant.read(coefficients)
                    reading = reading and _looked(variant, cut, reading)
                    if reading is None or ((reading.mistake is not None) and not wrong):
                        continue
                    if _holds(variant, cut, numbers):
                        return Match(form, variant, cut, reading, numbers), False
            sure = sure and not cut.undetermined
        return None, sure

    def _fits(self, form: Form, variant: Variant, cut: Cut) -> tuple[Fit, ...]:
        key = cut, id(variant)
        if key not in self.tried:
            self.left -= 1 + max(t.numel() for t in cut.recorded) / UNIT
            self.tried[key] = tuple(fits(form, variant, cut))
        return self.tried[key]


def _source(found: Slice, number: int) -> int | None:
    """The value of which this one is a multiple, or a sum with a constant, entry by entry: forms are known up to
    these."""
    call = found.call_of(number)
    if call is None or call.name not in _AFFINE:
        return None
    live = [n for n in call.inputs if found.values[n].requires_grad]
    still = [found.values[n] for n in call.inputs if n not in live]
    if len(live) != 1 or any(v.kind != "constant" or v.tensor.numel() != 1 for v in still):
        return None
    if (call.name in DIVISIONS and call.inputs[0] != live[0]) or not call.args or call.name == "reciprocal":
        return None
    if call.name in DIVISIONS and not isinstance(call.args[0], Ref):
        return None
    same = found.values[live[0]].tensor.numel() == found.values[number].tensor.numel()
    return live[0] if same else None


def maker(found: Slice, number: int) -> Call | None:
    """The call that made a value, before it was multiplied by a weight or added to a constant."""
    while (source := _source(found, number)) is not None:
        number = source
    return found.call_of(number)


def _looked(variant: Variant, cut: Cut, reading: Reading) -> Reading:
    try:
        return variant.look(cut, reading)
    except CannotReplay:
        return reading
    except (RuntimeError, IndexError, ValueError) as error:
        reraise_raised(error)
        return reading


def _holds(variant: Variant, cut: Cut, numbers: Mapping[str, float]) -> bool:
    try:
        return variant.holds(cut, numbers)
    except (RuntimeError, IndexError, ValueError) as error:
        reraise_raised(error)
        return False


def _cuts(found: Slice, number: int, form: Form, known: _Known) -> Iterator[Cut]:
    """The ways to take values of the slice as the arguments of a form."""
    if number not in known.before:
        names = {c.name for n in found.ancestors(number) if (c := found.call_of(n)) is not None}
        known.before[number] = frozenset(names), _nearest(found, number)
    names_before, ordered = known.before[number]
    if not all(names_before & needed for needed in form.needs):
        return
    most = MOST_ARGUMENTS if len(form.arguments) < 3 else MOST_OF_THREE
    ordered = ordered[::-1] if form.farthest else ordered
    choices = [[v for v in ordered if plays(v, a)][:most] for a in form.arguments]
    taken: list[tuple[int, ...]] = []
    for chosen in _products(choices):
        numbers = tuple(v.number for v in chosen)
        if len(set(numbers)) < len(numbers):
            continue
        key = number, frozenset(numbers)
        if key not in known.separates:
            known.separates[key] = _separates(found, number, numbers)
        if not known.separates[key]:
            continue
        cut = _cut(found, number, numbers, known)
        if all(cut.ops & needed for needed in form.needs) and _suits(form, cut):
            taken.append(numbers)
            yield cut
    for numbers in taken if form.on_unit else ():
        cut = _cut(found, number, numbers, known)
        if cut.ops & CLAMPS and _leaves_unit(cut.recorded[0]):
            given = known.given.setdefault((*numbers, -1), Arguments(found, numbers, in_unit=True))
            yield known.cuts.setdefault((number, (*numbers, -1)), Cut(found, number, given))


def _leaves_unit(prediction: torch.Tensor) -> bool:
    return prediction.is_floating_point() and bool((prediction < 0).any() or (prediction > 1).any())


def _suits(way: Form | Variant, cut: Cut) -> bool:
    try:
        return way.suits(cut)
    except (RuntimeError, IndexError, ValueError) as error:  # arguments of other shapes than the form's
        reraise_raised(error)
        return False


def _cut(found: Slice, number: int, numbers: tuple[int, ...], known: _Known) -> Cut:
    given = known.given.setdefault(numbers, Arguments(found, numbers))
    return known.cuts.setdefault((number, numbers), Cut(found, number, given))


def _products(choices: Sequence[Sequence[Value]]) -> Iterator[tuple[Value, ...]]:
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _products(choices[1:]):
            yield (first, *rest)


def _nearest(found: Slice, number: int) -> list[Value]:
    """What a value was computed from, the nearest first. Of values that only differ by a reshape the nearest represents
    all."""
    order = {n: (c.number, n) for c in found.calls for n in c.outputs}
    before = sorted(found.ancestors(number) - {number}, key=lambda n: order.get(n, (-1, -n)), reverse=True)
    readers = Counter(n for c in found.calls for n in set(c.inputs))
    left_out: set[int] = set()
    source = _source(found, number)
    while source is not None:  # the same value up to constants is no argument
        left_out.add(source)
        source = _source(found, source)
    kept: list[Value] = []
    for n in before:
        value = found.values[n]
        call = found.call_of(n)
        if call is not None and call.name in VIEWS | CASTS and len(call.inputs) == 1:
            whole = call.inputs[0]
            if found.values[whole].tensor.numel() == value.tensor.numel() and readers[whole] == 1:
                left_out.add(whole)
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
