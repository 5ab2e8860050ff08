"""The first steps of the optimizers of a loop: what they work on, their options, and the state that they keep."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import first_entries, snapshot
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.optimizers.replay import Snapshot
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 4096
"""Entries of a tensor that are copied: all of a small one, and a small part of the memory of a large one."""

OPTIMIZERS = 8
"""Optimizers that are watched: some loops build a new one in every iteration."""

COUNTED_TO = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""The largest integer to which 1 can be added: the next number of the dtype after it is two further on."""

ROOTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), "exp_avg_sq"),
    **{"Adamax": "exp_inf", "Adagrad": "sum", "RMSprop": "square_avg"},
}
"""The state of each optimizer from which its denominator is made; ``eps`` is added in the dtype of that state."""


def root_of(kind: str, options: dict[str, Any]) -> str:
    """The key of that state under these options."""
    return "max_exp_avg_sq" if options.get("amsgrad") and kind != "Adagrad" else ROOTS.get(kind, "")


@dataclass(frozen=True, slots=True)
class ZeroEps:
    """An ``eps`` that is 0 in the dtype in which it is added; ``given`` is what the user asked for."""

    kind: str
    given: float
    dtype: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LowPrecisionCount:
    """A step count in a dtype in which it stays at ``last``."""

    kind: str
    dtype: str
    last: int
    names: tuple[str, ...]


@dataclass(slots=True)
class OptimizerStart:
    """One optimizer: its first step, and what its first two steps show."""

    snap: Snapshot
    zero_eps: dict[tuple[float, str], set[int]] = field(default_factory=dict)
    """Parameters by an ``eps`` and the dtype of the state in which it is 0."""
    counts: dict[str, set[int]] = field(default_factory=dict)
    """Parameters by the low-precision dtype in which their steps are counted."""


class FirstSteps:
    """A short run in which the first two steps of every optimizer are watched, or the run that is observed."""

    def __init__(self) -> None:
        self.found: dict[int, OptimizerStart] = {}
        self.record: Record

    @classmethod
    def of(cls, evidence: Evidence) -> FirstSteps:
        """A further run, as far as it needs to go."""
        first, seen = cls(), evidence.run()
        wanted = {o.index for o in seen.optimizers if o.steps}
        least = {o.index: min(2, o.steps) for o in seen.optimizers}

        def enough(record: Record) -> bool:
            made = {o.index for o in record.optimizers if o.steps >= least.get(o.index, 2)}
            return wanted <= made or record.rounds >= FULL_ROUNDS

        evidence.rerun(enough=enough, contexts=first.contexts)
        return first

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What the run is made in."""
        self.record = watch.record
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        steps: dict[int, int] = {}

        def take(optimizer: Any) -> Snapshot | None:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            if steps[id(optimizer)] > 2 or len(self.found) >= OPTIMIZERS:
                return None
            return snapshot(optimizer, watch, first_entries(MOST), lambda p: True)

        def use(optimizer: Any, snap: Snapshot) -> None:
            start = self.found.setdefault(watch.optimizers.index(optimizer), OptimizerStart(snap))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    index = watch.table.index(p)
                    if index is None or p.grad is None:
                        continue
                    state = optimizer.state.get(p, {})
                    eps, count = zero_eps(snap.kind.__name__, group, state), state.get("step")
                    if eps is not None:
                        start.zero_eps.setdefault(eps, set()).add(index)
                    if isinstance(count, torch.Tensor) and count.dtype in COUNTED_TO:
                        start.counts.setdefault(str(count.dtype).removeprefix("torch."), set()).add(index)

        with around_steps(watch, take, use):
            yield

    def zero_eps(self) -> list[ZeroEps]:
        """Every ``eps`` that is 0 where it is added."""
        return [
            ZeroEps(start.snap.kind.__name__, given, dtype, self.record.names(indices))
            for start in self.found.values()
            for (given, dtype), indices in start.zero_eps.items()
        ]

    def low_precision_counts(self) -> list[LowPrecisionCount]:
        """Every step count that is kept in low precision."""
        return [
            LowPrecisionCount(
                start.snap.kind.__name__, dtype, COUNTED_TO[getattr(torch, dtype)], self.record.names(indices)
            )
            for start in self.found.values()
            for dtype, indices in start.counts.items()
        ]


def zero_eps(kind: str, group: dict[str, Any], state: dict[str, Any]) -> tuple[float, str] | None:
    """The ``eps`` of a group and the dtype of this state, where the one is 0 in the other. A fused step adds it in
    float32, a capturable one divides it by the learning rate first."""
    root, eps = state.get(root_of(kind, group)), group.get("eps")
    if not isinstance(root, torch.Tensor) or not (root.is_floating_point() or root.is_complex()):
        return None
    if not isinstance(eps, (int, float)) or any(group.get(f) for f in ("fused", "capturable", "differentiable")):
        return None
    real = torch.finfo(root.dtype).dtype
    held = torch.tensor(eps, dtype=torch.float64).to(getattr(torch, real))
    return (float(eps), str(root.dtype).removeprefix("torch.")) if not bool(held) else None
