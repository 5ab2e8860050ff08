"""Two parameters that share their entries through ``.data``, and are stepped as two.

Each of them gets its own gradient, its own moments and its own decay, and both write to the same entries. For plain SGD
that is exactly the step of one parameter in both places; for all else it is not. So the loop is run both ways, in
float64 from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.checks.wiring.weights_are_read.reads import Reads, SharedStorage
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.dependence import difference
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 4


@dataclass(frozen=True, slots=True)
class Tied:
    """The parameters ``first`` and ``second`` are one storage; ``change`` is the largest relative difference of the
    losses of the first steps to those with one parameter in both places."""

    first: str
    second: str
    change: float
    bound: float
    where: str
    assigned: str
    """The line that shares the storage."""


def tied_through_data(evidence: Evidence) -> Iterator[Tied]:
    reads = evidence.shared(Reads.of)
    record = reads.record
    if record is None or not reads.shared or record.raised is not None:
        return
    two, double = _losses(evidence, lambda watch: None)
    for shared in reads.shared:
        one, again = _losses(evidence, lambda watch, shared=shared: _make_one(watch, shared))  # type: ignore[misc]
        bound = ROUNDING * torch.finfo(torch.float64 if double and again else torch.float32).eps
        change = difference(two, one) if two and one else 0.0
        if change > bound:
            yield Tied(
                record.name(shared.first),
                record.name(shared.second),
                change,
                bound,
                record.step_line(),
                _assigned(evidence),
            )


def _losses(evidence: Evidence, prepare: Callable[[Watch], None]) -> tuple[list[float], bool]:
    """What the first steps backpropagate, and whether all of it was computed in float64."""
    record = evidence.rerun(prepare=prepare, double=True, enough=lambda r: r.rounds >= STEPS, may_raise=True)
    if record.raised is not None:
        return [], False
    return [root.value for b in record.of(Backward) for root in b.roots], record.double


def _make_one(watch: Watch, shared: SharedStorage) -> None:
    """Put one parameter in both places, and take the other one out of the optimizers."""
    first, second = (watch.table.tensors[i] for i in (shared.first, shared.second))
    if first.data_ptr() != second.data_ptr():
        raise CannotDecide("in float64 the two parameters no longer share their entries")
    for _, module in list(watch.table.named_modules()):
        for name, parameter in list(members.named_parameters(module, recurse=False)):
            if parameter is second:
                setattr(module, name, first)
    for _, optimizer in watch.optimizers.indexed():
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not second]


def _assigned(evidence: Evidence) -> str:
    """The last line that assigns to the ``data`` of a parameter, while the loop is built."""
    seen = _Assignments()
    evidence.rerun(around=lambda: seen, enough=lambda r: r.rounds >= 1, may_raise=True)
    return seen.line


class _Assignments(FunctionMode):
    """Notes assignments to ``data`` of a tensor that another parameter's entries are given to."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        setter = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data
        if setter and args and isinstance(args[0], torch.nn.Parameter):
            self.line = str(here()[0])
        return super().call(name, func, args, kwargs)
