"""The runs of one loop that its checks share: made once, kept as records without the user's objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trainloop.core.errors import (
    BrokenRun,
    CannotDecide,
    OwnMistake,
    Refused,
    TimeRanOut,
    UsageError,
    UserCodeError,
)
from pytest_trainloop.declare.loop import TrainLoop
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs import own_exceptions
from pytest_trainloop.runs.budget import Budget
from pytest_trainloop.runs.build import BUILDING, Make, build, require_fresh, require_on_cuda
from pytest_trainloop.runs.kept_batches import LoaderBatches
from pytest_trainloop.runs.process_state import generators_of_modules_kept, preserved
from pytest_trainloop.runs.released import Memory
from pytest_trainloop.runs.run import ENOUGH_ROUNDS, READ_AHEAD_BUDGETS, RunPlan, run, stepless
from pytest_trainloop.runs.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.baseline_file import BaselineFile
    from pytest_trainloop.recording.record import Record

    Progress = Callable[[int, int, float], None]

T = TypeVar("T")

WINDOWS = 4
"""Windows of an accumulating run; one more batch follows, so that a last partial window shows. Without the knob 13
batches do the same for every window of 2 to 12."""

DECLARED = (
    "nondeterministic",
    "rows_interact",
    "ordered",
    "expected_init_loss",
    "pretrained",
    "padding",
    "roles",
    "renews",
    "steps",
    "epochs",
)
"""Fields of ``TrainLoop`` that describe the loop and run nothing."""


class Evidence:
    """The evidence about one loop: a check asks for what it needs, and what was made once is not made again.

    ``make`` builds a fresh loop when called with the user's keywords; ``knobs`` maps the plugin's knob names to those
    keywords. ``seed`` is that of every build and run, ``timeout`` the seconds that one run of ``fit`` may take,
    ``device`` the value of a knob of that name and ``hypothesis_seed`` Hypothesis' own option. ``budget`` bounds what
    all further runs may take together.
    """

    repeatable = True
    """Whether further runs of the loop can be made; not those of a run that ``observe()`` saw."""

    def __init__(
        self,
        make: Make,
        *,
        knobs: Mapping[str, str] | None = None,
        seed: int = 0,
        timeout: float = 120.0,
        device: str | None = None,
        hypothesis_seed: str = "",
        budget: Budget | None = None,
    ) -> None:
        self.make = make
        self.knobs = dict(knobs or {})
        self._seed = seed
        self.hypothesis_seed = hypothesis_seed
        self._timeout = timeout
        self.budget = Budget() if budget is None else budget
        self._device = device or ""
        self._fixed = {self.knobs["device"]: device} if device is not None and "device" in self.knobs else {}
        self._records: dict[tuple[tuple[str, Any], ...], Record] = {}
        self._refused: dict[object, UsageError | TimeRanOut | BrokenRun | OwnMistake] = {}
        self._plans: dict[tuple[tuple[str, Any], ...], RunPlan] = {}
        self._shared: dict[Callable[..., Any], Any] = {}
        self._kept = LoaderBatches()
        self._memory = Memory()
        self.threads = Threads()
        """How many threads torch takes for this loop."""
        self._declared: dict[str, Any] = {}
        self._offers: frozenset[str] | None = None
        self.own_steps = 0
        """Optimizer steps of the loop that were made for its checks so far."""
        self.root_causes: Callable[[str], Sequence[Finding]] = lambda check: ()
        """Faults that other checks found and that explain a failure of the named one."""
        self.baseline: BaselineFile | None = None
        """The file of the loop's baseline, where one was given."""
        self.progress: Progress = lambda step, most, loss: None
        """Called in long runs with step, number of steps and loss."""
        self.tick: Callable[[int], None] = lambda steps: None
        """Called in all runs with the number of steps so far."""
        self.listeners: Callable[[], Sequence[str]] = lambda: ()
        """The listeners of the checks that are to come, as ``module:class`` (runs/second_run.py)."""

    @property
    def offers(self) -> frozenset[str]:
        """The fields of ``TrainLoop`` that were given; "fit" is fit or step, "run" is either of these or a
        loss."""
        if self._offers is None:
            self._offers = self._first_look()
        return self._offers

    @property
    def seed(self) -> int:
        """That of every build and run, and of every search."""
        return self._seed

    @property
    def timeout(self) -> float:
        """Seconds that one run of the project's code may take. Raises ``OutOfBudget`` where none are left."""
        self.budget.require()
        return min(self._timeout, self.budget.left)

    def declared(self, name: str) -> Any:
        """The value of one of the fields in ``DECLARED``; None where it was not given."""
        return self._declared.get(name) if self.offers else None

    def run(self, **knobs: Any) -> Record:
        """The watched run with these knobs, all others at their defaults.

        Raises ``CannotDecide`` for a knob that the function does not have, ``UsageError`` for a loop that cannot be
        run, ``TimeRanOut``, and ``OwnMistake`` where this package made one during the run.
        """
        _ = self.offers
        key = tuple(sorted(knobs.items()))
        if key in self._refused:
            raise self._refused[key]  # a loop that never ends would take its whole time again
        if key not in self._records:
            try:
                self._records[key] = self._long_enough(key, self._plan(knobs))
            except (TimeRanOut, UsageError, BrokenRun, OwnMistake) as refusal:
                self._refused[key] = refusal
                raise
        return self._records[key]

    @property
    def watched(self) -> Record | None:
        """The watched run with all knobs at their defaults, if it was made."""
        return self._records.get(())

    @property
    def kept_batches(self) -> bool:
        """Whether runs were given batches that an earlier run had read from workers."""
        return bool(self._kept)

    def plan(self, **knobs: Any) -> RunPlan:
        """The plan of the run with these knobs; that of the watched run has as many batches as it needed."""
        if knobs:
            return self._plans.get(tuple(sorted(knobs.items()))) or self._plan(knobs)
        self.run()
        return self._plans[()]

    def rerun(self, plan: RunPlan | None = None, /, **changes: Any) -> Record:
        """A further run, by the plan of the watched run or another one, with these of its fields replaced.

        Raises as ``require_returned`` does, unless the plan says that it may raise.
        """
        plan = replace(self.plan() if plan is None else plan, **changes, further=True)
        record = self._made(plan)
        if not plan.may_raise:
            self.require_returned(plan, record)
        return record

    def require_returned(self, plan: RunPlan, record: Record) -> None:
        """Raise ``CannotDecide`` or ``BrokenRun`` where ``fit`` raised in this run and not in the watched one."""
        key = next((key for key, known in self._plans.items() if known.knobs == plan.knobs), None)
        if record.raised is not None and key in self._records:
            own_exceptions.require_returned(self.make, plan, record, self._records[key])

    def release(self) -> None:
        """Return the memory that runs and checks have left."""
        self._memory.release()

    def _made(self, plan: RunPlan, *, first: bool = False) -> Record:
        if not first:
            self.budget.require()
            plan = replace(plan, left=self.budget.left)
        self.release()
        try:
            with self.threads.used():
                record = run(self.make, replace(plan, tick=self._tick))
        except TimeRanOut:
            if plan.left < plan.timeout:
                raise self.budget.ended() from None
            raise
        except UserCodeError as error:
            if error.error.stage == BUILDING and (number := self._number_of_ours(plan)):
                raise Refused(f"{error} with {number}, and not with the default") from error
            raise
        record.require_no_mistake()
        self._memory.learn(record)
        if plan.own_steps:
            self.own_steps += record.steps
        return record

    def _tick(self, steps: int) -> None:
        self.tick(steps)
        if self.watched is None:
            self.threads.note(steps)

    def shared(self, kind: Callable[[Evidence], T]) -> T:
        """What ``kind`` makes of this evidence: made once a loop, for whichever check asks first."""
        if kind in self._refused:
            raise self._refused[kind]
        if kind not in self._shared:
            try:
                self._shared[kind] = kind(self)
            except (TimeRanOut, BrokenRun, OwnMistake) as refusal:
                self._refused[kind] = refusal
                raise
        made: T = self._shared[kind]
        return made

    def fresh_loop(self, *, other_seed: int = 0) -> TrainLoop:
        """A loop that no other caller gets, built under the seed of the runs plus ``other_seed``."""
        if self._offers is not None:
            self.budget.require()
        with preserved(), generators_of_modules_kept():
            seed = self._seed + other_seed
            return build(self.make, self._fixed, seed, self._kept.of(seed, self._fixed))

    def _first_look(self) -> frozenset[str]:
        first, second = self.fresh_loop(), self.fresh_loop(other_seed=1)
        require_fresh(self.make, first, second)
        if self._device.startswith("cuda"):
            require_on_cuda(first, self.knobs, self._device)
        self._declared = {name: getattr(first, name) for name in DECLARED}
        given = {name for name in TrainLoop.field_names() if getattr(first, name) is not None}
        if given & {"fit", "step"}:
            given.add("fit")
        if given & {"fit", "loss"}:
            given.add("run")
        return frozenset(given)

    def _number_of_ours(self, plan: RunPlan) -> str:
        """How many micro-batches a window has in this run, in words as "accumulate=4"; empty where it is the loop's own
        number: a project need not take every one."""
        name = self.knobs.get("accumulate", "")
        return f"{name}={plan.knobs[name]}" if name in plan.knobs and self._offers is not None else ""

    def _plan(self, knobs: Mapping[str, Any]) -> RunPlan:
        unknown = [name for name in knobs if name not in self.knobs]
        if unknown:
            raise CannotDecide(
                f"the function has no knob {unknown[0]!r}: give it a keyword default, or map one with knobs={{...}}",
                needs=f"{unknown[0]}=",
            )
        user = {self.knobs[name]: value for name, value in knobs.items()}
        accumulate = int(knobs.get("accumulate", 1))
        return RunPlan(
            knobs={**self._fixed, **user},
            seed=self._seed,
            timeout=self._timeout,
            kept=self._kept,
            count=FULL_ROUNDS + 1 if accumulate == 1 else WINDOWS * accumulate + 1,
            read_ahead=2 * accumulate + 8,
        )

    def _first_run(self, plan: RunPlan) -> Record:
        """The first run of the loop; from its start once more with more threads, where its steps are large."""

        def enough(record: Record) -> bool:
            return plan.enough(record) or self.threads.too_few

        record = self._made(replace(plan, enough=enough), first=True)
        if not self.threads.too_few:
            return record
        self.threads.more()
        return self._made(plan, first=True)

    def _long_enough(self, key: tuple[tuple[str, Any], ...], plan: RunPlan) -> Record:
        """The run, made again with more batches where it read ahead or accumulated over more than it was given."""
        record = self._made(plan, first=False) if key else self._first_run(plan)
        first = plan, record
        for count in READ_AHEAD_BUDGETS:
            if record.steps >= ENOUGH_ROUNDS or stepless(record) or not _could_step(record):
                break
            if record.raised is not None and not record.cut_short:
                break
            plan = replace(plan, count=count, read_ahead=None)
            record = self._made(plan, first=not key)
        if not record.steps and not record.autograd_passes():
            plan, record = first  # more batches brought nothing
        if record.raised is not None and not own_exceptions.is_own(self.make, plan):
            # Once more: the first run may have imported what is patched from then on.
            record = self._made(plan, first=not key)
            own_exceptions.require_returned_watched(record)
        self._plans[key] = plan
        return record


def _could_step(record: Record) -> bool:
    """Whether more batches may bring steps: the loop accumulates, reads ahead, or has not begun to train (a replay
    buffer that fills first)."""
    return not (record.moved_outside_steps() or (record.changed() and not record.autograd_passes()))
