"""Episodes that a loop plays itself: which values of a step depend on the rewards of a later episode.

What an environment's ``step()`` returns says where an episode ends: its flag belongs to the reward of the same call.
Where none ends in time, one is made to. A second run gets the rewards after an end in another order. They change no
action and no observation, and so no value of the steps before it.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.checks.batch.segment_independence.rollouts import (
    StepValues,
    crossing_found,
    first_crossing,
    reordered,
    scaled,
    unequal,
)
from pytest_trainloop.instruments.batches.episodes import LEAST_STEPS, Border
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.runs.reachable_state.walker import walk
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

ROUNDS = 8
"""Optimizer steps in which it is seen whether episodes end at all."""

MOST_OBJECTS = 5_000
"""Objects that are looked into for environments."""

ROUNDING = 1e-5
"""Of the largest value: 1e-7 is what sums of some thousand rewards in float32 differ by in another order."""


def across_played_episodes(evidence: Evidence, *, declared: bool) -> list[Finding] | None:
    """Steps whose weight in the loss depends on rewards of a later episode that the loop plays; None where it plays
    none that can be compared."""
    played = Played()
    played.run(evidence)
    given = played.rewards_and_ends()
    if given is None:
        return None
    rewards, ends = given
    borders = _after_the_ends(ends)
    if forced := not borders:
        ends[len(ends) // 2 - 1] = True
        borders = _after_the_ends(ends)
    rewards = unequal(rewards)
    moved = reordered(rewards, borders)
    base, other = (Played((values, ends)).run(evidence) for values in (rewards, moved))
    if base is None or other is None or not base.read:
        return None
    if (crossing := first_crossing(base, other, borders, ROUNDING)) is None:
        return []
    number = next(n for n, values in enumerate(base.found) if values is crossing[2])
    for step in (0, len(rewards) // 2, len(rewards) - 2):
        higher = rewards.clone()
        higher[step] += rewards.abs().max() + 1.0
        changed = Played((higher, ends)).run(evidence)
        if changed is None or not _is_of_step(step, base, changed, number):
            return None
    # a task without an end has flags that need not be read (odd: a_task_that_never_ends)
    intended = played.with_limits or not played.ends_ever
    level = "advice" if intended and not declared else "fault"
    flags = f"the flag that {played.name} returns{', set to True here,' if forced else ''}"
    return [crossing_found(crossing, rewards="the rewards", flags=flags, level=level, culprit=played.name)]


def _is_of_step(step: int, base: StepValues, other: StepValues, number: int) -> bool:
    """Whether the values follow the steps in time: another reward changes that of its own step, and those of later
    steps by one factor and one shift at most. Rows drawn from a replay buffer follow none."""
    if number >= len(other.found) or other.found[number].values.shape != base.found[number].values.shape:
        return False
    one, two = (run.found[number].values for run in (base, other))
    limit = ROUNDING * max(float(one.abs().max()), float(two.abs().max()))
    later = scaled(one[step + 1 :], two[step + 1 :], limit)
    return later and not scaled(one[step:], two[step:], limit)


def _after_the_ends(ends: torch.Tensor) -> list[Border]:
    """The last end of each line of steps that leaves steps to compare before it, and two after it: the first step of
    the next episode is the border."""
    steps, found = len(ends), []
    for line, flags in enumerate(ends.reshape(steps, -1).T):
        starts = [at + 1 for at in flags.nonzero().flatten().tolist() if LEAST_STEPS <= at + 1 < steps - 2]
        if starts:
            found.append(Border(0, (line,) if ends.dim() > 1 else (), starts[-1], steps))
    return found


@dataclass
class Played:
    """What the environments of one run give before the first step of an optimizer; with ``given`` the reward and the
    end of each call are those there."""

    given: tuple[torch.Tensor, torch.Tensor] | None = None
    name: str = ""
    with_limits: bool = False
    """Whether one flag may be that of a time limit: gymnasium returns it as a value of its own, gym does not."""
    ends_ever: bool = False
    _returned: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _within: int = 0
    _watch: Watch | None = None

    def run(self, evidence: Evidence) -> StepValues | None:
        """The values for each step that the loss reads in such a run; None where it raised, or played otherwise."""
        values = StepValues(torch.Size() if self.given is None else self.given[0].shape, lambda: None)
        with Patches() as patches:

            def fit(loop: TrainLoop) -> Callable[[Any], Any]:
                for kind in environments(loop):
                    patches.put(kind, "step", functools.partial(self._noting, kind.__name__))
                return fit_of(loop)

            def contexts(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
                self._watch = watch
                return () if self.given is None else values.contexts(watch)

            rounds = ROUNDS if self.given is None else 1
            record = evidence.rerun(fit=fit, contexts=contexts, enough=lambda r: r.rounds >= rounds, may_raise=True)
        played_as_given = self.given is None or len(self._returned) == len(self.given[0])
        return values if record.raised is None and played_as_given else None

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._within += 1
            try:
                out = original(*args, **kwargs)
            finally:
                self._within -= 1
            if self._within or self._watch is None:
                return out  # of an environment within another
            return self._noted(name, out)

        return step

    def _noted(self, name: str, out: Any) -> Any:
        if not isinstance(out, tuple) or len(out) not in (3, 4, 5):
            return out
        reward, end = _plain(out[1]), _plain(out[2])
        if reward is None or end is None or reward.shape != end.shape or not bool(((end == 0) | (end == 1)).all()):
            return out
        self.ends_ever = self.ends_ever or bool(end.any())
        if self._watch is None or self._watch.record.begun:
            return out
        number = len(self._returned)
        self.name, self.with_limits = f"{name}.step()", len(out) == 4
        self._returned.append((reward, end != 0))
        if self.given is None or number >= len(self.given[0]):
            return out
        reward, end = (values[number] for values in self.given)
        return (out[0], _as_it_was(reward, out[1]), _as_it_was(end, out[2]), *out[3:])

    def rewards_and_ends(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(steps, ...) each; None where the calls are too few, or of several shapes."""
        shapes = {reward.shape for reward, _ in self._returned}
        if len(self._returned) < LEAST_STEPS + 3 or len(shapes) > 1:
            return None
        rewards, ends = zip(*self._returned, strict=True)
        return torch.stack(rewards), torch.stack(ends)


def environments(loop: TrainLoop) -> Iterator[type]:
    """The classes of what the loop holds that steps by a function in Python, and is none of torch's."""
    kinds = dict.fromkeys(type(value) for _, value in walk(loop, MOST_OBJECTS).graph.known.values())
    for kind in kinds:
        own = not issubclass(kind, (nn.Module, torch.optim.Optimizer)) and kind.__module__.partition(".")[0] != "torch"
        if own and isinstance(getattr(kind, "step", None), types.FunctionType):
            yield kind


def _plain(value: Any) -> torch.Tensor | None:
    """A number, an array or a tensor of numbers, in float64."""
    try:
        return torch.as_tensor(value).detach().to("cpu", torch.float64).clone()
    except (TypeError, ValueError, RuntimeError):
        return None


def _as_it_was(reward: torch.Tensor, like: Any) -> Any:
    if isinstance(like, torch.Tensor):
        return reward.to(like.device, like.dtype)
    if hasattr(like, "dtype"):  # numpy's
        return reward.numpy().astype(like.dtype)[()]
    return type(like)(reward.item())
