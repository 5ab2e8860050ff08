"""Steps that divide by zero: the second moment is 0, ``eps`` is 0 in its dtype, and the parameter is non-finite after.

The denominator is sqrt(v) + eps. With both 0 the step is m / 0, infinite, or 0 / 0, NaN.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import root_of, zero_eps
from pytest_trainloop.checks.numerics.optimizer_numerics.state_casts import StateCasts
from pytest_trainloop.optimizers.replay import kind_of
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.runs.hooks import around_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Finite = list[tuple[torch.Tensor, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class DividedByZero:
    """A step that made finite entries with finite gradients non-finite."""

    name: str
    kind: str
    eps: float
    dtype: str
    """Of the second moment."""
    step: int
    """Of the optimizer, from 1."""
    count: int
    """Entries that are not finite after it."""
    without: int
    """Those of them with a gradient of exactly zero."""
    entries: int
    state: str = ""
    """The name of the second moment."""
    weights: str = ""
    """The dtype of the parameter."""
    cast: str = ""
    """The line of the loop that brought the second moment to its dtype."""

    @property
    def narrowed(self) -> bool:
        """Whether the state is in float16 and the weights are not: the loop casts it, torch keeps both alike."""
        return self.dtype == "float16" != self.weights and bool(self.weights)


class ZeroDenominators:
    """The watched run made once more, with the parameters whose ``eps`` is 0 read after each step."""

    def __init__(self, evidence: Evidence) -> None:
        """Raises ``CannotDecide`` where no further run can be made."""
        self._found: dict[int, DividedByZero] = {}
        self._casts = StateCasts()
        record = evidence.rerun(contexts=lambda watch: (self._watching(watch), *self._casts.contexts(watch)))
        self.found = [replace(found, name=record.name(index)) for index, found in self._found.items()]

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        steps: dict[int, int] = {}
        self._cast_at: dict[int, str] = {}

        def take(optimizer: Any) -> Finite | None:
            if not watch.full or kind_of(optimizer) is None:
                return None
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            self._look(watch, optimizer)
            return [(p, group) for group in optimizer.param_groups for p in group["params"] if _finite(p)]

        def use(optimizer: Any, finite: Finite) -> None:
            kind = kind_of(optimizer)
            for p, group in finite:
                index = watch.table.index(p)
                found = _divided(kind.__name__ if kind else "", p, group, optimizer.state.get(p, {}))
                if found is not None and index is not None and index not in self._found:
                    cast = self._cast_at.get(index, "")
                    self._found[index] = replace(found, step=steps[id(optimizer)], cast=cast)

        with around_steps(watch, take, use):
            yield

    def _look(self, watch: Watch, optimizer: Any) -> None:
        """Note the lines that made what the optimizer finds as its state."""
        for p, state in optimizer.state.items():
            index = watch.table.index(p) if isinstance(p, torch.Tensor) else None
            for value in state.values() if index is not None and isinstance(state, dict) else ():
                place = self._casts.place_of(value) if isinstance(value, torch.Tensor) else None
                if index is not None and place is not None:
                    self._cast_at[index] = str(place)


def _finite(p: torch.Tensor) -> bool:
    grad = p.grad
    if grad is None or not readable(p) or grad.layout is not torch.strided or not readable(grad):
        return False
    return bool(p.isfinite().all()) and bool(grad.isfinite().all())


def _divided(kind: str, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> DividedByZero | None:
    known = zero_eps(kind, group, state)
    if known is None or p.grad is None:
        return None
    name = root_of(kind, group)
    root = state[name]
    bad = (root == 0) & ~p.isfinite() if root.shape == p.shape else torch.zeros(1, dtype=torch.bool)
    if not bool(bad.any()):
        return None
    without = int((bad & (p.grad == 0)).sum())
    return DividedByZero(
        "",
        kind,
        *known,
        step=0,
        count=int(bad.sum()),
        without=without,
        entries=p.numel(),
        state=name,
        weights=str(p.dtype).removeprefix("torch."),
    )
