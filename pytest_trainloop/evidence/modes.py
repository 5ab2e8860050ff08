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
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from pytest_trainloop import batch as nests
from pytest_trainloop.evidence.dependence import difference
from pytest_trainloop.evidence.ledger import keep
from pytest_trainloop.evidence.run import fit_of
from pytest_trainloop.observe.events import Backward, Forward, ModeCall, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.evidence.run import RunPlan
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.observe.record import Record
    from pytest_trainloop.observe.watch import Watch

NORMS = (nn.modules.batchnorm._NormBase,)

Cause = Literal["trained_in_eval", "eval_left_on"]


@dataclass(frozen=True, slots=True)
class InEval:
    """Modules that ran in evaluation mode in a training forward pass: since which step, and the call that left them
    so."""

    cause: Cause
    modules: tuple[str, ...]
    step: int
    whole: bool
    call: str
    forward: str


def trained_in_eval(record: Record, norms: set[str], own_train: set[str]) -> InEval | None:
    """The first training forward pass with modules in evaluation mode that nobody put there on purpose.

    On purpose: norms (their statistics are to stay), and a part of the model that was switched by itself, or by a
    ``train()`` that the model defines, with no evaluation in between.
    """
    trained = {p.owner for p in record.parameters if record.reached(p.index) and p.index in record.held}
    once_training: set[str] = set()
    for forward in _training_passes(record):
        if not _trains(forward, trained):
            continue
        switched = set(forward.in_eval)
        whole = not forward.training
        left = {m for m in switched & once_training if _evaluated_since(record, m, forward)}
        never = (
            switched - once_training if whole else _not_on_purpose(record, switched - once_training, forward, own_train)
        )
        if not whole:
            never -= norms
            never = {m for m in never if any(owner.startswith(_parent(m)) for owner in trained)}
        if whole and switched & once_training and not left:
            left = switched & once_training
        chosen = left or never
        if chosen:
            step = sum(s.at < forward.at for s in record.consuming_steps())
            cause: Cause = "eval_left_on" if left else "trained_in_eval"
            call = _call_before(record, chosen, forward)
            return InEval(
                cause, tuple(sorted(chosen)), step, whole, str(call.place) if call else "", str(forward.place)
            )
        once_training |= set(forward.in_training)
    return None


def _training_passes(record: Record) -> Iterator[Forward]:
    """Forward passes with gradients on whose next backward pass brings a gradient that a step consumes: not those that
    look for adversarial examples."""
    ledger = keep(record)
    consumed = {id(a.backward) for a in ledger.accounts if a.consumed}
    backwards = record.of(Backward)
    for forward in record.root_forwards():
        after = next((b for b in backwards if b.at > forward.at), None)
        if forward.grad_enabled and after is not None and (ledger.by_hand or id(after) in consumed):
            yield forward


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _trains(forward: Forward, trained: set[str]) -> bool:
    root = forward.module
    return any(owner == root or owner.startswith(f"{root}.") or "." not in root for owner in trained)


def _covers(call: ModeCall, module: str) -> bool:
    return call.below in ("", module) or module.startswith(f"{call.below}.")


def _call_before(record: Record, modules: Iterable[str], forward: Forward) -> ModeCall | None:
    """The last call that put one of the modules into evaluation mode."""
    calls = [c for c in record.of(ModeCall) if c.at < forward.at and not c.on and any(_covers(c, m) for m in modules)]
    return calls[-1] if calls else None


def _evaluated_since(record: Record, module: str, forward: Forward) -> bool:
    """Whether the module was called without gradients after it was switched: the switch was for an evaluation."""
    call = _call_before(record, [module], forward)
    since = call.at if call else 0
    return any(since < f.at < forward.at and not f.grad_enabled and module in f.in_eval for f in record.root_forwards())


def _not_on_purpose(record: Record, modules: set[str], forward: Forward, own_train: set[str]) -> set[str]:
    """Those that no call of their own put into evaluation mode, or one that an evaluation followed."""
    left = set()
    for module in modules:
        call = _call_before(record, [module], forward)
        alone = call is not None and call.below != "" and not _evaluated_since(record, module, forward)
        by_class = any(module == path or module.startswith(f"{path}.") or path == "" for path in own_train)
        if not alone and not by_class:
            left.add(module)
    return left


class Kinds:
    """Which modules of a loop are norms, and which have a ``train()`` of their own. To be used as ``prepare``."""

    def __init__(self) -> None:
        self.norms: set[str] = set()
        self.own_train: set[str] = set()

    def __call__(self, watch: Watch) -> None:
        for path, module in watch.book.named_modules():
            if isinstance(module, NORMS):
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

        handle = register_module_forward_pre_hook(enter)
        try:
            yield
        finally:
            handle.remove()

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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Forward passes without gradients in training mode: how many, in how many goes, and where."""

    modules: tuple[str, ...]
    calls: int
    steps: int
    place: str
    site: object

    @property
    def in_phases(self) -> bool:
        """Whether they do not simply come once with each step, as a second look at the training batch would."""
        return self.calls not in (self.steps, self.steps + 1, self.steps - 1)


def without_gradients(record: Record) -> list[Evaluation]:
    """Such passes of a model that trains, by the line that makes them."""
    trained = {p.owner for p in record.parameters if record.reached(p.index) and p.index in record.held}
    by_site: dict[object, list[Forward]] = {}
    for f in record.root_forwards():
        if not f.grad_enabled and f.training and f.in_training and _trains(f, trained) and not _checkpointed(f):
            by_site.setdefault(f.site[:1], []).append(f)
    steps = sum(1 for s in record.of(Step) if s.full and not s.nested)
    return [Evaluation(fs[0].in_training, len(fs), steps, str(fs[0].place), site) for site, fs in by_site.items()]


def _checkpointed(forward: Forward) -> bool:
    return any("checkpoint" in file for file, _ in forward.site)


class Spoiled(TorchFunctionMode):
    """Changes what the model gives at one line without gradients, and sees whether anybody uses it."""

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
            if torch.is_grad_enabled() or not mine:
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


def is_evaluation(
    found: Evaluation, first: Record, plan: RunPlan, run: Callable[[RunPlan], Record], bound: float
) -> bool:
    """Whether the passes' results are used for something, and not for the training: with other results in their
    place the loop backpropagates the same."""
    spoiled = Spoiled(found.site)
    other = run(replace(plan, contexts=spoiled.contexts))
    return spoiled.used and other.raised is None and difference(*_common(_roots(first), _roots(other))) <= bound


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
