"""Optimizers of unknown arithmetic, compared with a float32 twin on the same gradient, step after step.

Such an optimizer may keep what rounding takes (Kahan summation, stochastic rounding, master weights). Once float32 has
gone several ULPs of the weight's dtype, all of these have moved the weight as well; an optimizer that stores the
rounded sum has not, and never will. The twin computes in float32 and not in float64, because code with its own rounding
works on the bits of float32 numbers.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import memory_layout
from pytest_trainloop.instruments.optimizers.lost_updates import EntryUpdates, LostUpdates, spaced_by_index, summed
from pytest_trainloop.instruments.optimizers.replay import kind_of, step
from pytest_trainloop.instruments.optimizers.spacing import lr_growth, spacings
from pytest_trainloop.recording.function_mode import OperationMode
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import has_step_hooks, is_patched_by_scheduler
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

HALVES = (torch.bfloat16, torch.float16)

START = 3
"""The step at which an optimizer is copied: its state exists by then."""

FAR = 4.0
"""ULPs that float32 goes before an entry with unchanged bits counts as lost. Rounding to nearest moves whatever is
stored exactly by half a ULP; one more may be lost on either side of a power of two, where the ULP doubles. Stochastic
rounding leaves an entry that is due to move by four ULPs unchanged with probability e^-4 at most, and never nearly all
entries of a tensor."""

MOST_STEPS = 256
"""A tensor that needs more steps to go so far is not judged."""

TRIED = 8
"""Steps in float32 that are made to estimate how many are needed."""

MOST_ENTRIES = 8_000_000
"""An optimizer that refers to more, state and all, is not copied."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of an optimizer and of all that it refers to."""

    optimizer: Any
    held: dict[int, torch.Tensor]
    """Its parameters, by index of the original."""

    def step(self, grads: Mapping[int, torch.Tensor], steps: int) -> None:
        for _ in range(steps):
            for index, p in self.held.items():
                p.grad = grads[index].to(p.dtype, copy=True)
            step(self.optimizer)

    def values(self) -> dict[int, torch.Tensor]:
        return {index: spaced_by_index(p.detach()).clone() for index, p in self.held.items()}


class Float32Twins:
    """A short run in which every optimizer whose steps cannot be repeated entry by entry is copied twice at its third
    step, once into float32."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._rerun = evidence.run(), evidence.rerun
        self._found: dict[int, tuple[int, EntryUpdates]] = {}

    def lost_updates(self, names: Collection[str], dtypes: Collection[str]) -> list[LostUpdates]:
        """By parameter, where float32 goes far enough for a verdict: ``updates`` counts the entries that it moves that
        far, ``lost`` those of them with unchanged bits."""
        kinds = {getattr(torch, dtype) for dtype in dtypes}
        record = self._rerun(
            enough=lambda so_far: so_far.rounds > START, contexts=lambda watch: (self._watching(watch, kinds),)
        )
        found = []
        for index, (steps, one) in self._found.items():
            p, update = record.parameters[index], float(one.due[one.counted].abs().median()) / steps
            if p.name in names:
                found.append(summed(p, [one], steps=steps, update=update, from_twin=True))
        return found

    @contextlib.contextmanager
    def _watching(self, watch: Watch, kinds: set[torch.dtype]) -> Iterator[None]:
        steps: dict[int, int] = {}
        comparing = False

        def look(optimizer: Any) -> None:
            nonlocal comparing
            if comparing:  # an optimizer inside the one that is copied
                return
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            if steps[id(optimizer)] == START and _unknown(optimizer) and _low_among(optimizer, kinds):
                comparing = True
                try:
                    with torch.random.fork_rng(_devices(optimizer)):
                        self._compare(watch, optimizer, kinds)
                except Exception as error:  # of a step of the project's own optimizer
                    watch.record.note_mistake(error)
                comparing = False

        with around_steps(watch, look, lambda _optimizer, _none: None):
            yield

    def _compare(self, watch: Watch, optimizer: Any, kinds: set[torch.dtype]) -> None:
        grads = {
            index: p.grad.detach().clone()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (index := watch.table.index(p)) is not None
        }
        factors = [_growth(self._seen, watch, group) for group in optimizer.param_groups]
        if not all(map(math.isfinite, factors)):
            return
        low, twin = (_copied(watch, optimizer, grads, factors) for _ in range(2))
        _to_float32(vars(twin.optimizer))
        before = low.values()
        judged = [i for i, entries in before.items() if entries.dtype in kinds]
        with _NoHalves():
            twin.step(grads, TRIED)
            tried = twin.values()
            needed = [math.ceil(TRIED * FAR * 2 / m) for i in judged if (m := _median_ulps(before[i], tried[i]))]
            steps = max((n for n in needed if n <= MOST_STEPS), default=0)
            twin.step(grads, max(0, steps - TRIED))
        low.step(grads, max(steps, TRIED))
        after, due = low.values(), twin.values()
        for i in judged:
            one = _updates(before[i], after[i], due[i])
            if bool(one.counted.any()):
                self._found[i] = max(steps, TRIED), one


def _unknown(optimizer: Any) -> bool:
    """Whether its steps cannot be repeated entry by entry, and no hooks or wrappers of its own do a part of them."""
    patched = vars(optimizer).get("step")
    wrapped = patched is None or is_patched_by_scheduler(patched)
    return kind_of(optimizer) is None and not has_step_hooks(optimizer) and wrapped


def _low_among(optimizer: Any, kinds: set[torch.dtype]) -> bool:
    low = any(p.dtype in kinds for group in optimizer.param_groups for p in group["params"])
    return low and sum(t.numel() for t in _reached(vars(optimizer))) <= MOST_ENTRIES


def _devices(optimizer: Any) -> set[torch.device]:
    return {p.device for group in optimizer.param_groups for p in group["params"] if p.is_cuda}


def _growth(seen: Record, watch: Watch, group: Mapping[str, Any]) -> float:
    """The factor by which a warm-up still raises the learning rate of this group."""
    indices = [watch.table.index(p) for p in group["params"]]
    return max((lr_growth(seen, i) for i in indices if i is not None), default=1.0)


def _copied(watch: Watch, optimizer: Any, grads: Collection[int], factors: list[float]) -> _Copy:
    """A copy of all attributes: the class's own ``__getstate__`` keeps groups and state only."""
    fresh = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): fresh}
    vars(fresh).update(copy.deepcopy(vars(optimizer), memo))
    for group, factor in zip(fresh.param_groups, factors, strict=True):
        if factor != 1.0 and group.get("lr") is not None:
            group["lr"] = group["lr"] * factor
    held = {
        index: memo[id(p)]
        for group in optimizer.param_groups
        for p in group["params"]
        if (index := watch.table.index(p)) is not None and index in grads and id(p) in memo
    }
    return _Copy(fresh, held)


def _median_ulps(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far the median entry that moves at all goes, in ULPs of the dtype before."""
    distance = (after.double() - before.double()).abs()
    moved = distance[distance > 0] / spacings(before.double(), _name(before))[distance > 0]
    return float(moved.median()) if moved.numel() else 0.0


def _updates(before: torch.Tensor, after: torch.Tensor, twin: torch.Tensor) -> EntryUpdates:
    start = before.double()
    due = twin - start
    ulp = torch.maximum(spacings(start, _name(before)), spacings(twin, _name(before)))
    far = due.isfinite() & (due.abs() >= FAR * ulp)
    return EntryUpdates(start, due, after.double(), counted=far, lost=far & (after == before), ulp=ulp)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _NoHalves(OperationMode):  # type: ignore[no-untyped-call]
    """Replaces every half-precision dtype among the arguments of an operation by float32."""

    changes = True

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return passed_on(func, tuple(map(_dtype, args)), {name: _dtype(value) for name, value in kwargs.items()})


def _dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value


def _to_float32(root: Any) -> None:
    """Convert every half-precision tensor that is reached through containers and attributes, in place."""
    memory_layout.cast(_reached(root), dict.fromkeys(HALVES, torch.float32))


def _reached(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor that is reached through containers and attributes, once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, ModuleType)):
            waiting.append(vars(value))
