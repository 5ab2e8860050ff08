"""Why the loss is exactly 0, with no gradient, on every batch and under every seed.

The root is followed back through values that are 0 to the calls that made 0 of something else. What is done otherwise
there on a further run shows the cause: the clamp left out, the integer division as a true one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.values import plain
from pytest_trainloop.checks.batch.every_row_teaches.cuts import as_given, cuts, with_fractions
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.memory_layout import write
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    CLAMPS,
    DISTANCE_LOSSES,
    DIVISIONS,
    MULTIPLICATIONS,
    SUBTRACTIONS,
    VIEWS,
)
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.tracing.call_log import Call, Calls, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

SEEDS = 5
"""Seeds of building and of ``fit`` under which the loss must be 0."""

HINGES = {"relu", "relu_", "relu6", "threshold", "hardtanh", *CLAMPS, "clamp_", "clamp_min_", "maximum", "max"}
MARGIN_LOSSES = {
    "margin_ranking_loss",
    "hinge_embedding_loss",
    "cosine_embedding_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
}
_COMPARED = DISTANCE_LOSSES | SUBTRACTIONS
_SAME = CASTS | VIEWS

Why = Literal["hinge", "weights", "itself"]


@dataclass(frozen=True, slots=True)
class ZeroLoss:
    """Why every loss was 0."""

    why: Why
    op: str
    place: Place
    """Where the loss becomes 0."""
    source: Place
    """Where what makes it 0 comes from."""
    cut_by: str = ""
    """The call that makes weights 0."""
    largest: float = math.nan
    """The largest entry before the clamp."""
    entries: int = 0
    passes: int = 0
    """The backward passes that were looked at."""
    seeds: int = SEEDS


def zero_loss(evidence: Evidence) -> ZeroLoss | None:
    """Why all losses of the watched run, and of runs under other seeds, are exactly 0; None where they are not. Raises
    ``CannotDecide`` where another batch may have another loss."""
    record = evidence.run()
    if not _all_zero(record):
        return None
    passes = len(record.backwards())
    for seed in range(1, SEEDS):
        again = evidence.rerun(
            replace(evidence.plan(), seed=evidence.plan().seed + seed), enough=lambda r: r.rounds >= 2, may_raise=True
        )
        if not _all_zero(again):
            return None
        if all(p.start.same(q.start) for p, q in zip(record.parameters, again.parameters, strict=False)):
            raise CannotDecide(
                "the loss is exactly 0 at the weights that the loop begins with, which are the same under every seed: "
                "give a batch that they do not fit yet"
            )
        passes += len(again.backwards())
    seen = Calls()
    evidence.rerun(
        contexts=seen.contexts, before_item=seen.take, enough=lambda r: r.begun or bool(r.backwards()), may_raise=True
    )
    if not seen.roots:
        return None
    found = [(call, _why(call)) for call in _makers(seen.roots[0])]
    if not found or any(why is None for _, why in found):
        raise CannotDecide(_no_signal(found[0][0] if found else None), needs="a batch with a signal")
    call, why = found[0]
    if why is None or not _has_gradient(evidence, {why[1].number: _otherwise(*why)}):
        raise CannotDecide(_no_signal(call), needs="a batch with a signal")
    if why[0] == "hinge" and not _zero_for_equal_inputs(evidence):
        raise CannotDecide(
            f"every margin is kept from the start on every batch given ({call.place}): give a batch that the untrained "
            "model gets wrong",
            needs="a batch with a signal",
        )
    before = max((v.largest for v in call.inputs if v.history), default=math.nan)
    entries = math.prod(call.outputs[0].shape) if call.outputs else 0
    return ZeroLoss(
        why[0],
        call.name,
        call.place,
        why[1].place,
        "//" if "div" in why[1].name else why[1].name,
        before,
        entries,
        passes,
    )


def _zero_for_equal_inputs(evidence: Evidence) -> bool:
    """Whether the loss is 0 as well where the model cannot tell any inputs apart: a margin that costs nothing there has
    the wrong sign, or the scores do not reach it."""

    def stream(loop: TrainLoop) -> Iterator[Any]:
        return itertools.repeat(equal_inputs(first_batch(loop)))

    record = evidence.rerun(stream=stream, enough=lambda r: r.begun or bool(r.backwards()), may_raise=True)
    return _all_zero(record)


def equal_inputs(batch: Any) -> Any:
    """The batch with one row in the place of all inputs of one shape; what has one number for each row stays."""
    made = nested.copy(batch)
    first: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in nested.tensors(made):
        if plain(tensor) and tensor.dim() > 1 and tensor[0].numel() > 1:
            row = first.setdefault((tuple(tensor.shape), tensor.dtype), tensor[0].detach().clone())
            with torch.no_grad():
                write(tensor, row.expand_as(tensor))
    return made


def _all_zero(record: Record) -> bool:
    """Whether every root is exactly 0 and no gradient that is not zero arrived anywhere."""
    passes = record.of(Backward)
    roots = [root.value for b in passes for root in b.roots]
    return bool(roots) and all(value == 0.0 for value in roots) and not any(b.reached for b in passes)


def _no_signal(call: Call | None) -> str:
    where = f" from {call.name} on ({call.place})" if call is not None and call.place.file else ""
    return f"the loss is exactly 0 on every batch given{where}: give a batch with a signal"


def _makers(root: Value) -> Iterator[Call]:
    """The calls that made 0 of what is not, on the way to a root that is 0."""
    todo, seen = [root], set[int]()
    while todo:
        value = todo.pop()
        call = value.made_by
        if id(value) in seen or call is None:
            continue
        seen.add(id(value))
        parents = [v for v in call.inputs if v.history]
        if parents and all(v.zero for v in parents) and call.name not in DISTANCE_LOSSES | MARGIN_LOSSES:
            todo += parents
        elif any(v.zero for v in parents) and call.name in ADDITIONS | {"stack", "cat"}:
            return  # it is 0 beside something that is not
        elif parents:
            yield call


def _why(call: Call) -> tuple[Why, Call] | None:
    """What made 0 of the call's inputs, and the call that is to be done otherwise."""
    if call.name in MARGIN_LOSSES or (call.name in HINGES and _cuts(call)):
        return "hinge", call
    given = [v for v in call.inputs if not v.history]
    if call.name in MULTIPLICATIONS | DIVISIONS | {"cross_entropy", "nll_loss", "binary_cross_entropy"}:
        for value in given:
            cutting = _cut_to_zero(value) if value.zero else None
            if cutting is not None:
                return "weights", cutting
    if call.name in _COMPARED and len(call.inputs) > 1 and len({v.digest for v in call.inputs[:2]}) == 1:
        one, other = (v.source(_SAME) for v in call.inputs[:2])
        if one is other and one.history:
            return "itself", next((v.made_by for v in call.inputs[:2] if v.made_by and not v.history), call)
    return None


def _cuts(call: Call) -> bool:
    """Whether every entry that a gradient could reach lies below what the call lets through."""
    largest = [v.largest for v in call.inputs if v.history]
    return bool(largest) and max(largest) < 0


def _cut_to_zero(value: Value) -> Call | None:
    """The call that made zeros of fractions, on the way to this value."""
    return next((at.made_by for at in value.origins() if at.zero and at.made_by and cuts(at.made_by)), None)


def _otherwise(why: Why, call: Call) -> Callable[..., Any]:
    """What takes the place of the result of the call."""
    if why == "hinge":
        return _wide_margin if call.name in MARGIN_LOSSES else as_given
    if why == "weights":
        return with_fractions(call)
    return _elsewhere


def _wide_margin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss with a margin so large that nothing is cut."""
    return func(*args, **{**kwargs, "margin": 1e3})


def _elsewhere(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a target is not: the tensor moved."""
    return as_given(_func, args, kwargs).detach() + 1.0


def _has_gradient(evidence: Evidence, others: dict[int, Callable[..., Any]]) -> bool:
    """Whether a gradient arrives where these calls give something else."""
    seen = Calls(others=others)
    record = evidence.rerun(
        contexts=seen.contexts, before_item=seen.take, enough=lambda r: r.begun or bool(r.backwards()), may_raise=True
    )
    return any(b.reached for b in record.of(Backward))
