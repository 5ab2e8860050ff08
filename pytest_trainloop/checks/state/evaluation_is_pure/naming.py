"""What a reader looks for of what evaluation changes: names, values in words, the weight that differs by most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import members
from pytest_trainloop.recording.train_mode import acts_by_mode
from pytest_trainloop.runs.reachable_state.graph import module_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.reachable_state.snapshot import Difference


MOST_NAMED = 4
"""Entries of one container that are named one by one."""


@dataclass(slots=True)
class Group:
    """Differences that are put back together."""

    kind: str
    component: str
    differences: list[Difference] = field(default_factory=list)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(d.leaf.path for d in self.differences)


def largest_change(
    end: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    trained: Iterable[str],
    same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> dict[str, Any]:
    """The weight that differs by most, and by which share of its largest entry; empty where none does."""
    gaps: dict[str, float] = {}
    for name in sorted(trained):
        mine, theirs = end.get(name), other.get(name)
        if mine is not None and theirs is not None and mine.shape == theirs.shape and not same(mine, theirs):
            gaps[name] = float((mine.double() - theirs.double()).abs().max()) / (float(theirs.abs().max()) or 1.0)
    weight = max(gaps, key=lambda name: gaps[name], default="")
    return {"weight": weight, "gap": gaps[weight]} if weight else {}


def names_of(group: Group, loop: TrainLoop) -> tuple[str, ...]:
    """What a reader looks for: of modes the modules that act by mode, of gradients the weights, of the optimizer's
    state the optimizer."""
    components = tuple(dict.fromkeys(d.leaf.component for d in group.differences))
    if group.kind == "optimizer_state" or (group.component == components[0] and len(group.paths) > MOST_NAMED):
        return components
    if group.kind == "mode":
        paths, by_mode = tuple(path.removesuffix(".training") for path in group.paths), acting(loop)
        return tuple(path for path in paths if path in by_mode) or paths
    if group.kind == "gradient":
        return tuple(dict.fromkeys(path.removesuffix(".grad") for path in group.paths))
    return tuple(dict.fromkeys(path[4:].removesuffix(")") if path.startswith("len(") else path for path in group.paths))


def modules_by_path(loop: TrainLoop) -> Iterator[tuple[str, nn.Module]]:
    """Every declared module by the path that the reach gives it."""
    for prefix, root in loop.modules.items():
        path = module_path(loop.model, prefix)
        for name, module in members.named_modules(root):
            yield f"{path}.{name}" if name else path, module


def acting(loop: TrainLoop) -> set[str]:
    """The paths of the modules that act by their mode."""
    return {path for path, module in modules_by_path(loop) if acts_by_mode(module)}


def in_words(value: Any, kind: str) -> str:
    """A value of one entry as a reader would write it; empty for others."""
    if kind == "mode":
        return "in training mode" if value else "in evaluation mode"
    if kind == "length":
        return "" if value is None else "of 1 entry" if value == 1 else f"of {value} entries"
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.detach().item()
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, (bool, int, str, torch.dtype, type(None))) else ""


def holder_of(held: Mapping[str, Sequence[str]]) -> str:
    """What holds the values that weights have, with what it shares with their paths left off: ``average.module`` where
    ``average.module.0.weight`` has the bits of ``model.0.weight``."""
    for path, holders in held.items():
        for holder in holders:
            if holder in held or holder.startswith("optimizer"):
                continue
            name = path
            while name:
                for end in (f".{name}", f"['{name}']", f'["{name}"]'):
                    if holder.endswith(end):
                        return holder.removesuffix(end)
                name = name.partition(".")[2]
            return holder.partition("[")[0]
    return ""
