"""The runs that checks share: made once per loop, kept as records, never as the user's objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trainloop.errors import CannotDecide, UsageError
from pytest_trainloop.loop import TrainLoop
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.build import Make, Origin, build, origins, require_fresh, require_on_cuda
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.run import ENOUGH_ROUNDS, READ_AHEAD_BUDGETS, RunPlan, run, stepless

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.runs import Accumulation
    from pytest_trainloop.checks.batch.edge_batches.runs import Edges
    from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns
    from pytest_trainloop.checks.learning.one_batch import OneBatch, Progress
    from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss, Which
    from pytest_trainloop.checks.loss.loss_contract.recorder import Contracts
    from pytest_trainloop.checks.state.determinism.repeat import Repetition
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.buffers import Resting
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_candidates import Kind
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import Cut
    from pytest_trainloop.finding import Finding
    from pytest_trainloop.gradients.dependence import Dependence
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.tracing.nonfinite import Births

    Further = Callable[[Record, RunPlan, Callable[[RunPlan], Record]], "T"]

T = TypeVar("T")

WINDOWS = 4
"""Windows of an accumulating run; one more batch follows, so that a last partial window shows. Without the knob 13
batches do the same for every window of 2 to 12."""


MOST = 300
"""Own steps on one fixed batch, at most."""


class Evidence:
    """What is known of one loop. A check asks for what it needs; what was made once is not made again.

    ``make`` builds a fresh loop when called with the user's keywords; ``knobs`` maps our knob names to those keywords.
    ``behind`` is asked for the faults that other checks found and that explain a failure of this one; ``progress`` is
    told how far a long run is.
    """

    def __init__(
        self,
        make: Make,
        *,
        knobs: Mapping[str, str] | None = None,
        seed: int = 0,
        timeout: float = 120.0,
        device: str | None = None,
    ) -> None:
        self.make = make
        self.knobs = dict(knobs or {})
        self._seed = seed
        self._timeout = timeout
        self._on_cuda = device == "cuda"
        self._fixed = {self.knobs["device"]: device} if device is not None and "device" in self.knobs else {}
        self._records: dict[tuple[tuple[str, Any], ...], Record] = {}
        self._refused: dict[tuple[tuple[str, Any], ...], UsageError] = {}
        self._plans: dict[tuple[tuple[str, Any], ...], RunPlan] = {}
        self._repetition: Repetition | None = None
        self._one_batch: dict[int, OneBatch] = {}
        self._declared: dict[str, Any] = {}
        self._initial: dict[tuple[float, str, int], list[InitialLoss]] = {}
        self._contracts: Contracts | None = None
        self._offers: frozenset[str] | None = None
        self._origins: dict[str, Origin] = {}
        self.own_steps = 0
        self.options: Mapping[str, Any] = {}
        self.behind: Callable[[str], Sequence[Finding]] = lambda _check: ()
        self.progress: Progress = lambda step, most, loss: None

    @property
    def offers(self) -> frozenset[str]:
        """The fields of ``TrainLoop`` that were given; "fit" stands for fit or step, "run" for either of these or a
        loss."""
        if self._offers is None:
            self._offers = self._first_look()
        return self._offers

    def has_knob(self, name: str) -> bool:
        return name in self.knobs

    def declared(self, name: str) -> Any:
        """What the loop says of itself by ``nondeterministic=``, ``rows_interact=`` or ``expected_init_loss=``."""
        return self._declared.get(name) if self.offers else None

    def run(self, **knobs: Any) -> Record:
        """The watched run with these knobs, all others at their defaults."""
        _ = self.offers
        key = tuple(sorted(knobs.items()))
        if key in self._refused:
            raise self._refused[key]  # a loop that never ends would take its whole time again
        if key not in self._records:
            try:
                self._records[key] = self._long_enough(key, self._plan(knobs))
            except UsageError as refusal:
                self._refused[key] = refusal
                raise
        return self._records[key]

    def short_run(
        self,
        prepare: Callable[[Watch], None],
        names: Sequence[str],
        contexts: Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]] = lambda watch: (),
        *,
        double: bool = False,
    ) -> Record:
        """A run, on wish in float64, that ends once every optimizer that holds one of the named parameters has
        stepped."""
        wanted = set(names)

        def enough(record: Record) -> bool:
            if self.run().raised is not None:
                return record.rounds >= FULL_ROUNDS
            holders = [o for o in record.optimizers if any(p in o.parameters for p in _indices(self.run(), wanted))]
            if not holders:
                return record.rounds >= 1
            return all(o.steps >= 1 for o in holders) or record.rounds >= FULL_ROUNDS

        return self._counted(replace(self._plan({}), enough=enough, prepare=prepare, contexts=contexts, double=double))

    def dependence(self, names: Sequence[str]) -> dict[str, Dependence]:
        """Whether what the loop backpropagates changes when each of these parameters is moved."""
        from pytest_trainloop.gradients.dependence import dependence

        return dependence(self, names)

    def influence(self, names: Sequence[str]) -> dict[str, Dependence]:
        """The same where gradients arrive: by how much what is backpropagated changes when each is moved."""
        from pytest_trainloop.gradients.dependence import influence

        return influence(self, names)

    def cut(self, names: Sequence[str], kinds: set[Kind]) -> tuple[Cut | None, set[str]]:
        """The operation that keeps the gradient from these parameters, and which parameters entered some
        computation."""
        from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import find_cut

        return find_cut(self, names, kinds)

    def starts_at_saddle(self, names: Sequence[str]) -> dict[str, float]:
        """Parameters that start at zero where no gradient can leave, and the largest gradient entry that arrives once
        all weights are moved a little."""
        from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import starts_at_saddle

        return starts_at_saddle(self, names)

    def exposed(self, names: Sequence[str]) -> set[str]:
        """Those of the parameters whose result is given out and left unused with good reason."""
        from pytest_trainloop.checks.wiring.gradient_reaches_every_param.exposed_results import exposed

        return exposed(self, names)

    def double_run(self) -> Record:
        """The watched run in float64."""
        return self._once("double", lambda plan: replace(plan, double=True))

    def longer_run(self) -> Record:
        """A run of five times as many steps, most of them at light density: what moves seldom has moved in it."""
        return self._once("longer", lambda plan: replace(plan, count=5 * plan.count, enough=_many_rounds))

    def displaced_run(self, names: Sequence[str]) -> Record:
        """A run of thirteen times as many steps in which these parameters begin elsewhere."""
        from pytest_trainloop.checks.wiring.every_param_moves.displaced import displaced

        plan = replace(self._plans[()], prepare=displaced(names), enough=lambda r: r.rounds >= 13 * FULL_ROUNDS)
        return self._counted(replace(plan, count=13 * plan.count))

    def stirred_run(self, names: Sequence[str]) -> Record:
        """A run in which they begin elsewhere, at a far higher rate: what can move does."""
        from pytest_trainloop.checks.wiring.every_param_moves.displaced import RAISED, displaced
        from pytest_trainloop.runs.optimizer_options import times

        plan = replace(self._plans[()], prepare=displaced(names), contexts=times(RAISED), enough=_many_rounds)
        return self._counted(replace(plan, count=5 * plan.count))

    def run_without_decay(self) -> Record:
        """The watched run with the weight decay of every group at zero."""
        from pytest_trainloop.runs.weight_decay_off import without_decay

        return self._once("without decay", lambda plan: replace(plan, contexts=without_decay))

    def resting(self, paths: Sequence[str]) -> Resting:
        """What forward passes do to the modules below these paths."""
        from pytest_trainloop.checks.wiring.frozen_stays_frozen.buffers import Resting

        found = Resting(paths)
        self._run_under(found.contexts)
        return found

    def _run_under(self, contexts: Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]) -> None:
        """The watched run made once more inside these contexts, for what they see."""
        self.run()
        self._counted(replace(self._plans[()], contexts=contexts))

    def _once(self, name: str, change: Callable[[RunPlan], RunPlan]) -> Record:
        base = self.run()
        key = ((f"_{name}", base.items),)
        if key not in self._records:
            self._records[key] = self._counted(change(self._plans[()]))
        return self._records[key]

    def births(self) -> Births:
        """The watched run made once more, with every operation looked at for values that are not finite."""
        from pytest_trainloop.tracing.nonfinite import Births

        self.run()
        found, plan = Births(), self._plans[()]
        enough = lambda record: found.settled or plan.enough(record)  # noqa: E731
        self._counted(replace(plan, contexts=found.contexts, enough=enough))
        return found

    def one_batch(self, steps: int = MOST) -> OneBatch:
        """Runs on one fixed batch, of so many own steps at most."""
        from pytest_trainloop.checks.learning.one_batch import OneBatch

        if steps not in self._one_batch:
            seen = self.run()
            plan, other = self._plans[()], lambda plan: run(self.make, plan)
            made = OneBatch(seen, plan, self._counted, other, lambda *at: self.progress(*at), steps)
            self._one_batch[steps] = made
        return self._one_batch[steps]

    def initial_losses(self, scale: float = 1.0, of: Which = "all", other_seed: int = 0) -> list[InitialLoss]:
        """The calls of loss functions before the first step: some weights multiplied by this, under another seed."""
        from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLosses, scaled

        self.run()
        key = scale, of, other_seed
        if key not in self._initial:
            found, plan = InitialLosses(), self._plans[()]
            plan = replace(plan, contexts=found.contexts, enough=lambda r: r.rounds >= 1, seed=plan.seed + other_seed)
            self._counted(replace(plan, prepare=scaled(scale, of)))
            self._initial[key] = found.seen
        return self._initial[key]

    def initial_losses_of_unit_inputs(self) -> tuple[list[InitialLoss], float]:
        """The same with inputs of unit size, and the root mean square that the largest of them had."""
        from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLosses
        from pytest_trainloop.checks.loss.loss_at_init.unit_inputs import UnitInputs

        found, unit, plan = InitialLosses(), UnitInputs(), self._plans[()]
        plan = replace(plan, contexts=lambda watch: (*unit.contexts(watch), *found.contexts(watch)))
        self._counted(replace(plan, enough=lambda r: r.rounds >= 1))
        return found.seen, unit.largest

    def contracts(self) -> Contracts:
        """The watched run made once more, with every call of a loss function looked at."""
        from pytest_trainloop.checks.loss.loss_contract.recorder import Contracts

        if self._contracts is None:
            self.run()
            padding = self.declared("padding")
            found = Contracts(getattr(padding, "pad_id", None))
            record = self._counted(replace(self._plans[()], contexts=found.contexts, before_item=found.handed))
            if record.raised is not None and self.run().raised is None:
                found.unread.append(f"fit raised {record.raised.summary} only while they were looked at")
            self._contracts = found
        return self._contracts

    def further(self, kind: Further[T]) -> T:
        """What makes further runs of its own, from the watched run and how it was made."""
        seen = self.run()
        return kind(seen, self._plans[()], self._counted)

    def origins(self) -> Mapping[str, Origin]:
        """Of each weight matrix that trains, whether it was loaded or drawn."""
        return self._origins if self.offers else {}

    def loaded(self) -> bool:
        """Whether the weights that train are the same under another seed: loaded, and not drawn."""
        from pytest_trainloop.runs.build import same_under_other_seeds

        with preserved():
            return same_under_other_seeds(self.make, self._fixed, self._seed)

    def repetition(self) -> Repetition:
        """The run made once more: whether it is the same bit for bit, and if not, why."""
        from pytest_trainloop.checks.state.determinism.repeat import repetition

        if self._repetition is None:
            first = self.run()
            with preserved():
                self._repetition = repetition(first, self._plans[()], self._counted)
        return self._repetition

    def accumulation(self) -> Accumulation:
        """The runs over windows of micro-batches, against those over whole batches."""
        from pytest_trainloop.batches.micro_batches import MicroBatches
        from pytest_trainloop.checks.batch.accumulation_equivalence.runs import WINDOWS, Accumulation

        seen = self.run()
        with preserved():
            batches = MicroBatches.of(build(self.make, self._fixed, self._seed), seen, WINDOWS)
        return Accumulation(batches, self._plan, self._counted)

    def edges(self) -> Edges:
        """Runs over batches that an unlucky epoch would bring, composed of rows of the first."""
        from pytest_trainloop.checks.batch.edge_batches.runs import Edges

        seen = self.run()
        with preserved():
            loop = build(self.make, self._fixed, self._seed)
            windows = self._plan({"accumulate": 2}) if self.has_knob("accumulate") else None
            return Edges.of(loop, seen, self._plans[()], self._counted, windows)

    def padding(self) -> list[PaddingRuns]:
        """The runs over rows with more and with less padding, for each length to which something is padded."""
        from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns

        with preserved():
            loop = build(self.make, self._fixed, self._seed)
            try:
                return PaddingRuns.of(loop, self.run, self._plan({}), self._counted)
            except UsageError:
                self.run()  # which is refused in the same words for every check
                raise

    def _first_look(self) -> frozenset[str]:
        with preserved():
            first = build(self.make, self._fixed, self._seed)
            second = build(self.make, self._fixed, self._seed + 1)
            require_fresh(first, second)
            if self._on_cuda:
                require_on_cuda(first, self.knobs)
            self._origins = origins(first, second)
        self._declared = {
            name: getattr(first, name)
            for name in ("nondeterministic", "rows_interact", "expected_init_loss", "padding")
        }
        given = {name for name in TrainLoop.field_names() if getattr(first, name) is not None}
        if given & {"fit", "step"}:
            given.add("fit")
        if given & {"fit", "loss"}:
            given.add("run")
        return frozenset(given)

    def _plan(self, knobs: Mapping[str, Any]) -> RunPlan:
        unknown = [name for name in knobs if name not in self.knobs]
        if unknown:
            raise CannotDecide(
                f"the function has no knob {unknown[0]!r}: give it a keyword default, or map one with knobs={{...}}"
            )
        user = {self.knobs[name]: value for name, value in knobs.items()}
        accumulate = int(knobs.get("accumulate", 1))
        return RunPlan(
            knobs={**self._fixed, **user},
            seed=self._seed,
            seconds=self._timeout,
            count=FULL_ROUNDS + 1 if accumulate == 1 else WINDOWS * accumulate + 1,
            read_ahead=2 * accumulate + 8,
        )

    def _long_enough(self, key: tuple[tuple[str, Any], ...], plan: RunPlan) -> Record:
        """The run, made again with more batches where it read ahead or accumulated over more than it was given."""
        record = self._counted(plan)
        for count in READ_AHEAD_BUDGETS:
            if record.steps >= ENOUGH_ROUNDS or stepless(record) or not _could_step(record):
                break
            if record.raised is not None and not record.cut_short:
                break
            plan = replace(plan, count=count, read_ahead=None)
            record = self._counted(plan)
        self._plans[key] = plan
        return record

    def _counted(self, plan: RunPlan) -> Record:
        record = run(self.make, plan)
        self.own_steps += record.steps
        return record


def _many_rounds(record: Record) -> bool:
    return record.rounds >= 5 * FULL_ROUNDS


def _could_step(record: Record) -> bool:
    from pytest_trainloop.recording.events import Backward

    return (bool(record.of(Backward)) or record.raised is not None) and not record.moved_by_hand()


def _indices(record: Record, names: set[str]) -> set[int]:
    return {p.index for p in record.parameters if p.name in names}
