"""A batch with more, less or other padding: one change of the padding of one group of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.core.errors import CannotDecide, UsageError
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.groups import padded_groups
from pytest_trainloop.instruments.batches.layout import Layout, MaskKind, rebuilt
from pytest_trainloop.instruments.batches.roles import read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.instruments.batches.roles import Roles

PaddingChange = Literal["as_is", "more", "other_values", "one_left", "no_padding", "empty_row"]


@dataclass(frozen=True, slots=True)
class Repadding:
    """One change of a batch's padding, as ``Composition.change`` and the strategy ``paddings`` make it. Real tokens,
    types, keys, dtypes and devices stay.

    ``left`` and ``right`` are positions that are added, ``row`` is the one that is cut, ``seed`` gives other values at
    padded positions, ``mask`` is another kind of mask of the same meaning, ``of`` are the tensors that are padded
    together (none: all), by name.
    """

    change: PaddingChange = "as_is"
    left: int = 0
    right: int = 0
    row: int | None = None
    seed: int | None = None
    mask: MaskKind | None = None
    of: tuple[str, ...] = ()
    padding: Padding | None = None

    def __str__(self) -> str:
        more, side = self.left or self.right, "left" if self.left else "right"
        change = {
            "as_is": "the padding as it is",
            "more": f"{more} more padded position{'s' if more > 1 else ''} on the {side}",
            "other_values": "other values at padded positions",
            "one_left": f"one real token left in row {self.row}",
            "no_padding": "no padding at all",
            "empty_row": f"row {self.row} all padding",
        }[self.change]
        mask = "" if self.mask is None else f", mask as {self.mask}"
        return f"{change}{mask}{f' in {self.of[0]}' if self.of else ''}"

    def apply(self, batch: Any) -> Any:
        """A fresh batch. Raises ``UsageError`` where padding cannot be read from it."""
        return self.made(batch, group(batch, self.padding, self.of))[0]

    def made(self, batch: Any, roles: Roles) -> tuple[Any, tuple[int, ...]]:
        """A fresh batch, and the real positions of each of its rows."""
        layout = Layout.of(roles)
        if self.change == "more":
            layout = layout.wider(self.left, self.right)
        elif self.change == "other_values":
            layout = replace(layout, seed=self.seed or 0)
        elif self.change == "no_padding":
            layout = layout.trimmed()
        elif self.row is not None:
            layout = layout.cut(self.row, 1 if self.change == "one_left" else 0, roles.side)
        return rebuilt(batch, roles, layout, self.mask), layout.lengths


def group(batch: Any, padding: Padding | None, of: tuple[str, ...]) -> Roles:
    """The roles of the tensors with these names; of all tensors where none are named.

    Raises ``UsageError`` where padding cannot be read from them.
    """
    named = {nested.shown(path): tensor for path, tensor in nested.paths(batch)}
    nested.require_names([batch], of)
    declared = None if padding is None else replace(padding, of=None)
    roles = read({name: named[name] for name in of} if of else batch, declared)
    if roles.undecided or roles.padded is None:
        raise UsageError(f"paddings: {roles.undecided}")
    return roles


def groups(batch: Any, padding: Padding | None) -> list[tuple[Padding | None, tuple[str, ...]]]:
    """What is padded together, by name, each with its declaration: one group without names where all tensors are."""
    declared = [p for p in (() if padding is None else padding.all) if p.of]
    if declared:
        return [(one, tuple(_resolved(batch, one))) for one in declared]
    try:
        found = padded_groups(batch, declared=padding)
    except CannotDecide as undecided:
        raise UsageError(f"paddings: {undecided}") from undecided
    if len(found) < 2:
        return [(padding, ())]
    order = [path for path, _ in nested.paths(batch)]
    return [(padding, tuple(nested.shown(path) for path in order if path in one.of | one.by)) for one in found]


def _resolved(batch: Any, padding: Padding) -> Iterator[str]:
    """Names as they are declared, as paths: a key may name all tensors below it."""
    for path, _ in nested.paths(batch):
        if nested.is_named(path, padding.of or ()):
            yield nested.shown(path)
