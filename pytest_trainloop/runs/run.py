"""One watched run of a fresh loop: build, seed, guard, watch. It gives a record."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, OwnMistake, UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.built_schedulers import BuiltSchedulers
from pytest_trainloop.recording.mistakes import noted_on
from pytest_trainloop.recording.mode_stack import modes_kept
from pytest_trainloop.recording.watch import FULL_ROUNDS, Watch
from pytest_trainloop.runs.batch_stream import Batches, generators_kept
from pytest_trainloop.runs.build import Make, build
from pytest_trainloop.runs.ctc_labels import ctc_labels_checked
from pytest_trainloop.runs.float64 import double_precision, widen
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.user_traceback import raised, user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.kept_batches import KeptBatches, LoaderBatches

READ_AHEAD_BUDGETS = (25, 100, 400)
"""Batches given to a loop that reads ahead, on fresh loops, until it has made enough steps
(docs/how-it-decides.md#how-many-batches-fit-gets)."""

ENOUGH_ROUNDS = 3
"""Steps of one optimizer below which a run is tried again with more batches."""

STEPLESS_BACKWARDS = 256
"""Backward passes without a step after which a run is given no more batches, and none is made with more: no loop's
window should be longer than this."""

SKIPPED_STEPS = 64
"""Steps skipped by a gradient scaler, with none made, that count the same: its scale falls from 2**40 to 2**-24."""

MOST_STEPS = 9
"""Largest number of steps of one optimizer in a run over chosen items; none needs more than two windows of four."""

_SCALARS_ONLY = "grad can be implicitly created only for scalar outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How one run is made."""

    knobs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout: float = 120.0
    """Seconds that ``fit`` may take; no verdict depends on them (see runs/guard.py)."""
    left: float = math.inf
    """Seconds that are left for all runs of the loop (see runs/budget.py)."""
    tick: Callable[[int], None] = lambda steps: None
    """Called with the number of steps so far, before each."""
    count: int = FULL_ROUNDS
    """The number of batches."""
    read_ahead: int | None = None
    """Batches after which a pass without an optimizer step ends."""
    enough: Callable[[Record], bool] = lambda record: record.rounds >= FULL_ROUNDS
    """Whether the run ends."""
    prepare: Callable[[Watch], None] = lambda watch: None
    """Called before ``fit``, to change the weights."""
    contexts: Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]] = lambda watch: ()
    """Entered around ``fit``."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around building and ``fit``."""
    double: bool = False
    """Whether the run is in float64."""
    items: Callable[[TrainLoop], Sequence[Any]] | None = None
    """Makes the batches in place of the loop's own, for a single pass."""
    stream: Callable[[TrainLoop], Iterator[Any]] | None = None
    """Makes the batches in place of the loop's own, and changes nothing else."""
    before_item: Callable[[int, Any], None] = lambda number, item: None
    """Called with the number of each batch and the batch."""
    fit_seed: int | None = None
    """The seed of ``fit``, where it is another than that of building."""
    fit: Callable[[TrainLoop], Callable[[Any], Any]] = lambda loop: fit_of(loop)
    """Gives the function that is run in place of the project's own loop."""
    may_raise: bool = False
    """Whether the check judges an exception that leaves ``fit``; else one that the watched run does not raise ends the
    check (``own_exceptions``)."""
    varied: str = ""
    """What the contexts change of the loop on purpose, in words as "with a higher learning rate": ``fit`` may raise for
    that."""
    varying: Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]] | None = None
    """These changes alone, without what looks at the run."""
    further: bool = False
    """Whether the watched run was made before: this one shows no warnings."""
    kept: LoaderBatches | None = None
    """Batches of DataLoaders with worker processes that earlier runs read; None to read them again."""
    most_rounds: int = 0
    """Steps of one optimizer after which the run ends; 0: twice the batches, and at least 25."""
    own_steps: bool = True
    """Whether the steps are the loop's own, and counted as such."""


def run(make: Make, plan: RunPlan) -> Record:
    """The record of one run.

    Raises ``UsageError`` and ``UserCodeError`` as ``build`` does, ``TimeRanOut`` where ``fit`` took longer than it may,
    and ``UsageError`` where it ignores the end of its batches.
    """
    with workers_ended():
        try:
            return _run(make, plan)
        except Exception as error:
            let_go(error)
            raise


def _run(make: Make, plan: RunPlan) -> Record:
    mistakes: list[OwnMistake] = []
    with preserved(), modes_kept(), noted_on(mistakes), contextlib.ExitStack() as precision:
        if plan.further:
            _show_no_warnings(plan)
            precision.enter_context(ctc_labels_checked())
        torch.set_grad_enabled(True)
        wide = precision.enter_context(double_precision()) if plan.double else None
        precision.enter_context(plan.around())
        schedulers = BuiltSchedulers()
        with schedulers.watching():
            loop = build(make, plan.knobs, plan.seed, _kept(plan))
        schedulers.declare(loop.scheduler)
        precision.enter_context(generators_kept(loop))
        if wide is not None:
            widen(loop)
            wide.lower.clear()  # building may use a lower precision (from numpy, from a file)
            wide.asked.clear()
        guard = Guard(plan.timeout, plan.left)
        watch = Watch(
            loop.modules,
            loop.optimizers,
            before_step=lambda w: _stop_if_past(w, stop, guard, plan),
            schedulers=schedulers,
        )

        def stop() -> None:
            watch.over = True
            guard.stop()

        record = watch.record
        items = None if plan.items is None else plan.items(loop)
        batches = Batches(
            loop,
            plan.count if items is None else len(items),
            items=items,
            stream=None if plan.stream is None else plan.stream(loop),
            before=plan.before_item,
            spent=lambda: plan.enough(record) or stepless(record),
            stepped=lambda: record.steps > 0,
            stop=stop,
            out_of_time=guard.out_of_time,
            read_ahead=plan.read_ahead,
            drawing=watch.data_is_drawn,
            double=plan.double,
        )
        watch.items = lambda: batches.taken
        fit = plan.fit(loop)
        with contextlib.closing(batches), watch, contextlib.ExitStack() as around:
            with watch.suspended():
                plan.prepare(watch)
            for context in plan.contexts(watch):
                around.enter_context(context)
            seed_all(plan.seed if plan.fit_seed is None else plan.fit_seed)
            try:
                error = guard.call(lambda: fit(batches), lambda: record.steps, lambda: batches.at_end)
            except UsageError as refusal:
                raise loop.located(refusal) from None
        if batches.counted and not batches.taken and record.steps:  # as many steps, on data of the loop's own
            batches.taken = len(batches)
        record.items = batches.taken
        record.passes = tuple(filter(None, batches.passes))
        record.double = wide is not None and not wide.lower
        record.lower = () if wide is None else tuple(wide.lower)
        record.asked = () if wide is None else wide.halves()
    record.mistakes += mistakes  # while the loop was built, and as the contexts were left
    record.knobs = dict(plan.knobs)
    record.frozen = None if loop.frozen is None else tuple(loop.frozen)
    if isinstance(error, UsageError) and not plan.further:
        raise loop.located(error)
    if error is not None and not isinstance(error, UsageError):  # in a further run: of a loss= on what we made
        reraise_ours(error)
    if error is not None and batches.held_back and record.steps:
        return _run(make, replace(plan, read_ahead=None))  # it may have raised for want of batches only
    if error is not None and _SCALARS_ONLY in str(error) and not plan.further:
        raise _no_scalar(record, error) from error
    if error is not None:
        ended = guard.stopped or plan.enough(record) or (batches.cut_short and record.steps > 0)
        _note_raised(record, raised(error), after_end=ended)
        let_go(error)
    record.cut_short = batches.cut_short or batches.held_back
    record.ended = error is None and not guard.stopped
    if error is None and not batches.taken and plan.further:
        raise CannotDecide("fit came back without taking a batch when it was run again")
    if error is None and not batches.taken:
        how = (
            "fit came back without taking a batch; it must iterate over the batches it is given, or make len(batches) "
            "steps on data of its own"
        )
        raise loop.located(UsageError(how))
    return record


def _show_no_warnings(plan: RunPlan) -> None:
    """Until the warning filters are restored.

    Warnings of the loop's own data were shown in the watched run, and act as they did there: a filter may make them
    errors. Those of what a check gives the loop are none of the user's.
    """
    warnings.showwarning = lambda *_args, **_kwargs: None
    as_it_is = RunPlan()
    own = plan.items is None and plan.stream is None and plan.prepare is as_it_is.prepare and not plan.double
    if not own:
        warnings.simplefilter("ignore")


def _kept(plan: RunPlan) -> KeptBatches | None:
    """The batches that other runs like this one read: nobody knows what building does inside ``around``."""
    if plan.kept is None or plan.around is not contextlib.nullcontext:
        return None
    return plan.kept.of(plan.seed, plan.knobs, double=plan.double)


def stepless(record: Record) -> bool:
    """Whether many backward passes were made, and no optimizer step."""
    if record.steps:
        return False
    tried = sum(call.what == "step" for call in record.scaler_calls())
    return tried >= SKIPPED_STEPS or len(record.backwards()) >= STEPLESS_BACKWARDS


def _no_scalar(record: Record, error: BaseException) -> UserCodeError:
    """Torch's own exception, with the shape of what was given to backward."""
    user = user_error(error, "fit")
    shape = next((root.shape for b in record.backwards()[-1:] for root in b.roots), ())
    return UserCodeError(replace(user, summary=f"{user.summary}; this one has shape {shape}: take its mean"))


def _stop_if_past(watch: Watch, stop: Callable[[], None], guard: Guard, plan: RunPlan) -> None:
    """End a loop that iterates over its own copy of the batches from inside its optimizer's step."""
    plan.tick(watch.record.steps)
    if guard.out_of_time():
        stop()
    if plan.items is not None and watch.record.rounds >= MOST_STEPS:
        stop()
    if watch.record.rounds >= (plan.most_rounds or max(2 * plan.count, 25)) or (
        plan.enough(watch.record) and watch.record.rounds >= 2 * FULL_ROUNDS
    ):
        stop()


def _note_raised(record: Record, what: Raised, *, after_end: bool) -> None:
    """Note what ended ``fit``; no fault where its batches had ended early (the mean over no batches)."""
    if after_end:
        record.notes.append(f"fit raised {what.summary} after the batches had ended")
    else:
        record.raised = what


def fit_of(loop: TrainLoop) -> Callable[[Any], Any]:
    """The project's loop; its per-batch step repeated; or, where only a loss was given, the plain canonical loop."""
    if loop.fit is not None:
        return loop.fit
    step = loop.step
    if step is not None:

        def fit(batches: Any) -> None:
            for batch in batches:
                step(batch)

        return fit
    return canonical(loop)


def fit_then_evaluate(
    loop: TrainLoop, at_end: Callable[[], None] = lambda: None, raised: Callable[[Exception], None] = lambda error: None
) -> Callable[[Any], Any]:
    """The project's loop, and after it the declared ``evaluate``. ``at_end`` is called between the two, and ``raised``
    with what ``evaluate`` raises: that is for ``evaluation_is_pure`` to judge."""
    own, evaluate = fit_of(loop), loop.evaluate

    def fit(batches: Any) -> None:
        own(batches)
        at_end()
        if evaluate is not None:
            try:
                evaluate()
            except Exception as error:
                reraise_ours(error)
                raised(error)

    return fit


def canonical(loop: TrainLoop) -> Callable[[Any], None]:
    """The plain loop over the declared loss."""
    loss: Any = loop.loss
    optimizers = loop.optimizers or [
        torch.optim.SGD([p for m in loop.modules.values() for p in members.parameters(m)], lr=1e-2)
    ]

    def fit(batches: Any) -> None:
        for batch in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            value = loss(loop.model, batch)
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"TrainLoop.loss returned {nested.describe(value)}; a scalar tensor with a history is needed"
                )
            if value.numel() != 1:
                raise UsageError(f"TrainLoop.loss returned {nested.describe(value)}; a scalar is needed: take its mean")
            value.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()

    return fit
