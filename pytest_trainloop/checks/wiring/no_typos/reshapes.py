"""Reshapes to the axes of a tensor in another order: ``x.reshape(b, c, h, w)`` of (b, h, w, c), where a permute fits.

A reshape keeps the entries in their order, so that it merges neighbouring axes, or splits one. Where the new shape is
that of the axes in another order, entries of different places end up in one axis.
"""

from __future__ import annotations

import ast
import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.checks.wiring.no_typos.edited_source import PREFIX
from pytest_trainloop.checks.wiring.no_typos.expressions import Slip, name_of, shown
from pytest_trainloop.instruments.tracing.call_expressions import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.instruments.tracing.syntax import Source

SHAPED, TURNED = f"{PREFIX}shaped", f"{PREFIX}turned"

Sizes = tuple[int, ...]


def reshaped(source: Source, node: ast.stmt) -> Iterator[Slip]:
    """The first reshape of a statement to three or more axes, by sizes that are not divided; whether it takes a
    permute's place is seen in a run (``Shapes``)."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and called_name(n) in ("view", "reshape")]
    calls = [c for c in calls if isinstance(c.func, ast.Attribute) and len(c.args) > 2 and not c.keywords]
    # frames that are stacked two by two (odd: frames_stacked_in_pairs)
    call = next((c for c in calls if not any(isinstance(n, (ast.FloorDiv, ast.Starred)) for n in ast.walk(c))), None)
    if call is not None:
        key = f"{source.file}:{call.lineno}:{call.end_col_offset}"
        run, probe = (_wrapped(node, call, helper, key) for helper in (TURNED, SHAPED))
        yield Slip("reshape_for_permute", source, node, run, key, (shown(call),), probe=probe)


def _wrapped(node: ast.stmt, call: ast.Call, helper: str, key: str) -> ast.stmt:
    """The statement with the reshape made by a function of ours."""

    class Wrap(ast.NodeTransformer):
        def visit_Call(self, other: ast.Call) -> ast.AST:
            mine = (other.lineno, other.end_col_offset, called_name(other)) == place
            self.generic_visit(other)
            if not mine or not isinstance(other.func, ast.Attribute):
                return other
            method = ast.Constant(other.func.attr)
            return ast.Call(name_of(helper), [ast.Constant(key), method, other.func.value, *other.args], [])

    place = call.lineno, call.end_col_offset, called_name(call)
    made: ast.stmt = Wrap().visit(copy.deepcopy(node))
    return made


class Shapes:
    """What reshapes make of the axes in one run."""

    def __init__(self) -> None:
        self.turns: dict[str, tuple[Sizes, Sizes, Sizes, Sizes]] = {}
        """By reshape: the shape it is given and makes, the axes by which both are explained, and their other order."""

    def shaped(self, key: str, method: str, given: Any, *sizes: Any) -> Any:
        """Reshape, and note where the axes come in another order."""
        made = getattr(given, method)(*sizes)
        if isinstance(given, torch.Tensor) and not isinstance(given, nn.Parameter) and key not in self.turns:
            turn = turned(tuple(given.shape), tuple(made.shape))
            if turn is not None:
                self.turns[key] = tuple(given.shape), tuple(made.shape), *turn
        return made

    def turned(self, _key: str, method: str, given: Any, *sizes: Any) -> Any:
        """The permute to the shape that the reshape makes."""
        made = getattr(given, method)(*sizes)
        turn = turned(tuple(given.shape), tuple(made.shape)) if isinstance(given, torch.Tensor) else None
        return made if turn is None else given.reshape(turn[0]).permute(turn[1]).reshape(made.shape)

    def facts(self, key: str, tensor: str) -> dict[str, Any]:
        """What a finding says of a reshape."""
        given, made, axes, order = self.turns[key]
        first = "" if axes == given else f".reshape{axes}"
        last = "" if tuple(axes[at] for at in order) == made else f".reshape{made}"
        return {"given": str(given), "made": str(made), "intended": f"{tensor}{first}.permute{order}{last}"}


def turned(given: Sizes, made: Sizes) -> tuple[Sizes, Sizes] | None:
    """The axes of a shape, neighbours merged or one split, and the order of them that is the new shape; None where the
    new shape merges neighbours or splits axes in their order, or is no other order of them."""
    if math.prod(given) != math.prod(made) or 0 in given or _natural(given, made):
        return None
    for axes in _refined(given, made):
        for target in _merges(axes) if len(axes) > len(made) else [[(at,) for at in range(len(axes))]]:
            order = _order([math.prod(axes[at] for at in group) for group in target], made)
            flat = None if order is None else tuple(at for place in order for at in target[place])
            if flat is not None and flat != tuple(range(len(axes))):
                return axes, flat
    return None


def _natural(given: Sizes, made: Sizes) -> bool:
    """Whether each block of axes with one product is one axis on one side."""
    one, two = [n for n in given if n > 1], [n for n in made if n > 1]
    while one and two:
        a, b = [one.pop(0)], [two.pop(0)]
        while math.prod(a) != math.prod(b):
            smaller, rest = (a, one) if math.prod(a) < math.prod(b) else (b, two)
            smaller.append(rest.pop(0))
        if len(a) > 1 and len(b) > 1:
            return False
    return True


def _refined(given: Sizes, made: Sizes) -> Iterator[Sizes]:
    """The axes as they are, and with one split into two sizes of the new shape (the heads of attention)."""
    yield given
    for at, size in enumerate(given) if len(made) == len(given) + 1 else ():
        for head in dict.fromkeys(made):
            if 1 < head < size and size % head == 0 and size // head in made:
                yield (*given[:at], head, size // head, *given[at + 1 :])


def _merges(axes: Sizes) -> Iterator[list[tuple[int, ...]]]:
    """The axes with two or three neighbours as one."""
    for width in (2, 3):
        for at in range(len(axes) - width + 1):
            yield [
                *((n,) for n in range(at)),
                tuple(range(at, at + width)),
                *((n,) for n in range(at + width, len(axes))),
            ]


def _order(sizes: Sequence[int], made: Sizes) -> list[int] | None:
    """Where each size of the new shape is among the sizes, equal ones in their order; None where they differ."""
    if sorted(sizes) != sorted(made):
        return None
    left = list(range(len(sizes)))
    found = []
    for size in made:
        at = next(n for n in left if sizes[n] == size)
        left.remove(at)
        found.append(at)
    return found
