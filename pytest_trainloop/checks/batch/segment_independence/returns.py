"""Whether what the loss weighs a step by depends on rewards of a later episode.

Two runs of one step in float64 from the same start: in the second one the rewards after the end of an episode stand in
another order, so that every mean, spread and extreme over the rollout is the same. What meets a tensor with a history
and has one entry for each step (returns, advantages) is compared at the steps before the end. Where all of these are
scaled and shifted alike, the whole was standardised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.episodes import Episodes, read_episodes
from pytest_trainloop.checks.batch.segment_independence.example import example_batch
from pytest_trainloop.checks.batch.segment_independence.step_values import StepRuns, StepValues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.batches.episodes import Border
    from pytest_trainloop.runs.evidence import Evidence

ROUNDING = 1e-9
"""Of the largest value: sums of the same numbers in another order differ by far less in float64."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """The weight of ``step`` changes from ``before`` to ``after`` with rewards after ``end``."""

    step: int
    end: int
    line: str
    """Which environment or row, where there are several."""
    before: float
    after: float
    place: str
    episodes: Episodes
    model_reads_flags: bool


def crossing(evidence: Evidence) -> tuple[Episodes | None, Crossing | None]:
    """The episodes of the example batch, and a step whose weight depends on rewards of a later one."""
    batch = evidence.shared(example_batch)
    episodes = read_episodes(batch)
    if episodes is None:
        return None, None
    runs = _Runs(evidence, batch, episodes)
    for borders in episodes.borders:
        found = runs.crossing(borders)
        if found is not None:
            return episodes, found
    return episodes, None


class _Runs:
    def __init__(self, evidence: Evidence, batch: Any, episodes: Episodes) -> None:
        self._episodes = episodes
        self._runs = StepRuns(evidence, batch, episodes.ends.shape, episodes.flags)
        rewards = next(t for path, t in nested.paths(batch) if path == episodes.rewards).detach()
        if bool((rewards == rewards.flatten()[0]).all()):  # returns of equal rewards look standardised
            random = torch.Generator().manual_seed(0)
            rewards = rewards + torch.randn(rewards.shape, generator=random).to(rewards)
        self._rewards = rewards
        self._base: StepValues | None = None

    def crossing(self, borders: Sequence[Border]) -> Crossing | None:
        if self._base is None:
            self._base = self._runs.with_values({self._episodes.rewards: self._rewards})
        moved = self._runs.with_values({self._episodes.rewards: self._in_other_order(borders)})
        base = self._base
        if base is None or moved is None or [v.name for v in base.found] != [v.name for v in moved.found]:
            return None
        for number in base.read:
            one, other = base.found[number], moved.found[number]
            if one.values.shape != other.values.shape:
                continue
            for border in borders:
                step = _reached(one.values, other.values, border, borders)
                if step is not None:
                    (cell,) = border.cells(range(step, step + 1))
                    was, now = (float(v.values[cell].flatten()[0]) for v in (one, other))
                    line = f"{'row' if border.axis else 'environment'} {border.at[0]}" if border.at else ""
                    reads = base.model_reads_flags
                    return Crossing(step, border.step, line, was, now, one.place, self._episodes, reads)
        return None

    def _in_other_order(self, borders: Sequence[Border]) -> torch.Tensor:
        cells = [cell for border in borders for cell in border.cells(range(border.step + 1, border.steps))]
        moved = self._rewards.clone()
        for to, by in zip(cells, [*cells[1:], cells[0]], strict=True):
            moved[to] = self._rewards[by]
        return moved


def _reached(one: torch.Tensor, other: torch.Tensor, border: Border, borders: Sequence[Border]) -> int | None:
    """The last step before the end whose value changes otherwise than by standardising, of one line or of all."""
    limit = ROUNDING * max(float(one.abs().max()), float(other.abs().max()))
    before, after = (_before(values, border) for values in (one, other))
    if limit != limit or not bool(((after - before).abs() > limit).any()):
        return None
    lines = [b for b in borders if b.axis == border.axis]
    whole = [torch.cat([_before(values, b) for b in lines]) for values in (one, other)]
    if _scaled(before, after, limit) or _scaled(whole[0], whole[1], limit):
        return None
    return int(((after - before).abs() > limit).reshape(len(before), -1).any(1).nonzero().max())


def _before(values: torch.Tensor, border: Border) -> torch.Tensor:
    return torch.stack([values[cell] for cell in border.cells(range(border.step))])


def _scaled(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    """Whether one factor and one shift make the second of the first."""
    basis = torch.stack([one.flatten(), torch.ones_like(one.flatten())], 1)
    fit = torch.linalg.lstsq(basis, other.flatten()[:, None], driver="gelsd").solution
    return bool(((basis @ fit)[:, 0] - other.flatten()).abs().max() <= 10 * limit)
