"""A fact about a resumed run: one cause, with what shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.state.resume_equivalence.loading import StateDictCall
    from pytest_trainloop.checks.state.resume_equivalence.runs import Uninterrupted
    from pytest_trainloop.finding import Level
    from pytest_trainloop.reach.snapshot import Difference
    from pytest_trainloop.recording.events import Raised


@dataclass(frozen=True, slots=True)
class Fact:
    """One cause, with what shows it."""

    cause: str
    names: tuple[str, ...]
    """As the reader types them."""
    level: Level = "fault"
    component: str = ""
    unequal: tuple[str, ...] = ()
    """Weights and buffers that end elsewhere for it alone; none where an identity shows it."""
    call: StateDictCall | None = None
    differences: tuple[Difference, ...] = ()
    detail: str = ""
    raised: Raised | None = None
    saved_as: str = ""
    """The entry of the checkpoint that holds what was lost."""


def shown(path: str, a: Uninterrupted) -> str:
    """A path; a declared weight or buffer by its plain name."""
    return next((name for name, own in a.paths.items() if own == path), path)


def saved_as(a: Uninterrupted, differences: Sequence[Difference]) -> str:
    """The entry of the checkpoint with the values of one of these tensors; many are alike where they are zero."""
    return next((held for d in differences if is_moment(d.before) and (held := a.checkpoint.holds(d.before))), "")


def as_weights(a: Uninterrupted, differences: Sequence[Difference]) -> bool:
    """Whether most of these tensors have the shapes of declared weights."""
    shapes = {v.shape for p in a.paths.values() if p in a.saved.leaves and (v := a.saved.value(p)) is not None}
    tensors = [d.before for d in differences if isinstance(d.before, torch.Tensor) and d.before.numel() > 1]
    return bool(tensors) and 2 * sum(t.shape in shapes for t in tensors) > len(tensors)


def is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1 and bool(value.any())
