"""Rows at an end of the batch that nothing uses: whatever their values, the loop does the same, bit for bit."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_trainloop.checks.batch.every_row_teaches.calls import roots_of, step_seen
from pytest_trainloop.checks.batch.every_row_teaches.causes import SIZES, found
from pytest_trainloop.core.errors import CannotDecide, Refused
from pytest_trainloop.core.wording import filled
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.row_axis import rows_known
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.search import smallest
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.gradients.dependence import stirred
from pytest_trainloop.recording import torch_names as functions
from pytest_trainloop.recording.events import Step
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.no_randomness import NoRandomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.instruments.tracing.call_log import Call, Calls
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

LONG = 6
"""Optimizer steps of the runs with the loop's own random numbers: what is only gathered at first is used by then."""

MOST_STEPS = 48
"""The loop's own steps that the search for the smallest batch may take."""

SEEDS = (1, 2)
"""Seeds of these runs."""

_TAKES_PARTS = frozenset("__getitem__ narrow select split chunk unbind tensor_split __iter__ index_select".split())
_MOVES = functions.VIEWS | functions.CASTS | functions.JOINS | functions.INDEXING | functions.TO_PYTHON | {"__iter__"}
_ASKS = functions.EQUALITIES | functions.EXTREME_PLACES | functions.ORDER_COMPARISONS


def rows_left_out(evidence: Evidence, seen: Calls) -> Iterator[Finding]:
    """The rows at an end of the batch that nothing uses; ``seen`` keeps the calls of one of the steps that are made.

    Raises ``CannotDecide`` where these may be positions, and where there is one row; ``Refused`` where the loop takes
    no rows in another order.
    """
    loop = evidence.fresh_loop()
    if nested.rows(first_batch(loop), loop.batch_dim if isinstance(loop.batch_dim, int) else 0) == 1:
        raise CannotDecide("the batch has one row: give a larger one to see whether each row teaches", needs="batch=")
    made = evidence.shared(StepGradients.of)
    count = made.rows
    rows = OneStep(made, range(count), seen)
    unused = rows.unused() if rows.base is not None else ()
    if not unused and rows.refused:
        raise Refused(f"{rows.refused} on {made.cut.which(rows.refused_rows)}, and not on the loop's own batches")
    used = [row for row in range(count) if row not in unused]
    if not unused or not used:
        return
    # with the loop's own random numbers, at other weights and over several batches
    other = [used[row % len(used)] if row in unused else row for row in range(count)]
    streams = [partial(_repeated, made, taken) for taken in (range(count), other)]

    def equal(seed: int, modes: Callable[[], tuple[NoRandomness, ...]]) -> bool:
        one, two = (
            evidence.rerun(
                stream=stream,
                fit_seed=evidence.plan().seed + seed,
                prepare=stirred(0.3 * seed),
                contexts=lambda _watch: modes(),
                enough=lambda record: record.rounds >= LONG,
                may_raise=True,
            )
            for stream in streams
        )
        return one.raised is None and bool(one.steps) and fingerprint(one) == fingerprint(two)

    if not all(equal(seed, lambda: (_as_drawn(),)) for seed in SEEDS):
        return
    by_statistics = not equal(SEEDS[0], tuple)
    ends = ends_of(*(step_seen(evidence, None, _as_drawn, stream=s, prepare=stirred(0.3))[0] for s in streams))
    if ends is None:
        return
    named = f"{unused[0]} to {unused[-1]}" if len(unused) > 1 else str(unused[0])
    if not (isinstance(loop.batch_dim, int) or rows_known(made.batch, made.axis)):
        raise CannotDecide(
            f"entries {named} along axis {made.axis} of the batch are never used, and whether these are rows "
            "or positions is not known: give batch_dim=0 if they are rows, batch_dim=1 if the second axis holds them",
            needs="batch_dim=",
        )
    others = ends.skips and rows.same([2 if unused[0] == 0 else count - 3])
    at_end = unused[-1] == count - 1
    # how the rows left out depend on the number of rows
    if again := OneStep(made, used).unused():
        sizes = "some" if len(again) == len(unused) else "share"
    else:
        beyond = range(len(used), 2 * count) if at_end else range(2 * count - len(used))
        sizes = "constant" if OneStep(made, [*range(count), *range(count)]).same(beyond) else "remainder"

    def shows(composition: Composition) -> bool:
        return OneStep(made, composition.rows).same([len(composition.rows) - 1 if at_end else 0])

    from hypothesis import strategies as st

    few = st.integers(2, count).map(lambda number: Composition(tuple(range(number))))
    whole = Composition(tuple(range(count)))
    least = smallest(few, shows, evidence=evidence, most=MOST_STEPS) or whole
    variant = "statistics" if by_statistics else "others" if others else "remainder" if sizes == "remainder" else ""
    # a share in front of the model may be one process's part
    intended = variant or (sizes == "share" and not ends.behind_model)
    several = len(unused) > 1
    facts: dict[str, Any] = {"number": f"{len(unused)} " if several else "", "are": "are" if several else "is"}
    facts |= {"count": count, "used": len(used), "twice": 2 * count, "named": f"row{'s' if several else ''} {named}"}
    facts |= {"end": "last" if at_end else "first", "other": "first" if at_end else "last", "steps": LONG}
    facts |= {"kept": f"{len(used)} are" if len(used) > 1 else "one is", "level": "advice" if intended else "fault"}
    facts["shown_by"] = filled(SIZES[sizes], facts) + (
        "; the model computes their outputs" if ends.behind_model else ""
    )
    facts |= {"smallest": str(least), "composition": least.as_data()}
    yield found("rows_left_out", ends.place, ("batch",), variant, **facts)


def _repeated(made: StepGradients, rows: Sequence[int], _loop: TrainLoop) -> Iterator[Any]:
    return itertools.repeat(nested.take(made.batch, rows, made.axis))


def _as_drawn() -> NoRandomness:
    """Without dropout and with running statistics; all else is drawn as the loop draws it."""
    return NoRandomness(keeps=lambda _name: True)


class OneStep:
    """One step over chosen rows of the batch, and over the same with some of them replaced."""

    def __init__(self, made: StepGradients, chosen: Sequence[int], seen: Calls | None = None) -> None:
        self._made, self._chosen, self._seen = made, tuple(chosen), seen
        self.refused, self.refused_rows = "", self._chosen
        """What the loop raised first, on which rows."""
        self.base = self._print(self._chosen)

    def unused(self) -> tuple[int, ...]:
        """The places at one end that no other row makes a difference at."""
        n = len(self._chosen)
        last = _most(lambda k: self.same(range(n - k, n)), n)
        return tuple(range(n - last, n)) if last else tuple(range(_most(lambda k: self.same(range(k)), n)))

    def same(self, places: Sequence[int]) -> bool:
        """Whether the run is the same with the row at any of three other places in these."""
        others = [p for p in range(len(self._chosen)) if p not in places]
        donors = dict.fromkeys((others[0], others[-1], others[len(others) // 2])) if others else {}
        taken = (tuple(self._chosen[d if p in places else p] for p in range(len(self._chosen))) for d in donors)
        return self.base is not None and bool(donors) and all(self._print(rows) == self.base for rows in taken)

    def _print(self, rows: tuple[int, ...]) -> object:
        watched = self._seen is not None and rows != self._chosen and not self._seen.calls
        made = self._made.at(Composition(rows), contexts=(self._seen.contexts,) if watched and self._seen else ())
        roots = [root.value for backward in made.record.backwards() for root in backward.roots]
        refused = made.refused or ("the loss is NaN" if any(map(math.isnan, roots)) else "")
        if refused and not self.refused:
            self.refused, self.refused_rows = refused, rows
        return None if made.refused or not made.record.ended else fingerprint(made.record)


def fingerprint(record: Record) -> object:
    """What was backpropagated, what each step read, and the weights at the end: equal for runs that are the same."""
    reads = (read.grads.items() for step in record.of(Step) for read in step.reads)
    grads = tuple((i, sample.raw) for each in reads for i, sample in each if sample is not None)
    return roots_of(record), grads, tuple((i, sample.raw) for i, sample in sorted(record.end.items()))


def _most(holds: Callable[[int], bool], below: int) -> int:
    """The largest number below ``below`` for which something holds that holds for all smaller ones as well."""
    low, high = 0, 1
    while high < below and holds(high):
        low, high = high, 2 * high
    high = min(high, below)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class Ends(NamedTuple):
    """``place`` is where the rows are taken out, ``behind_model`` whether that is after a model was called with them,
    ``skips`` whether every other row or so is taken."""

    place: Place | None
    behind_model: bool
    skips: bool = False


def ends_of(one: Calls, other: Calls) -> Ends | None:
    """Where what differs between two runs ends; None where that depends on values (a mask, a clamp, a hardest
    example), since another batch may then use the rows, or where it is not seen."""
    if [c.name for c in one.calls] != [c.name for c in other.calls]:
        return None  # how the loop goes on depends on the values of the rows
    pairs = list(zip(one.calls, other.calls, strict=True))
    changed = {v for a, b in pairs for v, w in zip(a.outputs, b.outputs, strict=False) if v.digest != w.digest}
    changed |= {v for v, w in zip(one.batch, other.batch, strict=False) if v.digest != w.digest}
    reads = [(a, [v for v in a.inputs if v in changed]) for a, _ in pairs if a.outputs or a.name in functions.TO_PYTHON]
    reads = [(call, given) for call, given in reads if given]
    computing = [call for call, _ in reads if call.name not in _MOVES]
    computed = any(call.grad for call in computing)
    if not computed and computing:
        return None  # rows held out: only looked at without gradients
    if not one.batch or (not computed and any(call.name in functions.TO_PYTHON for call, _ in reads)):
        return None  # they leave torch
    numbers = [v for a, _ in pairs for v in a.outputs if v in changed and v.history and not v.shape]
    if numbers:
        # made by the calls that make what is backpropagated, as when a loop over parts keeps the last; a loss of rows
        # held out is made elsewhere
        used = {v.made_by.site for root in one.roots for v in root.origins() if v.made_by is not None}
        made = [v.made_by for v in numbers if v.made_by is not None]
        return Ends(made[0].place, behind_model=True) if all(call.site in used for call in made) else None
    places, parting = [], []
    for call, given in reads:
        learned = not computed or any(v.history for v in given)
        if call.name in _TAKES_PARTS and (not computed or any(v.history for v in call.inputs)):
            parting.append(call)
        if call.outputs and not any(v in changed for v in call.outputs):
            constant = not any(v.made_by or v.shape for v in call.inputs[1:])
            if call.name in _TAKES_PARTS and call.name != "index_select" and constant:
                if learned:
                    places.append(call)  # some entries, by their places alone
            elif learned and call.grad and call.name not in _ASKS:
                return None  # what comes out depends on what the rows hold, for other values than these
    places = places or parting
    if computed and not places:
        return None  # what is made of them is looked at separately
    behind = computed and any(v.history for v in places[-1].inputs)
    return Ends(places[-1].place if places else None, behind, any(map(_skips, places)))


def _skips(call: Call) -> bool:
    parts = (part for given in call.plain for part in (given if isinstance(given, tuple) else (given,)))
    return any(isinstance(part, slice) and part.step not in (None, 1) for part in parts)
