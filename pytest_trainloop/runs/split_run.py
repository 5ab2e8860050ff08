"""A run in two halves, ``fit(b1)`` and ``fit(b2)``, with something between them.

Two such runs of one loop are compared that differ in what is between their halves alone. ``fit`` is called twice in
both of them, so what it does as it begins cancels out. The batches of both halves are drawn before the first one, and
every half begins under a seed of its own, whatever was drawn between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, UserCodeError
from pytest_trainloop.core.whose import present, reraise_ours
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.guard import StopFit, let_go
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.process_state import generators_of_modules_kept, seed_all
from pytest_trainloop.runs.reachable_state.leaves import same_value
from pytest_trainloop.runs.reachable_state.stored import StoredTensors
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Mapping

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.batch_stream import Batches
    from pytest_trainloop.runs.evidence import Evidence

    Between = Callable[[TrainLoop, Watch], Any]

STEPS_OF_A_HALF = 3
"""Steps of one optimizer in a half: the third depends on moments that two steps made."""

MOST_STEPS = 4 * STEPS_OF_A_HALF
"""Steps after which a half ends that trains on without asking for a batch."""


class _HalfOver(StopFit):
    """Ends one half of a run."""


def no_halves(evidence: Evidence) -> Halves:
    """The reference: both halves, and nothing between them. To be asked for by ``evidence.shared``.

    It is in float64, or in the loop's own precision where that raises. Raises ``CannotDecide`` where ``fit`` cannot be
    called twice.
    """
    made = halves(evidence, double=True)
    if made.record.raised is not None:
        made = halves(evidence, double=False)
    raised = made.record.raised
    if raised is not None:
        when = "called a second time" if made.calls > 1 else "run again"
        raise CannotDecide(f"fit raised {raised.summary} when it was {when}")
    if not made.steps or not made.steps[0]:
        raise CannotDecide("fit made no optimizer step on its first batches")
    if not made.steps[-1]:
        raise CannotDecide("fit makes no optimizer step when it is called a second time")
    return made


@dataclass(slots=True)
class Halves:
    """A run in halves. Tensors are copies, on their device and in their dtype, each read when it is asked for."""

    record: Record
    double: bool
    """Whether the run was in float64."""
    items: int
    """Batches of one half."""
    steps: list[int] = field(default_factory=list)
    """Optimizer steps of each half that was run, those of all optimizers together."""
    calls: int = 0
    """Calls of ``fit`` that were begun."""
    stopped: bool = False
    """Whether a half was ended inside ``fit``, which trained on without asking for a batch."""
    between_was_called: bool = False
    cut: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Weights and buffers by name as the half after the cut began."""
    end: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The same at the end."""
    weights: frozenset[str] = frozenset()
    """Which of these names are weights."""

    def trained(self) -> frozenset[str]:
        """Names of the weights that the half after the cut moves."""
        return frozenset(n for n in self.weights & self.cut.keys() if not same_tensor(self.cut[n], self.end.get(n)))

    def differ(self, other: Mapping[str, torch.Tensor], among: Iterable[str] | None = None) -> list[str]:
        """Names, of these or of all, whose values at the end are not those of ``other``."""
        names = self.end if among is None else among
        return [name for name in names if not same_tensor(self.end.get(name), other.get(name))]


def halves(
    evidence: Evidence,
    between: Between | None = None,
    *,
    double: bool,
    at_end: Between | None = None,
    before: tuple[int, ...] = (0,),
    after: tuple[int, ...] = (1,),
    drawn_late: bool = False,
    inside: bool = False,
    other_seed: int = 0,
    cut_seed: int = 0,
    seed_after: bool = True,
    stage: str = "",
    contexts: Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]] = lambda watch: (),
) -> Halves:
    """Run the halves ``before`` the cut, then ``between(loop, watch)``, then those ``after`` it, on one fresh loop.

    ``((0,), (1,))`` is a run with something in its middle, ``((), (1,))`` one that resumes on a fresh loop, and
    ``((), (0,))`` one with something before its first step. ``at_end`` is called after all of them, under the seed of
    the half that would follow. ``stage`` names what ``between`` calls ("evaluate"): what that raises becomes a
    ``UserCodeError``; without it, it is raised as it is.

    Generators are seeded before each half: by the seed of the runs plus the number of the half, after the cut plus
    ``cut_seed`` as well. Without ``seed_after`` that seed is set before ``between``, and not after it.
    ``drawn_late``: the batches after the cut are drawn there. ``inside``: ``fit`` is called once with the batches of
    both halves, and the cut is where it asks for the first one of the second half. ``other_seed`` is added to the seed
    that the loop is built under, and not to that of its batches. An exception of ``fit`` is in ``record.raised``.
    """
    plan = evidence.plan()
    items = _items_of_a_half(evidence.run())
    made = Halves(record=evidence.run(), double=double, items=items)
    run = _Run(made, between, at_end, before, after, drawn_late, seed_after, plan.seed, cut_seed, stage)
    with generators_of_modules_kept():
        made.record = evidence.rerun(
            plan,
            seed=plan.seed + other_seed,
            fit_seed=plan.seed,
            count=items * 2,
            read_ahead=None,
            # what is built under another seed is given the batches of the other runs
            stream=(lambda loop: iter(first_batches(evidence.fresh_loop(), items * 2))) if other_seed else plan.stream,
            enough=lambda record: False,
            prepare=run.opened,
            contexts=lambda watch: (hooked(before_steps(run.stop_late)), *contexts(watch)),
            fit=run.inside if inside else run.per_half,
            double=double,
            may_raise=True,
        )
    return made


def same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are the same up to rounding in the lower of their dtypes; NaN is NaN."""
    return a is b if a is None or b is None else same_value(a, b)


@dataclass(slots=True)
class _Run:
    """What one run does in place of ``fit``."""

    made: Halves
    between: Between | None
    at_end: Between | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    drawn_late: bool
    seed_after: bool
    seed: int
    cut_seed: int
    stage: str
    watch: Watch | None = None
    _since: dict[int, int] = field(default_factory=dict)
    _in_half: bool = False

    def opened(self, watch: Watch) -> None:
        self.watch = watch

    def per_half(self, loop: TrainLoop) -> Callable[[Any], Any]:
        """``fit`` once for each half."""
        fit = _fit_of(loop)

        def run(batches: Batches) -> None:
            everything = 0 if self.drawn_late else 2 * self.made.items
            batches.draw(max(everything, self.made.items))
            for number in self.before:
                seed_all(self.seed + number)
                self._half(fit, batches, number)
            self._at_cut(loop, self.after[0] if self.after else 0)
            if not self.before and not self.after:
                batches.taken = self.made.items  # fit, which is not called, takes none
            for position, number in enumerate(self.after):
                if position:
                    seed_all(self.seed + number + self.cut_seed)
                self._half(fit, batches, number)
            self.made.end = self._tensors(loop)
            if self.at_end is not None:
                seed_all(self.seed + self.after[-1] + 1)
                self.at_end(loop, self._watched())
            self.watch = None  # the run's own objects are let go of

        return run

    def inside(self, loop: TrainLoop) -> Callable[[Any], Any]:
        """``fit`` once for both halves."""
        fit = _fit_of(loop)

        def run(batches: Batches) -> None:
            items = self.made.items
            batches.draw(2 * items)
            first = [0]

            def cut(number: int) -> None:
                if number == items and not self.made.between_was_called and not self._pending():
                    first[0] = self._steps()
                    self._in_half = False
                    self._at_cut(loop, 1)
                    self._in_half = True

            part = batches.part(
                0,
                2 * items,
                spent=lambda: self._rounds() >= 2 * STEPS_OF_A_HALF,
                stepped=lambda: self._steps() > 0,
                stop=self._stop,
                before=cut,
            )
            seed_all(self.seed)
            self._call(fit, part)
            self.made.steps = [first[0], self._steps() - first[0]]
            self.made.end = self._tensors(loop)
            self.watch = None

        return run

    def stop_late(self, *_step: Any) -> None:
        if self._in_half and self._rounds() >= MOST_STEPS:
            self._stop()

    def _half(self, fit: Callable[[Any], Any], batches: Batches, number: int) -> None:
        steps = self._steps()
        self._since = self._steps_by_optimizer()
        part = batches.part(
            number * self.made.items,
            self.made.items,
            spent=lambda: self._rounds() >= STEPS_OF_A_HALF,
            stepped=lambda: self._steps() > steps,
            stop=self._stop,
        )
        self._call(fit, part)
        self.made.steps.append(self._steps() - steps)

    def _call(self, fit: Callable[[Any], Any], part: Batches) -> None:
        self.made.calls += 1
        self._in_half = True
        steps = self._steps()
        try:
            fit(part)
        except _HalfOver:
            self.made.stopped = True
        except Exception as error:  # of the project's fit
            reraise_ours(error)
            if not part.cut_short or self._steps() == steps:
                raise
            let_go(error)  # the mean over no batches, as in an epoch that began when the half was over
            self.made.stopped = True
        finally:
            self._in_half = False

    def _at_cut(self, loop: TrainLoop, number: int) -> None:
        watch = self._watched()
        if self.made.stopped:
            _clear_gradients(watch)  # how far the window under way had come is an accident
        seed = self.seed + number + self.cut_seed
        seed_all(seed)
        if self.between is not None:
            try:
                self.between(loop, watch)
            except UserCodeError:
                raise
            except Exception as error:  # of what a check has the project do at the cut
                reraise_ours(error)
                if not self.stage:
                    raise
                raise UserCodeError(user_error(error, self.stage), one_check=True) from error
        self.made.between_was_called = True
        if self.seed_after:
            seed_all(seed)
        self.made.cut = self._tensors(loop)

    def _pending(self) -> bool:
        """Whether a backward pass waits for its step."""
        last = next((e for e in reversed(self._watched().record.events) if isinstance(e, (Backward, Step))), None)
        return isinstance(last, Backward)

    def _tensors(self, loop: TrainLoop) -> StoredTensors:
        """Copies of weights and buffers by name: the declared ones, and what any optimizer holds."""
        watch = self._watched()
        found: dict[str, torch.Tensor] = {}
        weights: set[str] = set(self.made.weights)
        for prefix, module in loop.modules.items():
            found.update(
                (f"{prefix}.{n}".lstrip("."), b) for n, b in members.named_buffers(module, remove_duplicate=False)
            )
            for name, parameter in members.named_parameters(module, remove_duplicate=False):
                found[f"{prefix}.{name}".lstrip(".")] = parameter
                weights.add(f"{prefix}.{name}".lstrip("."))
        known = {id(tensor) for tensor in found.values()}
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=False):
            if id(tensor) not in known and entry.name not in found:
                found[entry.name] = tensor
                weights.add(entry.name)
        self.made.weights = frozenset(weights)
        with watch.suspended(), torch.no_grad():
            there = {n: t for n, t in found.items() if not torch.nn.parameter.is_lazy(t) and not t.is_meta}
            return StoredTensors.of(there)

    def _steps(self) -> int:
        return self._watched().record.steps

    def _steps_by_optimizer(self) -> dict[int, int]:
        return {o.index: o.steps for o in self._watched().record.optimizers}

    def _rounds(self) -> int:
        """The most steps that one optimizer has made since this half began."""
        return max((n - self._since.get(i, 0) for i, n in self._steps_by_optimizer().items()), default=0)

    def _stop(self) -> NoReturn:
        raise _HalfOver

    def _watched(self) -> Watch:
        return present(self.watch, "the watch of the run")


def _fit_of(loop: TrainLoop) -> Callable[[Any], Any]:
    """The project's loop. Where a trainer of another library evaluates inside of it and can do without, it does: what
    an evaluation leaves would be there already at the end of a half."""
    without: Callable[[Any], Any] | None = getattr(loop.fit, "without_evaluation", None)
    return without or fit_of(loop)


def _clear_gradients(watch: Watch) -> None:
    for tensor in watch.table.tensors:
        if tensor.is_leaf:
            tensor.grad = None


def _items_of_a_half(record: Record) -> int:
    """Batches that the watched run took for its first steps."""
    most = max(record.optimizers, key=lambda optimizer: optimizer.steps, default=None)
    steps = [s for s in record.of(Step) if most is not None and s.optimizer == most.index and not s.nested][
        :STEPS_OF_A_HALF
    ]
    if not steps:
        raise CannotDecide("fit made no optimizer step")
    taken = [b.item for b in record.of(Backward) if b.at < steps[-1].until and b.item]
    return max(taken[-1] if taken else -(-record.items * len(steps) // max(record.rounds, 1)), 1)
