"""Groups with options of their own that a project makes for an optimizer and then does not give to it."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.learning.weight_decay_groups.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.instruments.tracing.syntax import source_of
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import place_of, user_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

FILLS = frozenset({"append", "extend", "insert"})
OPTIONS = ("weight_decay", "lr")


def unused_groups(evidence: Evidence) -> Iterator[Finding]:
    """The loop is built once more. A variable next to the optimizer holds just the optimizer's parameters, in groups
    with other options than the optimizer's, and no code reads it."""
    seen: list[tuple[str, list[torch.Tensor], dict[str, Any]]] = []

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            seen.extend(filter(None, (_unused(optimizer, frame) for frame in user_frames(2))))

        return init

    with Patches() as patches:
        patches.put(torch.optim.Optimizer, "__init__", around)
        loop = evidence.fresh_loop()
    own = [(root, n, p) for root, module in loop.modules.items() for n, p in members.named_parameters(module)]
    names = {id(p): f"{root}.{n}" if root else n for root, n, p in own}
    for place, tensors, facts in seen[:1]:
        facts["repair"] = "{optimizer}({variable}, ...)".format_map(facts)
        yield found("groups_not_given", place, tuple(names[id(t)] for t in tensors if id(t) in names), **facts)


def _unused(
    optimizer: torch.optim.Optimizer, frame: FrameType
) -> tuple[str, list[torch.Tensor], dict[str, Any]] | None:
    """The line that builds the optimizer, the parameters with another option in the variable, and the facts."""
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, value in list(frame.f_locals.items()):
        groups = value if isinstance(value, list | tuple) else ()
        if not groups or not all(isinstance(group, dict) and "params" in group for group in groups):
            continue
        given = [(p, group) for group in groups for p in _tensors(group["params"])]
        if {id(p) for p, _ in given} != held.keys() or _is_read(frame, name):
            continue
        for option in OPTIONS:
            other = [(p, group[option]) for p, group in given if _differ(group.get(option), held[id(p)].get(option))]
            if other:
                wanted = dict.fromkeys(f"{value:g}" for _, value in other)
                facts = {"groups": len(groups), "variable": name, "optimizer": type(optimizer).__name__}
                facts |= {
                    "option": option,
                    "given": float(held[id(other[0][0])][option]),
                    "wanted": " or ".join(wanted),
                }
                return str(place_of(frame.f_code.co_filename, frame.f_lineno)), [p for p, _ in other], facts
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
    source = source_of(frame.f_code.co_filename)
    statement = source.statement(frame.f_lineno)
    tree: ast.AST = (None if statement is None else source.function(statement)) or source.tree
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
