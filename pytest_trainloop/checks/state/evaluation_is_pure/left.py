"""What ``evaluate()`` leaves changed, in groups that are put back together, and the cause that each would be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.reach.graph import module_path
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.recording.train_mode import acts_by_mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from pytest_trainloop.finding import Level
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.reach.snapshot import Difference

MOST_GROUPS = 8
"""Groups that are put back one by one; where there are more, those of one kind are put back together."""

MOST_NAMED = 4
"""Entries of one container that are named one by one."""

WITHIN_FIT = frozenset({"mode", "gradient", "requires_grad", "switch"})
"""Kinds that ``fit`` may set anew as it begins, so that evaluation between two calls of it is no test of them."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(slots=True)
class Left:
    """Something that evaluation leaves, and that training depends on."""

    cause: str
    level: Level = "fault"
    component: str = ""
    paths: tuple[str, ...] = ()
    before: str = ""
    """The value of the first of the paths, in words; empty where that has too many entries."""
    after: str = ""
    holder: str = ""
    """What else holds these very values."""
    steps: int = 0
    """Optimizer steps inside ``evaluate()``."""
    rounds: int = 0
    """Optimizer steps after it."""
    weight: str = ""
    """The weight that ends elsewhere by most."""
    change: float = 0.0
    raised: str = ""
    measured: str = ""
    shown_by: str = ""
    where: str = ""


@dataclass(slots=True)
class Group:
    """Differences that are put back together."""

    kind: str
    component: str
    differences: list[Difference] = field(default_factory=list)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(d.leaf.path for d in self.differences)

    @property
    def in_words(self) -> str:
        several = self.component in _TOGETHER.values() and self.component != self.kind
        return f"the {self.component}" if several else self.component

    @property
    def ours(self) -> bool:
        """Whether training may depend on it: a stream's position is no fault."""
        return self.kind != "generator"


_TOGETHER: dict[str, str] = {
    "weight": "weights",
    "gradient": "gradients",
    "mode": "modes",
    "requires_grad": "requires_grad",
    "buffer": "buffers",
    "hooks": "hooks",
    "optimizer_state": "optimizer's state",
    "group_value": "options of the optimizer",
    "scheduler": "options of the optimizer",
}
"""Kinds whose leaves one statement changes together."""


def groups(differences: Iterable[Difference]) -> list[Group]:
    """The differences in groups."""
    made: dict[str, Group] = {}
    for difference in differences:
        leaf = difference.leaf
        of_optimizer = leaf.component.endswith(".state") and "optimizer" in leaf.reached_from
        kind = "optimizer_state" if of_optimizer else leaf.kind
        component = _TOGETHER.get(kind) or leaf.component
        made.setdefault(component, Group(kind, component)).differences.append(difference)
    found = list(made.values())
    if sum(group.ours for group in found) <= MOST_GROUPS:
        return found
    by_kind: dict[str, list[Group]] = {}
    for group in found:
        by_kind.setdefault(group.kind, []).append(group)
    return [merged(of_kind) for of_kind in by_kind.values()]


def merged(parts: Sequence[Group]) -> Group:
    """Groups of one kind as one."""
    return Group(parts[0].kind, parts[0].component, [d for part in parts for d in part.differences])


def components_of(group: Group) -> list[Group]:
    """A group of one kind as one group a component, of buffers one a buffer; one whose leaves one statement changes
    together, as it is."""
    if group.kind == "buffer":
        return [replace(group, differences=[difference]) for difference in group.differences]
    if group.kind in _TOGETHER:
        return [group]
    parts: dict[str, Group] = {}
    for difference in group.differences:
        component = difference.leaf.component
        parts.setdefault(component, Group(group.kind, component)).differences.append(difference)
    return list(parts.values())


def cause_of(group: Group, steps_inside: int) -> str:
    """What it would be called, if training depends on it."""
    if group.kind == "weight":
        return "evaluation_trains" if steps_inside else "weights_left"
    if group.kind in ("tensor", "array") and all(_is_data(d) for d in group.differences):
        return "data_changed"
    return {
        "gradient": "gradients_left",
        "buffer": "buffers_moved_by_evaluation",
        "mode": "mode_left",
        "switch": "switch_left",
        "group_value": "feedback",
        "scheduler": "feedback",
    }.get(group.kind, "state_left")


def _is_data(difference: Difference) -> bool:
    """Whether it is data rather than state: the batches are drawn from it, or it is written in place and belongs to
    nothing that trains."""
    if "batches" in difference.leaf.reached_from:
        return True
    of_training = difference.leaf.reached_from & {"model", "optimizer", "scheduler", "scaler"}
    before, after = difference.before, difference.after
    in_place = difference.how == "changed" and getattr(before, "shape", None) == getattr(after, "shape", None)
    return not of_training and in_place and getattr(before, "ndim", 0) > 1 and len(before) > 1


def named(group: Group, loop: TrainLoop) -> tuple[str, ...]:
    """What a reader looks for: of modes the modules that act by mode, of gradients the weights, of the optimizer's
    state the optimizer."""
    components = tuple(dict.fromkeys(d.leaf.component for d in group.differences))
    if group.kind == "optimizer_state" or (group.component == components[0] and len(group.paths) > MOST_NAMED):
        return components
    paths = tuple(path.removesuffix(_ENDS.get(group.kind, "")) for path in group.paths)
    if group.kind == "mode":
        acting = {path for path, module in modules_by_path(loop) if acts_by_mode(module)}
        return tuple(path for path in paths if path in acting) or paths
    return tuple(
        dict.fromkeys(
            path.removeprefix("len(").removesuffix(")") if path.startswith("len(") else path for path in paths
        )
    )


_ENDS = {"mode": ".training", "gradient": ".grad"}


def modules_by_path(loop: TrainLoop) -> Iterable[tuple[str, nn.Module]]:
    """Every declared module by the path that the reach gives it."""
    for prefix, root in loop.modules.items():
        path = module_path(loop.model, prefix)
        for name, module in members.named_modules(root):
            yield f"{path}.{name}" if name else path, module


def set_anew_by_fit(differences: Sequence[Difference], loop: TrainLoop) -> bool:
    """Whether something differs that ``fit`` may set anew as it begins, and that can matter: the mode of a module that
    acts by it, gradients, switches."""
    acting = {f"{path}.training" for path, module in modules_by_path(loop) if acts_by_mode(module)}
    return any(d.leaf.kind in WITHIN_FIT and (d.leaf.kind != "mode" or d.leaf.path in acting) for d in differences)


def statistics_of_norms(differences: Sequence[Difference], loop: TrainLoop) -> tuple[str, ...]:
    """Paths of the running statistics of norms among the differences."""
    norms = {path for path, module in modules_by_path(loop) if isinstance(module, NORM_MODULES)}
    return tuple(
        d.leaf.path
        for d in differences
        if d.leaf.kind == "buffer"
        and d.leaf.path.rpartition(".")[2] in STATISTICS
        and d.leaf.path.rpartition(".")[0] in norms
    )


def in_words(value: Any, kind: str) -> str:
    """A value of one entry as a reader would write it; empty for others."""
    if kind == "mode":
        return "training" if value else "evaluation"
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
            if holder not in held and not holder.startswith("optimizer"):
                return _without_common_end(holder, path)
    return ""


def _without_common_end(holder: str, path: str) -> str:
    name = path
    while name:
        for end in (f".{name}", f"['{name}']", f'["{name}"]'):
            if holder.endswith(end):
                return holder.removesuffix(end)
        name = name.partition(".")[2]
    return holder.partition("[")[0]
