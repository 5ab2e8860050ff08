"""Losses that cannot teach: one that is exactly 0 on every batch, and one that is a constant for rows of one class."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.every_row_teaches.calls import (
    as_given,
    cuts,
    of_batch,
    reached,
    roots_of,
    step_seen,
    with_fractions,
    written,
)
from pytest_trainloop.checks.batch.every_row_teaches.causes import found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.batches.values import binary, plain
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.search import of_rows, smallest
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients
from pytest_trainloop.instruments.gradients.dependence import stirred
from pytest_trainloop.instruments.tracing.call_log import Calls
from pytest_trainloop.recording import torch_names as functions
from pytest_trainloop.runs.batch_stream import first_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

SEEDS = 5
"""Seeds of building and of ``fit`` under which the loss must be 0."""

MOVED = 0.3
"""Share of their size by which the weights are moved."""

STIRRED = (0.0, 0.6)
"""Other shares."""

MOST_TENSORS = 2
"""Tensors of classes that are tried."""

_SIGNAL = "a batch with a signal"

_HINGES = functions.CLAMPS | frozenset("relu relu_ relu6 threshold hardtanh clamp_ clamp_min_ maximum max".split())
_MARGIN_LOSSES = frozenset(
    """margin_ranking_loss hinge_embedding_loss cosine_embedding_loss triplet_margin_loss
    triplet_margin_with_distance_loss multi_margin_loss multilabel_margin_loss""".split()
)
_WEIGHED = functions.MULTIPLICATIONS | functions.DIVISIONS | functions.CLASS_LOSSES | {"binary_cross_entropy"}


def always_zero(evidence: Evidence) -> Iterator[Finding]:
    """The loss is exactly 0 with no gradient, on every batch and under every seed. It is followed back to the calls
    that made 0 of something else. A further run with the first of these calls replaced shows the cause.

    Raises ``CannotDecide`` where another batch may have another loss.
    """
    record = evidence.run()
    if not _all_zero(record):
        return
    passes, plan = len(record.backwards()), evidence.plan()
    for seed in range(plan.seed + 1, plan.seed + SEEDS):
        again = evidence.rerun(replace(plan, seed=seed), enough=lambda r: r.rounds >= 2, may_raise=True)
        if not _all_zero(again):
            return
        if all(p.start.same(q.start) for p, q in zip(record.parameters, again.parameters, strict=False)):
            raise CannotDecide(
                "the loss is exactly 0 at the weights that the loop begins with, which are the same under every seed: "
                "give a batch that they do not fit yet"
            )
        passes += len(again.backwards())
    once: Any = {"mode": contextlib.nullcontext, "enough": lambda r: r.begun or bool(r.backwards())}
    seen, _ = step_seen(evidence, **once)
    if not seen.roots:
        return
    made = [(call, _made_zero(call)) for call in _makers(seen.roots[0])]
    call, why = made[0] if made else (None, None)
    proven = why is not None and all(other for _, other in made)
    if why is not None and proven:
        proven = reached(step_seen(evidence, Calls(others={why[1].number: why[2]}), **once)[1])
    if call is None or why is None or not proven:
        where = f" from {call.name} on ({call.place})" if call is not None and call.place.file else ""
        raise CannotDecide(f"the loss is exactly 0 on every batch given{where}: give {_SIGNAL}", needs=_SIGNAL)
    cause, source, _ = why
    hinge, cut = cause == "hinge_never_active", cause == "weights_cut_to_zero"
    # a margin costs where no model could distinguish the inputs, unless it has the wrong sign or meets no scores
    if hinge and not _all_zero(evidence.rerun(stream=_of_equal_inputs, enough=once["enough"], may_raise=True)):
        raise CannotDecide(
            f"every margin is kept from the start on every batch given ({call.place}): give a batch that the untrained "
            "model gets wrong",
            needs=_SIGNAL,
        )
    entries = math.prod(call.outputs[0].shape) if call.outputs else 0
    facts: dict[str, Any] = {"passes": passes, "seeds": SEEDS, "op": call.name, "entries": entries}
    facts["largest"] = max((v.largest for v in call.inputs if v.history), default=math.nan)
    if cut:
        facts["change"] = str(source.place)
    variant = "all" if cut else "several" if hinge and entries > 1 else ""
    yield found(cause, call, (written(source) if cut else call.name,), variant, **facts)


def _all_zero(record: Record) -> bool:
    """Whether every root is exactly 0 and no gradient that is not zero arrived anywhere."""
    roots = roots_of(record)
    return bool(roots) and all(value == 0.0 for value in roots) and not reached(record)


def _of_equal_inputs(loop: TrainLoop) -> Iterator[Any]:
    """The batch with one row in the place of all inputs of one shape; what has one number for each row stays."""
    made = nested.copy(first_batch(loop))
    first: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in nested.tensors(made):
        if plain(tensor) and tensor.dim() > 1 and tensor[0].numel() > 1:
            row = first.setdefault((tuple(tensor.shape), tensor.dtype), tensor[0].detach().clone())
            with torch.no_grad():
                write(tensor, row.expand_as(tensor))
    return itertools.repeat(made)


def _makers(root: Value) -> Iterator[Call]:
    """The calls that made 0 of what is not, on the way to a root that is 0."""
    todo, seen = [root], set()
    while todo:
        value = todo.pop()
        call = value.made_by
        if value in seen or call is None:
            continue
        seen.add(value)
        parents = [v for v in call.inputs if v.history]
        if parents and all(v.zero for v in parents) and call.name not in functions.DISTANCE_LOSSES | _MARGIN_LOSSES:
            todo += parents
        elif any(v.zero for v in parents) and call.name in functions.ADDITIONS | {"stack", "cat"}:
            return  # it is 0 next to a value that is not
        elif parents:
            yield call


def _made_zero(call: Call) -> tuple[str, Call, Callable[..., Any]] | None:
    """What made 0 of the call's inputs: the cause, the call to replace, and what takes its place."""
    if call.name in _MARGIN_LOSSES:
        return "hinge_never_active", call, lambda func, args, kwargs: func(*args, **{**kwargs, "margin": 1e3})
    largest = [v.largest for v in call.inputs if v.history]
    if call.name in _HINGES and largest and max(largest) < 0:
        return "hinge_never_active", call, as_given
    for value in call.inputs if call.name in _WEIGHED else ():
        origins = value.origins() if value.zero and not value.history else ()
        cutting = next((at.made_by for at in origins if at.zero and at.made_by and cuts(at.made_by)), None)
        if cutting is not None:
            return "weights_cut_to_zero", cutting, with_fractions(cutting)
    return None


def class_costs_a_constant(evidence: Evidence) -> Iterator[Finding]:
    """Rows of one class alone cost the same at several states of the weights, more than 0, and have no gradient."""
    loop = evidence.fresh_loop()
    batch = first_batch(loop) if loop.batch_dim in (None, 0) else None
    for path in [path for path, tensor in nested.paths(batch) if _has_both(batch, tensor)][:MOST_TENSORS]:
        seen, first = _of_class(evidence, path, 0)
        cost, place = _cost(seen)
        if cost is None or not _costs_without_gradient(first):
            continue
        others = (_of_class(evidence, path, 0, share)[1] for share in STIRRED)
        if not all(_costs_without_gradient(other) and roots_of(other) == roots_of(first) for other in others):
            continue
        if not reached(_of_class(evidence, path, 1)[1]):
            continue
        _, signed = _of_class(evidence, path, 0, instead=-1)
        steps = evidence.shared(StepGradients.of)
        rows = _rows_of(steps.batch, path, 0)
        least = smallest(of_rows(rows), partial(_shows, steps), evidence=evidence) or Composition(tuple(rows))
        facts: dict[str, Any] = {"cost": cost, "states": len(STIRRED) + 1}
        facts["signed"] = signed.raised is None and reached(signed)
        facts |= {"smallest": str(least), "composition": least.as_data()}
        yield found("class_costs_a_constant", place, (nested.shown(path),), **facts)
        return


def _has_both(batch: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor has 0 or 1 for each row, and both."""
    one_each = plain(tensor) and tensor.dim() > 0 and 1 < len(tensor) == tensor.numel() == nested.rows(batch)
    return one_each and binary(tensor) and bool(tensor.any()) and not bool(tensor.all())


def _rows_of(batch: Any, path: nested.Path, chosen: int) -> list[int]:
    """The rows of one class."""
    rows: list[int] = (dict(nested.paths(batch))[path].detach().flatten() == chosen).nonzero().flatten().tolist()
    return rows


def _of_class(
    evidence: Evidence, path: nested.Path, chosen: int, share: float = MOVED, *, instead: int | None = None
) -> tuple[Calls, Record]:
    """A step on as many rows of one class alone, with another number in its place."""

    def stream(loop: TrainLoop) -> Iterator[Any]:
        batch = first_batch(loop)
        rows = itertools.cycle(_rows_of(batch, path, chosen))
        made = nested.take(batch, [next(rows) for _ in range(nested.rows(batch))])
        if instead is not None:
            with torch.no_grad():
                dict(nested.paths(made))[path].fill_(instead)
        return itertools.repeat(made)

    return step_seen(evidence, None, contextlib.nullcontext, stream=stream, prepare=stirred(share))


def _costs_without_gradient(record: Record) -> bool:
    roots = roots_of(record)
    return record.raised is None and bool(roots) and all(0.0 < abs(v) < math.inf for v in roots) and not reached(record)


def _shows(steps: StepGradients, composition: Composition) -> bool:
    return _costs_without_gradient(steps.at(composition).record)


def _cost(seen: Calls) -> tuple[float | None, object]:
    """What each row costs: the entries of what is reduced last before the backward pass, if all are one number above 0.
    And the place of the nearest product of the model's results with zeros of the batch."""
    cost, reduced, place = None, False, None
    for value in seen.roots[0].origins() if seen.roots else ():
        call = value.made_by
        if call is None or not call.inputs:
            continue
        given = call.inputs[0]
        if call.name in functions.REDUCTIONS and given.shape and not value.shape and not reduced:
            reduced, cost = True, given.largest if given.smallest == given.largest > 0 else None
        if place is None and call.name in functions.MULTIPLICATIONS and any(v.history for v in call.inputs):
            zeros = (v for v in call.inputs if v.zero and not v.history)
            place = call.place if any(map(of_batch, zeros)) else None
    return cost, place
