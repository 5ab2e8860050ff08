"""The loop as it is written and with one statement edited."""

from __future__ import annotations

import ast
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.no_typos.causes import found
from pytest_trainloop.checks.wiring.no_typos.edited_source import PREFIX, edited
from pytest_trainloop.checks.wiring.no_typos.reshapes import SHAPED, TURNED, Shapes
from pytest_trainloop.checks.wiring.no_typos.slips import CALLED, KEPT, SET, slips
from pytest_trainloop.core.errors import CannotDecide, OwnMistake, UsageError, UserCodeError
from pytest_trainloop.instruments.gradients.dependence import difference
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.samples import raw_bytes
from pytest_trainloop.recording.source import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pytest_trainloop.checks.wiring.no_typos.edited_source import Edit
    from pytest_trainloop.checks.wiring.no_typos.expressions import Slip
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 3
"""Optimizer steps of a run."""

MOST = 8
"""Statements that are tried."""

VISIBLE = 1e-5
"""Relative difference of two losses that their first six digits show."""

RAN = f"{PREFIX}ran"


def confirmed(evidence: Evidence) -> Iterator[Finding]:
    """The slips whose edit changes what the loop backpropagates."""
    if not evidence.repeatable:
        raise CannotDecide("edited statements are tried in further runs: return a TrainLoop from a marked test")
    candidates = list({id(slip.statement): slip for slip in slips(evidence.make)}.values())
    if not candidates:
        return
    reached = set[int]()
    shapes = Shapes()
    helpers = {**HELPERS, RAN: reached.add, SHAPED: shapes.shaped, TURNED: shapes.turned}
    marked = [
        _edit(slip, [_mark(number), slip.statement] if slip.probe is None else [slip.probe])
        for number, slip in enumerate(candidates)
    ]
    written = _run(evidence, partial(edited, marked, helpers))
    if written.raised is not None:
        return
    reached |= {number for number, slip in enumerate(candidates) if slip.text in shapes.turns}
    before, bound = _losses(written), ROUNDING * torch.finfo(torch.float64 if written.double else torch.float32).eps
    repeats = False
    for number in sorted(reached)[:MOST]:
        slip = candidates[number]
        other = _edited_run(evidence, partial(edited, [_edit(slip, [slip.run])], helpers))
        if other is None or other.raised is not None:
            continue
        after = _losses(other)
        if other.double == written.double and difference(before, after) > bound:
            if not repeats and difference(before, _losses(_run(evidence, contextlib.nullcontext))) > bound:
                raise CannotDecide("two runs of the loop under one seed backpropagate different losses")
            repeats = True
            place = place_of(slip.source.file, slip.line or slip.statement.lineno)
            facts = {"intended": slip.text, **slip.facts}
            if slip.text in shapes.turns:
                facts |= shapes.facts(slip.text, slip.names[0].rpartition(".")[0])
            repair = slip.repair or f"write {facts['intended']}"
            yield found(
                slip.cause,
                place,
                slip.names,
                slip.variant,
                change=str(place),
                repair=repair,
                effect=_effect(before, after),
                **facts,
            )


def _edit(slip: Slip, new: list[ast.stmt]) -> Edit:
    return slip.source.file, slip.statement, new


def _mark(number: int) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(RAN, ast.Load()), [ast.Constant(number)], []))


def _edited_run(evidence: Evidence, around: Callable[[], AbstractContextManager[None]]) -> Record | None:
    """A run with edited code; None where the loop cannot be built with it, or a patched function refuses it."""
    try:
        return _run(evidence, around)
    except (OwnMistake, UserCodeError, UsageError):
        return None


def _run(evidence: Evidence, around: Callable[[], AbstractContextManager[None]]) -> Record:
    return evidence.rerun(double=True, enough=lambda r: r.rounds >= STEPS, may_raise=True, around=around)


def _losses(record: Record) -> list[float]:
    return [root.value for b in record.of(Backward) for root in b.roots]


def _effect(before: list[float], after: list[float]) -> str:
    if len(before) != len(after):
        return f"{len(after)} losses are backpropagated in place of {len(before)}"
    at = next((i for i in range(len(after)) if difference(before[i : i + 1], after[i : i + 1]) > VISIBLE), 0)
    return f"the loss of backward pass {at + 1} is {after[at]:.6g} in place of {before[at]:.6g}"


def _kept(old: Any) -> Callable[[Any], Any]:
    """Give what a call returns if it is a changed copy of this value, and else the value."""
    mark = _marked(old)

    def choose(new: Any) -> Any:
        if mark is None or new is old or _marked(old) != mark or _kind(new) != _kind(old):
            return old
        if isinstance(old, torch.Tensor) and old.is_leaf and old.requires_grad:
            with torch.no_grad():
                return old.copy_(new)  # a parameter stays the same object
        return new

    return choose


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", value.shape, value.dtype
    return type(value), getattr(value, "shape", None), getattr(value, "size", None), getattr(value, "dtype", None)


def _marked(value: Any) -> Any:
    """The entries of a tensor, an array or an image as bytes; None for other objects."""
    if isinstance(value, torch.Tensor):
        return raw_bytes(value)
    if callable(entries := getattr(value, "tobytes", None)) and type(value).__module__.startswith(("numpy", "PIL")):
        return entries()
    return None


def _called(value: Any) -> Any:
    """What a method of a tensor, a module, an optimizer or the like gives; another value as it is."""
    kinds = type(getattr(value, "__self__", None)).__mro__
    return value() if callable(value) and any(k.__module__.startswith("torch") for k in kinds) else value


def _set(target: Any, written: str, value: Any) -> None:
    """Set ``requires_grad`` of a tensor or a module, besides the attribute that the line sets."""
    setattr(target, written, value)
    if isinstance(target, (torch.Tensor, torch.nn.Module)):
        switch: Any = type(target).requires_grad_  # the line may have set an attribute of this name
        switch(target, bool(value))


HELPERS = {KEPT: _kept, CALLED: _called, SET: _set}
