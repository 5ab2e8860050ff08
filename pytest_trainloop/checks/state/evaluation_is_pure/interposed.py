"""Runs with ``evaluate()`` at their cut, with some of what it leaves put back after it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.checks.state.evaluation_is_pure.changed_at import ChangedAt, Probe
from pytest_trainloop.checks.state.evaluation_is_pure.generators import Seed, global_states, noted_seeds
from pytest_trainloop.errors import UserCodeError
from pytest_trainloop.reach.copies import same_bits
from pytest_trainloop.reach.snapshot import Reach, differences
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import NOWHERE, here
from pytest_trainloop.runs.halves import halves
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.user_traceback import raised, user_error
from pytest_trainloop.whose import present, reraise_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from pytest_trainloop.finding import UserError
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.reach.snapshot import Difference, Snapshot
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.halves import Halves

CASTS = frozenset({"half", "bfloat16", "to", "type"})
"""Calls that cast a tensor to a lower precision."""

MOST_HELD = 4
"""Weights whose bits are looked for elsewhere."""


@dataclass(frozen=True, slots=True)
class Raised:
    """``evaluate()`` raised."""

    error: UserError
    kind: type[BaseException]
    where: str
    steps: int
    """Optimizer steps before it."""

    @property
    def before_first_step(self) -> bool:
        return self.steps == 0


class EvaluateRaised(UserCodeError):
    """Carries what ``evaluate()`` raised out of a run."""

    def __init__(self, what: Raised) -> None:
        super().__init__(what.error, one_check=True)
        self.what = what


@dataclass(slots=True)
class Seen:
    """What one run with ``evaluate()`` at its cut showed."""

    differences: list[Difference] = field(default_factory=list)
    stepped: list[Place] = field(default_factory=list)
    """The lines of the optimizer steps inside it."""
    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The paths that hold the bits of weights that differ, by the weight's."""
    inference: tuple[str, ...] = ()
    """Paths of inference tensors that were not there before."""
    entering: dict[str, object] = field(default_factory=dict)
    """The states of the global generators before it."""
    leaving: dict[str, object] = field(default_factory=dict)
    seeded: list[Seed] = field(default_factory=list)
    """Calls that seed a global generator, with their lines."""
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
    cut: str = ""
    """What the reach left out."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values before it of the leaves that were asked for."""
    broken: Exception | None = None
    """An exception of this package."""
    place: Place = NOWHERE


@dataclass(slots=True)
class Run:
    """A run and what was seen at its cut."""

    halves: Halves
    seen: Seen


class Interposed:
    """Makes the runs of one loop at one cut: between two calls of ``fit``, before the first step, inside one call."""

    def __init__(self, evidence: Evidence, *, double: bool, **options: Any) -> None:
        self._evidence = evidence
        self.double = double
        self._options = options

    def also(self, **options: Any) -> Interposed:
        """The same with further options of its runs."""
        return Interposed(self._evidence, double=self.double, **{**self._options, **options})

    def up_to_cut(self) -> Interposed:
        """The same without what comes after the cut, where ``fit`` is called anew there."""
        return self if self._options.get("inside") else self.also(after=())

    def run(
        self,
        put_back: Callable[[Difference], bool] = lambda difference: difference.leaf.kind == "generator",
        *,
        watched: Collection[str] = (),
        times: int = 1,
        displaced: bool = False,
        **options: Any,
    ) -> Run:
        """One run, with those of the differences put back of which ``put_back`` says so.

        ``watched`` are paths that the user's line is looked for at which one of them changes. ``times`` is how often
        ``evaluate()`` is called, ``displaced`` whether the weights are scaled before. Raises ``EvaluateRaised``.
        """
        seen = Seen()

        def between(loop: TrainLoop, watch: Watch) -> None:
            if displaced:
                _displace(loop, watch)
            _evaluate(loop, watch, seen, put_back, watched, times)

        given = {"double": self.double, **self._options, **options}
        with torch.inference_mode(mode=False):  # one that evaluation enters and never leaves ends here
            made = halves(self._evidence, between, **given)
        if seen.broken is not None:
            raise seen.broken
        return Run(made, seen)


def _evaluate(
    loop: TrainLoop,
    watch: Watch,
    seen: Seen,
    put_back: Callable[[Difference], bool],
    watched: Collection[str],
    times: int,
) -> None:
    with _ours(watch, seen):
        before = Reach.of(loop).snapshot()
        kept = _inference_tensors(before)
        seen.values = {path: before.value(path) for path in watched if path in before.leaves}
    seen.began = watch.tick()
    seen.entering = global_states()
    line = ChangedAt(Probe(watched, before, watch).changed)
    with _noted(seen), line.watching() if watched else contextlib.nullcontext():
        for _ in range(times):
            _call(loop, watch)
    seen.ended = watch.tick()
    seen.place = line.place
    seen.leaving = global_states()
    seen.inference_mode = torch.is_inference_mode_enabled()
    forwards = [f for f in watch.record.root_forwards() if f.at > seen.began]
    seen.tested = any(not f.training or f.in_eval for f in forwards)
    with _ours(watch, seen):
        reach = Reach.of(loop)
        after = reach.snapshot()
        seen.cut = reach.cut
        seen.differences = differences(before, after)
        seen.rounded = _add_rounded(seen.differences, before, after) if seen.casts else False
        seen.inference = tuple(path for path in _inference_tensors(after) if path not in kept)
        written = [d.leaf.path for d in seen.differences if d.leaf.kind == "weight" and d.how == "changed"]
        seen.holders = {path: reach.holders(reach.value(path)) for path in written[:MOST_HELD]}
        before.put_back([d.leaf.path for d in seen.differences if put_back(d)])


def _add_rounded(found: list[Difference], before: Snapshot, after: Snapshot) -> bool:
    """Add the weights that went through a lower precision and came back, by less than ``differences`` tells apart."""
    rounded = [
        d
        for d in differences(before, after, same=lambda a, b: not _came_back(a, b))
        if d.leaf.kind == "weight" and d.how == "changed"
    ]
    known = {d.leaf.path for d in found}
    found += [d for d in rounded if d.leaf.path not in known]
    return bool(rounded)


def _came_back(before: Any, after: Any) -> bool:
    """Whether ``after`` is ``before`` rounded to a lower precision."""
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.is_floating_point()):
        return False
    if before.dtype != after.dtype or before.layout != torch.strided or same_bits(before, after):
        return False
    return any(same_bits(before.to(low).to(before.dtype), after) for low in (torch.float16, torch.bfloat16))


def _displace(loop: TrainLoop, watch: Watch) -> None:
    """Turn the model around: its scores are others."""
    with watch.suspended(), torch.no_grad():
        for module in loop.modules.values():
            for parameter in members.parameters(module):
                if parameter.is_floating_point() and not torch.nn.parameter.is_lazy(parameter):
                    parameter.data.mul_(-1.5)


def _call(loop: TrainLoop, watch: Watch) -> None:
    evaluate = present(loop.evaluate, "TrainLoop.evaluate")
    try:
        evaluate()
    except (Exception, SystemExit) as error:  # of the project's evaluate
        reraise_ours(error)
        where = raised(error).place
        steps = watch.record.steps
        what = Raised(user_error(error, "evaluate"), type(error), str(where) if where.file else "", steps)
        raise EvaluateRaised(what) from error


@contextlib.contextmanager
def _ours(watch: Watch, seen: Seen) -> Iterator[None]:
    """Around code of this package inside a run: what it raises is no exception of ``fit``."""
    try:
        with watch.suspended():
            yield
    except Exception as error:  # raised behind the run
        seen.broken = error


@contextlib.contextmanager
def _noted(seen: Seen) -> Iterator[None]:
    """Note the steps, the seeds and the casts that are made inside."""

    def stepping(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        seen.stepped.append(here()[0])

    def setting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def set_default_dtype(*args: Any, **kwargs: Any) -> Any:
            seen.casts = True
            return original(*args, **kwargs)

        return set_default_dtype

    dtype = patched(torch, "set_default_dtype", setting)
    with hooked(before_steps(stepping)), noted_seeds(seen.seeded.append), dtype, _Casts(seen):
        yield


class _Casts(FunctionMode):
    """Notes whether a weight is cast."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in CASTS and args and isinstance(args[0], torch.nn.Parameter):
            asked = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)), None)
            self._seen.casts |= name in ("half", "bfloat16") or asked in (torch.float16, torch.bfloat16)
        return super().call(name, func, args, kwargs)


def _inference_tensors(snapshot: Snapshot) -> Collection[str]:
    """Paths of tensors made under ``torch.inference_mode()``, which no backward pass may use."""
    held = ((path, snapshot.object(path)) for path in snapshot.leaves)
    return [path for path, value in held if isinstance(value, torch.Tensor) and value.is_inference()]
