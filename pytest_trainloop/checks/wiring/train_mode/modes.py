"""In which mode training and evaluation ran, and whether it made a difference.

A mode is judged by what it does: with the modules in question switched the other way at the same calls, under the same
seed, what the loop backpropagates changes, or the mode did not matter.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pytest_trainloop.gradients.dependence import difference
from pytest_trainloop.recording.events import Backward, Forward, ModeCall
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.records.gradient_ledger import gradient_ledger
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.run import RunPlan

Cause = Literal["trained_in_eval", "eval_left_on"]


@dataclass(frozen=True, slots=True)
class InEval:
    """Modules that ran in evaluation mode in a training forward pass: since which step, and the call that left them
    so. ``unscored`` is the line of a pass without gradients between that call and the training pass, if any."""

    cause: Cause
    modules: tuple[str, ...]
    step: int
    whole: bool
    call: str
    forward: str
    unscored: object = None


def trained_in_eval(record: Record, norms: set[str], own_train: set[str]) -> InEval | None:
    """The first training forward pass with modules in evaluation mode that nobody put there on purpose.

    On purpose: norms (their statistics are to stay), and a part of the model that was switched by itself, or by a
    ``train()`` that the model defines, with no evaluation in between.
    """
    once_training: set[str] = set()
    passes = list(_training_passes(record))
    for forward in passes:
        switched = set(forward.in_eval) - _in_both_modes(forward, passes)
        whole = not forward.training
        left = {m for m in switched & once_training if _evaluated_since(record, m, forward)}
        never = (
            switched - once_training if whole else _not_on_purpose(record, switched - once_training, forward, own_train)
        )
        if not whole:
            never -= norms
            never = {m for m in never if _holder_trains(record, m)}
        if whole and switched & once_training and not left:
            left = switched & once_training
        chosen = left or (never if forward.below else set())
        if chosen:
            step = sum(s.at < forward.at for s in record.innermost_steps())
            cause: Cause = "eval_left_on" if left else "trained_in_eval"
            call = _call_before(record, chosen, forward)
            between = [] if call is None else _between(record, call, forward)
            return InEval(
                cause,
                tuple(sorted(chosen)),
                step,
                whole,
                str(call.place) if call else "",
                str(forward.place),
                between[0].site if between and not left else None,
            )
        once_training |= set(forward.in_training)
    return None


def _training_passes(record: Record) -> Iterator[Forward]:
    """Forward passes that train what was called: a backward pass goes through the result, and a step consumes the
    gradient that it brings to a parameter of the module. Not those that look for adversarial examples, nor those of a
    fixed net or a validation."""
    ledger = gradient_ledger(record)
    consumed = {b.backward.at: b.consumed for b in ledger.backwards}
    for forward in record.root_forwards():
        mine = {i for at in forward.answered for i in consumed.get(at, ())} | ledger.assigned
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
    return any(module in f.in_eval for f in _between(record, _call_before(record, [module], forward), forward))


def _between(record: Record, call: ModeCall | None, forward: Forward) -> list[Forward]:
    """Forward passes without gradients after the call and before the forward pass."""
    since = call.at if call else 0
    return [f for f in record.root_forwards() if since < f.at < forward.at and not f.grad_enabled]


def _not_on_purpose(record: Record, modules: set[str], forward: Forward, own_train: set[str]) -> set[str]:
    """Those that no call of their own put into evaluation mode for training passes, and that did not come so, by
    themselves, when the run began."""
    left = set()
    for module in modules:
        calls = [c for c in record.of(ModeCall) if c.at < forward.at and not c.on and c.below and _covers(c, module)]
        came_so = module in forward.apart and not any(_covers(c, module) and c.below for c in calls)
        by_class = any(module == path or module.startswith(f"{path}.") or path == "" for path in own_train)
        if not came_so and not by_class and not any(_for_training(record, c) for c in calls):
            left.add(module)
    return left


def _for_training(record: Record, call: ModeCall) -> bool:
    """Whether the next call of a model after a switch has gradients on: the switch was not for an evaluation."""
    return next((f.grad_enabled for f in record.root_forwards() if f.at > call.at), False)


class Kinds:
    """Which modules of a loop are norms, and which have a ``train()`` of their own. To be used as ``prepare``."""

    def __init__(self) -> None:
        self.norms: set[str] = set()
        self.own_train: set[str] = set()

    def __call__(self, watch: Watch) -> None:
        for path, module in watch.book.named_modules():
            if isinstance(module, NORM_MODULES):
                self.norms.add(watch.book.path_of(module))
            if type(module).train is not nn.Module.train and not type(module).__module__.startswith("torch."):
                self.own_train.add(path)


def forced(
    modules: Sequence[str], training: bool
) -> Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]:
    """Contexts in which the named modules run in this mode whenever gradients are on."""
    chosen = set(modules)

    @contextlib.contextmanager
    def switched(watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, _args: Any) -> None:
            if torch.is_grad_enabled() and module.training is not training and watch.book.path_of(module) in chosen:
                module.training = training

        with hooked(register_module_forward_pre_hook(enter)):
            yield

    return lambda watch: (switched(watch),)


def matters(first: Record, plan: RunPlan, run: Callable[[RunPlan], Record], modules: Sequence[str]) -> float:
    """By how much what is backpropagated changes with the modules in training mode."""
    other = run(replace(plan, contexts=forced(modules, training=True)))
    return difference(*_common(_roots(first), _roots(other)))


def _roots(record: Record) -> list[float]:
    return [root.value for b in record.of(Backward) for root in b.roots]


def _common(a: list[float], b: list[float]) -> tuple[list[float], list[float]]:
    count = min(len(a), len(b))
    return a[:count], b[:count]
