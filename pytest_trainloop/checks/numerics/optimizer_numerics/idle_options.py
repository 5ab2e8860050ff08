"""Options of a project's own optimizer that change no bit of the run: the same run with another value shows it."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.optimizer_numerics.causes import found
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Optimizer, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

OPTIONS = ("weight_decay", "momentum")
"""Those that act on every step, whatever the gradients are."""

SHRINKS = 0.1
"""The part of a weight that another decay takes at each step: rounding cannot hide it."""

LEAST_STEPS = 3

CHANGED = 30.0
"""Entries that a decay in float32 is expected to round otherwise: with so many, e^-30 is the chance that none is.
A decay of lr * weight_decay changes the rounding of an entry with a probability of that over eps, or more."""


class OtherValue:
    """An optimizer whose option has another value in every step, also where the optimizer keeps it for itself."""

    def __init__(self, optimizer: Optimizer, option: str, other: float = math.nan) -> None:
        """``other``: the other value; chosen here where it is NaN."""
        self._number, self._option = optimizer.index, option
        self.default: object = None
        self.inherited = False  # its __init__ is torch's
        self.given: set[float] = set()
        self.other = other
        self.lr = 0.0
        self.states: list[float] = []
        """Before each step, the sum of all entries of the optimizer's state."""

    @contextlib.contextmanager
    def of(self, watch: Watch) -> Iterator[None]:
        def enter(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if watch.is_suspended or watch.optimizers.known(optimizer) != self._number:
                return
            held = (v for state in optimizer.state.values() for v in dict(state).values())
            self.states.append(sum(float(v.double().sum()) for v in held if isinstance(v, torch.Tensor)))
            made_by = type(optimizer).__init__
            parameter = inspect.signature(made_by).parameters.get(self._option)
            self.default = None if parameter is None else parameter.default
            self.inherited = getattr(made_by, "__module__", "").startswith("torch.")
            lrs = [float(g["lr"]) for g in optimizer.param_groups if g.get("lr")]
            self.lr = max(lrs, default=0.0)
            for place in (*optimizer.param_groups, optimizer.defaults, vars(optimizer)):
                own = place is vars(optimizer)  # where it may have another name
                for name, value in place.items():
                    if not isinstance(value, float) or not value or value == self.other:
                        continue
                    if name == self._option or (own and value in self.given):
                        self.given.add(value)
                        if math.isnan(self.other):
                            decays = self._option == "weight_decay"
                            self.other = max(SHRINKS / max(lrs, default=1.0), 10 * value) if decays else value / 2
                        place[name] = self.other

        with hooked(before_steps(enter)):
            yield

    def shrinks(self) -> float:
        """The decay of a step over the eps of bfloat16, which is that of float16 or more."""
        return self.lr * max(self.given) / torch.finfo(torch.bfloat16).eps


def without_effect(evidence: Evidence) -> Iterator[Finding]:
    """Options that the project gives a value, and that leave every weight as it is without it."""
    record = evidence.run()
    stepping = {step.optimizer for step in record.innermost_steps()}  # not one that passes its options to another
    for optimizer in record.optimizers if evidence.repeatable and not record.raised else ():
        matrices = [p for p in record.parameters if p.index in optimizer.parameters and len(p.shape) > 1]
        moved = record.changed()
        known = optimizer.from_torch or optimizer.index not in stepping
        if known or optimizer.steps < LEAST_STEPS or not any(p.index in moved for p in matrices):
            continue  # a decay that leaves out vectors has none to decay
        for option in OPTIONS:
            values = {g[option] for g in optimizer.settings if option in g} if option in optimizer.options else set()
            if not values - {"0", "0.0"}:
                continue
            value = OtherValue(optimizer, option)
            same, low = _same(record, _rerun(evidence, value)), _low(record, optimizer)
            entries = sum(math.prod(p.shape) for p in matrices) * optimizer.steps
            if not same and low and option == "weight_decay" and value.given and value.shrinks() * entries > CHANGED:
                # its effect may be kept for later where rounding takes it (odd: keeping_what_rounding_takes)
                value, plain = OtherValue(optimizer, option, 0.0), OtherValue(optimizer, option, max(value.given))
                same = _same(record, _rerun(evidence, value)) and _same(record, _rerun(evidence, plain))
                same = same and value.states == plain.states
            if value.given and same:
                facts = {"kind": optimizer.kind, "option": option, "value": max(value.given), "other": value.other}
                facts |= {"steps": optimizer.steps, "tensors": len(optimizer.parameters)}
                chosen = value.given != {value.default}
                if not chosen and value.inherited:
                    continue  # a class derived from torch's AdamW that has another update, and no __init__ of its own
                facts["level"] = "fault" if chosen else "advice"
                variant = "" if value.other else "rounded"
                yield found("option_without_effect", record.step_line(), (option,), variant, **facts, low=low)


def _low(record: Record, optimizer: Optimizer) -> str:
    """The dtype of the optimizer's parameters where it is one of 16 bits."""
    held = (p.dtype for p in record.parameters if p.index in optimizer.parameters)
    return next((dtype for dtype in held if dtype in ("bfloat16", "float16")), "")


def _rerun(evidence: Evidence, value: OtherValue) -> Record:
    return evidence.rerun(contexts=lambda watch: (value.of(watch),), may_raise=True)


def _same(a: Record, b: Record) -> bool:
    """Whether two runs leave all weights equal, bit for bit."""
    ends = {p.name: b.end.get(p.index) for p in b.parameters}
    return not b.raised and all(a.end[p.index].same(ends.get(p.name)) for p in a.parameters if p.index in a.end)
