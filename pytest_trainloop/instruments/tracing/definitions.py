"""From where a value is used to the statement that made it, by the source: what a mask, a list or a number comes from.

A finding is seen where a symptom arrives: at an attention, at ``backward()``, at an optimizer. The statement to edit
is where its argument was made. These questions take a line as findings have it, ``file:line   source``, and give one,
or an empty text where the source does not say.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.instruments.tracing.syntax import (
    FARTHEST,
    FUNCTIONS,
    argument_of,
    assignment_of,
    base_of,
    calls_at,
    given_for,
    maker_of,
    nodes_within,
    parameters_of,
    statement_at,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_MASKS = re.compile(r"mask|visible|allowed|hidden_keys|causal|ahead|seen|padded|padding")
_MASK_ARGUMENTS = ("attn_mask", "src_mask", "tgt_mask", "memory_mask", "attention_mask", "mask")
CAUSAL_MASKS = ("attn_mask", "src_mask", "tgt_mask")
PADDING_MASKS = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
_FILLS = ("masked_fill", "masked_fill_", "where")


def mask(line: str, *, of: Sequence[str] = ()) -> str:
    """The statement that made the mask which the statement at a line uses; empty where it uses none. ``of`` are the
    only keywords of a layer of attention under which it counts: a layer takes one mask for time and one for padding."""
    found = statement_at(line)
    if found is None:
        return ""
    source, statement = found
    for _ in range(FARTHEST):
        used = _mask_in(statement, of)
        if used is not None:
            return maker_of(source, used)
        scores = next((n for n in ast.walk(statement) if isinstance(n, ast.Name) and "score" in n.id), None)
        before = None if scores is None else assignment_of(source, scores)
        if before is None:
            return ""
        statement = before
    return ""


def _mask_in(statement: ast.AST, of: Sequence[str]) -> ast.expr | None:
    """The mask among the arguments of the calls in a statement."""
    calls = [n for n in nodes_within(statement) if isinstance(n, ast.Call)]
    given = {k.arg: k.value for call in calls for k in call.keywords if not isinstance(k.value, ast.Constant)}
    if found := [given[name] for name in of or (*_MASK_ARGUMENTS, *PADDING_MASKS) if name in given]:
        return found[0]
    if of and any(name in given for name in (*_MASK_ARGUMENTS, *PADDING_MASKS)):
        kernel = any("scaled_dot_product" in called_name(call) for call in calls)
        return given["attn_mask"] if kernel and "attn_mask" in given else None
    for call in calls:
        if called_name(call) in _FILLS and call.args:
            return call.args[0]
    return next((n for n in nodes_within(statement) if isinstance(n, ast.Name) and _MASKS.search(n.id)), None)


def positions(line: str) -> tuple[str, str]:
    """The statement that made the positions which the statement at a line looks up in a table of positions, and the
    parameter that they are."""
    found = statement_at(line)
    for node in nodes_within(found[1]) if found is not None else ():
        table: Any = (
            node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
        )
        name = getattr(table, "attr", getattr(table, "id", "")).lower()
        given = node.slice if isinstance(node, ast.Subscript) else next(iter(getattr(node, "args", ())), None)
        if found is not None and given is not None and re.search(r"pos|wpe|wave|rotary|time_emb|table", name):
            bare = isinstance(given, ast.Name) and assignment_of(found[0], given) is None
            return maker_of(found[0], given), given.id if bare and isinstance(given, ast.Name) else ""
    return "", ""


def index(line: str) -> str:
    """The statement that made the index by which the statement at a line, or the one before that made what it uses,
    chooses rows; empty where it is given the index."""
    found = statement_at(line)
    if found is None:
        return ""
    source, statement = found
    names = [n for n in nodes_within(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    before = [
        one for one in (assignment_of(source, n) for n in names) if one is not None and not isinstance(one, ast.For)
    ]
    for one in (statement, *before):
        for node in nodes_within(one):
            chosen = node.slice if isinstance(node, ast.Subscript) else None
            chosen = chosen.lower if isinstance(chosen, ast.Slice) else chosen
            if isinstance(chosen, ast.Name) and assignment_of(source, chosen) is not None:
                return maker_of(source, chosen)
    return ""


def compared(line: str, side: int = 1) -> str:
    """The statement before the one at a line that made a side of its comparison: 0 the outputs, 1 the targets."""
    found = statement_at(line)
    sides: list[Any] = []
    for node in nodes_within(found[1]) if found is not None else ():
        if isinstance(node, ast.Call) and re.search(r"loss|entropy|kl_div|criterion", called_name(node)):
            sides += node.args[side : side + 1]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            sides.append((node.left, node.right)[side])
    for one in reversed(sides):
        before = (
            assignment_of(found[0], base) if found is not None and isinstance(base := base_of(one), ast.Name) else None
        )
        if before is not None and found is not None:
            return found[0].text(before)
    return ""


def criterion(line: str, keyword: str = "") -> str:
    """The statement that built the criterion which the one at a line calls, or that made an argument of it."""
    found = statement_at(line)
    for node in nodes_within(found[1]) if found is not None else ():
        if not isinstance(node, ast.Call) or found is None:
            continue
        built = statement_at(maker_of(found[0], node.func))
        for one in nodes_within(built[1]) if built is not None else ():
            if built is not None and isinstance(one, ast.Call) and re.search(r"Loss$|Criterion$", called_name(one)):
                given = argument_of(one, keyword, -1) if keyword else None
                return built[0].text(built[1]) if given is None else maker_of(built[0], given)
    return ""


def made_by(line: str, names: str) -> str:
    """The statement that made a value which the one at a line reads, in the same function, by a call whose name
    matches: the last such."""
    found = statement_at(line)
    read = [n for n in nodes_within(found[1]) if isinstance(n, ast.Name)] if found is not None else []
    made = [m for n in read if found is not None and (m := assignment_of(found[0], n)) is not None]
    chosen = [
        m
        for m in made
        if isinstance(m, ast.Assign)
        and any(isinstance(n, ast.Call) and re.search(names, called_name(n)) for n in ast.walk(m.value))
    ]
    last = max(chosen, key=lambda m: m.lineno, default=None)
    inside = last is not None and found is not None and found[0].function(last) is found[0].function(found[1])
    return found[0].text(last) if found is not None and inside else ""


def returned_sorted(line: str) -> str:
    """What the function of a line returns, where the line sorts rows and keeps their order: ``x, order = x.sort()``."""
    found = statement_at(line)
    target = found[1].targets[0] if found is not None and isinstance(found[1], ast.Assign) else None
    calls = [n for n in nodes_within(found[1]) if isinstance(n, ast.Call)] if found is not None else []
    if found is None or not isinstance(target, ast.Tuple) or not any(called_name(n) == "sort" for n in calls):
        return ""
    function = found[0].function(found[1])
    last = function.body[-1] if function is not None else None
    return found[0].text(last) if isinstance(last, ast.Return) else ""


def subtracted(line: str) -> str:
    """The statement that made what a line subtracts or compares with, past an entry of it and what iterates over it."""
    found = statement_at(line)
    for node in nodes_within(found[1]) if found is not None else ():
        side: Any = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else None
        if isinstance(node, ast.Call) and re.search(r"_loss$", called_name(node)) and len(node.args) > 1:
            side = node.args[1]
        while isinstance(side, ast.Subscript) or (isinstance(side, ast.Attribute) and side.attr == "data"):
            side = side.value
        if isinstance(side, (ast.Name, ast.Attribute)) and found is not None:
            return maker_of(found[0], side)
    return ""


def first_argument(line: str) -> str:
    """The statement that made what the call at a line is given first, where that is a name."""
    found = statement_at(line)
    for node in nodes_within(found[1]) if found is not None else ():
        given = argument_of(node, "params", 0) if isinstance(node, ast.Call) else None
        if isinstance(given, ast.Name) and found is not None:
            before = assignment_of(found[0], given)
            return "" if before is None else found[0].text(before)
    return ""


def source_of_draws(line: str) -> str:
    """The statement that made the generator which the one at a line draws from, or the line itself; empty where nothing
    in it has the name of a draw."""
    found = statement_at(line)
    for node in nodes_within(found[1]) if found is not None else ():
        owner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if isinstance(node, ast.Call) and (given := argument_of(node, "generator", -1)) is not None:
            owner = given
        drawn = f"{getattr(owner, 'id', '')}.{called_name(node)}" if isinstance(node, ast.Call) else ""
        if found is not None and re.search(r"rng|gen|rand|draw|normal|uniform|choice|shuffle|uuid|time", drawn):
            before = assignment_of(found[0], owner) if isinstance(owner, ast.Name) else None
            return line if before is None else found[0].text(before)
    return ""


def value(line: str, method: str = "backward") -> str:
    """The statement that made what a method is called on at a line, as the loss that is backpropagated."""
    for source, call in calls_at(line, method):
        if isinstance(call.func, ast.Attribute):
            return maker_of(source, call.func.value)
    return ""


def value_here(line: str, method: str) -> str:
    """The statement of the same function that made what a method is called on at a line."""
    for source, call in calls_at(line, method):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        made = assignment_of(source, owner) if isinstance(owner, ast.Name) else None
        if made is not None and source.function(made) is source.function(call):
            return source.text(made)
    return ""


def argument(line: str, call: str, name: str, position: int) -> str:
    """The statement that made an argument of a call at a line."""
    for source, made in calls_at(line, call):
        given = argument_of(made, name, position)
        return "" if given is None else maker_of(source, given)
    return ""


def copied(line: str) -> str:
    """The statement that made the state which ``load_state_dict`` is given at a line; where that is the state of
    another model, the one that made the model that loads it."""
    for source, call in calls_at(line, "load_state_dict"):
        if call.args and isinstance(call.func, ast.Attribute):
            of, owner = call.args[0], call.func.value
            made = maker_of(source, owner if isinstance(of, ast.Call) else of)
            other = isinstance(of, ast.Call) and ast.dump(getattr(of.func, "value", of)) != ast.dump(owner)
            name = getattr(owner, "attr", getattr(owner, "id", ""))
            return (network(line, name) if other and made == source.text(call) else "") or made
    return ""


def network(line: str, name: str) -> str:
    """The statement that made the network of this name, which the statement at a line calls; where it calls it by
    another name, the only one of the file that assigns this name."""
    last = name.rpartition(".")[2]
    for source, call in calls_at(line, last) if last else ():
        return maker_of(source, call.func)
    found = statement_at(line)
    nodes = [n for n in ast.walk(found[0].tree) if isinstance(n, ast.Assign)] if found is not None and last else []
    attributes = [n for n in nodes if any(getattr(t, "attr", "") == last for t in n.targets)]
    named = attributes or [n for n in nodes if last in targets_of(n)]
    return found[0].text(named[0]) if found is not None and len(named) == 1 else ""


def reading(line: str, key: str) -> str:
    """The only statement of a file that reads this key of the batch."""
    found = statement_at(line)
    nodes = [n for n in ast.walk(found[0].tree) if isinstance(n, ast.Subscript)] if found is not None else []
    reads = {n.lineno for n in nodes if isinstance(n.ctx, ast.Load) and getattr(n.slice, "value", None) == key}
    return found[0].text(found[0].statement(reads.pop())) if found is not None and len(reads) == 1 else ""


def given(line: str) -> str:
    """The statement that gives the function at a line the value that the line reads: the only call, past functions that
    pass it on."""
    found = statement_at(line)
    function = None if found is None else found[0].function(found[1])
    if found is None or function is None:
        return ""
    for name in (n for n in ast.walk(found[1]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)):
        if name.id in parameters_of(function)[1:] and (made := given_for(found[0], name, FARTHEST)):
            return made
    return ""


def assigned_value(line: str) -> str:
    """The statement that made the value which the line assigns."""
    found = statement_at(line)
    value = None if found is None else getattr(found[1], "value", None)
    return "" if found is None or not isinstance(value, ast.Name) else maker_of(found[0], value)


def length_given(line: str) -> str:
    """Where the function that builds a schedule at a line is given its length: the only call, or what was assigned to
    the name that it gives."""
    found = statement_at(line)
    function = None if found is None else found[0].function(found[1])
    if found is None or function is None or isinstance(found[0].parents.get(function), ast.ClassDef):
        return ""
    source, parameters = found[0], parameters_of(function)
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    lengths = [n for n in parameters if n in read and re.search(r"steps|total|max|iter|epoch", n)]
    calls = source.calls(function.name)
    if len(calls) != 1 or not lengths:
        return ""
    total = next((n for n in lengths if "warm" not in n), lengths[0])
    given = argument_of(calls[0], total, parameters.index(total))
    before = assignment_of(source, given) if isinstance(given, ast.Name) else None
    return source.text(before if before is not None else calls[0])


def entry(line: str, key: str) -> str:
    """The statement that made what the only dict of a file that has this key gives for it."""
    found = statement_at(line)
    dicts = [n for n in ast.walk(found[0].tree) if isinstance(n, ast.Dict)] if found is not None else []
    given = [v for n in dicts for k, v in zip(n.keys, n.values, strict=True) if getattr(k, "value", None) == key]
    if len(given) != 1 or found is None:
        return ""
    base = base_of(given[0])
    before = assignment_of(found[0], base) if isinstance(base, ast.Name) else None
    return found[0].text(found[0].statement(given[0].lineno) if before is None else before)


def key_written(line: str, key: str, attribute: str = "") -> str:
    """The only statement of a file that writes this key into a dict, or into the one that an attribute holds."""
    found = statement_at(line)
    if found is None:
        return ""
    nodes = list(ast.walk(found[0].tree))
    keys = [k for n in nodes if isinstance(n, ast.Dict) for k in n.keys if k is not None]
    keys += [n.slice for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    if attribute:
        owners = [n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        keys = [n.slice for n in owners if getattr(n.value, "attr", "") == attribute]
    lines = [k for k in keys if isinstance(k, ast.Constant) and k.value == key]
    return found[0].text(lines[0]) if len(lines) == 1 else ""


def names_in_condition(line: str) -> str:
    """The statement that made the list of names by which a statement at a line, or the condition that it is under,
    chooses parameters."""
    found = statement_at(line)
    if found is None:
        return ""
    source, statement = found
    for node in source.above(statement):
        if isinstance(node, FUNCTIONS):
            return ""
        whole = node.test if isinstance(node, ast.If) else node
        lists = [g.iter for n in nodes_within(whole) if isinstance(n, ast.GeneratorExp) for g in n.generators]
        chosen = [n for n in lists if isinstance(n, (ast.Name, ast.Attribute))]
        given = [
            c.args[0]
            for c in nodes_within(whole)
            if isinstance(c, ast.Call) and called_name(c) == "startswith" and c.args
        ]
        chosen += [n for n in given if isinstance(n, (ast.Name, ast.Attribute))]
        for one in chosen:
            if (made := maker_of(source, one)) and made != source.text(source.statement(one.lineno)):
                return made
    return ""
