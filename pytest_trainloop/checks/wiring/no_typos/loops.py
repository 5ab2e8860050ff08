"""Loops that end in their first round, or whose rounds do not follow each other."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.no_typos.expressions import Slip, shown, stored
from pytest_trainloop.checks.wiring.no_typos.names import name_in, unread_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.wiring.no_typos.calls import Functions
    from pytest_trainloop.instruments.tracing.syntax import Source

_ADDED = frozenset({"append", "extend", "add", "update", "insert"})


def returns_inside_loop(source: Source, node: ast.For) -> Iterator[Slip]:
    """A loop that adds something up, and whose last statement returns it in its first round."""
    last = node.body[-1]
    inner = [n for statement in node.body for n in ast.walk(statement)]
    if not isinstance(last, ast.Return) or last.value is None or any(isinstance(n, ast.Continue) for n in inner):
        return
    returned = {n.id for n in ast.walk(last.value) if isinstance(n, ast.Name)}
    added = {name_in(n.target) for n in inner if isinstance(n, ast.AugAssign)}
    calls = [n.func for n in inner if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    added |= {name_in(func.value) for func in calls if func.attr in _ADDED}
    function = source.function(node)
    before = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    summed = returned & added & {n.id for n in before if n.lineno < node.lineno}
    if summed and len(node.body) > 1 and not node.orelse:
        loop = ast.For(node.target, node.iter, node.body[:-1], [], None)
        run = ast.If(ast.Constant(True), [loop, last], [])
        facts = {"summed": sorted(summed)[0]}
        text = f"{shown(last)}, behind the loop"
        repair = "move the return behind the loop"
        yield Slip(
            "return_inside_loop", source, node, run, text, tuple(sorted(summed)), facts, last.lineno, repair=repair
        )


def state_not_carried(source: Source, node: ast.Assign, functions: Functions) -> Iterator[Slip]:
    """A recurrent layer in a loop that is given the same state in each round, where nothing reads its new one."""
    around = next((n for n in source.above(node) if isinstance(n, ast.For)), None)
    target, call = node.targets[0], node.value
    if around is None or not isinstance(call, ast.Call) or not functions.is_recurrent(call):
        return
    given = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "hx"), None)
    if given is None or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return
    new, old = ({n.id for n in ast.walk(e) if isinstance(n, ast.Name)} for e in (target.elts[1], given))
    within = {n.id for n in ast.walk(around) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if new and old and new <= unread_in(source.function(node)) and not old & within:
        run = copy.deepcopy(node)
        run.targets[0].elts[1] = stored(given)  # type: ignore[attr-defined]
        facts = {"unread": shown(target.elts[1]), "read": shown(given), "function": shown(call.func)}
        repair = f"give {shown(call.func)}() the state that it gave in the round before"
        yield Slip("state_not_carried", source, node, run, shown(run), (shown(given),), facts, repair=repair)
