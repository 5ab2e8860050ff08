"""Loops in which nothing trains: no optimizer step, no weight that changes by any other way.

A further run over many batches looks for what would excuse it, and for why it is so: buffers and other state that the
loop changes by itself, tensors besides the model that get gradients, exceptions that it swallows, and calls of
``backward()`` that it never reaches.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import gc
import linecache
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.ours import holds_alone
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.runs.run import READ_AHEAD_BUDGETS, fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Backward, Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

MANY = READ_AHEAD_BUDGETS[-1]
"""Batches in which a loop that trains has made a backward pass or a step."""

FEWEST_BACKWARDS = 2

_EARLY, _LATER = 1, 3
"""Batches at which tensors besides parameters are compared."""


@dataclass(frozen=True, slots=True)
class Untrained:
    """A loop in which nothing trains."""

    batches: int
    backwards: int
    first: Backward | None
    """The first backward pass, if there is any."""
    parameters: tuple[str, ...]
    """Those that get a gradient."""
    swallowed: str
    """The exception that the loop swallows most often, in one line; empty without one."""
    times: int
    """How often it does."""
    never_reached: bool
    """Whether a call of ``backward()`` stands in the code that ran, on a line that did not."""
    place: Place | None
    """Where the exception is raised; else that call; else where ``fit`` begins. None where that was not seen."""


@dataclass(slots=True)
class _Look:
    """What the further run saw."""

    state_changed: bool = False
    leaves: dict[int, torch.Tensor] | None = None
    """Copies of the tensors besides parameters that require gradients, by ``id``, early in the run."""
    leaf_changed: bool = False
    codes: dict[CodeType, None] = field(default_factory=dict)
    """What ran of the user's code, in order."""
    lines: set[tuple[str, int]] = field(default_factory=set)
    raised: dict[tuple[str, int, str], int] = field(default_factory=lambda: collections.defaultdict(int))


def untrained(evidence: Evidence) -> Untrained | None:
    """The loop, where nothing trains in it; None where something does, or may."""
    if not evidence.repeatable or not _idle(evidence.run()):
        return None
    look = _Look()
    plan = replace(
        evidence.plan(),
        count=MANY,
        read_ahead=None,
        fit=lambda loop: _watched_fit(loop, look),
        before_item=lambda number, _item: _look_at_leaves(number, look),
    )
    longer = evidence.rerun(plan)
    if not _idle(longer) or look.state_changed or look.leaf_changed:
        return None
    backwards = longer.backwards()
    reached = {i for b in backwards for i, arrived in b.arrivals.items() if any(not a.incoming.zero for a in arrived)}
    if backwards and (len(backwards) < FEWEST_BACKWARDS or not reached):
        return None
    swallowed, times, raised_at = _most_often(look)
    call = _never_reached(look)
    begin = next((place_of(code.co_filename, code.co_firstlineno) for code in look.codes), None)
    return Untrained(
        batches=longer.items,
        backwards=len(backwards),
        first=backwards[0] if backwards else None,
        parameters=longer.names(reached),
        swallowed=swallowed,
        times=times,
        never_reached=call is not None,
        place=raised_at or call or begin,
    )


def _idle(record: Record) -> bool:
    """Whether no step was made or tried, no weight moved, and nothing says why: no exception, no optimizer that the
    backward passes are for (``step_missing`` judges these), no gradient that is kept elsewhere (``autograd.grad``)."""
    if record.steps or record.raised is not None or record.scaler_calls():
        return False
    if record.backwards() and record.optimizers:
        return False
    elsewhere = len(record.autograd_passes()) > len(record.backwards())
    return not (elsewhere or record.moved_outside_steps() or record.changed())


def _watched_fit(loop: TrainLoop, look: _Look) -> Callable[[Any], None]:
    own = fit_of(loop)

    def fit(batches: Any) -> None:
        before = _state(loop)
        try:
            with _traced(look):
                own(batches)
        finally:
            after = _state(loop)
            look.state_changed = before.keys() != after.keys() or any(
                before[name].shape != after[name].shape or not torch.equal(before[name], after[name]) for name in before
            )

    return fit


def _state(loop: TrainLoop) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the declared modules."""
    held = ((f"{prefix}.{name}", t) for prefix, m in loop.modules.items() for name, t in m.state_dict().items())
    return {name: t.detach().clone() for name, t in held if isinstance(t, torch.Tensor) and readable(t)}


def _look_at_leaves(number: int, look: _Look) -> None:
    """Note a tensor besides the parameters of modules that requires gradients and changes: what trains may be that."""
    if number not in (_EARLY, _LATER):
        return
    held = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and type(o) is not torch.nn.Parameter]
    leaves = {id(t): t.detach() for t in held if _trains(t)}
    if look.leaves is None:
        look.leaves = {at: t.clone() for at, t in leaves.items()}
        return
    early = look.leaves
    changed = [t for t in held if id(t) in leaves and (id(t) not in early or not _same(early[id(t)], leaves[id(t)]))]
    look.leaf_changed = any(not holds_alone(t, (id(held), id(changed))) for t in changed)


def _trains(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be what trains. Any of the process is met here, also those that can't be compared: lazy,
    fake, sparse."""
    return readable(tensor) and tensor.layout is torch.strided and tensor.is_leaf and tensor.requires_grad


def _same(early: torch.Tensor, later: torch.Tensor) -> bool:
    """Whether nothing changed; the later one may be another tensor, made in the place of the first."""
    return early.dtype == later.dtype and early.device == later.device and torch.equal(early, later)


@contextlib.contextmanager
def _traced(look: _Look) -> Iterator[None]:
    """Note the user's lines that run and the exceptions that are raised there; not under a debugger or coverage, which
    trace themselves."""
    if sys.gettrace() is not None:
        yield
        return
    latest: list[object] = [None]

    @unnoticed
    def at(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            look.lines.add((frame.f_code.co_filename, frame.f_lineno))
        elif event == "exception" and arg[1] is not latest[0] and issubclass(arg[0], Exception):
            latest[0] = arg[1]
            if not issubclass(arg[0], (StopIteration, StopAsyncIteration)):
                said = str(arg[1]).strip().partition("\n")[0]
                words = f"{arg[0].__name__}: {said}" if said else arg[0].__name__
                look.raised[(frame.f_code.co_filename, frame.f_lineno, words)] += 1
        return at

    @unnoticed
    def enter(frame: FrameType, _event: str, _arg: Any) -> Any:
        if layer(frame.f_code.co_filename) != 2:
            return None
        look.codes[frame.f_code] = None
        return at

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def _most_often(look: _Look) -> tuple[str, int, Place | None]:
    if not look.raised:
        return "", 0, None
    file, line, words = max(look.raised, key=lambda where: look.raised[where])
    return words, look.raised[(file, line, words)], place_of(file, line)


def _never_reached(look: _Look) -> Place | None:
    """The first call of ``backward()`` in the functions that ran, on a line that did not."""
    for code in look.codes:
        try:
            tree = ast.parse("".join(linecache.getlines(code.co_filename)))
        except SyntaxError:
            continue
        lines = {line for _, _, line in code.co_lines() if line is not None}
        calls = sorted(
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        )
        for line in calls:
            if line in lines and (code.co_filename, line) not in look.lines:
                return place_of(code.co_filename, line)
    return None
