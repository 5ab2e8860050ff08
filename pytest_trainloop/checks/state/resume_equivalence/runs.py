"""The uninterrupted run, and the run that stops after its first half and goes on in a fresh loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested, places
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import (
    Checkpoint,
    Uncopied,
    random_states,
    random_states_are,
    states_among,
)
from pytest_trainloop.checks.state.resume_equivalence.loading import Loading, enabled_scalers, reached_by_functions
from pytest_trainloop.checks.state.resume_equivalence.names import declared_tensors, declared_weights, ties
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.reach.leaves import same_value
from pytest_trainloop.reach.snapshot import Snapshot, differences
from pytest_trainloop.reach.walk import Reach
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.runs.halves import halves, same_tensor
from pytest_trainloop.runs.hooks import before_calls, hooked
from pytest_trainloop.runs.process_state import seed_all
from pytest_trainloop.runs.user_traceback import raised as as_text
from pytest_trainloop.whose import present, project_may_raise, reraise_ours

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.reach.snapshot import Difference
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.halves import Halves

ELSEWHERE = 7919
"""Added to the seed before ``load`` where the checkpoint holds a random state: what it restores is seen by it."""


class Over(Exception):
    """Ends a run between its halves."""

    of_the_project = True  # the run is not broken by it


@dataclass(slots=True)
class SecondHalf:
    """What is seen of the half after the cut."""

    loop: TrainLoop | None = None
    stepped: dict[int, Any] = field(default_factory=dict)
    """Optimizers that step."""
    inputs: list[torch.Tensor] | None = None
    """What the first forward pass is given."""
    drawn: frozenset[str] = frozenset()
    """Whose generators are drawn from."""
    end: Snapshot | None = None
    held: frozenset[str] = frozenset()
    """Names of declared weights that the optimizers that step hold."""
    foreign: int = 0
    """Tensors that they hold besides."""
    _began: Mapping[str, Any] = field(default_factory=dict)

    def contexts(self, watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        yield self._looked_at_the_end(watch)
        yield hooked(before_steps(self._step))
        yield before_calls(watch, self._call)

    def begin(self, loop: TrainLoop, seed: int) -> None:
        """From here on; generators are about to be seeded so."""
        self.loop = loop
        seed_all(seed)
        self._began = random_states()

    @contextlib.contextmanager
    def _looked_at_the_end(self, watch: Watch) -> Iterator[None]:
        yield
        if self.loop is None:
            return
        self.drawn = frozenset(self._began) - random_states_are(self._began)
        with watch.suspended():
            self.end = Reach.of(self.loop).snapshot()
            names = {id(p): name for name, p in declared_weights(self.loop)}
            groups = [group for optimizer in self.stepped.values() for group in optimizer.param_groups]
            held = [p for group in groups for p in group["params"]]
            aliases: dict[int, list[str]] = {}
            for name, p in declared_weights(self.loop):
                aliases.setdefault(id(p), []).append(name)
            self.held = frozenset(name for p in held for name in aliases.get(id(p), ()))
            self.foreign = sum(id(p) not in names for p in held)
        self.stepped.clear()

    def _step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.loop is not None:
            self.stepped.setdefault(id(optimizer), optimizer)

    def _call(self, _module: Any, args: Any, kwargs: Any) -> None:
        if self.loop is not None and self.inputs is None:
            self.inputs = [t.detach().clone() for t in nested.tensors([args, kwargs])]


@dataclass(slots=True)
class Ended:
    """How a run ended."""

    made: Halves
    half: SecondHalf

    @property
    def raised(self) -> Raised | None:
        return self.made.record.raised


class Uninterrupted:
    """``fit(b1); save(); fit(b2)``, with everything as it was when it was saved.

    Raises ``CannotDecide`` where ``fit`` cannot be called twice.
    """

    def __init__(self, evidence: Evidence, *, double: bool, put_back: Collection[str] = (), bare: bool = False) -> None:
        self.evidence = evidence
        self._put_back = put_back
        self.checkpoint = Checkpoint(bare=bare)
        self.save_error: Raised | None = None
        self.unreadable = ""
        self._saved: Snapshot | None = None
        self.changed_by_save: list[Difference] = []
        self.ties: list[tuple[str, ...]] = []
        self.states: dict[str, Any] = {}
        """Random states as ``save`` began."""
        self.scales: dict[str, float] = {}
        """The scale of each gradient scaler by its path."""
        self.lines = {"save": "", "load": ""}
        """Where these two functions begin."""
        self.paths: dict[str, str] = {}
        """The paths of declared weights and buffers by name."""
        self.drifting: dict[str, str] = {}
        """Entries of the checkpoint that went on changing, with the path that the loop keeps them under, if any."""
        self._marks = not double
        self.double = double
        self.ended = self._run()

    @property
    def seed(self) -> int:
        return self.evidence.plan().seed + 1

    def _run(self) -> Ended:
        half = SecondHalf()

        def between(loop: TrainLoop, watch: Watch) -> None:
            with watch.suspended():
                if self._marks:
                    for scaler in enabled_scalers(Reach.of(loop)):
                        state = scaler.state_dict()
                        scaler.load_state_dict({**state, "scale": state["scale"] / 2})
                before = Reach.of(loop).snapshot()
            self.lines = {"save": line_of(loop.save), "load": line_of(loop.load)}
            self._save(loop)
            with watch.suspended():
                if self._put_back:
                    before.put_back(self._put_back)
                reach = Reach.of(loop)
                self._saved = reach.snapshot()
                self.scales = scales(reach)
                self.changed_by_save = differences(before, self.saved)
                self.ties = ties(loop)
                self.paths = {n: reach.path_of(t) for n, t in declared_tensors(loop)}
                weights = {address(t) for _, t in declared_tensors(loop)} - {0}
                own = ("weight", "buffer")
                self._kept = {
                    entry.path: reach.path_of(entry.live)
                    for entry in self.checkpoint.entries
                    if address(entry.live) in weights
                    and (leaf := reach.leaves.get(reach.path_of(entry.live))) is not None
                    and leaf.kind not in own
                }  # fmt: skip
                half.begin(loop, self.seed)

        made = halves(self.evidence, between, double=self.double, contexts=half.contexts)
        self.drifting = {entry.path: self._kept.get(entry.path, "") for entry in self.checkpoint.changed()}
        for entry in self.checkpoint.entries:
            object.__setattr__(entry, "live", entry.saved)
        return Ended(made, half)

    def _save(self, loop: TrainLoop) -> None:
        seed_all(self.seed)
        self.states = random_states()
        try:
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
    def cut(self) -> str:
        """What the snapshot of the loop leaves out; empty without one."""
        return "" if self._saved is None else self._saved.cut

    def values(self) -> dict[str, torch.Tensor]:
        """Declared weights and buffers by name, as they were saved."""
        return {name: self.saved.value(path) for name, path in self.paths.items() if path in self.saved.leaves}

    def require_two_halves(self) -> None:
        raised, steps = self.ended.raised, self.ended.made.steps
        if raised is not None:
            when = "called a second time" if self.ended.made.calls > 1 else "run again"
            raise CannotDecide(f"fit raised {raised.summary} when it was {when}")
        if not steps or not steps[0]:
            raise CannotDecide("fit made no optimizer step on its first batches")
        if not steps[-1]:
            raise CannotDecide(f"fit makes no optimizer step when it is called a second time{self._run_out()}")

    def _run_out(self) -> str:
        """The counter that may have ended the second call of ``fit``: a number that the first one moved to the value of
        another one; empty where there is none."""
        if self.saved is None:
            return ""
        saved, fresh = self.saved, Reach.of(self.evidence.fresh_loop()).snapshot()
        both = [p for p, leaf in saved.leaves.items() if leaf.kind == "scalar" and p in fresh.leaves]
        numbers = {p: saved.value(p) for p in both if type(saved.value(p)) is int}
        moved = {p: v for p, v in numbers.items() if v > 0 and fresh.value(p) != v}
        for path, value in moved.items():
            for limit, other in numbers.items():
                if limit not in moved and other == value:
                    return (
                        f": {path} is {value} by then, and so is {limit}, where fit may stop. Let the test's fit train "
                        f"on: set {limit} = {path} + {value} before it calls the trainer"
                    )
        return ""


class Resumed:
    """A fresh loop, ``load``, and the second half; with values of the uninterrupted run carried over in between.

    ``carry`` gives the paths to carry for what differs after ``load``. With ``steps`` False, or under another seed of
    building, no half is run.
    """

    def __init__(
        self,
        a: Uninterrupted,
        carry: Collection[str] = (),
        *,
        renewed: Renewed | None = None,
        other_seed: int = 0,
        steps: bool = True,
        evaluate: bool = False,
    ) -> None:
        self.a = a
        self.load_error: Raised | None = None
        self.unopened = ""
        """What ``load`` did not find, within the folder that ``save`` wrote to."""
        self._built: Snapshot | None = None
        self.loaded: Snapshot | None = None
        self.lost: list[Difference] = []
        self.ties: list[tuple[str, ...]] = []
        self.restored: frozenset[str] = frozenset()
        self.loading = Loading()
        self.kept_for_later: frozenset[str] = frozenset()
        """Of torch, numpy and python those whose random state the loop holds, to restore it when it trains."""
        self.set_alike: frozenset[str] = frozenset()
        """Paths of values that training has left as built and that ``load`` sets: the epoch to start from. The second
        half of the uninterrupted run began with them as they are built, and so does this one."""
        self.scales: dict[str, float] = {}
        self.numbers: list[float] = []
        """The numbers in what ``evaluate`` returned."""
        half = SecondHalf()

        def between(loop: TrainLoop, watch: Watch) -> None:
            with watch.suspended():
                self._built = Reach.of(loop).snapshot()
                before = reached_by_functions(loop)
            self._load(loop)
            with watch.suspended():
                self.loading.put_in_place(loop, before)
                reach = Reach.of(loop)
                self.loaded = reach.snapshot()
                self.scales = scales(reach)
                held = (
                    self.loaded.value(p) for p, leaf in self.loaded.leaves.items() if leaf.kind in ("tensor", "array")
                )
                self.kept_for_later = states_among(held, a.states) if a.checkpoint.random_states else frozenset()
                self.ties = ties(loop)
                self.lost = differences(a.saved, self.loaded)
                self.set_alike = self._for_resuming_alone()
                chosen = {*carry, *self.set_alike, *(renewed.among(self.lost) if renewed is not None else ())}
                if chosen:
                    a.saved.carry_over(reach, [d.leaf.path for d in self.lost if d.leaf.path in chosen])
            if evaluate and loop.evaluate is not None:
                seed_all(a.seed)
                with project_may_raise():  # evaluation_is_pure says so
                    self.numbers = list(_numbers(loop.evaluate()))
            if not steps:
                raise Over
            half.begin(loop, a.seed)

        made = halves(
            a.evidence, between, double=a.double, before=(), after=(1,), other_seed=other_seed, contexts=half.contexts
        )
        self.ended = Ended(made, half)

    def _load(self, loop: TrainLoop) -> None:
        seed_all(self.a.seed + (ELSEWHERE if self.a.checkpoint.random_states else 0))
        try:
            with self.loading.watched(loop, self.a.values()):
                self.a.checkpoint.give(loop)
        except Exception as error:  # of the project's load
            reraise_ours(error)
            self.load_error, self.ties = as_text(error), ties(loop)
            self.unopened = self.a.checkpoint.missing(getattr(error, "filename", None))
            raise Over from None
        self.restored = random_states_are(self.a.states)

    @property
    def built(self) -> Snapshot:
        """The loop before ``load``."""
        return present(self._built, "the loop before load()")

    def _for_resuming_alone(self) -> frozenset[str]:
        built = self.built
        return frozenset(
            d.leaf.path
            for d in self.lost
            if d.leaf.kind == "scalar" and d.how == "changed" and d.leaf.path in built.leaves
            and same_value(built.value(d.leaf.path), d.before)
        )  # fmt: skip

    def unequal(self) -> list[str]:
        """Names of weights and buffers that end with other values than in the uninterrupted run: those that training
        moves or a state dict holds. "fit" where it raised."""
        if self.ended.raised is not None:
            return ["fit"]
        a, b = self.a.ended.made, self.ended.made
        both = [name for name in self.a.paths if name in a.end and name in b.end and name not in self._apart()]
        return [name for name in both if not same_tensor(a.end[name], b.end[name])]

    def _apart(self) -> frozenset[str]:
        """Names of buffers that no state dict holds."""
        leaves = self.a.saved.leaves
        return frozenset(n for n, path in self.a.paths.items() if path in leaves and not leaves[path].persistent)


@dataclass(frozen=True, slots=True)
class Renewed:
    """What the project declares to begin anew."""

    names: tuple[str, ...] = ()

    def among(self, lost: list[Difference]) -> set[str]:
        """Paths of what differs and is declared."""
        return {d.leaf.path for d in lost if self.covers(d.leaf.path, d.leaf.kind)}

    def covers(self, path: str, kind: str) -> bool:
        return any(
            kind in RENEWABLE_KINDS.get(name, ()) or (name not in RENEWABLE_KINDS and _within(path, name))
            for name in self.names
        )


RENEWABLE_KINDS = {
    "optimizer": ("optimizer_state", "group_value"),
    "scheduler": ("scheduler", "group_value"),
    "scaler": ("scaler",),
    "rng": ("generator",),
}


def _within(path: str, name: str) -> bool:
    name = name.rstrip(".")
    inner = path.removeprefix("len(")
    return any(
        p == name or p.startswith((f"{name}.", f"{name}[", f"{name})")) for p in (inner, inner.removeprefix("model."))
    )


def scales(reach: Reach) -> dict[str, float]:
    return {reach.path_of(scaler): float(scaler.state_dict()["scale"]) for scaler in enabled_scalers(reach)}


def _numbers(result: Any) -> Iterator[float]:
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        for value in result:
            yield from _numbers(value)
    elif isinstance(result, torch.Tensor):
        yield from (float(n) for n in ([] if result.is_complex() else result.detach().flatten()[:1000].tolist()))
    elif isinstance(result, (int, float)) or hasattr(result, "item"):
        yield float(result)


def line_of(function: object) -> str:
    """The line where a function of the project's begins; empty for other callables."""
    code = places.code_of(function)
    if code is None or layer(code.co_filename) != 2:
        return ""
    return str(place_of(code.co_filename, places.first_line(code)))
