"""A term of the loss that shrinks the weights too: the first step made again without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.learning.weight_decay_groups.causes import found
from pytest_trainloop.core.errors import CannotDecide, TrainLoopError
from pytest_trainloop.instruments.gradients.vectors import consumed, values
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_SQUARES = frozenset(
    "pow __pow__ float_power square norm vector_norm linalg_norm linalg_vector_norm linalg_matrix_norm matrix_norm "
    "frobenius_norm".split()
)
_PRODUCTS = frozenset("mul multiply __mul__ dot vdot inner".split())

_ROUNDING = 1e-9
"""Of a difference of two gradients in float64."""


class _Squares(WatchingMode):
    """Notes the weights that are squared by themselves; ``cut`` detaches them there."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self._cut = cut
        self.squared: dict[str, str] = {}
        """The line of each, by its name."""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        alone = name in _SQUARES or (name in _PRODUCTS and len(args) > 1 and args[0] is args[1])
        if not (alone and args and isinstance(args[0], torch.Tensor) and torch.is_grad_enabled()):
            return super().call(name, func, args, kwargs)
        weight = args[0]
        index = self.watch.table.index(weight)
        if index is None or not weight.requires_grad:
            return super().call(name, func, args, kwargs)
        self.squared.setdefault(self.watch.table.entries[index].name, str(here()[0]))
        if self._cut:
            args = tuple(a.detach() if a is weight else a for a in args)
        return super().call(name, func, args, kwargs)


def l2_in_loss(evidence: Evidence, groups: DecayGroups) -> Iterator[Finding]:
    """A term over weights that decay, whose gradient is a constant times each. The first step is made twice in float64:
    as it is, and with the weights detached wherever they are squared by themselves (``p.pow(2)``, ``p.norm()``,
    ``p * p``). The difference of the two gradients is that of the term."""
    seen = _Squares(cut=False)
    record = _first_step(evidence, seen)
    for group in groups.groups if record is not None else ():
        names = [name for name in group.names if name in seen.squared]
        if record is None or group.decay <= 0 or not names:
            continue
        without = _first_step(evidence, _Squares(cut=True))
        factor = None if without is None else _factor(record, without, group.optimizer, names)
        if factor is not None:
            decayed = {name for g in groups.groups if g.decay > 0 for name in g.names}
            every = tuple(name for name in seen.squared if name in decayed)
            facts = {"factor": factor, "decay": group.decay, "tensors": len(every)}
            yield found("decayed_twice", seen.squared[names[0]], every, level="advice", **facts)
            return


def _first_step(evidence: Evidence, mode: _Squares) -> Record | None:
    try:
        record = evidence.rerun(double=True, contexts=mode.contexts, enough=lambda r: r.rounds >= 1, may_raise=True)
    except (TrainLoopError, CannotDecide):
        return None
    return record if record.raised is None and not record.lower else None


def _factor(whole: Record, without: Record, optimizer: int, names: Sequence[str]) -> float | None:
    """What each weight is multiplied by in the difference of the gradients; None where that is not one number."""
    before, after = consumed(whole, optimizer, 0), consumed(without, optimizer, 0)
    starts = {p.name: values(p.start, p.dtype) for p in whole.parameters if p.name in names and p.start.raw}
    if before is None or after is None:
        return None
    factors = []
    for name in names:
        if name not in before or name not in starts:
            continue
        weight = starts[name]
        size = float(weight @ weight)
        difference = before[name] - after.get(name, torch.zeros_like(before[name]))
        if difference.shape != weight.shape or size == 0:
            continue
        factor = float(difference @ weight) / size
        if float((difference - factor * weight).norm()) > _ROUNDING * float(before[name].norm() + difference.norm()):
            return None
        factors.append(factor)
    if not factors or min(factors) <= 0 or max(factors) - min(factors) > 1e-6 * max(factors):
        return None
    return sum(factors) / len(factors)
