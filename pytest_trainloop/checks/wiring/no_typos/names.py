"""Names that nothing reads, next to others that are read in their place."""

from __future__ import annotations

import ast
import copy
import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.no_typos.expressions import Slip, other_part, parts_of, shown
from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.instruments.tracing.syntax import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.instruments.tracing.syntax import Source


LIKE = 0.85
"""Similarity of two keys from which one is taken for the other."""

_OF_TWO = frozenset(
    "min max minimum maximum mse_loss l1_loss smooth_l1_loss huber_loss kl_div cosine_similarity dist sub".split()
)
"""Functions that give nothing new of a value and itself."""


class Known:
    """The attributes and keys of the project's files: which are read, and which are given a value."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.read: Counter[str] = Counter()
        """How often an attribute, or a string, is looked up."""
        self.keys = set[str]()
        """Keys that some dict of the project has."""
        self.stored = set[str]()
        for node in (n for source in sources for n in source.parents):
            if isinstance(node, ast.Attribute):
                self.read[node.attr] += isinstance(node.ctx, ast.Load)
                self.stored |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.read[node.value] += 1
            elif isinstance(node, ast.Dict):
                self._given(node.keys)
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                self._given([node.slice])
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
                self.keys.update(k.arg for k in node.keywords if k.arg)
        self.stored |= self.keys

    def _given(self, keys: Sequence[ast.expr | None]) -> None:
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.keys.add(key.value)
                self.read[key.value] -= 1


def unread_in(function: Any) -> set[str]:
    """The variables and parameters of a function that nothing in it reads; none where it may read all."""
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    read = {n.id for n in names if not isinstance(n.ctx, ast.Store)}
    stored = {n.id for n in names} | set(parameters_of(function))
    return set() if read & {"locals", "vars"} else {n for n in stored - read if len(n) > 1 and n[0] != "_"}


def copied(source: Source, node: ast.Assign, known: Known) -> Iterator[Slip]:
    """A statement that is a copy of one above, with a name left as it was there; nothing reads the name that fits."""
    block = next((b for b in _blocks(source.parents[node]) if node in b), [])
    mine, at = _targets(node), block.index(node) if node in block else 0
    for above in block[max(0, at - 3) : at]:
        theirs = _targets(above) if isinstance(above, ast.Assign) else []
        renamed = {other_part(one, two) for one, two in zip(theirs, mine, strict=False)}
        change = renamed.pop() if len(renamed) == 1 and len(mine) == len(theirs) else None
        if (
            change is None
            or not isinstance(above, ast.Assign)
            or _with(above.value, change) != _with(node.value, change)
        ):
            continue
        unread = unread_in(source.function(node))
        for name in dict.fromkeys(_identifiers(node.value)):
            fits = _renamed(name, change)
            if fits != name and (fits in unread or (fits in known.stored and not known.read[fits])):
                run = copy.deepcopy(node)
                for part in ast.walk(run.value):
                    for field in ("id", "attr", "value"):
                        if getattr(part, field, None) == name:
                            setattr(part, field, fits)
                facts = {"read": name, "unread": fits, "above": above.lineno}
                yield Slip("name_repeated", source, node, run, shown(run), (name,), facts, variant="copied")


def _targets(node: ast.Assign) -> list[str]:
    target = node.targets[0]
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return [p.id if isinstance(p, ast.Name) else getattr(p, "attr", "") for p in parts]


def _blocks(node: Any) -> list[list[ast.stmt]]:
    return [block for name in ("body", "orelse", "finalbody") if isinstance(block := getattr(node, name, None), list)]


def _identifiers(expression: ast.expr) -> list[str]:
    found = [getattr(n, "id", getattr(n, "attr", getattr(n, "value", None))) for n in ast.walk(expression)]
    return [name for name in found if isinstance(name, str)]


def _renamed(name: str, change: tuple[str, str]) -> str:
    """The name with one word in place of another; as it is where it does not have the word once."""
    at = parts_of(name).count(change[0])
    return name.replace(change[0], change[1]) if at == 1 and name.count(change[0]) == 1 else name


def _with(expression: ast.expr, change: tuple[str, str]) -> str:
    """An expression with all names changed, to be compared."""
    twin = copy.deepcopy(expression)
    for part in ast.walk(twin):
        for field in ("id", "attr", "value"):
            if isinstance(name := getattr(part, field, None), str):
                setattr(part, field, _renamed(name, change))
    return ast.dump(twin)


def key_misspelt(source: Source, node: ast.stmt, known: Known) -> Iterator[Slip]:
    """A look-up with a default by a key that no dict of the project has, where nothing reads one that is almost it."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)):
        key = call.args[0] if call.args else None
        if call.func.attr not in ("get", "pop") or not isinstance(key, ast.Constant) or not isinstance(key.value, str):  # type: ignore[attr-defined]
            continue
        similar = [k for k in known.keys if LIKE <= difflib.SequenceMatcher(None, k, key.value).ratio() < 1]
        unread = [k for k in similar if known.read[k] <= 0]
        if key.value not in known.keys and len(similar) == len(unread) == 1:
            run = copy.deepcopy(node)
            for part in ast.walk(run):
                if isinstance(part, ast.Constant) and part.value == key.value:
                    part.value = unread[0]
            facts = {"read": key.value, "unread": unread[0]}
            yield Slip("key_misspelt", source, node, run, shown(run), (key.value,), facts)


def name_in(expression: ast.expr) -> str:
    return expression.id if isinstance(expression, ast.Name) else ""


def repeated(source: Source, node: ast.stmt) -> Iterator[Slip]:
    """A name twice in a tuple, where another name of its kind is assigned and never read."""
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Tuple) or len(value.elts) < 2:
        return
    targets = node.targets[0].elts if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) else []
    texts = Counter(map(shown, value.elts))
    for place, element in enumerate(value.elts):
        names = {n.id for n in ast.walk(element) if isinstance(n, ast.Name)}
        first = next(i for i, e in enumerate(value.elts) if shown(e) == shown(element))
        if texts[shown(element)] != 2 or place == first:
            continue
        if len(targets) == len(value.elts):  # h, c = h[rows], h[rows]
            pair = [t.id for t in (targets[first], targets[place]) if isinstance(t, ast.Name)]
            read, unread = pair if len(pair) == 2 else ("", "")
            if read not in names or unread in names or not _never_read(source, node, unread):
                continue
        else:  # return mean_a, logvar_a, mean_b, logvar_a
            read = element.id if isinstance(element, ast.Name) else ""
            others = [n for n in _locals(source, node) if n != read and _similar(n, read)] if read else []
            others = [n for n in others if n not in texts and _never_read(source, node, n)]
            if len(others) != 1:
                continue
            unread = others[0]
        run = copy.deepcopy(node)
        for n in ast.walk(run.value.elts[place]):  # type: ignore[attr-defined]
            if isinstance(n, ast.Name) and n.id == read:
                n.id = unread
        yield Slip("name_repeated", source, node, run, shown(run), (read,), {"read": read, "unread": unread})


def same_twice(source: Source, node: ast.stmt) -> Iterator[Slip]:
    """A function of two values that is given one name twice, ``torch.min(q1, q1)``, where one other name fits."""
    for call in ast.walk(node):
        pair = call.args[:2] if isinstance(call, ast.Call) and called_name(call) in _OF_TWO else []
        pair = [call.left, call.right] if isinstance(call, ast.BinOp) and isinstance(call.op, ast.Sub) else pair
        one, other = map(name_in, pair) if len(pair) == 2 else ("", "")
        fits = [n for n in _locals(source, node) if other_part(n, one)] if one and one == other else []
        if len(fits) == 1:
            run = copy.deepcopy(node)
            twin = next(n for n in ast.walk(run) if type(n) is type(call) and ast.dump(n) == ast.dump(call))
            if isinstance(twin, ast.Call):
                twin.args[1] = ast.Name(fits[0], ast.Load())
            elif isinstance(twin, ast.BinOp):
                twin.right = ast.Name(fits[0], ast.Load())
            facts = {"read": one, "unread": fits[0]}
            yield Slip("name_repeated", source, node, run, shown(run), (one,), facts, variant="operands")


def _similar(one: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, one, other).ratio() >= 0.6 and len(one) > 2


def _locals(source: Source, node: ast.stmt) -> list[str]:
    """The names that the function around assigns above a statement."""
    function = source.function(node)
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(n.id for n in names if n.lineno < node.lineno and not n.id.startswith("_")))


def _never_read(source: Source, node: ast.stmt, name: str) -> bool:
    """Whether the function assigns a name, or is given it, and the value that it has at a statement is not read."""
    function = source.function(node)
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    stored = [n.lineno for n in uses if isinstance(n.ctx, ast.Store) and n.lineno < node.lineno]
    stored += [function.lineno] if name in parameters_of(function) else []
    if not stored:
        return False
    read = (n.lineno for n in uses if isinstance(n.ctx, ast.Load))
    last = getattr(node, "end_lineno", None) or node.lineno
    rebound = any(isinstance(n.ctx, ast.Store) and node.lineno <= n.lineno <= last for n in uses)
    return not any(line > max(stored) and (not rebound or line <= last) for line in read)
