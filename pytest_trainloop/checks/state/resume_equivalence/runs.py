"""The uninterrupted run, and the run that stops after its first half and goes on in a fresh loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.resume_equivalence.causes import RENEWABLE
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import (
    Checkpoint,
    StateDictCall,
    Uncopied,
    calls_noted,
    enabled_scalers,
    put_in_place,
    random_states,
    reached_by_functions,
    standing_at,
    states_among,
    tensors_of,
    weights_of,
)
from pytest_trainloop.checks.state.resume_equivalence.state_calls import Call, calls_of_the_project
from pytest_trainloop.checks.state.two_runs import line_of, numbers_in
from pytest_trainloop.core.errors import CannotDecide, UsageError
from pytest_trainloop.core.whose import present, project_may_raise, reraise_ours
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.knobs import nearest
from pytest_trainloop.instruments.batches.values import plain
from pytest_trainloop.recording.events import ModeCall
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.samples import raw_bytes
from pytest_trainloop.recording.shards import address
from pytest_trainloop.runs.hooks import before_calls, hooked
from pytest_trainloop.runs.process_state import seed_all
from pytest_trainloop.runs.reachable_state.leaves import same_value
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences, empty_loop
from pytest_trainloop.runs.reachable_state.stored import StoredTensors
from pytest_trainloop.runs.split_run import halves, no_halves, same_tensor
from pytest_trainloop.runs.user_traceback import raised as as_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from pytest_trainloop.checks.state.two_runs import RunComparison
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.leaves import Leaf
    from pytest_trainloop.runs.reachable_state.snapshot import Difference, Snapshot
    from pytest_trainloop.runs.split_run import Halves

ELSEWHERE = 7919
"""Added to the seed before ``load`` where the checkpoint holds a random state: what it restores is seen by it."""

COUNTED = frozenset({"epoch", "step", "iter", "iteration", "update", "round"})
"""Words of a counter's name that its limit has as well."""

INTERVALS = frozenset({"every", "interval", "freq", "period", "warmup", "save", "log", "eval"})
"""Words of a number of epochs or steps at which something else is done."""

_TOUCHED = ("weight", "buffer", "mode", "requires_grad", "optimizer_state", "group_value")
"""Kinds that save must leave as they are, where training goes on with them."""


class Over(Exception):
    """Ends a run between its halves."""

    of_the_project = True  # the run is not broken by it


class Run:
    """One run, and what is seen of its half after the cut."""

    made: Halves
    """Set by the subclass, once the run is over."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.seed = evidence.plan().seed + 1
        self.at_end: Snapshot | None = None
        self.drawn = frozenset[str]()
        """Whose generators are drawn from."""
        self.held = frozenset[str]()
        """Names of declared weights that the optimizers that step hold."""
        self.foreign = 0
        """Tensors that they hold besides."""
        self.inputs: list[torch.Tensor] | None = None
        """What the first forward pass is given."""
        self.rows: set[int] | None = None
        """The rows of what all forward passes are given, where they are asked for."""
        self.ties: list[tuple[str, ...]] = []
        """Groups of names that share one weight at the cut."""
        self.scales: dict[str, float] = {}
        """The scale of each gradient scaler at the cut, by its path."""
        self.statements: list[Call] = []
        """What the project's own code called in ``save``, or in ``load``."""
        self._loop: TrainLoop | None = None
        self._stepped: dict[int, Any] = {}

    @property
    def raised(self) -> Raised | None:
        return self.made.record.raised

    def _contexts(self, watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        def step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if self._loop is not None:
                self._stepped.setdefault(id(optimizer), optimizer)

        def call(_module: Any, args: Any, kwargs: Any) -> None:
            if self._loop is None:
                return
            given = nested.tensors([args, kwargs])
            if self.inputs is None:
                self.inputs = [t.detach().clone() for t in given]
            if self.rows is not None:
                self.rows.update(row for tensor in given for row in rows_in(tensor))

        yield self._looked_at_the_end(watch)
        yield hooked(before_steps(step))
        yield before_calls(watch, call)

    def _begin(self, loop: TrainLoop) -> None:
        """The half after the cut begins."""
        self._loop = loop
        seed_all(self.seed)
        self._began = random_states()

    @contextlib.contextmanager
    def _looked_at_the_end(self, watch: Watch) -> Iterator[None]:
        yield
        if self._loop is None:
            return
        self.drawn = frozenset(self._began) - standing_at(self._began)
        with watch.suspended():
            self.at_end = Reach.of(self._loop).snapshot()
            names = _names_by_weight(self._loop)
            groups = (group for optimizer in self._stepped.values() for group in optimizer.param_groups)
            held = [id(p) for group in groups for p in group["params"]]
            self.held = frozenset(name for key in held for name in names.get(key, ()))
            self.foreign = sum(key not in names for key in held)
        self._loop, self._stepped = None, {}

    def _look_at_cut(self, loop: TrainLoop, reach: Reach) -> None:
        self.ties = ties_of(loop)
        self.scales = {reach.path_of(s): float(s.state_dict()["scale"]) for s in enabled_scalers(reach)}


class Uninterrupted(Run):
    """``fit(b1); save(); fit(b2)``, with everything as it was when it was saved.

    ``put_back`` are paths that are restored after ``save``.
    """

    def __init__(self, evidence: Evidence, *, double: bool, put_back: Collection[str] = (), bare: bool = False) -> None:
        super().__init__(evidence)
        self.double = double
        self.checkpoint = Checkpoint(bare=bare)
        self.save_error: Raised | None = None
        self.unreadable = ""
        """Why what ``save`` returned cannot be copied."""
        self._saved: Snapshot | None = None
        self.changed_by_save: list[Difference] = []
        self.states: dict[str, Any] = {}
        """Random states as ``save`` began."""
        self.lines = {"save": "", "load": ""}
        """Where these two functions begin."""
        self.paths: dict[str, str] = {}
        """The paths of declared weights and buffers by name."""
        self.mode_left = False
        """Whether modules were switched at the end of the first half, after its last backward pass."""
        kept: dict[str, str] = {}

        def between(loop: TrainLoop, watch: Watch) -> None:
            with watch.suspended():
                for scaler in [] if double else enabled_scalers(Reach.of(loop)):
                    state = scaler.state_dict()
                    scaler.load_state_dict({**state, "scale": state["scale"] / 2})
                before = Reach.of(loop).snapshot()
            backwards, switches = watch.record.backwards(), watch.record.of(ModeCall)
            self.mode_left = bool(backwards) and any(call.at > backwards[-1].at for call in switches)
            self.lines = {name: line_of(getattr(loop, name)) for name in self.lines}
            self._save(loop)
            with watch.suspended():
                if put_back:
                    before.put_back(put_back)
                reach = Reach.of(loop)
                self._saved = reach.snapshot()
                self.changed_by_save = differences(before, self.saved)
                self._look_at_cut(loop, reach)
                self.paths = {n: reach.path_of(t) for n, t in tensors_of(loop)}
                weights = {address(t) for _, t in tensors_of(loop)} - {0}
                for entry, live in self.checkpoint.live.items():
                    leaf = reach.leaves.get(reach.path_of(live)) if address(live) in weights else None
                    if leaf is not None and leaf.kind not in ("weight", "buffer"):
                        kept[entry] = leaf.path
                self._begin(loop)

        self.made = halves(evidence, between, double=double, contexts=self._contexts)
        changed = self.checkpoint.changed()
        self.drifting = {entry: kept[entry] for entry in changed if entry in kept}
        """Entries of the checkpoint that went on changing, with the path that the loop keeps them under."""
        self.snapshots = [s for s in (self._saved, self.at_end) if s is not None]
        empty_loop(self.snapshots)

    def _save(self, loop: TrainLoop) -> None:
        seed_all(self.seed)
        self.states = random_states()
        try:
            with calls_of_the_project(self.statements):
                self.checkpoint.take(loop)
        except Uncopied as error:
            self.unreadable = str(error)
            raise Over from None
        except Exception as error:  # of the project's save
            reraise_ours(error)
            self.save_error = as_text(error)
            raise Over from None

    @property
    def saved(self) -> Snapshot:
        """The loop as it was saved."""
        return present(self._saved, "the saved state")

    @property
    def stopped(self) -> bool:
        """Whether it did not come to its end."""
        steps = self.made.steps
        return bool(self.unreadable or self.save_error or self.raised or not (self.made.end and steps[-1]))

    def values(self) -> StoredTensors:
        """Declared weights and buffers by name, as they were saved."""
        copies = {name: self.saved.copies[path].raw for name, path in self.paths.items() if path in self.saved.leaves}
        return StoredTensors({name: copy for name, copy in copies.items() if copy is not None})

    def name_of(self, path: str) -> str:
        """A path; a declared weight or buffer by its plain name."""
        return next((name for name, own in self.paths.items() if own == path), path)

    def require_two_halves(self) -> None:
        """Raise ``CannotDecide`` where ``fit`` cannot be called twice."""
        steps = self.made.steps
        if self.raised is not None:
            when = "called a second time" if self.made.calls > 1 else "run again"
            raise CannotDecide(f"fit raised {self.raised.summary} when it was {when}")
        if not steps or not steps[0]:
            raise CannotDecide("fit made no optimizer step on its first batches")
        if not steps[-1]:
            raise CannotDecide(f"fit makes no optimizer step when it is called a second time{self._run_out()}")

    def _run_out(self) -> str:
        """The counter that may have ended the second call of ``fit``: a number that the first one moved to the value of
        another one, which counts the same by its name; empty where there is none."""
        saved, fresh = self.saved, Reach.of(self.evidence.fresh_loop()).snapshot()
        both = [p for p, leaf in saved.leaves.items() if leaf.kind == "scalar" and p in fresh.leaves]
        numbers = {p: saved.value(p) for p in both if type(saved.value(p)) is int}
        moved = {p: v for p, v in numbers.items() if v > 0 and fresh.value(p) != v}
        for path, value in moved.items():
            for limit, other in numbers.items():
                counted = _words(path) & _words(limit) & COUNTED
                if limit not in moved and other == value and counted and not _words(limit) & INTERVALS:
                    return (
                        f": {path} is {value} by then, and so is {limit}, where fit may stop. Let the test's fit train "
                        f"on: set {limit} = {path} + {value} before it calls the trainer"
                    )
        return ""


def _words(path: str) -> set[str]:
    """The words of an attribute's name, in the singular."""
    return {word.removesuffix("s") for word in path.rpartition(".")[2].lower().split("_")}


class Resumed(Run):
    """A fresh loop, ``load``, and the second half; with values of the uninterrupted run carried over in between.

    ``carry`` gives the paths to carry for what differs after ``load``. Without ``steps`` no half is run.
    """

    def __init__(
        self,
        a: Uninterrupted,
        renewed: Renewed,
        carry: Collection[str] = (),
        *,
        other_seed: int = 0,
        steps: bool = True,
        evaluate: bool = False,
        rows: bool = False,
    ) -> None:
        super().__init__(a.evidence)
        self.rows = set() if rows else None
        self.a, self.renewed = a, renewed
        self.load_error: Raised | None = None
        self.unopened = ""
        """What ``load`` did not find, within the folder that ``save`` wrote to."""
        self._built: Snapshot | None = None
        self.loaded: Snapshot | None = None
        self.lost: list[Difference] = []
        self.calls: list[StateDictCall] = []
        self.restored = frozenset[str]()
        """Of torch, numpy and python those whose random state ``load`` restored."""
        self.kept_for_later = frozenset[str]()
        """Those whose random state the loop holds, to restore it when it trains."""
        self.set_equal = frozenset[str]()
        """Paths of values that training has left as built and that ``load`` sets: the epoch to start from. The second
        half of the uninterrupted run began with them as they are built, and so does this one. Modes that load leaves
        as built, too, where an evaluation in fit has left others: it is for train_mode to say so."""
        self.numbers: list[float] = []
        """The numbers in what ``evaluate`` returned."""

        def between(loop: TrainLoop, watch: Watch) -> None:
            with watch.suspended():
                self._built = Reach.of(loop).snapshot()
                before = reached_by_functions(loop)
            self._load(loop)
            with watch.suspended():
                if put_in_place(loop, before):  # a model that load made is the loop's own since
                    self.calls = [StateDictCall(*call[:-1], elsewhere="") for call in self.calls]
                reach = Reach.of(loop)
                self.loaded = reach.snapshot()
                self._look_at_cut(loop, reach)
                if a.checkpoint.random_states:
                    kinds = ((path, leaf.kind) for path, leaf in self.loaded.leaves.items())
                    held = (self.loaded.value(path) for path, kind in kinds if kind in ("tensor", "array"))
                    self.kept_for_later = states_among(held, a.states)
                self.lost = differences(a.saved, self.loaded)
                self.set_equal = frozenset(d.leaf.path for d in self.lost if self._is_for_resuming_alone(d))
                chosen = {*carry, *self.set_equal, *(d.leaf.path for d in self.lost if renewed.covers(d.leaf))}
                if chosen:
                    a.saved.carry_over(reach, [d.leaf.path for d in self.lost if d.leaf.path in chosen])
            if evaluate and loop.evaluate is not None:
                seed_all(self.seed)
                with project_may_raise():  # evaluation_is_pure says so
                    self.numbers = list(numbers_in(loop.evaluate()))
            if not steps:
                raise Over
            self._begin(loop)

        given: dict[str, Any] = {"before": (), "after": (1,), "other_seed": other_seed, "contexts": self._contexts}
        self.made = halves(a.evidence, between, double=a.double, **given)
        empty_loop([s for s in (self._built, self.loaded, self.at_end) if s is not None], a.snapshots)

    def _load(self, loop: TrainLoop) -> None:
        seed_all(self.seed + (ELSEWHERE if self.a.checkpoint.random_states else 0))
        try:
            with calls_of_the_project(self.statements), calls_noted(self.calls, loop, self.a.values()):
                self.a.checkpoint.give(loop)
        except Exception as error:  # of the project's load
            reraise_ours(error)
            self.load_error, self.ties = as_text(error), ties_of(loop)
            self.unopened = self.a.checkpoint.missing(getattr(error, "filename", None))
            raise Over from None
        self.restored = standing_at(self.a.states)

    @property
    def built(self) -> Snapshot:
        """The loop before ``load``."""
        return present(self._built, "the loop before load()")

    def left_as_built(self, difference: Difference) -> bool:
        """Whether ``load`` has left a value as the fresh loop had it."""
        path = difference.leaf.path
        if path not in self.built.leaves:
            return difference.how == "vanished"
        return difference.how != "vanished" and same_value(self.built.value(path), difference.after)

    def _is_for_resuming_alone(self, d: Difference) -> bool:
        if d.leaf.kind == "mode" and self.a.mode_left:
            return self.left_as_built(d)
        known = d.leaf.kind == "scalar" and d.how == "changed" and d.leaf.path in self.built.leaves
        return known and same_value(self.built.value(d.leaf.path), d.before) and not self.is_decayed_lr(d)

    def is_decayed_lr(self, d: Difference) -> bool:
        """Whether a number that was the initial learning rate is that of the checkpoint after ``load``, with which the
        uninterrupted run goes on: a ``fit`` that sets the rate as it begins reads it there on purpose."""
        if not isinstance(d.before, float) or "scheduler" in self.renewed.names:
            return False
        lrs = [p for p, leaf in self.built.leaves.items() if leaf.kind == "group_value" and p.endswith("lr']")]
        steps = self.a.made.record.innermost_steps()[self.a.made.steps[0] :]
        return d.before in map(self.built.value, lrs) and bool(steps) and d.after in steps[0].lrs

    def unequal(self) -> list[str]:
        """Names of weights and buffers that end with other values than in the uninterrupted run: those that training
        moves or a state dict holds. "fit" where it raised."""
        if self.raised is not None:
            return ["fit"]
        mine, other, leaves = self.made.end, self.a.made.end, self.a.saved.leaves
        held = [n for n, path in self.a.paths.items() if path not in leaves or leaves[path].persistent]
        return [n for n in held if n in mine and n in other and not same_tensor(other[n], mine[n])]

    def candidates(self) -> dict[str, tuple[Difference, ...]]:
        """What differs after ``load``, by component: not what is declared in ``renews`` or set for resuming alone, nor
        what the loop's data alone lead to (how far they have come is no part of a checkpoint here)."""
        found: dict[str, list[Difference]] = {}
        for d in self.lost:
            if not (self.renewed.covers(d.leaf) or d.leaf.path in self.set_equal or d.leaf.reached_from == {"batches"}):
                found.setdefault(d.leaf.component, []).append(d)
        return {name: tuple(differences) for name, differences in found.items()}

    def again(self, carry: Collection[str] = (), **options: Any) -> Resumed:
        """The same with these paths carried over."""
        return Resumed(self.a, self.renewed, carry, **options)


class Renewed:
    """What the project declares in ``renews``. Raises ``UsageError`` for a name that nothing has."""

    def __init__(self, evidence: Evidence, saved: Snapshot) -> None:
        self.names = tuple(evidence.declared("renews") or ())
        for name in self.names:
            if name not in RENEWABLE and not any(_within(path, name) for path in saved.leaves):
                known = [*RENEWABLE, *(path for path in saved.places if not path.startswith("len("))]
                raise UsageError(f"TrainLoop.renews names {name!r}, which nothing has; {nearest(name, known)}")

    def covers(self, leaf: Leaf) -> bool:
        return any(leaf.kind in RENEWABLE[n] if n in RENEWABLE else _within(leaf.path, n) for n in self.names)


class Reported:
    """What was reported of one loop."""

    def __init__(self, _evidence: Evidence) -> None:
        self.courses: RunComparison | None = None
        """The resumed run compared with the uninterrupted one; None where nothing differs, or one of them raised."""


def both(evidence: Evidence) -> tuple[Uninterrupted, Resumed | None]:
    """The two runs in float64, where no scaler is used; in the loop's own precision where anything raises in float64.
    None for the second one where the first did not come to its end."""
    scaled = any(call.enabled for call in evidence.run().scaler_calls())
    for double in (False,) if scaled else (True, False):
        a = Uninterrupted(evidence, double=double)
        b = None if a.stopped else Resumed(a, Renewed(evidence, a.saved))
        if b is not None and b.unopened and a.checkpoint.files():  # the project may put the ending there itself
            other = Uninterrupted(evidence, double=double, bare=True)
            resumed = None if other.stopped else Resumed(other, b.renewed)
            if resumed is not None and not resumed.unopened:
                a, b, other = other, resumed, a
            other.checkpoint.remove()
        if not double or (b is not None and b.load_error is None and b.raised is None):
            break
        a.checkpoint.remove()
    return a, b


def changed_by_save(a: Uninterrupted) -> list[str]:
    """What save leaves changed, where training goes on otherwise for it. Raises ``CannotDecide`` where it does for
    something else."""
    touched = [d for d in a.changed_by_save if d.leaf.kind in _TOUCHED]
    if not touched:
        return []
    without = a.evidence.shared(no_halves)
    if without.double != a.double:
        without = halves(a.evidence, double=a.double)
    both_hold = without.end.keys() & a.made.end.keys()
    if not a.made.differ(without.end, both_hold):
        return []
    healed = Uninterrupted(a.evidence, double=a.double, put_back={d.leaf.path for d in touched})
    healed.checkpoint.remove()
    if healed.made.differ(without.end, without.end.keys() & healed.made.end.keys()):
        raise CannotDecide("training goes on otherwise after save() than without it, for what cannot be put back")
    return [a.name_of(d.leaf.path) for d in touched]


def _within(path: str, name: str) -> bool:
    name = name.rstrip(".")
    inner = path.removeprefix("len(")
    return any(
        p == name or p.startswith((f"{name}.", f"{name}[", f"{name})")) for p in (inner, inner.removeprefix("model."))
    )


def _names_by_weight(loop: TrainLoop) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in weights_of(loop):
        found.setdefault(id(parameter), []).append(name)
    return found


def ties_of(loop: TrainLoop) -> list[tuple[str, ...]]:
    """Groups of names that share one weight."""
    return [tuple(names) for names in _names_by_weight(loop).values() if len(names) > 1]


def rows_in(tensor: torch.Tensor) -> list[int]:
    """The rows of a tensor by digest, whatever its precision is."""
    if not plain(tensor) or not tensor.ndim:
        return []
    values = tensor.detach().cpu()
    return [hash(raw_bytes(row)) for row in (values.double() if values.is_floating_point() else values)]
