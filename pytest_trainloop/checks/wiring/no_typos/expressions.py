"""A slip, and what is asked of expressions and names."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_trainloop.instruments.tracing.syntax import Source


@dataclass(frozen=True)
class Slip:
    """One statement, and the one that was probably intended; ``run`` is what is run in its place, ``text`` is shown."""

    cause: str
    source: Source
    statement: ast.stmt
    run: ast.stmt
    text: str
    names: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    """The line to change, where it is not the first of the statement."""
    variant: str = ""
    probe: ast.stmt | None = None
    """What takes the statement's place while the loop runs as written, where it must be seen whether it is a slip."""
    repair: str = ""
    """What to do, where it is not to write ``text``."""


def tokens_of(expression: Any) -> frozenset[str]:
    """The words of the last name of an expression: ``self.obs_rate`` has obs and rate."""
    path = path_of(expression)
    return words_of(path[-1]) if path else frozenset()


def words_of(name: str) -> frozenset[str]:
    return frozenset(word for word in name.lower().split("_") if word)


def path_of(expression: Any) -> list[str]:
    """The names of ``a.b.c``; empty for another expression."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    return [*names, expression.id][::-1] if isinstance(expression, ast.Name) else []


def at(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def name_of(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def stored(expression: ast.expr) -> ast.expr:
    stored = copy.deepcopy(expression)
    stored.ctx = ast.Store()  # type: ignore[attr-defined]
    return stored


def shown(node: ast.AST) -> str:
    if isinstance(node, ast.Assign):
        return " = ".join(map(shown, (*node.targets, node.value)))
    if isinstance(node, ast.Return) and node.value is not None:
        return f"return {shown(node.value)}"
    if isinstance(node, ast.Tuple):
        return ", ".join(map(shown, node.elts))
    return ast.unparse(node)


def parts_of(name: str) -> list[str]:
    """The words and numbers of a name, in order: ``aug_imgs2`` has aug, imgs and 2."""
    return re.findall(r"[0-9]+|[A-Z]?[a-z]+|[A-Z]+", name)


def other_part(one: str, other: str) -> tuple[str, str] | None:
    """The one word that differs between two names, as it is in each; None where more do."""
    mine, theirs = parts_of(one), parts_of(other)
    differ = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
    return differ[0] if len(mine) == len(theirs) > 1 and len(differ) == 1 else None
