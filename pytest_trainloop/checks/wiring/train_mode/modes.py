"""In which mode training passes ran, and whether it made a difference.

A further run decides that: with the modules switched at the same calls, under the same seed, what the loop
backpropagates changes, or the mode did not matter.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.checks.wiring.train_mode.causes import found
from pytest_trainloop.checks.wiring.train_mode.evaluations import phases, trained_on
from pytest_trainloop.instruments.gradients.dependence import difference
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.instruments.tracing.statements import call_in_function_of, in_one_loop
from pytest_trainloop.recording.events import Backward, Forward, ModeCall
from pytest_trainloop.recording.hooks import before_modules
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Set

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan


def trained_in_evaluation_mode(evidence: Evidence) -> Iterator[Finding]:
    """Modules in evaluation mode in training passes, where the mode makes a difference.

    Without further runs, what an evaluation left on is a fault. A whole model that never ran in training mode may be
    intended, and is advice. Norms and parts of a model are left out then: what kinds they are is not looked at.
    """
    runs = itertools.chain(phases(evidence), _called_twice(evidence))
    for record, plan in runs if evidence.repeatable else [(evidence.run(), None)]:
        if plan and not any(f.in_eval and f.grad_enabled for f in record.root_forwards()):
            continue
        first = first_in_evaluation_mode(record, *(_kinds(evidence, plan) if plan else (set(), set())))
        if first is None:
            continue
        forward, modules, left = first
        whole, call = not forward.training and not forward.in_training, _call_before(record, modules, forward)
        change, level = math.nan, "fault" if left or plan else "advice"
        if plan is None and not left and not whole:
            return
        if plan is not None:
            # parts were switched back before fit: no default of new parts (odd: switched_when_the_model_is_built)
            on = forward.in_training if not forward.training and not left else ()
            if on and any(map(evidence.shared(MadeAt.of).switched_on, on)):
                continue
            # the loop makes its own training data, maybe both in one mode (odd: looking_policy_alike_in_both)
            between = _without_gradients(record, call, forward) if call and not left else []
            if between and trained_on(evidence, between[0].site, record, plan):
                level = "advice"
            change = _change_in_training_mode(evidence, record, plan, set(modules))
            if change <= 0.0:  # the mode makes no difference, as with dropout of p = 0
                return
        facts = {"modules": modules, "several": len(modules) > 1, "count": len(modules), "whole": whole, "level": level}
        facts |= {"differs": change, "known": not math.isnan(change)}
        at, shown = str(call.place if call else forward.place), modules[:12]
        if left:
            facts["change"] = call_in_function_of(call.site, forward.site) if call else ""
            step = 1 + sum(s.at < forward.at for s in record.innermost_steps())
            variant = "called twice" if plan is not None and plan.varied else ""
            yield found("eval_left_on", at, shown, variant, step=step, **facts)
        else:
            yield found("trained_in_eval", at, shown, "switched" if call else "", **facts)
        return


def _called_twice(evidence: Evidence) -> Iterator[tuple[Record, RunPlan]]:
    """A run that calls ``fit`` twice, where it ends in an evaluation which switched modules, and a loop that holds both
    this and the training would go on: a loop over epochs of which ``fit`` makes one."""
    record, plan = list(phases(evidence))[-1]
    last = next(reversed(list(_training_passes(record))), None)
    calls = [c for c in record.of(ModeCall) if last is not None and c.at > last.at]
    if last is None or not calls or calls[-1].on or not in_one_loop(calls[-1].site, last.site, "train"):
        return

    once = plan.fit

    def twice(loop: TrainLoop) -> Callable[[Any], Any]:
        fit = once(loop)
        return lambda batches: [fit(batches) for _ in range(2)]

    plan = replace(plan, fit=twice, may_raise=True, varied="with fit called twice")
    yield evidence.rerun(plan), plan


def first_in_evaluation_mode(
    record: Record, norms: Set[str], own_train: Set[str]
) -> tuple[Forward, tuple[str, ...], bool] | None:
    """The first training forward pass with modules in evaluation mode that nobody put there on purpose, these modules,
    and whether an evaluation left them so.

    On purpose: norms (their statistics are to stay), a part of the model that was switched alone, or by a ``train()``
    that the model defines, with no evaluation in between, and a model in evaluation mode of which parts were switched
    back.
    """
    once_training: set[str] = set()
    passes = list(_training_passes(record))
    for forward in passes:
        # a clean and a noisy look at one batch make one loss (odd: looking_clean_and_noisy)
        both = {m for other in passes if set(other.answered) & set(forward.answered) for m in other.in_training}
        switched = set(forward.in_eval) - both
        never, left = switched - once_training, set()
        for module in switched & once_training:
            since = _without_gradients(record, _call_before(record, [module], forward), forward)
            if any(module in f.in_eval for f in since):
                left.add(module)  # not where dropout is switched off for good (odd: mode_dropout_switched_off_later)
        if forward.training:
            never = {m for m in never - norms if not _on_purpose(record, m, forward, own_train)}
            # what gradients do not reach is a fixed part; no loop of the corpus needs this
            reached = [p.owner for p in record.parameters if p.index in record.held and record.reached(p.index)]
            never = {m for m in never if any(owner.startswith(m.rpartition(".")[0]) for owner in reached)}
        elif _switched_by_parts(record, forward):  # (odd: switched_by_attribute)
            never = set()
        else:
            left = left or switched & once_training
        if chosen := left or (never if forward.below else set()):
            return forward, tuple(sorted(chosen)), bool(left)
        once_training |= set(forward.in_training)
    return None


def _training_passes(record: Record) -> Iterator[Forward]:
    """Forward passes that train what was called: a backward pass goes through the result, and a step consumes the
    gradient that it brings to a parameter of the module.

    A search for adversarial examples, a fixed net and a validation are none (odd: mode_adversary_in_eval,
    looking_gan_roles_by_mode).
    """
    ledger = Ledger(record)
    used = {p.at: p.used for p in ledger.passes}
    for forward in record.root_forwards():
        mine = {i for at in forward.answered for i in used.get(at, ())} | ledger.assigned
        if forward.answered and (forward.below & mine if forward.below else mine):
            yield forward


def _covers(path: str, module: str) -> bool:
    return path in ("", module) or module.startswith(f"{path}.")


def _call_before(record: Record, modules: Iterable[str], forward: Forward) -> ModeCall | None:
    """The last call that put one of the modules into evaluation mode."""
    calls = [c for c in record.of(ModeCall) if c.at < forward.at and not c.on]
    return next((c for c in reversed(calls) if any(_covers(c.below, m) for m in modules)), None)


def _without_gradients(record: Record, call: ModeCall | None, forward: Forward) -> list[Forward]:
    """Forward passes without gradients after the call and before the forward pass."""
    since = call.at if call else 0
    return [f for f in record.root_forwards() if since < f.at < forward.at and not f.grad_enabled]


def _on_purpose(record: Record, module: str, forward: Forward, own_train: Set[str]) -> bool:
    """Whether a call on a part of the model put it into evaluation mode for training passes, or the ``train()`` of a
    class did, or it differed from the rest of the model when the run began."""
    calls = [c for c in record.of(ModeCall) if c.at < forward.at and not c.on and c.below and _covers(c.below, module)]
    # a class's own train() may switch a part through the attribute, which is no call
    if (module in forward.unlike_parent and not calls) or any(_covers(path, module) for path in own_train):
        return True
    # the next call of a model after the switch has gradients on: no evaluation (odd: switched_whole_on_and_norms_off)
    return any(next((f.grad_enabled for f in record.root_forwards() if f.at > c.at), False) for c in calls)


def _switched_by_parts(record: Record, forward: Forward) -> bool:
    """Whether code put parts of a model in evaluation mode back into training mode: by a call that leaves others in
    evaluation mode, or through the attribute after a call of ``eval()``. New parts are in training mode without any."""
    for module in forward.in_training:
        calls = [c for c in record.of(ModeCall) if c.at < forward.at and _covers(c.below, module)]
        if calls and not (calls[-1].on and all(_covers(calls[-1].below, m) for m in forward.in_eval)):
            return True
    return False


def _kinds(evidence: Evidence, plan: RunPlan) -> tuple[set[str], set[str]]:
    """The modules that are norms, and those whose class has a ``train()`` of its own."""
    norms, own_train = set(), set()

    def look(watch: Watch) -> None:
        for path, module in watch.table.named_modules():
            if isinstance(module, NORM_MODULES):
                norms.add(watch.table.path_of(module))
            if type(module).train is not nn.Module.train and not type(module).__module__.startswith("torch."):
                own_train.add(path)

    evidence.rerun(plan, prepare=look, enough=lambda r: r.rounds >= 1)
    return norms, own_train


def _change_in_training_mode(evidence: Evidence, record: Record, plan: RunPlan, modules: Set[str]) -> float:
    """By how much the losses differ, as far as both runs go, where these modules run in training mode whenever
    gradients are on."""

    def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        def enter(module: nn.Module, _args: Any) -> None:
            if torch.is_grad_enabled() and not trains(module) and watch.table.path_of(module) in modules:
                module.training = True

        yield hooked(before_modules(unless_suspended(watch, enter)))

    other = evidence.rerun(plan, contexts=contexts, varied="in training mode")
    losses = [[root.value for b in run.of(Backward) for root in b.roots] for run in (record, other)]
    count = min(map(len, losses))
    return difference(losses[0][:count], losses[1][:count])
