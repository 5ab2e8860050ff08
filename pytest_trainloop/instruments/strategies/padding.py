"""A real batch with other padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import strategies as st

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.loop import one_padding
from pytest_trainloop.instruments.batches.repadding import PaddingChange, Repadding, group, groups
from pytest_trainloop.instruments.strategies.seeds import seeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.instruments.batches.layout import MaskKind
    from pytest_trainloop.instruments.batches.roles import Roles

Side = Literal["right", "left"]

CHANGES: tuple[PaddingChange, ...] = ("as_is", "more", "other_values", "one_left", "no_padding", "empty_row")

MOST_MORE = 4
"""Positions that are added at most."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Padded:
    """A batch that is padded in another way.

    Attributes
    ----------
    change
        what was changed, one of the names that ``paddings`` takes as ``only``
    batch
        the batch, of the type of the one that was given
    lengths
        real positions of each row
    left, right
        positions that were added on each side
    row
        the row that was emptied or cut to one token
    mask
        the kind of the mask, where it was changed
    of
        the tensors whose padding was changed, where the batch has several groups of padded ones
    """

    change: PaddingChange
    batch: Any
    lengths: tuple[int, ...]
    left: int = 0
    right: int = 0
    row: int | None = None
    mask: MaskKind | None = None
    of: tuple[str, ...] = ()

    @property
    def same_tokens(self) -> bool:
        """Whether the real positions are those of the given batch: outputs there should be the same, ``left`` positions
        later."""
        return self.change in ("as_is", "more", "other_values")

    def __repr__(self) -> str:
        change = {
            "as_is": "the batch as it is",
            "more": f"{self.left or self.right} more on the {'left' if self.left else 'right'}",
            "other_values": "other values at padded positions",
            "one_left": f"one real token left in row {self.row}",
            "no_padding": "no padding at all",
            "empty_row": f"row {self.row} all padding",
        }[self.change]
        mask = "" if self.mask is None else f", mask as {self.mask}"
        of = f" of {self.of[0]}" if self.of else ""
        return f"padding{of}: {change}{mask}; lengths {list(self.lengths)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis writes into a failure, in place of all fields."""
        printer.text(repr(self))


def paddings(
    batch: Any,
    padding: Padding | Sequence[Padding] | None = None,
    *,
    only: Sequence[PaddingChange] | None = None,
    sides: Sequence[Side] | None = None,
    masks: Sequence[MaskKind] = (),
    most: int = MOST_MORE,
) -> SearchStrategy[Padded]:
    """The batch with more or less padding, one change in each.

    Real tokens, types, keys, dtypes and devices stay; every batch is a fresh copy. Failures shrink to the batch as it
    is, then to little padding in the first row.

    >>> @given(strategies.paddings(batch, only=["more", "other_values"]))
    ... def test_padding_does_not_count(padded):
    ...     assert torch.allclose(loss(model, padded.batch), loss(model, batch))

    Parameters
    ----------
    batch
        a batch with rows of different lengths
    padding
        how the batch is padded, where neither a mask nor lengths in the batch say so. Of several groups of padded
        tensors (source and target) one is changed at a time; ``of`` names one, a list of paddings all of them
    only
        the changes that may be drawn. "as_is"; "more": 1 to ``most`` positions added; "other_values": other ids or
        numbers at padded positions, where a mask or lengths mark them; "one_left": one real token left in a row;
        "no_padding": only positions that are real in every row; "empty_row": a row of padding only (with lengths
        drawn only if named here, since packing refuses a length of 0)
    sides
        the sides on which positions may be added: "right", "left"; default: where padding is
    masks
        further kinds of mask: "bool", "int", "float", of the same meaning, and "additive" (0, and -inf at padded
        positions)
    most
        positions that are added at most

    Raises
    ------
    UsageError
        padding cannot be read from this batch, or no such change is possible; the message says what to pass
    """
    declared = one_padding(padding, "paddings: padding")
    for names in [] if declared is None else declared.names:
        nested.require_names([batch], names)
    return _paddings(batch, declared, only, sides, masks, most)


@st.composite
def _paddings(
    draw: st.DrawFn,
    batch: Any,
    padding: Padding | None,
    only: Sequence[PaddingChange] | None,
    sides: Sequence[Side] | None,
    masks: Sequence[MaskKind],
    most: int,
) -> Padded:
    declared, of = draw(st.sampled_from(groups(batch, padding)))
    roles = group(batch, declared, of)
    change = draw(st.sampled_from(_possible(roles, only)))
    made = Repadding(change, of=of, padding=declared)
    if change == "more":
        side = draw(st.sampled_from(_sides(roles, sides)))
        more = draw(st.integers(1, most))
        made = replace(made, left=more) if side == "left" else replace(made, right=more)
    elif change == "other_values":
        made = replace(made, seed=draw(seeds()))
    elif change in ("one_left", "empty_row"):
        at_least = 2 if change == "one_left" else 1
        made = replace(made, row=draw(st.sampled_from([i for i, n in enumerate(roles.lengths) if n >= at_least])))
    if masks and roles.of("mask"):
        made = replace(made, mask=draw(st.sampled_from([None, *masks])))
    changed, lengths = made.made(batch, roles)
    return Padded(change, changed, lengths, made.left, made.right, made.row, made.mask, of)


def _possible(roles: Roles, only: Sequence[PaddingChange] | None) -> list[PaddingChange]:
    """The changes that this batch allows, of those that are wanted."""
    padded = present(roles.padded, "which positions are padding")
    said = bool(roles.of("mask", "lengths"))
    allowed = {
        "as_is": True,
        "more": True,
        "other_values": said and bool(padded.any()) and bool(roles.of("ids", "features")),
        "one_left": max(roles.lengths) > 1,
        "no_padding": bool(padded.any()) and not bool(padded.any(0).all()),
        "empty_row": max(roles.lengths) > 0 and (only is not None or not roles.of("lengths")),
    }
    unknown = [change for change in only or () if change not in CHANGES]
    if unknown:
        raise UsageError(f"paddings has no change {unknown[0]!r}: there are {', '.join(CHANGES)}")
    found = [change for change in CHANGES if allowed[change] and (only is None or change in only)]
    if not found:
        raise UsageError(f"paddings: none of {', '.join(only or CHANGES)} can be made of a batch with lengths "
                         f"{list(roles.lengths)} of {roles.length}")  # fmt: skip
    return found


def _sides(roles: Roles, wanted: Sequence[Side] | None) -> Sequence[Side]:
    if wanted is None:
        return [roles.side]
    if "left" in wanted and (lengths := roles.of("lengths")):
        raise UsageError(f"paddings: {lengths[0].name} are counted from the left, where no padding can be; leave "
                         "sides= out")  # fmt: skip
    return wanted
