"""First steps made again under other settings: which weights a project's own optimizer leaves out of the decay of their
group, and whether the loss has a term that shrinks the weights too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.learning.weight_decay_groups.causes import found
from pytest_trainloop.errors import BrokenRun, CannotDecide, TrainLoopError
from pytest_trainloop.gradients.vectors import consumed, values
from pytest_trainloop.reach.copies import same_bits
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

_OFF_ZERO = 0.01

_RATE = 0.01
"""The learning rate in the place of one that is 0, as at the first step of a warm-up: no weight would move."""


_SQUARES = frozenset(
    "pow __pow__ float_power square norm vector_norm linalg_norm linalg_vector_norm linalg_matrix_norm matrix_norm "
    "frobenius_norm".split()
)
_PRODUCTS = frozenset("mul multiply __mul__ dot vdot inner".split())

_ROUNDING = 1e-9
"""Of a difference of two gradients in float64."""


def spared(evidence: Evidence, record: Record) -> dict[int, frozenset[int]]:
    """By optimizer, the parameters that do not decay although others of it do, as LARS leaves out biases and gains;
    nothing where no run can tell. The option of the group does not say so. Two runs of one step, with ``weight_decay``
    0 and 1 in every group, do: a weight that ends at the same bits in both does not decay. Before the step all weights
    are moved from 0, where decay has nothing to shrink."""
    own = {o.index for o in record.optimizers if o.steps and not o.from_torch and any(d > 0 for d in o.weight_decays)}
    if not own or not evidence.repeatable:
        return {}
    try:
        without, with_decay = (_Step(own, decay).made(evidence) for decay in (0.0, 1.0))
    except (CannotDecide, BrokenRun):
        return {}
    found = {}
    for index, weights in without.items():
        others = with_decay.get(index, {})
        same = {i for i, w in weights.items() if i in others and same_bits(w, others[i])}
        if same and same < weights.keys():  # an optimizer that does not read the option at all is no such case
            found[index] = frozenset(same)
    return found


class _Step:
    """The first step of each of these optimizers, with a weight decay of ours."""

    def __init__(self, own: set[int], decay: float) -> None:
        self._own, self._decay = own, decay
        self._after: dict[int, dict[int, torch.Tensor]] = {}

    def made(self, evidence: Evidence) -> dict[int, dict[int, torch.Tensor]]:
        """The weights after it, by optimizer and parameter."""
        evidence.rerun(contexts=lambda watch: (self._watching(watch),), enough=lambda record: record.rounds >= 1)
        return self._after

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            index = watch.optimizers.index(optimizer)
            if index not in self._own or index in self._after:
                return
            for group in optimizer.param_groups:
                if isinstance(group.get("weight_decay"), float | int):
                    group["weight_decay"] = self._decay
                if isinstance(group.get("lr"), float | int) and group["lr"] == 0:
                    group["lr"] = _RATE
            with watch.suspended(), torch.no_grad():
                for p in _held(optimizer):
                    p.add_(_OFF_ZERO)

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            index = watch.optimizers.index(optimizer)
            if index in self._own and index not in self._after:
                with watch.suspended():
                    known = ((watch.table.index(p), p) for p in _held(optimizer) if p.grad is not None)
                    self._after[index] = {i: p.detach().clone() for i, p in known if i is not None}

        with hooked(before_steps(before), after_steps(after)):
            yield


def _held(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if readable(p) and p.is_floating_point())


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
