"""Runs with ``evaluate()`` at their cut, with some of what it leaves put back, and the line that changed it."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import functools
import random
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pytest_trainloop.checks.state.two_runs import numbers_in
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import UserCodeError
from pytest_trainloop.core.whose import present, reraise_ours
from pytest_trainloop.recording.changed_at import ChangedAt
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.samples import raw_bytes
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.reachable_state.copies import same_bits
from pytest_trainloop.runs.reachable_state.slots import MISSING, Entries, Hooks
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences
from pytest_trainloop.runs.reachable_state.walker import quiet, walk
from pytest_trainloop.runs.split_run import halves, same_tensor
from pytest_trainloop.runs.user_traceback import raised, user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.copies import Copy
    from pytest_trainloop.runs.reachable_state.snapshot import Difference, Snapshot
    from pytest_trainloop.runs.split_run import Halves

Moment = Literal["between", "first", "inside", "later"]
"""Where a run calls ``evaluate()``: between two calls of ``fit``, before the first step, between two steps of one
``fit``, between the sixth call of ``fit`` and the seventh."""

OPTIONS: dict[Moment, dict[str, Any]] = {
    "between": {},
    "first": {"before": (), "after": (0,)},
    "inside": {"inside": True},
    "later": {"before": (0,) * 6, "after": (1,) * 2},
}

MOST_HELD, MOST_PATHS, MOST_WALKS = 4, 4, 400
"""Weights whose bits are looked for elsewhere; values whose line is looked for; lines at which the loop is walked for
what was not there before."""

WANTED = (OSError, ImportError)
"""What an evaluation raises that wants something which is not there: a file that training writes, a package."""

SEEDS = ("torch.manual_seed", "torch.set_rng_state", "random.seed", "numpy.random.seed")

TORCH, NUMPY, PYTHON = "torch's generator", "numpy's generator", "python's generator"


class EvaluateRaised(UserCodeError):
    """What ``evaluate()`` raised, after so many optimizer steps."""

    def __init__(self, raised_by_it: BaseException, steps: int) -> None:
        super().__init__(user_error(raised_by_it, "evaluate"), one_check=True)
        place = raised(raised_by_it).place
        self.kind, self.steps, self.where = type(raised_by_it), steps, str(place) if place.file else ""


class Call(NamedTuple):
    """A call of a function of torch's, numpy's or Python's, with its line."""

    name: str
    where: str

    @property
    def generator(self) -> str:
        """The generator that it seeds."""
        return {"random": PYTHON, "np": NUMPY}.get(self.name.partition(".")[0], TORCH)


@dataclass(slots=True)
class Result:
    """What one call of ``evaluate()`` gave."""

    numbers: list[float] = field(default_factory=list)
    forwards: int = 0
    raised: EvaluateRaised | None = None
    used_up: tuple[str, ...] = ()
    """Paths of iterators that are at their end, where it called no module or fewer than before."""


@dataclass(slots=True)
class Run:
    """A run with ``evaluate()`` at its cut, and what was seen there."""

    halves: Halves = field(init=False)
    differences: list[Difference] = field(default_factory=list)
    stepped: list[str] = field(default_factory=list)
    """The lines of the optimizer steps inside it."""
    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The paths that hold the bits of weights that differ, by the weight's."""
    inference: tuple[str, ...] = ()
    """Paths of inference tensors that were not there before."""
    entering: dict[str, object] = field(default_factory=dict)
    """The states of the global generators before it."""
    leaving: dict[str, object] = field(default_factory=dict)
    seeded: list[Call] = field(default_factory=list)
    casts: bool = False
    """Whether it casts a weight to a lower precision or sets the default dtype: a run in float64 undoes that."""
    rounded: bool = False
    """Whether a weight came back rounded to a lower precision."""
    began: int = 0
    """The position in the record at which it began."""
    ended: int = 0
    tested: bool = False
    """Whether a module was called in evaluation mode."""
    inference_mode: bool = False
    """Whether it entered inference mode and did not leave it: no one else can."""
    cut_short: str = ""
    """What the reach left out."""
    result: Result = field(default_factory=Result)
    again: Result | None = None
    """Of another call, after the last step."""
    values: dict[str, Any] = field(default_factory=dict)
    """Copies of the leaves that were asked for, as they were before it (``value_of``)."""
    where: str = ""
    """The line that changed the first of them."""
    broken: Exception | None = None
    """An exception of this package."""


@dataclass(slots=True)
class Cut:
    """One moment at which ``evaluate()`` is called, and the run without it that others are compared with."""

    evidence: Evidence
    moment: Moment
    without: Halves
    bitwise: bool = False
    drawn_late: bool = False
    end: Mapping[str, torch.Tensor] = field(init=False)
    trained: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.without.cut if self.moment == "first" else self.without.end
        self.trained = self.without.trained()

    def same(self, a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        if self.bitwise:
            return a is not None and b is not None and same_bits(a, b)
        return same_tensor(a, b)

    def differs(self, run: Run) -> bool:
        """Whether training is another than without ``evaluate()``, or raises."""
        end = run.halves.end
        differ = (not self.same(end.get(name), self.end.get(name)) for name in self.trained)
        return run.halves.record.raised is not None or any(differ)

    def run(
        self,
        put_back: Callable[[Difference], bool] = lambda difference: difference.leaf.kind == "generator",
        *,
        watched: Collection[str] = (),
        to_cut: bool = False,
        times: int = 1,
        displaced: bool = False,
        again: bool = False,
        **options: Any,
    ) -> Run:
        """One run, with those of the differences put back of which ``put_back`` says so.

        ``watched`` are paths: it is noted which line changes the first of them. ``to_cut`` leaves out what comes after
        the cut, where ``fit`` is called again there. ``times`` is how often ``evaluate()`` is called, ``displaced``
        whether the weights are scaled before, ``again`` whether it is also called after the last step. Raises
        ``EvaluateRaised``.
        """
        seen = Run()

        def between(loop: TrainLoop, watch: Watch) -> None:
            if displaced:  # turned around, the model has other scores
                with watch.suspended(), torch.no_grad():
                    for parameter in (p for module in loop.modules.values() for p in members.parameters(module)):
                        if parameter.is_floating_point() and not torch.nn.parameter.is_lazy(parameter):
                            parameter.data.mul_(-1.5)
            with _ours(watch, seen):
                before = Reach.of(loop).snapshot()
                known = _inference_tensors(before)
                seen.values = {path: before.copies[path].raw for path in watched if path in before.leaves}
            seen.began, seen.entering = watch.tick(), global_states()
            line = ChangedAt(Probe(watched, before, watch).changed)
            with _noted(seen), line.watching() if watched else contextlib.nullcontext():
                for _ in range(times):
                    seen.result = evaluated(loop, watch)
            seen.ended, seen.leaving, seen.where = watch.tick(), global_states(), line.where
            seen.inference_mode = torch.is_inference_mode_enabled()
            forwards = [f for f in watch.record.root_forwards() if f.at > seen.began]
            seen.tested = any(not f.training or f.in_eval for f in forwards)
            with _ours(watch, seen):
                reach = Reach.of(loop)
                after = reach.snapshot()
                seen.cut_short, seen.differences = reach.cut, differences(before, after)
                if seen.casts:  # by less than ``differences`` tells
                    small = differences(before, after, same=lambda a, b: not _came_back(a, b))
                    small = [d for d in small if d.leaf.kind == "weight" and d.how == "changed"]
                    listed = {d.leaf.path for d in seen.differences}
                    seen.rounded = bool(small)
                    seen.differences += [d for d in small if d.leaf.path not in listed]
                seen.inference = tuple(path for path in _inference_tensors(after) if path not in known)
                written = [d.leaf.path for d in seen.differences if d.leaf.kind == "weight" and d.how == "changed"]
                seen.holders = {path: reach.holders(reach.value(path)) for path in written[:MOST_HELD]}
                before.put_back([d.leaf.path for d in seen.differences if put_back(d)])

        def at_end(loop: TrainLoop, watch: Watch) -> None:
            try:
                seen.again = evaluated(loop, watch)
            except EvaluateRaised as error:
                seen.again = Result(raised=error)
            if not seen.again.forwards or seen.again.forwards < seen.result.forwards:
                with _ours(watch, seen):
                    seen.again.used_up = tuple(used_up(loop))

        options |= {"at_end": at_end} if again else {}
        given = {"double": self.without.double, "drawn_late": self.drawn_late, **OPTIONS[self.moment], **options}
        if to_cut and self.moment != "inside":
            given["after"] = ()
        with torch.inference_mode(mode=False):  # one that evaluation enters and never leaves ends here
            seen.halves = halves(self.evidence, between, **given)
        if seen.broken is not None:
            raise seen.broken
        return seen


def evaluated(loop: TrainLoop, watch: Watch) -> Result:
    """Call ``evaluate()``."""
    began = watch.tick()
    try:
        returned = present(loop.evaluate, "TrainLoop.evaluate")()
    except (Exception, SystemExit) as error:  # of the project's evaluate
        reraise_ours(error)
        raise EvaluateRaised(error, watch.record.steps) from error
    with watch.suspended():
        return Result(list(numbers_in(returned)), sum(f.at > began for f in watch.record.root_forwards()))


def used_up(loop: TrainLoop) -> Iterator[str]:
    """The iterators that ``evaluate`` leads to and that give nothing more."""
    bare = copy.copy(loop)
    bare.fit = bare.step = bare.loss = bare.batches = None
    for path, place in Reach.of(bare).walked.places.items():
        if isinstance(place.value, collections.abc.Iterator):
            try:
                ended = next(place.value, path) is path
            except Exception as error:  # of the project's iterator
                reraise_ours(error)
                continue
            if ended:
                yield path


@contextlib.contextmanager
def _ours(watch: Watch, seen: Run) -> Iterator[None]:
    """Around code of this package inside a run: what it raises is no exception of ``fit``."""
    try:
        with watch.suspended():
            yield
    except Exception as error:  # raised behind the run
        seen.broken = error


def _came_back(before: Any, after: Any) -> bool:
    """Whether ``after`` is ``before`` rounded to a lower precision."""
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.is_floating_point()):
        return False
    if before.dtype != after.dtype or before.layout != torch.strided or same_bits(before, after):
        return False
    return any(same_bits(before.to(low).to(before.dtype), after) for low in (torch.float16, torch.bfloat16))


def _inference_tensors(snapshot: Snapshot) -> Collection[str]:
    """Paths of tensors made under ``torch.inference_mode()``, which no backward pass may use."""
    held = ((path, snapshot.object(path)) for path in snapshot.leaves)
    return [path for path, value in held if isinstance(value, torch.Tensor) and value.is_inference()]


@contextlib.contextmanager
def _noted(seen: Run) -> Iterator[None]:
    """Note the steps, the seeds and the casts that are made inside."""

    def widens(_call: Call) -> None:
        seen.casts = True

    steps = hooked(before_steps(lambda *_: seen.stepped.append(_where())))
    with steps, noted_calls(SEEDS, seen.seeded.append), noted_calls(("torch.set_default_dtype",), widens), _Casts(seen):
        yield


class _Casts(FunctionMode):
    """Notes whether a weight is cast."""

    def __init__(self, seen: Run) -> None:
        super().__init__()
        self._seen = seen

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("half", "bfloat16", "to", "type") and args and isinstance(args[0], torch.nn.Parameter):
            asked = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)), None)
            self._seen.casts |= name in ("half", "bfloat16") or asked in (torch.float16, torch.bfloat16)
        return super().call(name, func, args, kwargs)


def _where() -> str:
    place = here()[0]
    return str(place) if place.file else ""


def global_states() -> dict[str, object]:
    """The states of the global generators, to be compared."""
    states: dict[str, object] = {TORCH: raw_bytes(torch.get_rng_state()), PYTHON: hash(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["CUDA's generator"] = b"".join(raw_bytes(state) for state in torch.cuda.get_rng_state_all())
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states[NUMPY] = (keys.tobytes(), *rest)
    return states


@contextlib.contextmanager
def noted_calls(functions: Iterable[str], note: Callable[[Call], None]) -> Iterator[None]:
    """Call ``note`` for each call of these functions."""

    def noting(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def called(*args: Any, **kwargs: Any) -> Any:
                note(Call(f"{name}()".replace("numpy", "np"), _where()))
                return original(*args, **kwargs)

            return called

        return around

    with Patches() as patches:
        for function in functions:
            module, _, name = function.rpartition(".")
            if module in sys.modules:
                patches.put(sys.modules[module], name, noting(function))
        yield


class Probe:
    """Whether one of some leaves is no longer as it was in a snapshot of the same loop."""

    def __init__(self, paths: Collection[str], before: Snapshot, watch: Watch) -> None:
        chosen = list(paths)[:MOST_PATHS]
        self._loop, self._watch, self._walks = before.walked.loop, watch, MOST_WALKS
        known = [before.copies[path] for path in chosen if path in before.copies]
        self._switches = [copy for copy in known if copy.place.kind == "switch"]
        self._known = [(copy, copy.value) for copy in known if copy.place.kind != "switch"]
        self._appearing = {path for path in chosen if path not in before.copies}
        weights = [path.removesuffix(".grad") for path in self._appearing if path.endswith(".grad")]
        self._parameters = [before.object(path) for path in weights if path in before.places]
        if self._parameters:
            self._appearing = set()

    def changed(self) -> bool:
        if any(c.place.slot is not None and c.place.slot.get() != c.value for c in self._switches):  # quiet() sets one
            return True
        with self._watch.suspended(), quiet():
            if any(_is_other(*known) for known in self._known) or any(p.grad is not None for p in self._parameters):
                return True
            if not self._appearing or self._walks <= 0:
                return False
            self._walks -= 1
            return not self._appearing.isdisjoint(walk(self._loop).leaves)


def _is_other(known: Copy, value: Any) -> bool:
    slot, was = known.place.slot, known.place.value
    above = known.place.within
    while above is not None:
        if not isinstance(above.slot, (Entries, Hooks, type(None))) and above.slot.get() is not above.value:
            return True
        above = above.within
    now = was if slot is None else slot.get()
    if isinstance(slot, (Entries, Hooks)):
        return len(now) != len(known.kept)
    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
        return not same_bits(now, value)
    if now is MISSING or type(now) is not type(was):
        return True
    if hasattr(now, "tobytes") and hasattr(value, "tobytes"):
        return bool(now.tobytes() != value.tobytes())
    return now is not was and bool(now != was)
