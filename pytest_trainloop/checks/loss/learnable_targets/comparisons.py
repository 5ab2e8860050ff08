"""Where results of the model meet their targets in the first steps, and what each of the two was made of."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.learnable_targets.writes import ArgumentWrites
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import plain
from pytest_trainloop.instruments.tracing.call_log import Calls
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    CLAMPS,
    DISTANCE_LOSSES,
    DIVISIONS,
    DRAWS,
    IN_PLACE_OPERATORS,
    MULTIPLICATIONS,
    NEGATIONS,
    ORDERINGS,
    RECIPROCALS,
    SHAPE_ONLY,
    SUBTRACTIONS,
    TO_PYTHON,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

COMPARED_STEPS = 2
"""Optimizer steps that are looked at."""

_TO_THE_LOSS = (
    frozenset(
        "pow __pow__ square abs __abs__ sqrt log log1p norm vector_norm linalg_norm linalg_vector_norm where".split()
    )
    | frozenset("__getitem__ masked_select nanmean mean sum nansum cumsum stack cat masked_fill".split())
    | ADDITIONS
    | SUBTRACTIONS
    | MULTIPLICATIONS
    | DIVISIONS
    | NEGATIONS
    | RECIPROCALS
    | CLAMPS
    | VIEWS
    | CASTS
    | IN_PLACE_OPERATORS
    | frozenset(name.strip("_") for name in IN_PLACE_OPERATORS)
)
"""What lies between a difference and the loss that it is a distance for: no kernel, no layer, no softmax."""

MOST_ENTRIES = 1_000_000
"""Entries of a prediction above which its values are not kept."""


Origin = frozenset[str | int]
"""What a value was made of: "batch"; "trained" parameters and other "weights", those of a frozen net; "ordered" where
something was sorted on the way, or all distances were taken, so that rows have no fixed partner; "opaque" where
something has a history that was not seen, as the results of a custom function of autograd have. The numbers are those
of the calls that drew random numbers."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and its target, of one shape, in one call."""

    call: Call
    prediction: Value
    target: Value
    predicted: torch.Tensor
    expected: torch.Tensor
    """Copies of the two."""


@dataclass(eq=False)
class FirstSteps(Calls):
    """The calls of the first steps, with the values that are compared."""

    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Copies of what a comparison was given, by the number of its call."""
    writes: ArgumentWrites = field(default_factory=ArgumentWrites)

    @classmethod
    def on(cls, evidence: Evidence) -> FirstSteps:
        """The first steps of the loop on its own batches."""
        return cls.seen(evidence, {})[0]

    @classmethod
    def seen(
        cls, evidence: Evidence, others: Mapping[int, Callable[..., Any]], restores: int = -1
    ) -> tuple[FirstSteps, Record]:
        """The first steps, some calls with other results, and their record. ``restores`` is a call that writes into
        the batch: this is undone when the function that makes it returns."""
        first = cls(others=others, steps=COMPARED_STEPS, writes=ArgumentWrites(restores))
        record = evidence.rerun(
            contexts=first.contexts,
            before_item=first.take,
            enough=lambda r: r.rounds >= COMPARED_STEPS,
            may_raise=True,
        )
        return first, record

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                self.writes.forget()

    def take(self, number: int, item: Any) -> None:
        super().take(number, item)
        with self.watch.suspended():
            self.writes.take([tensor for _, tensor in nested.paths(item)])

    def looked_at(self, made: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.writes.follow(made, args, kwargs)
        if made.name not in DISTANCE_LOSSES | SUBTRACTIONS:
            return
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)][:2]
        if len(given) < 2 or given[0].shape != given[1].shape or not 1 < given[0].numel() <= MOST_ENTRIES:
            return
        if any(not t.is_floating_point() or not plain(t) or not readable(t) for t in given):
            return
        if given[0].requires_grad != given[1].requires_grad:
            self.kept[made.number] = (given[0].detach().clone(), given[1].detach().clone())

    @functools.cached_property
    def leads(self) -> set[int]:
        """The identities of all values that something backpropagated was made of."""
        found = {id(root) for root in self.roots}
        for call in reversed(self.calls):
            if any(id(out) in found for out in call.outputs):
                found.update(id(value) for value in call.inputs)
        return found

    def reaches_a_root(self, call: Call) -> bool:
        return any(id(out) in self.leads for out in call.outputs)

    @functools.cached_property
    def by_line(self) -> list[list[Comparison]]:
        """The comparisons that something backpropagated depends on, of a result with a history with one without, for
        each line of the project."""
        lines: dict[tuple[str, int], list[Comparison]] = defaultdict(list)
        for number in sorted(self._distances & self.kept.keys()):
            call = self.calls[number]
            (one, first), (other, second) = sides = list(zip(call.inputs[:2], self.kept[number], strict=True))
            if one.history != other.history:
                (one, first), (other, second) = sides if one.history else reversed(sides)
                lines[call.place.file, call.place.line].append(Comparison(call, one, other, first, second))
        return list(lines.values())

    @property
    def _distances(self) -> set[int]:
        """Numbers of the calls from which only arithmetic leads to something backpropagated, and of which it measures
        a length: of differences, those that are squared, or of which the size is taken."""
        leads, measured, found = {id(root) for root in self.roots}, set[int](), set[int]()
        for call in reversed(self.calls):
            outs = {id(out) for out in call.outputs}
            if not outs & leads:
                continue
            if call.name in DISTANCE_LOSSES or (call.name in SUBTRACTIONS and outs & measured):
                found.add(call.number)
            if call.name in _TO_THE_LOSS:
                ins = {id(value) for value in call.inputs}
                leads |= ins
                if measures(call) or outs & measured:
                    measured |= ins
        return found

    def origin(self, value: Value) -> Origin:
        """What a value was made of."""
        return self._origins.get(id(value)) or _of_leaf(value)

    @functools.cached_property
    def _origins(self) -> dict[int, Origin]:
        """Of all results, in the order of the calls: no recursion."""
        known: dict[int, Origin] = {}
        for call in self.calls:
            made = Origin({"ordered"} if call.name in ORDERINGS else ())
            if call.name in DRAWS:
                made |= {call.number}
            elif call.name not in SHAPE_ONLY:
                made = made.union(*(known.get(id(value)) or _of_leaf(value) for value in call.inputs))
            known |= dict.fromkeys(map(id, call.outputs), made)
        return known

    @functools.cached_property
    def left_torch(self) -> Origin:
        """The origins of values that were taken out of torch: what became of them there is not known."""
        calls = [c for c in self.calls if c.name in TO_PYTHON and any(math.prod(v.shape) > 1 for v in c.inputs)]
        return Origin().union(*(self.origin(value) for call in calls for value in call.inputs))


def measures(call: Call) -> bool:
    """Whether it is a power, a size or a norm."""
    squares = call.name in MULTIPLICATIONS and len({id(v) for v in call.inputs}) == 1 and len(call.inputs) == 2
    return squares or "norm" in call.name or call.name in ("pow", "__pow__", "square", "abs", "__abs__")


def _of_leaf(value: Value) -> Origin:
    if value.made_by is not None:
        return Origin({"opaque"})  # made before the log began
    if value.of_batch:
        return Origin({"batch"})
    if value.parameter:
        return Origin({"trained" if value.history else "weights"})
    return Origin({"opaque"} if value.history else ())
