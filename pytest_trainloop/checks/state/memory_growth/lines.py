"""The lines of the project's that made a tensor, and that put one into a container."""

from __future__ import annotations

import ast
import functools
import linecache
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.graphs import metadata_of
from pytest_trainloop.recording.source import here, place_of
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_trainloop.recording.events import Place, Site

_KEY = "pytest_trainloop.place"
_ADDS = frozenset("append appendleft extend add insert push put update record log store".split())


class Lines(WatchingMode):
    """Notes the line that made each node of a graph, in the node itself."""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if name != "__get__":
            with self.watch.suspended():
                nodes = [t.grad_fn for t in tensors_in(out) if t.requires_grad and not t.is_leaf]
                fresh = [m for node in nodes if (m := metadata_of(node)) is not None and _KEY not in m]
                if fresh:
                    now = Made(*here(), window=self.watch.record.rounds + 1, item=self.watch.items())
                    for metadata in fresh:
                        metadata[_KEY] = now
        return out


class Made(NamedTuple):
    """Where and when a node was made."""

    place: Place
    site: Site
    window: int
    """The number of the optimizer step that followed."""
    item: int
    """The number of batches that the loop had taken."""


def made(node: Any) -> Made | None:
    """Where and when a node was made; None where ``Lines`` did not see it."""
    metadata = None if node is None else metadata_of(node)
    return None if metadata is None else metadata.get(_KEY)


def made_at(node: Any) -> Place | None:
    """The line that made a node, where it is known."""
    known = made(node)
    return None if known is None else known.place


def put_at(container: str, files: Iterable[str]) -> Place | None:
    """The one line of these files that puts something into the container of this name; None where there are several."""
    last = container.rpartition(".")[2].partition("[")[0]
    lines = {(file, line) for file in dict.fromkeys(files) for line in _puts(file).get(last, ())} if last else set()
    return place_of(*lines.pop()) if len(lines) == 1 else None


@functools.lru_cache(maxsize=64)
def _puts(file: str) -> dict[str, tuple[int, ...]]:
    """The lines that put something into a container, by the last name of the container."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        for name in _put_into(node):
            found.setdefault(name, []).append(node.lineno)  # type: ignore[attr-defined]
    return {name: tuple(dict.fromkeys(lines)) for name, lines in found.items()}


def _put_into(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS:
        return [_last_name(node.func.value)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return [_last_name(node.target)]
    if isinstance(node, ast.Assign):
        return [_last_name(t.value) for t in node.targets if isinstance(t, ast.Subscript)]
    return []


def _last_name(expression: ast.expr) -> str:
    while isinstance(expression, (ast.Subscript, ast.Call)):
        expression = expression.value if isinstance(expression, ast.Subscript) else expression.func
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
