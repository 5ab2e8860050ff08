"""Groups with options of their own that a project makes for an optimizer and then does not give to it."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.learning.weight_decay_groups.causes import found
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import place_of, user_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

FILLS = frozenset({"append", "extend", "insert"})
OPTIONS = ("weight_decay", "lr")


@dataclass(frozen=True, slots=True)
class Unused:
    name: str
    """Of the variable."""
    optimizer: str
    place: str
    """The line that builds the optimizer."""
    groups: int
    option: str
    """The one that differs."""
    given: float
    wanted: tuple[float, ...]
    tensors: tuple[torch.Tensor, ...]
    """Those with another value in the groups than in the optimizer."""


def unused_groups(evidence: Evidence) -> Iterator[Finding]:
    """The loop is built once more. A variable next to the optimizer holds just the optimizer's parameters, in groups
    with other options than the optimizer's, and no code reads it."""
    seen: list[Unused] = []

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            seen.extend(filter(None, (_unused(optimizer, frame) for frame in user_frames(2))))

        return init

    with Patches() as patches:
        patches.put(torch.optim.Optimizer, "__init__", around)
        loop = evidence.fresh_loop()
    names = {
        id(p): n if not root else f"{root}.{n}" for root, m in loop.modules.items() for n, p in m.named_parameters()
    }
    for unused in seen[:1]:
        culprits = tuple(names[id(t)] for t in unused.tensors if id(t) in names)
        facts: dict[str, Any] = {"groups": unused.groups, "variable": unused.name, "optimizer": unused.optimizer}
        facts |= {"option": unused.option, "given": unused.given}
        facts["wanted"] = " or ".join(f"{value:g}" for value in unused.wanted)
        facts["repair"] = f"{unused.optimizer}({unused.name}, ...)"
        yield found("groups_not_given", unused.place, culprits, **facts)


def _unused(optimizer: torch.optim.Optimizer, frame: FrameType) -> Unused | None:
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, value in list(frame.f_locals.items()):
        groups = value if isinstance(value, list | tuple) else ()
        if not groups or not all(isinstance(group, dict) and "params" in group for group in groups):
            continue
        members = [(p, group) for group in groups for p in _tensors(group["params"])]
        if {id(p) for p, _ in members} != held.keys() or _is_read(frame, name):
            continue
        for option in OPTIONS:
            other = [(p, group[option]) for p, group in members if _differ(group.get(option), held[id(p)].get(option))]
            if other:
                return Unused(
                    name=name,
                    optimizer=type(optimizer).__name__,
                    place=str(place_of(frame.f_code.co_filename, frame.f_lineno)),
                    groups=len(groups),
                    option=option,
                    given=float(held[id(other[0][0])][option]),
                    wanted=tuple(dict.fromkeys(float(wanted) for _, wanted in other)),
                    tensors=tuple(p for p, _ in other),
                )
    return None


def _tensors(params: Any) -> list[torch.Tensor]:
    """What a group holds; nothing of a generator, which would be used up."""
    if isinstance(params, torch.Tensor):
        return [params]
    return [p for p in params if isinstance(p, torch.Tensor)] if isinstance(params, list | tuple | set) else []


def _differ(wanted: Any, given: Any) -> bool:
    return isinstance(wanted, float | int) and isinstance(given, float | int) and wanted != given


def _is_read(frame: FrameType, name: str) -> bool:
    """Whether the code around a frame reads a variable for more than to add to it; true without its source."""
    tree: ast.AST = syntax_of(frame.f_code.co_filename)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == frame.f_code.co_name
            and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
        ):
            tree = node
    filled = {
        statement.value.func.value
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr in FILLS
    }
    known = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in (name, "locals", "vars")]
    reads = [node for node in known if isinstance(node.ctx, ast.Load) and node not in filled]
    return not known or bool(reads)
