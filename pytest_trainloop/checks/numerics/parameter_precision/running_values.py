"""Running averages outside of modules' parameters (a dict of shadow weights, buffers of statistics) that are kept in a
low precision, and whose updates rounding takes back.

Such a value keeps its bits from step to step, float64 moves it at every step, and displaced it does not come back: its
update is below half a ULP however far it is from what it averages.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.optimizers.lost_updates import spaced_by_index
from pytest_trainloop.optimizers.spacing import spacings
from pytest_trainloop.reach.walk import Reach
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ADDITIONS
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Values = dict[str, torch.Tensor]
"""Sampled entries by the path of the tensor."""

LOW = (torch.bfloat16, torch.float16)

_UPDATES = ADDITIONS | {"add_", "__iadd__", "iadd", "lerp", "lerp_", "copy_", "_foreach_lerp_", "_foreach_add_"}

HALF = 0.5
"""Share of a value's entries that must keep their bits."""

LEAST_STEPS = 4

LONGER = 5
"""Times as many steps for a displaced value to come back."""

AWAY = 1 / 8
"""By which share of its size it is displaced: 16 ULPs of bfloat16 or more."""


@dataclass(frozen=True, slots=True)
class LostAverage:
    """Running values in one dtype that never move."""

    names: tuple[str, ...]
    dtype: str
    steps: int
    largest: float
    """Largest change of an entry that one update makes in float64."""
    ulp: float
    """Median ULP of the first one's entries."""
    displaced: int
    """Steps after which it had not come back."""
    place: str
    """The line of an update that is lost."""


class RunningValues:
    """Low-precision tensors that the loop's functions hold, over runs as they are, in float64 and from elsewhere."""

    def __init__(self, evidence: Evidence) -> None:
        record = evidence.run()
        self._plan, self._rerun = evidence.plan(), evidence.rerun
        self._place = ""
        self._trained = {record.parameters[i].shape for i in record.held}
        loop = evidence.fresh_loop()
        self.candidates = {path: str(t.dtype).removeprefix("torch.") for path, t in self._held(loop) if t.dtype in LOW}

    def _held(self, loop: TrainLoop) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that are neither an optimizer's, nor a gradient, nor data; of parameters those of a copy that is not
        declared as the model."""
        reach = Reach.of(loop)
        declared = {id(p) for module in loop.modules.values() for p in members.parameters(module)}
        for path, leaf in reach.leaves.items():
            if leaf.kind not in ("tensor", "buffer", "weight"):
                continue
            value = reach.value(path)
            if not isinstance(value, torch.Tensor) or value.requires_grad or not readable(value) or not value.numel():
                continue
            if leaf.kind != "weight" or (id(value) not in declared and tuple(value.shape) in self._trained):
                yield path, value

    def lost(self) -> list[LostAverage]:
        """Those that never move, by dtype."""
        if not self.candidates:
            return []
        low = self._over_steps(self.candidates)
        resting = {path for path in self.candidates if _rests([step.get(path) for step in low])}
        if len(low) < LEAST_STEPS or not resting:
            return []
        wide = self._over_steps(resting, double=True, may_raise=True)
        moving = {path for path in resting if _moves([step.get(path) for step in wide])}
        staying, rounds = self._staying(moving) if moving else (set[str](), 0)
        found = []
        for dtype in sorted({self.candidates[path] for path in staying}):
            names = tuple(sorted(path for path in staying if self.candidates[path] == dtype))
            largest = max(_largest([step[path] for step in wide]) for path in names)
            ulp = float(spacings(low[0][names[0]].double(), dtype).median())
            found.append(LostAverage(names, dtype, len(low), largest, ulp, rounds, self._place))
        return found

    def _over_steps(self, paths: Any, **changes: Any) -> list[Values]:
        """The values before each step, and at the end."""
        loops, found = list[Any](), list[Values]()

        def look(*_call: Any) -> None:
            if len(found) < FULL_ROUNDS:
                found.append(self._values(loops[0], paths))

        @contextlib.contextmanager
        def watching(watch: Watch) -> Iterator[None]:
            def at_step(*_call: Any) -> None:
                if not watch.is_suspended:
                    with watch.suspended():
                        look()

            with hooked(before_steps(at_step)):
                yield

        self._rerun(fit=self._fit(loops), contexts=lambda watch: (watching(watch),), **changes)
        look()
        return found

    def _staying(self, paths: set[str]) -> tuple[set[str], int]:
        """Those that do not come back from an eighth of their size away."""
        loops, starts, writes = list[Any](), list[Values](), _LostWrite()

        def displaced(loop: TrainLoop) -> None:
            reach = Reach.of(loop)
            with torch.no_grad():
                for path in paths:
                    _displace(reach.value(path))
                    writes.kept.append(reach.value(path).detach().clone())
            starts.append(self._values(loop, paths))

        record = self._rerun(
            fit=self._fit(loops, displaced),
            contexts=writes.contexts,
            count=LONGER * self._plan.count,
            enough=lambda record: record.rounds >= LONGER * FULL_ROUNDS,
        )
        if record.rounds < LONGER * FULL_ROUNDS // 2:
            return set(), record.rounds
        end, self._place = self._values(loops[0], paths), writes.place
        return {p for p in paths if _rests([starts[0].get(p), end.get(p)])}, record.rounds

    def _fit(self, loops: list[Any], before: Callable[[Any], None] = lambda loop: None) -> Callable[[Any], Any]:
        def fit(loop: TrainLoop) -> Callable[[Any], Any]:
            loops.append(loop)
            before(loop)
            return self._plan.fit(loop)

        return fit

    def _values(self, loop: TrainLoop, paths: Any) -> Values:
        reach, found = Reach.of(loop), {}
        with torch.no_grad():
            for path in paths:
                if path in reach.leaves and isinstance(value := reach.value(path), torch.Tensor) and readable(value):
                    found[path] = spaced_by_index(value.detach()).clone()
        return found


class _LostWrite(WatchingMode):
    """Notes the first line that computes what one of these tensors holds already."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.place = ""

    def active(self) -> bool:
        """Until one was found."""
        return not self.place and bool(self.watch.record.steps) and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name in _UPDATES and isinstance(out, torch.Tensor) and out.dtype in LOW:
            with self.watch.suspended(), torch.no_grad():
                same = (k for k in self.kept if k.shape == out.shape and k.dtype is out.dtype)
                if any(float((k == out).double().mean()) >= HALF for k in same):
                    self.place = str(here()[0])
        return out


def _displace(value: torch.Tensor) -> None:
    """Move each entry by an eighth of its size and leave it between the same two powers of 2: its ULP stays."""
    larger = value * (1.0 + AWAY)
    crosses = torch.frexp(larger.float()).exponent != torch.frexp(value.float()).exponent
    value.copy_(torch.where(crosses, value / (1.0 + AWAY), larger))


def _rests(steps: list[torch.Tensor | None]) -> bool:
    """Whether most entries that are not zero keep their bits over all steps."""
    first = steps[0]
    if first is None or any(s is None or s.shape != first.shape for s in steps):
        return False
    same = torch.ones_like(first, dtype=torch.bool)
    for step in steps[1:]:
        same &= step == first
    return float((same & (first != 0)).double().mean()) >= HALF


def _moves(steps: list[torch.Tensor | None]) -> bool:
    """Whether most entries change at every step but the first, before which an average may not have begun."""
    known = [s for s in steps if s is not None and s.dtype is torch.float64]
    if len(known) < max(LEAST_STEPS, len(steps)):
        return False
    changes = [float((b != a).double().mean()) for a, b in itertools.pairwise(known[1:])]
    return all(share > HALF for share in changes)


def _largest(steps: list[torch.Tensor]) -> float:
    return max(float((b - a).abs().max()) for a, b in itertools.pairwise(steps))
