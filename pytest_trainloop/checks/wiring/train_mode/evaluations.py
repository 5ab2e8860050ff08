"""Evaluations: forward passes whose results are used, and not for a gradient. Dropout that acts in them, and the
training mode.

Further runs decide whether passes evaluate: with other results in their place the loop backpropagates the same.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.wiring.train_mode.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.dropout_in_evaluation import DropoutInEvaluation, digest_of, rows_repeat
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.events import Backward, Event, ModeCall, Move, Step
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.torch_names import EQUALITIES, SAMPLES
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.runs.hooks import call_from_outside, hooked, unless_suspended
from pytest_trainloop.runs.run import fit_then_evaluate
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from pytest_trainloop.core.finding import Finding, Level, UserError
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Forward
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

EPOCH = 3
"""Steps of an epoch in a run that is to have several."""

_NORMS = frozenset({"batch_norm", "instance_norm"})
_MAY_DROP = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh"})
_CHOOSES = frozenset({"argmax", "argmin", "argsort", "topk", "sort"})
_READS = frozenset({"item", "__float__", "__int__", "__bool__", "__format__", "tolist", "numpy"})


def phases(evidence: Evidence) -> Iterator[tuple[Record, RunPlan]]:
    """The watched run, and one over so few batches that its epochs, and what follows them, are watched as well."""
    record = evidence.run()
    yield record, evidence.plan()
    if record.rounds and any(f.in_training or f.in_eval for f in record.root_forwards()):
        yield evidence.shared(_short_epochs)[:2]


def _short_epochs(evidence: Evidence) -> tuple[Record, RunPlan, DropoutInEvaluation]:
    record = evidence.run()
    count = EPOCH * max(1, round(record.items / record.rounds))
    plan = replace(evidence.plan(), count=count, enough=lambda r: r.rounds >= 2 * EPOCH)
    dropout = DropoutInEvaluation()
    return evidence.rerun(plan, contexts=dropout.contexts), plan, dropout


def dropout_stays_on(evidence: Evidence) -> Iterator[Finding]:
    """Dropout that acts in evaluation mode in evaluations inside ``fit``."""
    record, seen = evidence.run(), None
    if evidence.repeatable:
        if not record.drops or not record.rounds:
            return
        short, _, seen = evidence.shared(_short_epochs)
        evaluates = [any(not f.training and not f.answered for f in run.root_forwards()) for run in (record, short)]
        if evaluates == [True, False]:
            seen = None
    for dropout in (seen or evidence.shared(DropoutInEvaluation.of)).found:
        texts = {"shown_by": dropout.shown_by, "repair": dropout.repair, "level": dropout.level}
        facts = {"what": dropout.summary, "measured": dropout.measured}
        yield found("dropout_stays_on", dropout.place, (dropout.module,), **facts, **texts)


def evaluated_in_training_mode(evidence: Evidence) -> Iterator[Finding]:
    """Evaluations inside ``fit`` that run in training mode."""
    if not evidence.repeatable:
        for forward, *_ in without_backward(evidence.run()).values():
            raise CannotDecide(
                f"whether the forward passes at {str(forward.place).partition('   ')[0]}, after which nothing is "
                "backpropagated, evaluate takes further runs: return a TrainLoop from a marked test"
            )
        return
    known: set[object] = set()
    for record, plan in phases(evidence):
        steps = sum(1 for s in record.of(Step) if s.full and not s.nested)
        for site, passes in without_backward(record).items():
            level = None if site in known else _level(evidence, site, record, plan)
            known.add(site)
            if level:
                # what comes once with each step may be a second look at the training batch
                level = level if abs(len(passes) - steps) > 1 else "advice"
                modules = passes[0].in_training
                facts = {"modules": modules, "several": len(modules) > 1, "calls": len(passes), "steps": steps}
                yield found("evaluated_in_train", passes[0].place, modules[:12], level=level, **facts)


def without_backward(record: Record) -> dict[object, list[Forward]]:
    """Forward passes in training mode that no backward pass follows, by the line that makes them: those of a model with
    parameters (one that trains, or an average of it) in which something acts by mode."""
    by_site: dict[object, list[Forward]] = {}
    for f in record.root_forwards():
        checkpointed = any("checkpoint" in file for file, _ in f.site)
        if f.training and f.in_training and f.below and not checkpointed:
            by_site.setdefault(f.site, []).append(f)
    return {site: fs for site, fs in by_site.items() if not any(f.answered for f in fs)}


def _level(evidence: Evidence, site: object, first: Record, plan: RunPlan) -> Level | None:
    """Whether the passes evaluate: a score is made of their results, and no gradient.

    None where the mode changes nothing, or where the same input is given several times (dropout as a sample). Advice
    for the batch that was trained on, and where training mode may be intended: the model returns another structure then
    (losses), or draws by a flag of its own.
    """
    replaced = LineProbe(site, "other results")
    training, evaluating = LineProbe(site), LineProbe(site, "evaluation mode")
    other = evidence.rerun(plan, contexts=replaced.contexts, may_raise=True)
    # statistics are refreshed, and a buffer filled, by passes that make no score (odd: mode_statistics_refreshed,
    # looking_acting_for_a_buffer)
    used = replaced.scored or replaced.taken_out
    if other.raised is not None or not used or not _same_until_steered(first, other):
        return None
    evidence.rerun(plan, contexts=training.contexts)
    if evidence.rerun(plan, contexts=evaluating.contexts, may_raise=True).raised is not None:
        return None
    samples = training.repeated_rows or len(set(training.given)) < len(training.given)
    shapes = [{path: t.shape for path, t in probe.result.items()} for probe in (training, evaluating)]
    same_shape = shapes[0] == shapes[1]
    same = same_shape and all(torch.equal(t, evaluating.result[path]) for path, t in training.result.items())
    if same or (samples and not training.normed):
        return None
    inputs: dict[int, tuple[str, ...]] = {}
    for step, digest in training.given:
        inputs.setdefault(step, digest)
    # what left torch row by row is a score where the first input after each step is always the same
    if not replaced.scored and (len(inputs) < 2 or len(set(inputs.values())) > 1):
        return None
    intended = not same_shape or not (training.dropped or training.normed)
    return "advice" if intended or replaced.on_training_batch else "fault"


def trained_on(evidence: Evidence, site: object, first: Record, plan: RunPlan) -> bool:
    """Whether what the loop backpropagates depends on the results of the forward passes on a line: rollouts, targets
    and pseudo-labels are no evaluation."""
    other = evidence.rerun(plan, contexts=LineProbe(site, "other results").contexts, may_raise=True)
    return not _same_until_steered(first, other)


def _same_until_steered(first: Record, other: Record) -> bool:
    """Whether two runs backpropagate the same, until one sets another learning rate or writes weights."""

    def course(record: Record) -> list[Event | Move]:
        writes = (m for m in record.moves if m.by is None)
        return sorted([*record.of(Backward), *record.of(Step), *writes], key=lambda event: event.at)

    for mine, theirs in zip(course(first), course(other), strict=False):
        if isinstance(mine, Backward) and isinstance(theirs, Backward):
            if [r.value for r in mine.roots] != [r.value for r in theirs.roots]:
                return False
        elif isinstance(mine, Step) and isinstance(theirs, Step):
            if mine.lrs != theirs.lrs:
                return True
        else:
            return isinstance(mine, Move) or isinstance(theirs, Move)
    return True


def declared_evaluation(evidence: Evidence) -> Iterator[Finding]:
    """The first forward pass in training mode that the declared ``evaluate`` makes, where it makes a score of it and
    trains nothing of its own. Advice where neither dropout nor a norm of torch's was active: a detector that gives its
    losses in training mode only is asked for them so.

    Raises ``CannotDecide`` where it raises: that is for ``evaluation_is_pure`` to say.
    """
    watches: list[Watch] = []
    since: list[int] = []
    raised: list[UserError] = []

    def then_evaluate(loop: TrainLoop) -> Callable[[Any], Any]:
        return fit_then_evaluate(
            loop,
            lambda: since.append(watches[-1].tick()),
            lambda error: raised.append(user_error(error, "evaluate")),
        )

    whole = replace(evidence.plan(), prepare=watches.append, fit=then_evaluate)
    plan = replace(whole, enough=lambda r: r.rounds >= 1)
    record = evidence.rerun(plan)
    if not since:  # fit raised: it may need more batches
        plan, record = whole, evidence.rerun(whole)
    if raised:
        raise CannotDecide(f"evaluate raised {raised[0].summary} (see evaluation_is_pure)")
    if not since or any(b.at > since[0] for b in record.of(Backward)):
        return
    forwards = (f for f in record.root_forwards() if f.at > since[0])
    if forward := next((f for f in forwards if f.training and f.in_training and f.below), None):
        probe = LineProbe(forward.site, "other results")
        evidence.rerun(plan, contexts=probe.contexts, may_raise=True)
        if probe.scored:
            modules = forward.in_training
            facts = {"modules": modules, "several": len(modules) > 1, "count": len(modules)}
            facts["level"] = "fault" if probe.dropped or probe.normed else "advice"
            switches = [c for c in record.of(ModeCall) if c.on and since[0] < c.at < forward.at]
            facts["change"] = str(switches[-1].place) if switches else ""
            yield found("evaluated_in_train", forward.place, modules[:12], "declared", **facts)


class LineProbe(WatchingMode):
    """Watches the outermost calls of a model on one line, in a run of its own: what they are given and return, and what
    the loop makes of their results.

    ``change`` says what is done to these calls: "evaluation mode" switches the model for them, "other results" replaces
    what they return and follows what is computed with it.
    """

    def __init__(
        self, site: object, change: Literal["nothing", "evaluation mode", "other results"] = "nothing"
    ) -> None:
        super().__init__()
        self._site, self._change = site, change
        self._depth = 0
        self._switched: list[nn.Module] = []
        self._scores: dict[int, bool] = {}
        """By the identity of what is made of replaced results, whether a number of it is a score."""
        self._kept: list[torch.Tensor] = []
        """So that no identity and no address is used again."""
        self._trained_on: set[int] = set()
        self.result: dict[nested.Path, torch.Tensor] = {}
        """The tensors that the first call returned."""
        self.given: list[tuple[int, tuple[str, ...]]] = []
        """The optimizer step and digests of the inputs of each call."""
        self.repeated_rows = False
        """Whether at least half the rows of some input repeat others."""
        self.dropped = False
        """Whether dropout of torch's was active in a call."""
        self.normed = False
        """Whether a norm of torch's used the statistics of the batch in a call."""
        self.scored = False
        """Whether a replaced result became one number outside torch: a loss, an accuracy."""
        self.taken_out = False
        """Whether replaced results left torch row by row (``numpy``, ``tolist``)."""
        self.on_training_batch = False
        """Whether a call was given what the model was trained on before."""

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, _args: Any) -> None:
            with watch.suspended():
                if self._depth:
                    self._depth += 1
                elif (call := call_from_outside(watch, module)) is not None and call.site == self._site:
                    self._depth = 1
                    evaluating = self._change == "evaluation mode"
                    self._switched = [m for m in members.modules(module) if trains(m)] if evaluating else []
                    for part in self._switched:
                        part.training = False

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            mine, self._depth = self._depth == 1, max(0, self._depth - 1)
            if self._depth:
                return None
            with watch.suspended():
                given = [t for t in nested.tensors((args, kwargs)) if address(t)]
                if not mine:
                    if self._change == "other results" and call_from_outside(watch, module) is not None:
                        self._trained_on |= set(map(address, given)) if torch.is_grad_enabled() else set()
                        self._kept += given
                elif self._change == "other results":
                    self.on_training_batch |= any(address(t) in self._trained_on for t in given)
                    for tensor in nested.tensors(output):
                        if tensor.is_floating_point():
                            tensor.mul_(-3.0).add_(1.0)
                        self._follow(tensor, score=True)
                    return output
                else:
                    for part in self._switched:
                        part.training = True
                    self.given.append((watch.record.steps, tuple(map(digest_of, given))))
                    first = next((t for t in given if t.dim() > 1 and len(t) > 1), None)
                    self.repeated_rows = self.repeated_rows or rows_repeat(first)
                    self.result = self.result or {path: t.detach().clone() for path, t in nested.paths(output)}
                return None

        before = before_modules(unless_suspended(watch, enter))
        after = after_modules(unless_suspended(watch, leave), with_kwargs=True, always_call=True)
        with super().watching(watch), hooked(before, after):
            yield

    def _follow(self, tensor: torch.Tensor, *, score: bool) -> None:
        self._scores[id(tensor)] = score
        self._kept.append(tensor)

    in_steps = True

    def active(self) -> bool:
        """Inside the calls on the line, and wherever a score may be made of replaced results, also inside steps and
        backward passes."""
        return self._depth > 0 or (bool(self._scores) and not self.scored)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            self.dropped = self.dropped or name in _MAY_DROP or ("dropout" in name and _flag(args, kwargs, 2, True))
            self.normed = self.normed or (name in _NORMS and _flag(args, kwargs, 5, False))
        out = passed_on(func, args, kwargs)
        known = [self._scores[id(t)] for t in tensors_in(args, kwargs) if id(t) in self._scores] if self._scores else []
        if not known or self.scored or name in SAMPLES:
            return out
        if name not in _READS:
            # what is chosen by results (an action, the next token) is no score until it is compared with something
            score = (any(known) and name not in _CHOOSES) or name in EQUALITIES
            for tensor in tensors_in(out):
                self._follow(tensor, score=score)
        elif "distributions" not in Path(sys._getframe(2).f_code.co_filename).parts:  # these validate their arguments
            self.scored = any(known) and args[0].numel() == 1
            self.taken_out = self.taken_out or args[0].numel() > 1
        return out


def _flag(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: bool) -> bool:
    value = kwargs.get("training", kwargs.get("use_input_stats", default))
    return bool(args[position] if len(args) > position else value)
