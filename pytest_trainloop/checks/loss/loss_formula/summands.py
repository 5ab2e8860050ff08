"""Sums that say nothing of a label, and minima that choose one order of the sources for all rows.

Two summands, one for each value of a label, that are the same function: the label says nothing. A minimum over
permutations of a mean over rows is one order for all rows.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_formula.causes import found
from pytest_trainloop.checks.loss.loss_formula.values import culprits_of
from pytest_trainloop.instruments.batches.row_axis import drawn_by_a_loader
from pytest_trainloop.instruments.formulas.cut import Arguments, close
from pytest_trainloop.instruments.formulas.origins import origin
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, Ref
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    EXTREMES,
    JOINS,
    MULTIPLICATIONS,
    NEGATIONS,
    SUBTRACTIONS,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice
    from pytest_trainloop.runs.evidence import Evidence

SETTINGS = 6
"""Settings of all that both summands are computed of, the first being that of the run."""

MOST_SOURCES = 4
"""Sources whose permutations are tried."""

_SAME = VIEWS | CASTS
_CHOICES = EXTREMES | frozenset({"minimum", "maximum"})


def summands(part: Slice, evidence: Evidence) -> Iterator[Finding]:
    needed = part.ancestors(part.root)
    calls = [call for call in part.calls if needed.intersection(call.outputs)]
    for call in calls:
        if call.name in ADDITIONS | SUBTRACTIONS and len(call.inputs) == 2:
            for label, line in _equal_branches(part, call):
                culprits = culprits_of(part, (label,)) or (call.name,)
                yield found("ingredient_differs", call, culprits, "one function", change=line)
    for call in calls if not evidence.declared("rows_interact") else ():
        if call.name in _CHOICES and (chosen := _chosen_together(part, call)):
            rows, count, averaged = chosen
            facts = {"function": call.name, "alone": len(rows), "rows": count, "first": rows[0]}
            # rows are samples of their own, and not the frames of one: a single run does not show it
            loop = evidence.fresh_loop() if evidence.repeatable else None
            samples = loop is not None and loop.rows_interact is False
            samples = samples or (loop is not None and loop.batch is None and drawn_by_a_loader(loop.batches))
            culprits, level = culprits_of(part, call.inputs) or (call.name,), "fault" if samples else "advice"
            facts["change"] = averaged
            yield found("mean_taken_early", call, culprits, "permutation", level=level, **facts)


def _equal_branches(part: Slice, call: Call) -> Iterator[tuple[int, str]]:
    """The labels of a sum of ``label * a`` and ``(1 - label) * b`` in which ``a`` and ``b`` are equal at all
    settings, and the line that made the second summand."""
    one, two = (_weighted(part, n) for n in call.inputs)
    if one is None or two is None:
        return
    first, second = (str((part.call_of(n) or call).place) for n in call.inputs)
    for (label, mine), (complement, theirs), line in ((one, two, second), (two, one, first)):
        if _complement(part, complement) != _bare(part, label) or not part.from_batch(label):
            continue
        both = set(part.values[label].tensor.flatten().tolist()) == {0.0, 1.0}
        if both and _equal(part, mine, theirs, label) and _says_nothing(part, call, label):
            yield label, line


def _bare(part: Slice, number: int) -> int:
    """A value before it was reshaped or cast."""
    return origin(part, number, _SAME)[0].number


def _weighted(part: Slice, number: int) -> tuple[int, int] | None:
    """The sides of a product of a value without a gradient and a learned one: past reshapes, signs and constant
    factors."""
    for _ in range(8):
        call = part.call_of(number)
        if call is None:
            return None
        if call.name in MULTIPLICATIONS and len(call.inputs) == 2:
            plain, learned = sorted(call.inputs, key=lambda n: part.values[n].requires_grad)
            if part.values[plain].requires_grad or not part.values[learned].requires_grad:
                return None
            if part.values[plain].tensor.numel() > 1:
                return plain, learned
            number = learned
        elif call.name in _SAME | NEGATIONS | MULTIPLICATIONS and len(call.inputs) == 1:
            number = call.inputs[0]
        else:
            return None
    return None


def _complement(part: Slice, number: int) -> int | None:
    """The value of which this one is 1 minus it."""
    call = part.call_of(_bare(part, number))
    if call is None or call.name not in SUBTRACTIONS or len(call.inputs) != 1 or 1.0 not in call.numbers:
        return None
    turned = call.name in {"rsub", "__rsub__"} or not isinstance(call.args[0], Ref)
    return _bare(part, call.inputs[0]) if turned else None


def _says_nothing(part: Slice, call: Call, label: int) -> bool:
    """Whether the sum stays the same with each label turned into the other one."""
    (number,) = call.outputs
    before, labels = part.values[number].tensor.double(), part.values[label].tensor
    try:
        (turned,) = part.replay({label: 1 - labels}, [number])
    except CannotReplay:
        return False
    return close(turned.detach().double(), before, float(before.abs().max()))


def _equal(part: Slice, a: int, b: int, label: int) -> bool:
    """Whether two values are equal in the run and wherever all that they are computed of has other values."""
    if a == b:
        return True
    before = part.ancestors(a) | part.ancestors(b)
    if part.ancestors(label) & before or part.values[a].tensor.shape != part.values[b].tensor.shape:
        return False
    ends = tuple(n for n in sorted(before) if part.values[n].kind in {"layer", "batch", "unknown"})
    given = Arguments(part, ends)
    for index in range(SETTINGS):
        try:
            made = part.replay(dict(zip(ends, given.at(index), strict=True)), [a, b])
        except CannotReplay:
            return False
        left, right = (m.detach().double() for m in made)
        if not close(left, right, float(left.abs().max())) or bool((left == left.flatten()[0]).all()):
            return False
    return bool(torch.isfinite(part.values[a].tensor).any())


def _chosen_together(part: Slice, call: Call) -> tuple[list[int], int, str] | None:
    """Of a minimum (or maximum) over costs of permuted outputs, each a mean over rows: the rows that alone choose
    another one, the number of all rows, and the line that made all costs, if one did."""
    costs = list(call.inputs)
    while len(costs) == 1 and (made := part.call_of(costs[0])) is not None:  # given stacked
        if made.name not in JOINS | VIEWS or (made.name not in JOINS and len(made.inputs) != 1):
            return None
        costs = list(made.inputs)
        if made.name in JOINS:
            break
    values = [part.values[n] for n in costs]
    if not 2 <= len(costs) <= 24 or not all(v.tensor.numel() == 1 and v.requires_grad for v in values):
        return None
    # outputs and targets that all costs are computed from, with as many rows
    common = frozenset.intersection(*(part.ancestors(n) for n in costs))
    wide = [n for n in common if part.values[n].tensor.dim() > 1 and part.values[n].tensor.shape[0] > 1]
    learned = [n for n in wide if part.values[n].requires_grad][:4]
    data = [n for n in wide if not part.values[n].requires_grad and part.from_batch(n)][:4]
    for outputs, targets in itertools.product(learned, data):
        count = part.values[outputs].tensor.shape[0]
        if count == part.values[targets].tensor.shape[0]:
            rows = _differing(part, costs, outputs, targets, largest=call.name in {"max", "amax", "maximum"})
            if rows:
                lines = {str(v.place) for v in values}
                return rows, count, lines.pop() if len(lines) == 1 else ""
    return None


def _differing(part: Slice, costs: list[int], outputs: int, targets: int, *, largest: bool) -> list[int]:
    """The rows that alone choose another permutation than all rows together."""
    mine, theirs = part.values[outputs].tensor, part.values[targets].tensor
    whole = torch.stack([part.values[n].tensor.double().reshape(()) for n in costs])
    of_row = ({outputs: mine[r : r + 1], targets: theirs[r : r + 1]} for r in range(len(mine)))
    try:
        alone = torch.stack([_costs(part, costs, given) for given in of_row])
        if not close(alone.mean(0), whole, float(alone.abs().max())) or not _permuted(part, costs, outputs, whole):
            return []
    except CannotReplay:
        return []
    sign = -1.0 if largest else 1.0
    best = int((sign * whole).argmin())
    better = (sign * alone[:, best : best + 1] - sign * alone).amax(1) > 1e-6 * float(alone.abs().max())
    return better.nonzero().flatten().tolist()


def _costs(part: Slice, costs: list[int], given: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([made.detach().double().reshape(()) for made in part.replay(given, costs)])


def _permuted(part: Slice, costs: list[int], outputs: int, whole: torch.Tensor) -> bool:
    """Whether each cost is the first one with the outputs permuted along an axis other than that of rows."""
    mine, size = part.values[outputs].tensor, float(whole.abs().max())
    for axis in range(1, mine.dim()):
        if 2 <= mine.shape[axis] <= MOST_SOURCES:
            orders = itertools.permutations(range(mine.shape[axis]))
            permuted = (mine.index_select(axis, torch.tensor(order, device=mine.device)) for order in orders)
            made = [_costs(part, costs[:1], {outputs: tensor}) for tensor in permuted]
            if all(any(close(m, cost.reshape(1), size) for m in made) for cost in whole):
                return True
    return False
