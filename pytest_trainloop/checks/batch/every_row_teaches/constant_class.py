"""Whether one of two classes costs a constant: its rows count in the loss, and the model cannot change what they cost.

The loop makes one step on a batch that holds rows of one class only, at several weights.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.values import binary, plain
from pytest_trainloop.checks.batch.every_row_teaches.one_pass import example
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.search import of_rows, smallest
from pytest_trainloop.compositions.step_gradients import StepGradients
from pytest_trainloop.gradients.dependence import stirred
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.torch_names import MULTIPLICATIONS, REDUCTIONS
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.tracing.call_log import Calls, Value

if TYPE_CHECKING:
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

STIRRED = (0.0, 0.3, 0.6)
"""Shares of their size by which the weights are moved."""

MOST = 2
"""Tensors of classes that are tried."""


@dataclass(frozen=True, slots=True)
class ConstantClass:
    """Rows whose ``name`` is 0 cost ``cost`` each, whatever the weights are."""

    name: str
    cost: float
    place: Place | None
    """Where the class is multiplied with what the model gave."""
    with_minus_one: bool
    """Whether these rows have a gradient with -1 in place of 0."""
    smallest: Composition
    states: int = len(STIRRED)


def constant_class(evidence: Evidence) -> ConstantClass | None:
    """The class that costs a constant, where each row of the batch has one of two."""
    batch = example(evidence)
    axis = evidence.fresh_loop().batch_dim
    paths = [path for path, tensor in nested.paths(batch) if _classes(batch, tensor, axis)]
    return next(filter(None, (_Classes(evidence, path).judge() for path in paths[:MOST])), None)


def _classes(batch: Any, tensor: torch.Tensor, axis: object) -> bool:
    """Whether a tensor has 0 or 1 for each row, and both."""
    if axis not in (None, 0) or not plain(tensor) or tensor.dim() == 0 or len(tensor) != nested.rows(batch):
        return False
    return tensor.numel() == len(tensor) > 1 and binary(tensor) and bool(tensor.any()) and not bool(tensor.all())


class _Classes:
    """Runs of one step on rows of one class."""

    def __init__(self, evidence: Evidence, path: nested.Path) -> None:
        self._evidence, self._path = evidence, path

    def judge(self) -> ConstantClass | None:
        first = self._step(0, STIRRED[1])
        if not _costs_without_gradient(first):
            return None
        others = [self._step(0, size) for size in (STIRRED[0], STIRRED[2])]
        if not all(_costs_without_gradient(r) and _roots(r) == _roots(first) for r in others):
            return None
        seen = Calls()
        self._step(0, STIRRED[1], seen=seen)
        cost = _cost(seen)
        taught = self._step(1, STIRRED[1])
        if cost is None or not any(b.reached for b in taught.of(Backward)):
            return None
        signed = self._step(0, STIRRED[1], instead=-1)
        reached = signed.raised is None and any(b.reached for b in signed.of(Backward))
        return ConstantClass(nested.shown(self._path), cost, _product(seen), reached, self._smallest())

    def _step(self, chosen: int, size: float, *, instead: int | None = None, seen: Calls | None = None) -> Record:
        plan = replace(
            self._evidence.plan(),
            stream=lambda loop: itertools.repeat(self._of_class(loop, chosen, instead)),
            prepare=stirred(size),
            enough=lambda r: r.rounds >= 1,
            may_raise=True,
        )
        if seen is not None:
            plan = replace(plan, contexts=seen.contexts, before_item=seen.take)
        return self._evidence.rerun(plan)

    def _smallest(self) -> Composition:
        """The smallest batch of such rows that costs something and has no gradient."""
        made = self._evidence.shared(StepGradients.of)
        classes = dict(nested.paths(made.batch))[self._path].detach().flatten()
        rows = (classes == 0).nonzero().flatten().tolist()

        def shows(composition: Composition) -> bool:
            return _costs_without_gradient(made.at(composition).record)

        return smallest(of_rows(rows), shows, evidence=self._evidence) or Composition(tuple(rows))

    def _of_class(self, loop: TrainLoop, chosen: int, instead: int | None) -> Any:
        batch = first_batch(loop)
        classes = dict(nested.paths(batch))[self._path].detach().flatten()
        rows = (classes == chosen).nonzero().flatten().tolist()
        made = nested.take(batch, list(itertools.islice(itertools.cycle(rows), len(classes))))
        if instead is not None:
            tensor = dict(nested.paths(made))[self._path]
            with torch.no_grad():
                tensor.fill_(instead)
        return made


def _roots(record: Record) -> list[float]:
    return [root.value for b in record.of(Backward) for root in b.roots]


def _costs_without_gradient(record: Record) -> bool:
    roots = _roots(record)
    reached = any(b.reached for b in record.of(Backward))
    return record.raised is None and bool(roots) and all(0.0 < abs(v) < float("inf") for v in roots) and not reached


def _cost(seen: Calls) -> float | None:
    """What each row costs: the entries of what is reduced last before the backward pass, if all are one number above
    0."""
    for value in seen.roots[0].origins() if seen.roots else ():
        call = value.made_by
        given = call.inputs[0] if call is not None and call.name in REDUCTIONS and call.inputs else None
        if given is not None and given.shape and not value.shape:
            return given.largest if given.smallest == given.largest > 0 else None
    return None


def _product(seen: Calls) -> Place | None:
    """The nearest product of the model's results with zeros of the batch."""
    for value in seen.roots[0].origins() if seen.roots else ():
        call = value.made_by
        if call is None or call.name not in MULTIPLICATIONS or not any(v.history for v in call.inputs):
            continue
        if any(v.zero and not v.history and _from_batch(v) for v in call.inputs):
            return call.place
    return None


def _from_batch(value: Value) -> bool:
    return any(origin.of_batch for origin in value.origins())
