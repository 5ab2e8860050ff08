"""In which mode training passes ran, and whether it made a difference.

A further run decides that: with the modules switched at the same calls, under the same seed, what the loop
backpropagates changes, or the mode did not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from pytest_trainloop.checks.wiring.train_mode.evaluations import trained_on
from pytest_trainloop.checks.wiring.train_mode.phases import phases
from pytest_trainloop.gradients.dependence import difference
from pytest_trainloop.recording.events import Backward, Forward, ModeCall
from pytest_trainloop.recording.hooks import before_modules
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.records.gradient_ledger import Ledger
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class InEval:
    """Modules that ran in evaluation mode in a training forward pass."""

    cause: Literal["trained_in_eval", "eval_left_on"]
    modules: tuple[str, ...]
    step: int
    """Optimizer steps before that pass."""
    whole: bool
    """Whether the whole model was in evaluation mode."""
    call: str
    """The line of the call that switched them, if one was seen."""
    forward: str
    training: tuple[str, ...] = ()
    """The modules that were in training mode in that pass, in a model that was not."""
    unscored: object = None
    """The call site of a pass without gradients between that call and the training pass, if any."""


class Judged(NamedTuple):
    """Modules in evaluation mode, and by how much training mode changes what is backpropagated; NaN where no
    further run shows it."""

    found: InEval
    change: float
    level: Level


def in_eval(evidence: Evidence) -> Judged | None:
    """Modules in evaluation mode in training passes.

    Advice where the loop switches the model to make its own training data (rollouts): it may want both passes alike.
    """
    if not evidence.repeatable:
        return _in_single_run(evidence.run())
    for record, plan in phases(evidence):
        if not any(f.in_eval and f.grad_enabled for f in record.root_forwards()):
            continue
        kinds = Kinds()
        evidence.rerun(plan, prepare=kinds, enough=lambda r: r.rounds >= 1)
        found = trained_in_eval(record, kinds.norms, kinds.own_train)
        if found and not _switched_when_built(evidence, found):
            own_data = found.unscored is not None and trained_on(evidence, found.unscored, record, plan)
            other = evidence.rerun(plan, contexts=_in_training_mode(set(found.modules)), varied="in training mode")
            return Judged(found, _difference(record, other), "advice" if own_data else "fault")
    return None


def _in_single_run(record: Record) -> Judged | None:
    """What an evaluation left on is a fault; what never ran in training mode may be meant, and is advice. Norms and
    parts of a model are left out: what kinds these are is not looked at."""
    found = trained_in_eval(record, set(), set())
    if found is None or (found.cause == "trained_in_eval" and not found.whole):
        return None
    return Judged(found, math.nan, "fault" if found.cause == "eval_left_on" else "advice")


def trained_in_eval(record: Record, norms: set[str], own_train: set[str]) -> InEval | None:
    """The first training forward pass with modules in evaluation mode that nobody put there on purpose.

    On purpose: norms (their statistics are to stay), a part of the model that was switched alone, or by a ``train()``
    that the model defines, with no evaluation in between, and a model in evaluation mode of which parts were switched
    back.
    """
    once_training: set[str] = set()
    passes = list(_training_passes(record))
    for forward in passes:
        switched = set(forward.in_eval) - _in_both_modes(forward, passes)
        left = {m for m in switched & once_training if _evaluated_since(record, m, forward)}
        never = switched - once_training
        if forward.training:
            never = _not_on_purpose(record, never, forward, own_train) - norms
            never = {m for m in never if _holder_trains(record, m)}
        elif _switched_by_parts(record, forward):
            never = set()
        else:
            left = left or switched & once_training
        chosen = left or (never if forward.below else set())
        if chosen:
            call = _call_before(record, chosen, forward)
            between = [] if call is None or left else _without_gradients(record, call, forward)
            return InEval(
                cause="eval_left_on" if left else "trained_in_eval",
                modules=tuple(sorted(chosen)),
                step=sum(s.at < forward.at for s in record.innermost_steps()),
                whole=not forward.training and not forward.in_training,
                call=str(call.place) if call else "",
                training=() if forward.training else forward.in_training,
                forward=str(forward.place),
                unscored=between[0].site if between else None,
            )
        once_training |= set(forward.in_training)
    return None


def _training_passes(record: Record) -> Iterator[Forward]:
    """Forward passes that train what was called: a backward pass goes through the result, and a step consumes the
    gradient that it brings to a parameter of the module.

    A search for adversarial examples, a fixed net and a validation are none.
    """
    ledger = Ledger(record)
    used = {p.at: p.used for p in ledger.passes}
    for forward in record.root_forwards():
        mine = {i for at in forward.answered for i in used.get(at, ())} | ledger.assigned
        if forward.answered and (forward.below & mine if forward.below else mine):
            yield forward


def _in_both_modes(forward: Forward, passes: Sequence[Forward]) -> set[str]:
    """Modules that another pass to the same loss runs in training mode: a clean and a noisy look at one batch."""
    return {m for other in passes if set(other.answered) & set(forward.answered) for m in other.in_training}


def _holder_trains(record: Record, module: str) -> bool:
    """Whether gradients reach parameters of what holds the module."""
    holder = module.rpartition(".")[0]
    return any(
        record.reached(p.index) and p.index in record.held and p.owner.startswith(holder) for p in record.parameters
    )


def _covers(call: ModeCall, module: str) -> bool:
    return call.below in ("", module) or module.startswith(f"{call.below}.")


def _call_before(record: Record, modules: Iterable[str], forward: Forward) -> ModeCall | None:
    """The last call that put one of the modules into evaluation mode."""
    calls = [c for c in record.of(ModeCall) if c.at < forward.at and not c.on and any(_covers(c, m) for m in modules)]
    return calls[-1] if calls else None


def _evaluated_since(record: Record, module: str, forward: Forward) -> bool:
    """Whether the module was called without gradients after it was switched: the switch was for an evaluation."""
    call = _call_before(record, [module], forward)
    return any(module in f.in_eval for f in _without_gradients(record, call, forward))


def _without_gradients(record: Record, call: ModeCall | None, forward: Forward) -> list[Forward]:
    """Forward passes without gradients after the call and before the forward pass."""
    since = call.at if call else 0
    return [f for f in record.root_forwards() if since < f.at < forward.at and not f.grad_enabled]


def _not_on_purpose(record: Record, modules: set[str], forward: Forward, own_train: set[str]) -> set[str]:
    """Those that no call on a part of the model put into evaluation mode for training passes, and that were not apart
    from the rest of the model when the run began."""
    left = set()
    for module in modules:
        calls = [c for c in record.of(ModeCall) if c.at < forward.at and not c.on and c.below and _covers(c, module)]
        initially = module in forward.apart and not calls
        by_class = any(path in ("", module) or module.startswith(f"{path}.") for path in own_train)
        if not initially and not by_class and not any(_for_training(record, c) for c in calls):
            left.add(module)
    return left


def _switched_by_parts(record: Record, forward: Forward) -> bool:
    """Whether code put parts of a model in evaluation mode back into training mode: by a call that leaves others in
    evaluation mode, or through the attribute after a call of ``eval()``. New parts are in training mode without any."""
    for module in forward.in_training:
        calls = [c for c in record.of(ModeCall) if c.at < forward.at and _covers(c, module)]
        if calls and not (calls[-1].on and all(_covers(calls[-1], m) for m in forward.in_eval)):
            return True
    return False


def _switched_when_built(evidence: Evidence, found: InEval) -> bool:
    """The same of calls that were made before ``fit``: then a mixture of modes is no default of new parts."""
    from pytest_trainloop.tracing.made_at import MadeAt

    made = evidence.shared(MadeAt.of) if found.training and found.cause == "trained_in_eval" else None
    return made is not None and any(map(made.switched_on, found.training))


def _for_training(record: Record, call: ModeCall) -> bool:
    """Whether the next call of a model after a switch has gradients on: the switch was not for an evaluation."""
    return next((f.grad_enabled for f in record.root_forwards() if f.at > call.at), False)


class Kinds:
    """Which modules of a loop are norms, and which have a ``train()`` of their own. To be used as ``prepare``."""

    def __init__(self) -> None:
        self.norms: set[str] = set()
        self.own_train: set[str] = set()

    def __call__(self, watch: Watch) -> None:
        for path, module in watch.table.named_modules():
            if isinstance(module, NORM_MODULES):
                self.norms.add(watch.table.path_of(module))
            if type(module).train is not nn.Module.train and not type(module).__module__.startswith("torch."):
                self.own_train.add(path)


def _in_training_mode(modules: set[str]) -> Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]:
    """Contexts in which these modules run in training mode whenever gradients are on."""

    def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        def enter(module: nn.Module, _args: Any) -> None:
            if torch.is_grad_enabled() and not trains(module) and watch.table.path_of(module) in modules:
                module.training = True

        yield hooked(before_modules(unless_suspended(watch, enter)))

    return contexts


def _difference(first: Record, other: Record) -> float:
    """By how much the losses that two runs backpropagate differ, as far as both go."""
    losses = [[root.value for b in record.of(Backward) for root in b.roots] for record in (first, other)]
    count = min(map(len, losses))
    return difference(losses[0][:count], losses[1][:count])
