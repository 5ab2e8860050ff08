"""Weights that user code moves between the backward passes of one step, or back after each step."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.wiring.step_order.causes import found
from pytest_trainloop.checks.wiring.step_order.further import line_of_write
from pytest_trainloop.core.wording import direction, some
from pytest_trainloop.instruments.gradients.vectors import values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.gradient_ledger import Ledger
    from pytest_trainloop.recording.events import Backward
    from pytest_trainloop.runs.evidence import Evidence

ASCENT = 1e-4
"""How far the cosine of a move with a gradient may be from 1: sampled entries are rounded to the weights' dtype."""

LEAST_MOVES = 4
"""Pulls that must agree in one rate and one point, in each entry."""

REACH = 4.0
"""Steps from the point within which nothing can be learned: a loop whose weights never get further is a fault."""

TAKEN_BACK = 0.2
"""Share of a step that is taken back, from which it is said (docs/how-it-decides.md#weights-that-are-moved-back)."""

ULPS = 8
"""Units in the last place of a weight within which its change is known: two products, a sum and a difference."""


def first_gradient_kept(ledger: Ledger) -> Iterator[Finding]:
    """Two steps or more before which the weights moved along the gradient that still stands in ``.grad``."""
    kept: list[tuple[float, Backward]] = []
    for window in ledger.windows:
        for first, second in itertools.pairwise(p.backward for p in window.passes):
            moves = [m for m in ledger.record.moves if first.at < m.at <= second.at and m.change]
            held = set(ledger.record.optimizers[window.optimizer].parameters)
            if len(moves) == 1 and (cosine := _cosine(ledger, moves[0].change, second, held)) >= 1.0 - ASCENT:
                kept.append((cosine, second))
    if len(kept) >= 2:
        cosine, second = kept[0]
        facts = {"steps": len(kept), "of": len(ledger.windows), "cosine": direction(cosine), "level": "advice"}
        yield found("first_gradient_kept", second, ("zero_grad()",), kinds=("missing call",), **facts)


def _cosine(ledger: Ledger, change: Mapping[int, Sequence[float]], second: Backward, held: set[int]) -> float:
    """That of a move with what stands in ``.grad`` before the second pass, over all weights."""
    standing, moved = [torch.zeros(1)], [torch.zeros(1)]
    for index in held & set(change) & set(second.arrivals):
        residual = second.arrivals[index][0].residual
        if residual is not None and not residual.zero and not residual.sparse:
            gradient = values(residual, ledger.record.parameters[index].dtype)
            if len(gradient) == len(change[index]):
                standing.append(gradient)
                moved.append(torch.tensor(change[index]))
    return float(torch.cosine_similarity(torch.cat(standing).double(), torch.cat(moved).double(), dim=0))


def step_taken_back(evidence: Evidence, ledger: Ledger) -> Iterator[Finding]:
    """What takes back much of each step by pulling the weights towards a fixed point: changes by hand differ by one
    share of how the weights differ, up to rounding."""
    record = ledger.record
    by_hand = [m for m in record.moves if m.by is None and m.change]
    tensors = sorted(set().union(*(m.change for m in by_hand)))
    common = sorted(set(tensors).intersection(*(m.change for m in by_hand)))
    dtypes = {i: getattr(torch, record.parameters[i].dtype) for i in tensors}
    if not ledger.windows or not common or not all(d.is_floating_point for d in dtypes.values()):
        return
    sizes = [len(by_hand[0].change[i]) for i in common]

    def flat(of: Mapping[int, Sequence[float]]) -> torch.Tensor:
        parts = [of.get(i, [0.0] * n) for i, n in zip(common, sizes, strict=True)]
        return torch.tensor([x for part in parts for x in part], dtype=torch.float64)

    pulls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    update = None
    for move in (m for m in record.moves if m.change.keys() & set(tensors)):
        if move.by is not None:
            update = flat(move.change) if update is None else update + flat(move.change)
        else:
            pulls += [] if update is None else [(update, flat(move.before), flat(move.change))]
            update = None
    if len(pulls) < LEAST_MOVES:
        return
    updates, weights, changes = (torch.stack(column) for column in zip(*pulls, strict=True))
    back = [float(-(u @ c) / (u @ u)) for u, c in zip(updates, changes, strict=True) if u @ u > 0]
    further, more = weights.diff(dim=0), changes.diff(dim=0)
    bottom = float((further**2).sum())
    rate = float(-(further * more).sum()) / bottom if bottom > 0 else 0.0
    ulp = flat({i: [ULPS * torch.finfo(dtypes[i]).eps] * n for i, n in zip(common, sizes, strict=True)})
    rounding = float(((ulp * weights[1:]) ** 2).sum())
    left, size = float(((more + rate * further) ** 2).sum()), rate**2 * bottom
    if not 0.0 < rate < 1.0 + 1e-6 or size < 100.0 * rounding or left > rounding + 1e-12 * size:
        return
    point = weights[0] + changes[0] / rate
    towards_zero = not bool((point.abs() > 1e-6).any())  # weight decay written by hand
    if towards_zero or len(back) < LEAST_MOVES or statistics.median(back) < TAKEN_BACK:
        return
    points = dict(zip(common, torch.split(point, sizes), strict=True))
    fixed = set(range(len(record.parameters))) - record.changed() - set(tensors)
    towards = record.names({i for i in fixed for j in common if _began_at(ledger, i, j, points[j])})
    every = sum(not w.step.reads[-1].grads.keys().isdisjoint(tensors) for w in ledger.windows) / len(pulls)
    stuck = every * (1.0 - rate) / rate <= REACH and rate <= 1.0 - 1e-6
    names = record.names(tensors)
    yield found(
        "step_taken_back",
        line_of_write(evidence, names) or ledger.windows[0].step,
        names,
        level="fault" if stuck else "advice",
        stuck=stuck,
        often="each step" if every < 1.5 else f"every {every:.0f} steps",
        towards=f"{some(towards)}, which never changes" if towards else "a point that never moves",
        rate=min(rate, 1.0),
        pulls=len(pulls),
        back=statistics.median(back),
        to_start=all(_began_at(ledger, i, i, points[i]) for i in common),
    )


def _began_at(ledger: Ledger, index: int, like: int, point: torch.Tensor) -> bool:
    """Whether a parameter began with these values, up to the rounding of how they were found."""
    entry, other = ledger.record.parameters[index], ledger.record.parameters[like]
    if not entry.start.raw or (entry.shape, entry.dtype) != (other.shape, other.dtype):
        return False
    start = values(entry.start, entry.dtype)
    return len(start) == len(point) and bool((start - point).abs().max() <= 1e-3 * start.abs().max())
