"""Whether the tensors that the loop backpropagates (the roots) change when a parameter is moved.

See docs/how-it-decides.md#whether-the-loss-depends-on-a-parameter.

There are two base points: the initial weights, and all trainable weights moved a little (behind a zero-initialised gate
nothing depends at first). At each the run is made twice under one seed, which shows its own noise, and then with the
parameters in question moved by half their root mean square. Runs are in float64, or in the loop's own precision where
it does not run in float64.

Moving a parameter that the loss does not depend on changes the roots by rounding alone: by a few machine epsilons times
the growth over the operations between (about the square root of their number: below 1e3 for these sizes). The bound is
1e3 eps of the lowest precision among root and parameters, and 10 times the difference between two identical runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide, Unreliable
from pytest_trainloop.core.wording import some, them
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.events import Backward, Step
from pytest_trainloop.recording.shards import local
from pytest_trainloop.recording.watch import FULL_ROUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_MOVED = 12
"""Parameters that are moved one by one; of more, one of each owning module represents the others."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """How the roots depend on one parameter."""

    change: float
    """The change of the roots relative to their size, when the parameter is moved."""
    bound: float
    """The largest change that rounding may cause."""
    alive: bool = False
    """Whether a gradient arrived in one of these runs (at an expert that other weights send tokens to)."""

    @property
    def depends(self) -> bool:
        return self.change > self.bound and not self.alive


class Dependences:
    """The dependence of the roots on parameters of one loop."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def of(self, names: Sequence[str]) -> dict[str, Dependence]:
        """For each named parameter, the largest change over both base points; 0 where a gradient arrives.

        Raises ``CannotDecide`` where the loop cannot be run again.
        """
        if not self._evidence.repeatable:
            raise CannotDecide(
                f"{some(names)}: no gradient was seen; whether the loss depends on {them(names)} takes further runs: "
                "return a TrainLoop from a marked test"
            )
        return _largest_changes(self._evidence, names, lambda probe: probe.arrived)

    def influence(self, names: Sequence[str]) -> dict[str, Dependence]:
        """For each named parameter, the largest change over both base points, whether or not gradients arrive."""
        return _largest_changes(self._evidence, names, lambda _probe: set())


def until_stepped(evidence: Evidence, names: Sequence[str]) -> Callable[[Record], bool]:
    """Ends a run once every optimizer that holds one of the named parameters has stepped."""
    seen = evidence.run()
    wanted = {p.index for p in seen.parameters if p.name in set(names)}

    def enough(record: Record) -> bool:
        if seen.raised is not None:
            return record.rounds >= FULL_ROUNDS
        holders = [o for o in record.optimizers if wanted & set(o.parameters)]
        if not holders:
            return record.rounds >= 1
        return all(o.steps >= 1 for o in holders) or record.rounds >= FULL_ROUNDS

    return enough


def _largest_changes(
    evidence: Evidence, names: Sequence[str], settled: Callable[[_Probe], set[str]]
) -> dict[str, Dependence]:
    probe = _Probe(evidence, names, _runs_in_double(evidence, names))
    found: dict[str, Dependence] = {}
    for jitter in (False, True):
        base = probe.roots((), jitter)
        noise = difference(base, probe.roots((), jitter))
        if noise > 1e-3:
            raise Unreliable(
                f"two identical runs of the loop backpropagate values that differ by {noise:.1e}; seed every random "
                "source inside the function"
            )
        bound = max(ROUNDING * _epsilon(evidence, probe.double), 10 * noise)
        known = settled(probe)
        found.update({n: Dependence(0.0, bound) for n in names if n in known and n not in found})
        todo = [n for n in names if n not in known and (n not in found or not found[n].change > bound)]
        if difference(base, probe.roots(todo, jitter)) <= bound:
            found.update({n: Dependence(0.0, bound) for n in todo if n not in found})
            continue
        for group in _groups(evidence, todo):
            change = difference(base, probe.roots(group[:1] if len(todo) > MOST_MOVED else group, jitter))
            for n in group:
                if n not in found or change > found[n].change:
                    found[n] = Dependence(change, bound)
    return {n: replace(d, alive=n in probe.arrived) for n, d in found.items()}


class _Probe:
    """Short runs with some parameters moved; ``arrived`` gathers the names that a gradient reached in any of them."""

    def __init__(self, evidence: Evidence, names: Sequence[str], double: bool) -> None:
        self._evidence = evidence
        self._names = names
        self._watched = evidence.run().raised is None
        self._enough = until_stepped(evidence, names)
        self.double = double
        self.arrived: set[str] = set()

    def roots(self, moved: Sequence[str], jitter: bool) -> list[float]:
        record = self._evidence.rerun(prepare=mover(moved, jitter), enough=self._enough, double=self.double)
        if self._watched:
            self.arrived |= {p.name for p in record.parameters if record.reached(p.index)}
        return roots_before_first_step(record, self._names)


def difference(a: list[float], b: list[float]) -> float:
    """The largest relative difference between two sequences of roots; infinite where lengths or finiteness differ."""
    if len(a) != len(b):
        return math.inf
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            worst = max(worst, abs(x - y) / max(abs(x), abs(y), 1e-12))
        elif not (x == y or (math.isnan(x) and math.isnan(y))):
            return math.inf
    return worst


def _groups(evidence: Evidence, names: Sequence[str]) -> list[list[str]]:
    if len(names) <= MOST_MOVED:
        return [[n] for n in names]
    owners: dict[str, list[str]] = {}
    owner_of = {p.name: p.owner for p in evidence.run().parameters}
    for n in names:
        owners.setdefault(owner_of.get(n, n), []).append(n)
    return list(owners.values())


def _runs_in_double(evidence: Evidence, names: Sequence[str]) -> bool:
    record = evidence.rerun(
        prepare=mover((), False), enough=until_stepped(evidence, names), double=True, may_raise=True
    )
    native = evidence.run().raised
    return record.double and (record.raised is None or (native is not None and record.raised.kind == native.kind))


def roots_before_first_step(record: Record, names: Sequence[str]) -> list[float]:
    """The roots' values until every optimizer that holds one of the names has stepped; without a step, all of them."""
    wanted = {p.index for p in record.parameters if p.name in set(names)}
    holders = {o.index for o in record.optimizers if wanted & set(o.parameters)}
    steps = [s for s in record.of(Step) if not s.nested]
    consumed_at = {h: [s.reads[0].at if s.reads else s.at for s in steps if s.optimizer == h] for h in holders}
    first = [min(consumed_at[h], default=None) for h in holders]  # a closure's backward comes inside the step
    until = max((at for at in first if at is not None), default=math.inf)
    mine = {i for o in record.optimizers if o.index in holders for i in o.parameters}
    backwards = [b for b in record.of(Backward) if b.at < until]
    relevant = [b for b in backwards if mine & set(b.arrivals)] or backwards
    return [root.value for b in relevant for root in b.roots]


def mover(names: Sequence[str], jitter: bool, share: float = 0.1, seed: int = 20_240) -> Callable[[Watch], None]:
    """Moves the named parameters by half their root mean square, and with ``jitter`` all trainable ones by a share of
    it."""
    chosen = set(names)

    def move(watch: Watch) -> None:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if not (tensor.is_floating_point() or tensor.is_complex()) or torch.nn.parameter.is_lazy(tensor):
                    continue
                trained, tensor = tensor.requires_grad, local(tensor)  # of a shard, what is here
                noise = torch.randn(tensor.shape, generator=random).to(tensor)
                other = noise.flip(0) if noise.dim() else -noise
                if entry.pad_row is not None and noise.shape == entry.shape:
                    noise[entry.pad_row], other[entry.pad_row] = 0.0, 0.0
                size = float(tensor.abs().square().mean().sqrt())
                if jitter and trained:
                    tensor.add_(noise, alpha=share * size or 0.2 * share)
                if entry.name in chosen:
                    tensor.add_(other, alpha=0.5 * size or 0.1)

    return move


def moved_a_little(watch: Watch) -> None:
    """Every trainable weight moved by a tenth of its root mean square (those at zero by 0.02)."""
    mover((), True)(watch)


def stirred(share: float, seed: int = 20_240) -> Callable[[Watch], None]:
    """Moves every trainable weight by this share of its root mean square."""
    return mover((), share > 0.0, share, seed)


def _epsilon(evidence: Evidence, double: bool) -> float:
    if double:
        return torch.finfo(torch.float64).eps
    dtypes = {p.dtype for p in evidence.run().parameters if p.requires_grad}
    epsilons = [
        torch.finfo(d).eps
        for name in dtypes
        if isinstance(d := getattr(torch, name), torch.dtype) and (d.is_floating_point or d.is_complex)
    ]
    return max(epsilons, default=torch.finfo(torch.float32).eps)
