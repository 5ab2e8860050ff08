"""Evaluations in training mode: forward passes whose results are used, and not for a gradient.

Whether they are is tried: with other results in their place the loop backpropagates the same.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_hook

from pytest_trainloop import nested
from pytest_trainloop.checks.wiring.train_mode.mode_switch import Passes
from pytest_trainloop.recording.events import Backward, Event, Move, Step
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import EQUALITIES, EXTREME_PLACES, SAMPLES, TO_PYTHON
from pytest_trainloop.runs.hooks import call_from_outside, hooked
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Forward
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.run import RunPlan


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
    """Such passes of a model with parameters (one that trains, or an average of it), by the line that makes them."""
    by_site: dict[object, list[Forward]] = {}
    for f in record.root_forwards():
        if f.training and f.in_training and f.below and not _checkpointed(f):
            by_site.setdefault(f.site, []).append(f)
    steps = sum(1 for s in record.of(Step) if s.full and not s.nested)
    return [
        Evaluation(fs[0].in_training, len(fs), steps, str(fs[0].place), site)
        for site, fs in by_site.items()
        if not any(f.answered for f in fs)
    ]


def _checkpointed(forward: Forward) -> bool:
    return any("checkpoint" in file for file, _ in forward.site)


Verdict = Literal["fault", "advice"]

_CHOSEN = EXTREME_PLACES | {"argsort", "topk", "sort"}
_READ = TO_PYTHON - {"__array__", "__complex__", "__index__"}


class Spoiled(WatchingMode):
    """Changes what the model gives at one line, and sees whether a number is made of it: a loss, a score.

    What is drawn by chance or chosen by it (an action, the next token) is no score, until it is compared with
    something. ``taken_out`` tells that results left torch by the row (``numpy``, ``tolist``), ``on_training_batch``
    that the model was given what it was trained on just before.
    """

    def __init__(self, site: object) -> None:
        super().__init__()
        self._site = site
        self._made: dict[int, bool] = {}
        self._kept: list[torch.Tensor] = []
        self._trained_on: set[int] = set()
        self.scored = False
        self.taken_out = False
        self.on_training_batch = False

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            call = call_from_outside(watch, module)
            if call is None:
                return None
            given = {t.data_ptr() for t in nested.tensors((args, kwargs))}
            if call.site != self._site:
                self._trained_on |= given if torch.is_grad_enabled() else set()
                self._kept += list(nested.tensors((args, kwargs)))
                return None
            self.on_training_batch = self.on_training_batch or bool(given & self._trained_on)
            with watch.quietly():
                return self._spoil(output)

        with super().watching(watch), hooked(register_module_forward_hook(leave, with_kwargs=True)):
            yield

    def _spoil(self, output: Any) -> Any:
        for tensor in nested.tensors(output):
            if tensor.is_floating_point():
                tensor.mul_(-3.0).add_(1.0)
            self._note(tensor, score=True)
        return output

    def _note(self, tensor: torch.Tensor, *, score: bool) -> None:
        self._made[id(tensor)] = score
        self._kept.append(tensor)  # an identity may not be used again

    def active(self) -> bool:
        """Also inside steps and backward passes: a score may be made anywhere."""
        return bool(self._made) and not self.scored

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if name not in SAMPLES:
            kinds = [self._made[id(t)] for t in tensors_in(args, kwargs) if id(t) in self._made]
            if kinds and name in _READ:
                if "distributions" in Path(sys._getframe(2).f_code.co_filename).parts:
                    return out  # torch looks whether its arguments are valid
                self.scored = any(kinds) and args[0].numel() == 1
                self.taken_out = self.taken_out or args[0].numel() > 1
            elif kinds:
                score = (any(kinds) and name not in _CHOSEN) or name in EQUALITIES
                for tensor in tensors_in(out):
                    self._note(tensor, score=score)
        return out


def verdict(found: Evaluation, first: Record, plan: RunPlan, run: Callable[[RunPlan], Record]) -> Verdict | None:
    """Whether a score is made of the results, and no gradient: with other results in their place the loop
    backpropagates the same, at least until they make it set another rate or put other weights in place.

    No evaluation where the mode changes nothing, or where the same is looked at several times (dropout as a sample).
    Advice where they come once with each step, or from the batch that was trained on: a look at how training goes; and
    where the model is to be in training mode: it gives something else then (losses), or draws by a flag of its own.
    """
    spoiled = Spoiled(found.site)
    other = run(replace(plan, contexts=spoiled.contexts))
    if other.raised is not None or not (spoiled.scored or spoiled.taken_out) or not _same_until_steered(first, other):
        return None
    training, evaluating = (Passes(found.site, evaluating=on) for on in (False, True))
    for passes in (training, evaluating):
        run(replace(plan, contexts=passes.contexts))
    if training.same_result(evaluating) or (training.samples and not training.normed):
        return None
    if not spoiled.scored and not training.held_out:
        return None
    meant = not training.same_shape(evaluating) or not (training.dropped or training.normed)
    return "advice" if meant or spoiled.on_training_batch or not found.in_phases else "fault"


def trained_on(site: object, first: Record, plan: RunPlan, run: Callable[[RunPlan], Record]) -> bool:
    """Whether what the loop backpropagates depends on the results of the forward passes at a line: rollouts, targets
    and pseudo-labels are no evaluation."""
    return not _same_until_steered(first, run(replace(plan, contexts=Spoiled(site).contexts)))


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
    ``evaluate`` called: nothing where it trains something of its own."""

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
        trains = any(b.at > self._since for b in record.of(Backward))
        return [f for f in record.root_forwards() if self._since and f.at > self._since and not trains]
