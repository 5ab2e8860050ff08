"""Casts of weights that are read after the weights have moved: autocast keeps them until its outermost block is left.

Shown by the same run in which the casts are dropped whenever the weights have changed: it differs in nothing else, for
a cast made anew from the same weight has the same bits.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.autocast import open_blocks
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.hooks import before_calls, hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.numerics.precision_parity.backward_inside import Again
    from pytest_trainloop.recording.events import Backward
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class StaleCasts:
    """The first backward pass whose loss was computed with weights as they were before an update."""

    number: int
    stale: float
    """Its loss."""
    fresh: float
    """The same with the weights as they are by then."""
    entered: str
    """The line that enters the outermost block; "" where that is before the run."""


def may_be_stale(record: Record) -> bool:
    """Whether weights are updated inside an open block: by a step, or by user code in a loop that computes under
    autocast."""
    if any(step.blocks for step in record.innermost_steps()):
        return True
    under_autocast = any(b.autocast for b in record.backwards()) or any(f.autocast for f in record.root_forwards())
    return under_autocast and bool(record.moved_outside_steps() & set(record.held))


def stale_casts(again: Again) -> StaleCasts | None:
    """None where no cast is stale, and where two equal runs differ already."""
    anew = _CastsAnew()
    kept, repeated = (again(lambda watch: (), ROUNDS).backwards() for _ in range(2))
    fresh = again(anew.contexts, ROUNDS).backwards()
    if _differ(kept, repeated) is not None or len(kept) != len(repeated):
        return None
    number = _differ(kept, fresh)
    if number is None:
        return None
    return StaleCasts(number + 1, _loss(kept[number]), _loss(fresh[number]), anew.entered)


def _differ(one: list[Backward], other: list[Backward]) -> int | None:
    """The first pass whose roots have other values, among those that both runs have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next(
        (n for n, (a, b) in pairs if [repr(r.value) for r in a.roots] != [repr(r.value) for r in b.roots]), None
    )


def _loss(backward: Backward) -> float:
    return sum(root.value for root in backward.roots)


class _CastsAnew:
    """Drops the casts that autocast keeps, once the weights have changed."""

    def __init__(self) -> None:
        self.entered = ""

    def contexts(self, watch: Watch) -> tuple[contextlib.AbstractContextManager[Any], ...]:
        return (self._dropping(watch), patched(torch.autocast, "__enter__", self._noting))

    @contextlib.contextmanager
    def _dropping(self, watch: Watch) -> Iterator[None]:
        kept: list[torch.Tensor] = []

        def drop_if_moved(*_call: Any) -> None:
            with watch.suspended(), torch.no_grad():
                weights = [t for t in watch.table.tensors if t.dtype is torch.float32 and readable(t)]
                if len(weights) != len(kept) or not all(map(torch.equal, weights, kept)):
                    torch.clear_autocast_cache()
                    kept[:] = [t.detach().clone() for t in weights]

        # weights may be read outside of modules: after a step they have moved in any case
        with hooked(after_steps(lambda *_call: torch.clear_autocast_cache())), before_calls(watch, drop_if_moved):
            yield

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(block: Any) -> Any:
            if not self.entered and not open_blocks():
                self.entered = str(here()[0])
            return original(block)

        return enter
