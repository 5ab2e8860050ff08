"""What the optimizers of a loop are about to do at their first steps: copies, options, and the state they keep."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import first_entries, snapshot
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.optimizers.replay import Snapshot
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 4096
"""Entries of a tensor that are copied: all of a small one, and a small part of the memory of a large one."""

OPTIMIZERS = 8
"""Optimizers that are looked at: some loops make a new one in every round."""

COUNTED_TO = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""The largest whole number to which 1 can be added: beyond it the next one is two further on, and 1 rounds away."""

ROOTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), "exp_avg_sq"),
    **{"Adamax": "exp_inf", "Adagrad": "sum", "RMSprop": "square_avg"},
}
"""What each optimizer keeps of which its denominator is made, by adding ``eps`` in the dtype of that."""


def root_of(kind: str, options: dict[str, Any]) -> str:
    """The name of that state under these options."""
    return "max_exp_avg_sq" if options.get("amsgrad") and kind != "Adagrad" else ROOTS.get(kind, "")


@dataclass(frozen=True, slots=True)
class Epsilon:
    """An ``eps`` that is 0 in the dtype in which it is added; ``given`` is what was asked for."""

    kind: str
    given: float
    dtype: str
    names: tuple[str, ...]


@dataclass(slots=True)
class First:
    """One optimizer at its first step; from its first two steps, ``zero`` maps an ``eps`` and the dtype of state in
    which it is 0 to parameters, and ``counters`` the low-precision dtype in which steps are counted."""

    optimizer: int
    snap: Snapshot
    zero: dict[tuple[float, str], set[int]] = field(default_factory=dict)
    counters: dict[str, set[int]] = field(default_factory=dict)


class FirstSteps:
    """A short run in which the first two steps of every optimizer are looked at."""

    def __init__(self, evidence: Evidence) -> None:
        seen = self._seen = evidence.run()
        self.found: dict[int, First] = {}
        wanted = {o.index for o in seen.optimizers if o.steps}
        least = {o.index: min(2, o.steps) for o in seen.optimizers}

        def enough(record: Record) -> bool:
            made = {o.index for o in record.optimizers if o.steps >= least.get(o.index, 2)}
            return wanted <= made or record.rounds >= FULL_ROUNDS

        self.record = evidence.rerun(enough=enough, contexts=lambda watch: (self._watching(watch),))

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        steps: dict[int, int] = {}

        def take(optimizer: Any) -> Snapshot | None:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            if steps[id(optimizer)] > 2 or len(self.found) >= OPTIMIZERS:
                return None
            return snapshot(optimizer, watch, first_entries(MOST), lambda p: True)

        def use(optimizer: Any, snap: Snapshot) -> None:
            index = watch.optimizers.index(optimizer)
            first = self.found.setdefault(index, First(index, snap))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    place = watch.book.index(p)
                    if place is None or p.grad is None:
                        continue
                    state = optimizer.state.get(p, {})
                    known, counter = zero_eps(snap.kind.__name__, group, state), state.get("step")
                    if known is not None:
                        first.zero.setdefault(known, set()).add(place)
                    if isinstance(counter, torch.Tensor) and counter.dtype in COUNTED_TO:
                        first.counters.setdefault(_plain_name(counter.dtype), set()).add(place)

        with around_steps(watch, take, use):
            yield

    def epsilons(self) -> list[Epsilon]:
        """Every ``eps`` that is 0 where it is added."""
        return [
            Epsilon(f.snap.kind.__name__, given, dtype, self.record.names(indices))
            for f in self.found.values()
            for (given, dtype), indices in f.zero.items()
        ]

    def counters(self) -> list[tuple[str, str, int, tuple[str, ...]]]:
        """Every optimizer that counts steps in low precision: its class, the dtype, where that stops counting, and
        whose steps they are."""
        return [
            (f.snap.kind.__name__, dtype, COUNTED_TO[getattr(torch, dtype)], self.record.names(indices))
            for f in self.found.values()
            for dtype, indices in f.counters.items()
        ]


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def zero_eps(kind: str, group: dict[str, Any], state: dict[str, Any]) -> tuple[float, str] | None:
    """The ``eps`` of a group and the dtype of this state, where the one is 0 in the other. A fused step adds it in
    float32, a capturable one divides it by the rate first."""
    root, eps = state.get(root_of(kind, group)), group.get("eps")
    if not isinstance(root, torch.Tensor) or not (root.is_floating_point() or root.is_complex()):
        return None
    if not isinstance(eps, (int, float)) or _otherwise(group):
        return None
    real = torch.finfo(root.dtype).dtype
    held = torch.tensor(eps, dtype=torch.float64).to(getattr(torch, real))
    return (float(eps), str(root.dtype).removeprefix("torch.")) if not bool(held) else None


def _otherwise(group: dict[str, Any]) -> bool:
    return any(group.get(flag) for flag in ("fused", "capturable", "differentiable"))
