"""Episodes behind each other in a batch of steps: flags of their ends next to rewards, under their usual names.

A flag may mark the last step of an episode or the first of the next. The steps before the flagged one and those
after it are of two episodes by both readings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.segments import Segments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.declare.nested import Path

_ENDS = re.compile(
    r"(b|mb|batch|is)?_?(episode|ep|env)?_?(done|terminal|terminated|termination)s?(_(flag|batch|buf|list|b)s?)?"
    r"|is_(last|first)s?|firsts|(episode|ep)_(end|start|last|first)s?"
)
_GOES_ON = frozenset("not_done not_dones notdone nonterminal nonterminals non_terminal continues continuation".split())
_LIMITS = frozenset("truncated truncateds truncations timeout timeouts time_outs time_limit is_truncated".split())
_REWARDS = re.compile(r"(b|mb|batch)?_?(reward|rew)s?(_(batch|buf|list|b))?")
_OTHER_REWARDS = ("intrinsic", "int_rew", "rew_int", "reward_int", "rewards_int", "curiosity", "bonus", "cost")

_AFTER = frozenset(
    """next_obs next_state next_states next_observation next_observations obs_next new_obs next_o obs2 s2 s_next
    next_s""".split()
)
_BY_NAME = ("terminat", "is_terminal", "terminal", "not_terminal", "nonterminal")
"""Flags that no time limit sets."""

LEAST_STEPS = 4
"""Steps before the end that are compared: whether one scale and shift fits all of them takes more than two."""


@dataclass(frozen=True, slots=True)
class Border:
    """One line of steps along ``axis``, ``at`` all other indices, with a flag at ``step`` of ``steps``."""

    axis: int
    at: tuple[int, ...]
    step: int
    steps: int

    def cells(self, steps: range) -> list[tuple[int, ...]]:
        return [(*self.at[: self.axis], step, *self.at[self.axis :]) for step in steps]


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """``ends``: true at flagged steps, (steps,) or (steps, environments) or with these axes swapped. ``flags`` and
    ``rewards``: their path in the batch. ``limits``: whether the flags are of time limits alone. ``streams``: the
    number of different rewards."""

    ends: torch.Tensor
    flags: Path
    rewards: Path
    limits: bool
    streams: int

    @property
    def borders(self) -> Iterator[list[Border]]:
        """For each axis that may be time, the last flag of each line that leaves steps to compare before it, and two
        after it."""
        for axis in range(self.ends.dim()):
            steps = self.ends.shape[axis]
            lines = self.ends.movedim(axis, -1).reshape(-1, steps)
            others = [n for d, n in enumerate(self.ends.shape) if d != axis]
            found = []
            for number, line in enumerate(lines):
                flagged = [s for s in line.nonzero().flatten().tolist() if LEAST_STEPS <= s < steps - 2]
                if flagged:
                    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), others)) if others else ()
                    found.append(Border(axis, at, flagged[-1], steps))
            if found:
                yield found


def read_episodes(batch: Any) -> Episodes | None:
    """The episodes of a batch with rewards and flags of one shape; None where it has none, or where what follows the
    flags is padding."""
    given = [(path, t.detach()) for path, t in nested.paths(batch) if t.layout is torch.strided and not t.is_nested]
    named = {path: (_name(path), t) for path, t in given if 0 < t.dim() <= 3}
    rewards = [(p, t) for p, (name, t) in named.items() if _REWARDS.fullmatch(name) and t.is_floating_point()]
    others = sum(any(word in name for word in _OTHER_REWARDS) for name, _ in named.values())
    if len(rewards) != 1:
        return None
    path, values = rewards[0]
    for kind in ("ends", "limits"):
        for flags, (name, t) in named.items():
            ends = _ends(name, t, kind) if t.shape == values.shape else None
            if ends is None or not bool(ends.any()) or bool(ends.all()):
                continue
            found = Episodes(ends, flags, path, kind == "limits", 1 + others)
            return None if _padded_after(found, [t for _, t in given]) else found
    return None


def segments_along(episodes: Episodes, axis: int) -> Segments:
    """The episodes as segments, were time this axis: what is flagged belongs to none, since it may be the end of one or
    the start of the next."""
    ends = episodes.ends.movedim(axis, -1)
    numbers = ends.long().cumsum(-1) + (episodes.ends.shape[axis] + 1) * torch.arange(
        ends[..., 0].numel(), device=ends.device
    ).reshape(*ends.shape[:-1], 1)
    _, numbered = numbers.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    ids = torch.where(ends, -1, numbered).movedim(-1, axis)
    return Segments("episode", ids, int(numbered.max()) + 1, nested.shown(episodes.flags))


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """Steps with the observation that comes after each. ``ends``: true where every flag says that the episode ends
    there, by no time limit, in the shape of the rewards. ``flags``, ``rewards``, ``after``: their paths in the
    batch. ``certain``: whether by their names the flags are of no time limits, or these have flags of their own."""

    ends: torch.Tensor
    flags: tuple[Path, ...]
    rewards: Path
    after: Path
    certain: bool


def read_transitions(batch: Any) -> Transitions | None:
    """The transitions of a batch; None where it has none, or ends in all or in none of its rows."""
    given = {p: (_name(p), t.detach()) for p, t in nested.paths(batch) if t.layout is torch.strided and not t.is_nested}
    floats = {p: (name, t) for p, (name, t) in given.items() if t.is_floating_point() and t.dim()}
    rewards = [(p, t) for p, (name, t) in floats.items() if _REWARDS.fullmatch(name)]
    after = [(p, t) for p, (name, t) in floats.items() if name in _AFTER and t.dim() > 1]
    if len(rewards) != 1 or len(after) != 1 or len(after[0][1]) != len(rewards[0][1]):
        return None
    (path, values), names, flags = rewards[0], [], []
    ends = torch.ones(values.shape, dtype=torch.bool)
    certain = False
    for where, (name, t) in given.items():
        if t.numel() != values.numel() or len(t) != len(values):
            continue
        found, limited = _ends(name, t, "ends"), _ends(name, t, "limits")
        if found is not None or limited is not None:
            flags.append(where)
            names.append(name)
            ends &= (found if limited is None else ~limited).reshape(values.shape).cpu()  # type: ignore[union-attr]
            certain = certain or limited is not None or name.startswith(_BY_NAME)
    if all(name in _LIMITS for name in names) or not bool(ends.any()) or bool(ends.all()):
        return None
    return Transitions(ends, tuple(flags), path, after[0][0], certain)


def _ends(name: str, tensor: torch.Tensor, kind: Literal["ends", "limits"]) -> torch.Tensor | None:
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        return None
    if kind == "limits":
        return tensor == 1 if name in _LIMITS else None
    return tensor == 1 if _ENDS.fullmatch(name) else tensor == 0 if name in _GOES_ON else None


def _padded_after(episodes: Episodes, tensors: list[torch.Tensor]) -> bool:
    """Whether nothing differs from step to step after the flags, or a mask leaves these steps out and no others."""
    shape = episodes.ends.shape
    aligned = [t for t in tensors if t.shape[: len(shape)] == shape]
    for borders in episodes.borders:
        after = torch.zeros(shape, dtype=torch.bool)
        before = torch.zeros(shape, dtype=torch.bool)
        for border in borders:
            for cell in border.cells(range(border.step + 1, border.steps)):
                after[cell] = True
            for cell in border.cells(range(border.step)):
                before[cell] = True
        values = [(t[after.to(t.device)], t[before.to(t.device)]) for t in aligned]
        if all(bool((later == later.flatten()[0]).all()) for later, _ in values if later.is_floating_point()):
            return True
        two_valued = [(a, b) for (a, b), t in zip(values, aligned, strict=True) if len(t.unique()) == 2]  # type: ignore[no-untyped-call]
        if any(len(set(a.flatten().tolist())) == 1 and not bool((b == a.flatten()[0]).any()) for a, b in two_valued):
            return True
    return False


def _name(path: Path) -> str:
    return str(nested.last_name(path)).lower().lstrip("_")
