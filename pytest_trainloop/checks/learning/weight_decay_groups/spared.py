"""Which weights a project's own optimizer leaves out of the decay of their group: the first step made again."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import BrokenRun, CannotDecide
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import place_of
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.reachable_state.copies import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

_OFF_ZERO = 0.01

_PLAIN = ("device", "dtype", "shape")
"""What any weight may be asked for, the last of a loop as well."""

_RATE = 0.01
"""The learning rate in the place of one that is 0, as at the first step of a warm-up: no weight would move."""


def spared(evidence: Evidence, record: Record) -> dict[int, tuple[frozenset[int], str]]:
    """By optimizer, the parameters that do not decay although others of it do, as LARS leaves out biases and gains, and
    the line of its step that reads a variable left over from a loop; nothing where no run can tell.

    The option of the group does not say so. Two runs of one step, with ``weight_decay`` 0 and 1 in every group, do: a
    weight that ends at the same bits in both does not decay. Before the step all weights are moved from 0, where decay
    has nothing to shrink."""
    own = {o.index for o in record.optimizers if o.steps and not o.from_torch and any(d > 0 for d in o.weight_decays)}
    if not own or not evidence.repeatable:
        return {}
    try:
        steps = _Step(own, 0.0), _Step(own, 1.0)
        without, with_decay = (step.made(evidence) for step in steps)
    except (CannotDecide, BrokenRun):
        return {}
    found = {}
    for index, weights in without.items():
        others = with_decay.get(index, {})
        same = {i for i, w in weights.items() if i in others and same_bits(w, others[i])}
        if same and same < weights.keys():  # an optimizer that does not read the option at all is no such case
            found[index] = frozenset(same), used_after_its_loop(steps[0].classes[index].step)
    return found


def used_after_its_loop(function: Any) -> str:
    """The first line that reads the variable of a ``for`` after this loop has ended; empty where there is none."""
    function = inspect.unwrap(function)
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return ""
    names: set[str] = set()
    inside: set[ast.AST] = set()
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            targets = [loop.target] if isinstance(loop, ast.For) else [g.target for g in loop.generators]
            bound = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            names |= bound if isinstance(loop, ast.For) else set()
            inside |= {n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.id in bound}
    inside |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in _PLAIN}
    reads = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names and n not in inside]
    return str(place_of(inspect.getsourcefile(function) or "", first + min(reads) - 1)) if reads else ""


class _Step:
    """The first step of each of these optimizers, with a weight decay of ours."""

    def __init__(self, own: set[int], decay: float) -> None:
        self._own, self._decay = own, decay
        self._after: dict[int, dict[int, torch.Tensor]] = {}
        self.classes: dict[int, Any] = {}

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
            self.classes[index] = type(optimizer)
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
