"""Targets whose values no model can give, or none that begins as usual: cut to one value, out of range, far away.

An argmax over an axis of one entry is 0 for all inputs. A cast that makes whole numbers of fractions between two
neighbours, or booleans of numbers that are not 0, gives one value for what differs between rows.
Where even the best output that the last function can give is further from the targets than one constant number would
be, the range is wrong for them: no correct loop has that. A smaller share outside may be noise around the end of the
range.
With usual initialisations outputs begin around 0. Where one constant for each output, the mean of its targets, is ten
times nearer to them than the first outputs are, the first steps only look for that constant. Where the targets of the
batch are in reach and the loop's own (y - mean) / spread takes them out of it, mean and spread are of other values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.learnable_targets.causes import found
from pytest_trainloop.checks.loss.learnable_targets.comparisons import COMPARED_STEPS, FirstSteps, measures
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    DIVISIONS,
    EXTREME_PLACES,
    INDEXING,
    LOSSES,
    MULTIPLICATIONS,
    SUBTRACTIONS,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.learnable_targets.comparisons import Comparison
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.runs.evidence import Evidence

RANGES = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, math.inf),
    "softplus": (0.0, math.inf),
    "exp": (0.0, math.inf),
    "log_softmax": (-math.inf, 0.0),
    "logsigmoid": (-math.inf, 0.0),
}

SHARE = 0.25
"""The share of targets outside of the range from which it is said."""

FAR = 10.0
"""Times the spread of the targets from which the first outputs are far from them: as for torch's squared errors."""

NEAR = 3.0
"""Times the spread up to which they are near."""

LEAST_TARGETS = 8
"""Targets below which nothing is said of their spread."""

_TO_WHOLE = frozenset("long int short byte char bool to type type_as".split())
_KEEPS_ENTRIES = VIEWS | CASTS | frozenset({"stack", "cat"}) | INDEXING


def cut(evidence: Evidence) -> Iterator[Finding]:
    """Targets that a cast or an argmax makes constant, where the batch's own entries differ."""
    first = evidence.shared(FirstSteps.on)
    cuts: dict[tuple[str, int], list[tuple[float, Finding | None]]] = defaultdict(list)
    for call in first.calls:
        results = [v for v in call.inputs if v.history and not v.parameter]
        if call.name not in LOSSES | SUBTRACTIONS | INDEXING or not results or not first.reaches_a_root(call):
            continue
        for value in call.inputs[:2]:  # what follows in a loss are weights
            if not value.history and (made := _cutting(value)) is not None:
                cuts[made.place.file, made.place.line].append((made.outputs[0].smallest, _cut(value, made, call)))
    for of_line in cuts.values():
        one = of_line[0][1]
        if one is not None and all(other for _, other in of_line) and len({value for value, _ in of_line}) == 1:
            yield one


def _cutting(value: Value) -> Call | None:
    """The cast or argmax nearest to a value, through moves that keep the entries."""
    while (call := value.made_by) is not None and call.inputs:
        if call.outputs:
            to_whole = call.name in _TO_WHOLE and call.inputs[0].dtype != call.outputs[0].dtype
            if call.name in EXTREME_PLACES or (to_whole and not call.outputs[0].floating):
                return call
        if call.name not in _KEEPS_ENTRIES:
            return None
        value = call.inputs[0]
    return None


def _cut(value: Value, call: Call, met: Call) -> Finding | None:
    given, made = call.inputs[0], call.outputs[0]
    if math.prod(value.shape) <= 1 or value.smallest != value.largest:
        return None  # it differs this time
    if given.history or not given.smallest < given.largest or made.smallest != made.largest:
        return None
    axis = None
    if call.name in EXTREME_PLACES:
        sizes = given.shape
        left = ((n, (*sizes[:n], *sizes[n + 1 :])) for n, size in enumerate(sizes) if size == 1)
        axis = next((n for n, rest in left if made.shape and made.shape in (rest, sizes)), None)
        if axis is None:
            return None
    elif str(made.dtype) == "torch.bool":
        if made.smallest != 1:
            return None  # all are 0, and then equal
    elif given.whole or not given.floating:
        return None
    name = next((v.of_batch for v in given.origins() if v.of_batch), "")
    facts: dict[str, Any] = {"value": made.smallest, "low": given.smallest, "high": given.largest, "axis": axis}
    facts |= {"op": call.name, "known": name or "what it is made of", "shape": str(given.shape)}
    variant = "" if axis is None else "argmax"
    return found("target_cut_to_one_value", met, (name or call.name,), variant, change=str(call.place), **facts)


_BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
_FILLS = frozenset("ones_like zeros_like full_like new_ones new_zeros new_full ones zeros full".split())
_SUMS = ADDITIONS | DIVISIONS | VIEWS | CASTS | frozenset({"mean", "sum", "add_", "__iadd__"})


def one_label(evidence: Evidence) -> Iterator[Finding]:
    """A binary loss all of whose targets are filled with one number, where no other term asks for another answer."""
    first = evidence.shared(FirstSteps.on)
    calls = _binary_calls(first)
    targets = [call.inputs[1].source(VIEWS | CASTS) for call in calls if len(call.inputs) > 1]
    if len({call.step for call in calls}) < COMPARED_STEPS or len(targets) < len(calls):
        return
    filled = all(t.made_by is not None and t.made_by.name in _FILLS and math.prod(t.shape) > 1 for t in targets)
    if not filled or len({bound for t in targets for bound in (t.smallest, t.largest)}) != 1:
        return
    origins = [first.origin(call.inputs[0]) for call in calls]
    # a critic that does not train is to be convinced (odd: convincing_a_judge_that_does_not_train)
    if all("trained" in origin and "weights" not in origin for origin in origins) and not first.left_torch:
        made = targets[0].made_by
        facts: dict[str, Any] = {"value": targets[0].smallest, "calls": len(calls), "op": calls[0].name}
        facts |= {"entries": math.prod(targets[0].shape), "change": str(made.place) if made is not None else ""}
        yield found("one_label_for_all", calls[0], (calls[0].name,), **facts)


def _binary_calls(first: FirstSteps) -> list[Call]:
    """The binary losses of all that is backpropagated; none where it has other terms than these and sizes of weights,
    or of what is made of weights alone."""
    met: dict[int, Call] = {}
    todo = list(first.roots)
    while todo:
        value = todo.pop()
        call = value.made_by
        learned = {id(v): v for v in call.inputs if v.history or v.parameter} if call is not None else {}
        if call is None or not learned:
            return []
        if call.name in _BINARY and len(call.inputs) == 2:  # weights may turn the sign, as advantages do
            met[call.number] = call
        elif call.name in _SUMS or (call.name in MULTIPLICATIONS and len(learned) == 1 and _positive(call)):
            todo.extend(learned.values())
        elif len(learned) > 1 or not measures(call) or _is_compared(first, next(iter(learned.values()))):
            return []
    return list(met.values())


def _positive(call: Call) -> bool:
    """Whether a factor is a number, or entries, above 0."""
    given = [n for n in call.plain if isinstance(n, (int, float))]
    given += [v.smallest for v in call.inputs if not v.history and not v.parameter]
    return bool(given) and all(n >= 0 for n in given)


def _is_compared(first: FirstSteps, value: Value) -> bool:
    """Whether something is compared on the way to a value, or the batch goes into it."""
    subtracts = any(v.made_by is not None and v.made_by.name in SUBTRACTIONS for v in value.origins())
    return subtracts or "batch" in first.origin(value)


MANY_RANGES = 4.0
"""Targets that many times the range away are in other units: they are to be scaled, and the function may stay."""


def out_of_reach(evidence: Evidence) -> Iterator[Finding]:
    """Each line that compares bounded outputs with data beyond their bounds."""
    first = evidence.shared(FirstSteps.on)
    for compared in first.by_line:
        made = [one.prediction.source(VIEWS | CASTS).made_by for one in compared]
        names = {call.name.rstrip("_") if call else "" for call in made}
        function, made_at = next(iter(names)), made[0]
        if len(names) > 1 or function not in RANGES or made_at is None:
            continue
        if not all(_of_data(first, one) for one in compared):
            continue
        targets = torch.cat([one.expected.flatten().double() for one in compared])
        targets = targets[targets.isfinite()]
        low, high = RANGES[function]
        off = targets - targets.clamp(low, high)
        outside = int((off != 0).sum())
        if not len(targets) or outside < SHARE * len(targets):
            continue
        least, constant = _rms(off), float(targets.std(unbiased=False))
        ends = f"{low:g} to {high:g}"
        if math.inf in (-low, high):
            ends = f"above {low:g}" if high == math.inf else f"below {high:g}"
        yield found(
            "target_out_of_reach",
            compared[0].call,
            (function,),
            level="fault" if least > constant else "advice",  # a constant is nearer than the best output in the range
            change=str(compared[0].call.place if least > MANY_RANGES * (high - low) else made_at.place),
            ends=ends,
            beyond=outside / len(targets),
            outside=outside,
            count=len(targets),
            least=least,
            constant=constant,
            lowest=float(targets.min()),
            highest=float(targets.max()),
        )


def _of_data(first: FirstSteps, one: Comparison) -> bool:
    """Whether the target is made of the batch, and of no weights and no random numbers."""
    origin = first.origin(one.target)
    return "batch" in origin and origin <= {"batch", "ordered"}


def far(evidence: Evidence) -> Iterator[Finding]:
    """Each line whose first comparison finds the targets far from the outputs, measured by their spread."""
    first = evidence.shared(FirstSteps.on)
    for one, *_ in first.by_line:
        if one.call.step or not _of_data(first, one) or not first.origin(one.prediction) >= {"trained", "batch"}:
            continue
        start, spread = _rms(one.predicted - one.expected), _spread(one.expected)
        if one.expected.numel() < LEAST_TARGETS or not spread or not start >= FAR * spread:
            continue
        leaf = next((v for v in one.target.origins() if v.of_batch), None)
        name = leaf.of_batch if leaf is not None else ""
        facts = {"mean": float(one.expected.double().mean()), "spread": spread, "start": start, "known": bool(name)}
        values = next((t for v, t in zip(first.batch, first.tensors, strict=True) if v is leaf), None)
        scaling = one.target.source(VIEWS | CASTS | INDEXING).made_by
        if scaling is not None and not _standardises(scaling):
            scaling = None
        if scaling and values is not None and values.numel() == one.expected.numel() and values.is_floating_point():
            values = values.reshape(one.expected.shape)
            facts |= {"before": float(values.double().mean()), "before_spread": _spread(values)}
            if _rms(one.predicted - values) <= NEAR * facts["before_spread"]:
                change = str(scaling.place)
                yield found("standardised_twice", one.call, (name or "target",), change=change, **facts)
                continue
        yield found("target_in_other_units", one.call, (name or "target",), level="advice", **facts)


def _standardises(call: Call) -> bool:
    """Whether it divides a difference."""
    if call.name not in DIVISIONS | MULTIPLICATIONS or not call.inputs:
        return False
    shifted = call.inputs[0].source(VIEWS | CASTS | INDEXING).made_by
    return shifted is not None and shifted.name in SUBTRACTIONS


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _spread(targets: torch.Tensor) -> float:
    """The distance of targets from the means of their columns, in root mean square."""
    rows = targets.double().reshape(len(targets), -1) if targets.dim() > 1 else targets.double()
    return _rms(rows - rows.mean(0))
