"""Evaluations in training mode: forward passes whose results are used, and not for a gradient.

Whether they are is tried: with other results in their place the loop backpropagates the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from pytest_trainloop import batch as nests
from pytest_trainloop.evidence.modes import trains
from pytest_trainloop.evidence.run import fit_of
from pytest_trainloop.observe.events import Backward, Event, Forward, Move, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import nn

    from pytest_trainloop.evidence.run import RunPlan
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.observe.record import Record
    from pytest_trainloop.observe.watch import Watch


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Forward passes in training mode that no backward pass follows: how many, beside how many steps, and where."""

    modules: tuple[str, ...]
    calls: int
    steps: int
    place: str
    site: object

    @property
    def in_phases(self) -> bool:
        """Whether they do not simply come once with each step, as a second look at the training batch would."""
        return self.calls not in (self.steps, self.steps + 1, self.steps - 1)


def without_backward(record: Record) -> list[Evaluation]:
    """Such passes of a model that trains, by the line that makes them: without gradients, or with gradients that are
    never asked for."""
    trained = {p.owner for p in record.parameters if record.reached(p.index) and p.index in record.held}
    by_site: dict[object, list[Forward]] = {}
    for f in record.root_forwards():
        if f.training and f.in_training and trains(f, trained) and not _checkpointed(f):
            by_site.setdefault(f.site[:1], []).append(f)
    steps = sum(1 for s in record.of(Step) if s.full and not s.nested)
    found = [Evaluation(fs[0].in_training, len(fs), steps, str(fs[0].place), site) for site, fs in by_site.items()]
    barren = [all(not f.grad_enabled for f in fs) for fs in by_site.values()]
    idle = [e.in_phases and not _followed(record, fs) for e, fs in zip(found, by_site.values(), strict=True)]
    return [e for e, *either in zip(found, barren, idle, strict=True) if any(either)]


def _followed(record: Record, forwards: Sequence[Forward]) -> bool:
    """Whether a backward pass comes right after any of these, before the next forward pass."""
    later = sorted([*record.root_forwards(), *record.of(Backward)], key=lambda e: e.at)
    return any(isinstance(next((e for e in later if e.at > f.at), None), Backward) for f in forwards)


def _checkpointed(forward: Forward) -> bool:
    return any("checkpoint" in file for file, _ in forward.site)


class Spoiled(TorchFunctionMode):
    """Changes what the model gives at one line, and sees whether anybody uses it."""

    def __init__(self, site: object) -> None:
        super().__init__()
        self._site = site
        self._given: list[torch.Tensor] = []
        self.used = False

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._hooked(watch), self)

    @contextlib.contextmanager
    def _hooked(self, watch: Watch) -> Iterator[None]:
        def leave(module: nn.Module, _args: Any, output: Any) -> Any:
            last = next((f for f in reversed(watch.record.events) if isinstance(f, Forward)), None)
            mine = last is not None and last.site[:1] == self._site and watch.book.path_of(module) == last.module
            if not mine:
                return None
            with watch.quietly():
                return self._spoil(output)

        handle = register_module_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()

    def _spoil(self, output: Any) -> Any:
        for tensor in nests.tensors(output):
            if tensor.is_floating_point():
                tensor.mul_(-3.0).add_(1.0)
            self._given.append(tensor)
        return output

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not self.used and name not in ("__get__", "size", "dim") and self._given:
            given = {id(t) for t in self._given}
            self.used = any(id(t) in given for t in nests.tensors((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def is_evaluation(found: Evaluation, first: Record, plan: RunPlan, run: Callable[[RunPlan], Record]) -> bool:
    """Whether the passes' results are used for something, and not for a gradient: with other results in their place the
    loop backpropagates the same, at least until they make it set another rate or put other weights in place."""
    spoiled = Spoiled(found.site)
    other = run(replace(plan, contexts=spoiled.contexts))
    return spoiled.used and other.raised is None and _same_until_steered(first, other)


def _same_until_steered(first: Record, other: Record) -> bool:
    for (_, mine), (_, theirs) in zip(_course(first), _course(other), strict=False):
        if isinstance(mine, Backward) and isinstance(theirs, Backward):
            if not _same_roots(mine, theirs):
                return False
        elif isinstance(mine, Step) and isinstance(theirs, Step):
            if mine.rates != theirs.rates:
                return True
        else:
            return isinstance(mine, Move) or isinstance(theirs, Move)
    return True


def _same_roots(a: Backward, b: Backward) -> bool:
    return [r.value for r in a.roots] == [r.value for r in b.roots]


def _course(record: Record) -> list[tuple[int, Event | Move]]:
    """Backward passes, steps, and what puts other weights in place by hand, in order."""
    events: list[tuple[int, Event | Move]] = [(e.at, e) for e in (*record.of(Backward), *record.of(Step))]
    events += [(move.at, move) for move in record.moves if move.by is None]
    return sorted(events, key=lambda pair: pair[0])


class ThenEvaluate:
    """A run of ``fit`` and then of the declared ``evaluate``: ``plan`` gives the run's plan, ``forwards`` what
    ``evaluate`` called."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._since = 0

    def plan(self, base: RunPlan) -> RunPlan:
        return replace(base, prepare=self._prepare, fit=self._fit, enough=lambda record: record.rounds >= 1)

    def _prepare(self, watch: Watch) -> None:
        self._watch = watch

    def _fit(self, loop: TrainLoop) -> Callable[[Any], Any]:
        own, evaluate = fit_of(loop), loop.evaluate

        def fit(batches: Any) -> None:
            own(batches)
            self._since = self._watch.tick() if self._watch else 0
            if evaluate is not None:
                evaluate()

        return fit

    def forwards(self, record: Record) -> list[Forward]:
        return [f for f in record.root_forwards() if self._since and f.at > self._since]
