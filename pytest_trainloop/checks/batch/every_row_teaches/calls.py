"""What the calls of one step show: an input that is read in the place of another, one target for all rows, flags that
are read as positions, weights that are cut to 0."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.every_row_teaches.causes import found
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.row_axis import rows_known
from pytest_trainloop.instruments.batches.values import all_equal, count_up, plain, two_valued
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.tracing.call_log import Calls
from pytest_trainloop.recording import torch_names as functions
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.source import place_of
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.no_randomness import NoRandomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Set
    from contextlib import AbstractContextManager

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

FLAG_STEPS = 6
"""Steps of the loop whose flags are read."""

LEAST_ROWS = 4
"""Rows of which fewer may be indexed with 0 and 1 by chance."""

_PICKS = functions.INDEXING | functions.EMBEDDINGS
_MOVES = functions.VIEWS | functions.CASTS | functions.INDEXING
_WHOLE = functions.CASTS | functions.RESHAPES | {"squeeze", "unsqueeze", "deepcopy"}
"""They keep all entries in their order."""
_INTEGERS = frozenset("long int short byte to".split())
_IGNORED = functions.SIZES | {"__len__", "is_floating_point", "is_nested", "__deepcopy__", "deepcopy"}
_DIVISIONS = frozenset("floor_divide __floordiv__ floordiv __rfloordiv__ div divide".split())
_CUTTING = _DIVISIONS | {"long", "int", "short", "to", "type"}


def step_seen(
    evidence: Evidence,
    seen: Calls | None = None,
    mode: Callable[[], AbstractContextManager[Any]] = NoRandomness,
    **changes: Any,
) -> tuple[Calls, Record]:
    """The calls of a step on the loop's own batch; without dropout and with running statistics by default."""
    calls = Calls() if seen is None else seen

    def contexts(watch: Watch) -> Iterable[AbstractContextManager[Any]]:
        return (mode(), *calls.contexts(watch))

    plan = {"enough": lambda record: record.rounds >= calls.steps, **changes}
    return calls, evidence.rerun(contexts=contexts, before_item=calls.take, may_raise=True, **plan)


def roots_of(record: Record) -> list[float]:
    """The values that were backpropagated."""
    return [root.value for backward in record.of(Backward) for root in backward.roots]


def reached(record: Record) -> bool:
    """Whether a gradient arrived anywhere that is not zero."""
    return any(backward.reached for backward in record.of(Backward))


def reads(seen: Calls, through: Set[str]) -> dict[Value, list[Call]]:
    """By value that no call made: the calls that read its entries, but for those that move it only."""
    by_source: defaultdict[Value, list[Call]] = defaultdict(list)
    for call in seen.calls:
        if call.name not in _IGNORED | through and (call.outputs or call.name in functions.TO_PYTHON):
            for value in call.inputs:
                source = value.source(through)
                if source.made_by is None:
                    by_source[source].append(call)
    return by_source


def of_batch(value: Value) -> bool:
    return any(origin.of_batch for origin in value.origins())


def one_input_for_two(evidence: Evidence) -> Iterator[Finding]:
    """Two equal calls are made with one tensor of the batch, and none with another that is like it."""
    batch = first_batch(evidence.fresh_loop())
    if not any(_like(one, other) for one, other in itertools.combinations(nested.tensors(batch), 2)):
        return
    seen, record = step_seen(evidence)
    given, read_by, twice = dict(zip(seen.batch, seen.tensors, strict=True)), reads(seen, _MOVES), []
    for read, unread in itertools.permutations((v for v in seen.batch if v.number == 0), 2):
        if read_by.get(unread) or not _like(given[read], given[unread]):
            continue
        equal: defaultdict[object, list[Call]] = defaultdict(list)
        for call in read_by.get(read, ()):
            # a loss may take a difference twice (odd: returns_compared_twice_beside_old_values)
            if call.grad and any(v.history and not of_batch(v) for v in call.inputs):
                equal[_key(call)].append(call)
        # an actor and a critic each run the shared trunk (odd: advantage_weighted_regression)
        twice += [
            (read.of_batch, unread.of_batch, calls)
            for calls in equal.values()
            if len(calls) == 2 and _weighted_after(seen, calls[0]) == _weighted_after(seen, calls[1])
        ]
    if record.raised is None and twice:
        one, other, (before, after) = twice[0]
        # the line of the second call, nearest to it, at which the first was not made
        sites = (two for two in zip(before.site, after.site, strict=False) if two[0] != two[1])
        place = next((place_of(*site) for _, site in sites), after.place)
        # dropout may make two different results of one input
        level = "advice" if any(call.name in functions.DROPOUTS for call in seen.calls) else "fault"
        facts = {"read": one, "unread": other, "calls": len(twice), "several": len(twice) > 1, "level": level}
        repair = f"give {other} to one of the two calls; or leave it out of the batch"
        yield found("one_input_for_two", place, (other, one), repair=repair, **facts)


def _like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may be two views, or two sides of a pair: of one shape and dtype, each of many values."""
    if one.shape != other.shape or one.dtype != other.dtype or one.dim() < 2 or not (plain(one) and plain(other)):
        return False
    return not torch.equal(one, other.to(one.device)) and not any(
        two_valued(t) or all_equal(t.flatten()) or count_up(t) for t in (one.detach(), other.detach())
    )


def _key(call: Call) -> tuple[object, ...]:
    """Equal for calls of one function with equal arguments."""
    return call.name, call.plain, tuple(v.digest for v in call.inputs)


def _weighted_after(seen: Calls, start: Call) -> set[object]:
    """The calls with weights that the results of a call go into, at any distance."""
    reached, weighted = set(start.outputs), set[object]()
    for call in seen.calls[start.number + 1 :]:
        if any(v in reached for v in call.inputs):
            reached.update(call.outputs)
            if any(v.parameter for v in call.inputs):
                weighted.add(_key(call))
    return weighted


def one_target_for_all_rows(evidence: Evidence, suspected: Calls) -> Iterator[Finding]:
    """One row of a tensor of the batch meets the outputs of all rows. ``suspected`` are calls of a step."""
    made = evidence.shared(StepGradients.of)
    if made.rows < 3 or made.axis != 0 or not any(_one_row(suspected, made.rows)):
        return
    if not rows_known(first_batch(evidence.fresh_loop()), 0):
        return
    seen, record = step_seen(evidence)
    given = dict(zip(seen.batch, seen.tensors, strict=True))
    for value, row, pick, meeting in _one_row(seen, made.rows):
        tensor, name = given.get(value), value.of_batch
        if tensor is None or not plain(tensor) or all_equal(tensor):
            continue
        _, other = step_seen(evidence, Calls(others={pick.number: as_given}))
        if other.raised is None and roots_of(other) != roots_of(record):
            facts = {"rows": made.rows, "row": row, "name": name, "op": meeting.name}
            facts |= {"before": sum(roots_of(record)), "after": sum(roots_of(other))}
            repair = f"take the whole of {name}, without the index"
            yield found("one_target_for_all_rows", meeting, (name,), repair=repair, **facts)
            return


def _one_row(seen: Calls, rows: int) -> Iterator[tuple[Value, int, Call, Call]]:
    """Tensors without a history of which an index with constants takes one row, and nothing reads more; that row, the
    call that picks it, and the call in which it meets something of all rows that the model made."""
    for value, taken in reads(seen, _WHOLE).items():
        picked = set[int | None]()
        for call in taken if not value.history and value.shape[:1] == (rows,) else ():
            index = call.plain[1] if call.name == "__getitem__" and len(call.plain) > 1 else None
            first = index[0] if isinstance(index, tuple) and index else index
            if isinstance(first, slice) and len(range(rows)[first]) == 1:
                picked.add(range(rows)[first][0])
            else:
                picked.add(range(rows)[first] if isinstance(first, int) and not isinstance(first, bool) else None)
        row = picked.pop() if len(picked) == 1 else None
        meeting = next((met for call in taken if row is not None and (met := _meeting(seen, call, rows))), None)
        if meeting is not None and row is not None:
            yield value, row, taken[0], meeting


def _meeting(seen: Calls, pick: Call, rows: int) -> Call | None:
    """The call in which what is picked, moved or cast, meets a result of the model with all rows."""
    picked = set(pick.outputs)
    for call in seen.calls[pick.number + 1 :]:
        mine = any(v in picked for v in call.inputs)
        if mine and call.name in _MOVES:
            picked.update(call.outputs)
        elif mine and any(v.history and v.shape[:1] == (rows,) for v in call.inputs):
            return call
    return None


@dataclass(eq=False)
class Indices(Calls):
    """The calls of the first steps, with copies of what tensors are indexed with, by line."""

    steps: int = FLAG_STEPS
    kept: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    def looked_at(self, made: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if made.name == "__getitem__" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            self.kept.setdefault((made.place.file, made.place.line), []).append(args[1].detach().clone())


def flags_as_indices(evidence: Evidence, suspected: Calls) -> Iterator[Finding]:
    """Flags of the rows are read as positions: ``x[flags]`` takes rows 0 and 1 over and over."""
    if not any(_indexed_by_two(suspected)):
        return
    seen = Indices()
    _, record = step_seen(evidence, seen, contextlib.nullcontext)
    leads = set(seen.roots)
    for call in reversed(seen.calls):
        if not leads.isdisjoint(call.outputs):
            leads.update(call.inputs)
    for call in _indexed_by_two(seen) if record.raised is None else ():
        (rows, index), flags = call.inputs, call.inputs[1].source(_MOVES | _INTEGERS)
        kept = seen.kept.get((call.place.file, call.place.line), [])
        count = index.shape[0]
        if leads.isdisjoint(call.outputs) or not flags.of_batch or flags.shape not in ((count,), (count, 1)):
            continue
        if not any(v.of_batch and v is not flags and v.shape[:1] == (count,) for v in rows.origins()):
            continue  # what is indexed is not made of these rows
        # partners point at rows that point at themselves, as the anchor of a view does; flags of rows do not heed that
        binary = all(bool(((t == 0) | (t == 1)).all()) for t in kept)
        if binary and any(not torch.equal(t[t], t) for t in (given.long() for given in kept)):
            ones = int(kept[0].sum())
            facts = {"rows": len(kept[0]), "ones": ones, "zeros": len(kept[0]) - ones, "steps": len(kept)}
            yield found("flags_as_indices", call, (flags.of_batch,), **facts)
            return


def _indexed_by_two(seen: Calls) -> Iterator[Call]:
    """Calls that index rows the model made something of with as many whole numbers, 0 and 1 among them and no other."""
    for call in seen.calls:
        if call.name != "__getitem__" or len(call.inputs) != 2 or len(call.plain) != 2 or call.plain[1] is not None:
            continue
        rows, index = call.inputs
        if not rows.history or rows.parameter or index.floating or index.dtype is torch.bool or len(index.shape) != 1:
            continue
        if rows.shape[:1] != index.shape or index.shape[0] < LEAST_ROWS or (index.smallest, index.largest) != (0, 1):
            continue
        if not {v.made_by.name for v in rows.origins() if v.made_by is not None} & functions.SCATTERS:
            yield call


def weights_cut_to_zero(evidence: Evidence, suspected: Calls) -> Iterator[Finding]:
    """Weights of classes of which an integer division or a cast makes some 0. ``suspected`` are calls of a step."""
    if not any(_weighed(suspected)):
        return
    seen, record = step_seen(evidence)
    for cutting, weights, call in _weighed(seen):
        _, other = step_seen(evidence, Calls(others={cutting.number: with_fractions(cutting)}))
        if other.raised is None and roots_of(other) != roots_of(record):
            facts = {"zeros": weights.zeros, "count": math.prod(weights.shape), "change": str(cutting.place)}
            yield found("weights_cut_to_zero", call, (written(cutting),), **facts)
            return


def _weighed(seen: Calls) -> Iterator[tuple[Call, Value, Call]]:
    """Calls that make whole numbers of fractions, some of them 0, what is picked of these by an index, and the call
    that it weighs a loss in."""
    for call in seen.calls:
        weighs = call.name in functions.MULTIPLICATIONS and any(v.history for v in call.inputs)
        for value in call.inputs if weighs or call.name in functions.CLASS_LOSSES else ():
            if value.history or not 0 < value.zeros < math.prod(value.shape):
                continue
            # back over what moves, casts or picks it, until something cuts it
            cutting, picked = value.made_by, call.name in functions.CLASS_LOSSES
            while cutting is not None and cutting.name in _MOVES | _PICKS and not cuts(cutting) and cutting.inputs:
                picked |= cutting.name in _PICKS
                cutting = cutting.inputs[0].made_by
            if picked and cutting is not None and cuts(cutting):
                yield cutting, value, call


def cuts(call: Call) -> bool:
    """Whether a call makes 0 of some numbers that are not, by taking their fractions away."""
    given, made = call.inputs[:1], call.outputs[:1]
    if call.name not in _CUTTING or not given or not made or made[0].zeros <= given[0].zeros or not made[0].whole:
        return False
    return call.name in _DIVISIONS or not (given[0].whole or made[0].floating)


def written(cutting: Call) -> str:
    """The call that cuts, as a user writes it."""
    return "//" if cutting.name in _DIVISIONS else cutting.name


def with_fractions(cutting: Call) -> Callable[..., Any]:
    """What takes the place of its result: the numbers with their fractions."""
    return _true_division if cutting.name in _DIVISIONS else as_given


def as_given(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor as it was given, with its history where one has any."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    return next((t for t in tensors if t.requires_grad), tensors[0])


def _true_division(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args[:2] if len(args) > 1 else (args[0], kwargs["other"])
    by_tensor = getattr(func, "__name__", "") == "__rfloordiv__"
    return other / one if by_tensor else torch.true_divide(one, other)
