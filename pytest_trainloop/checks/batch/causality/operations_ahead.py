"""Which operations of a pass let a position see later ones, by the gradient of each operation alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    CONVOLUTIONS,
    NORMALISATIONS,
    PRODUCTS,
    RECURRENT,
    RESHAPES,
    SOFTMAXES,
)
from pytest_trainloop.tracing.forward_pass import alone, axis_of, slopes, weighed
from pytest_trainloop.tracing.operation_fixes import (
    STATISTICS,
    as_a_constant,
    moved_first,
    scrambles,
    takes_away,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_trainloop.tracing.forward_pass import Change, Op

Kind = Literal["views", "attention", "softmax", "recurrent", "convolution", "statistics", "other"]

FARTHEST = 40
"""Operations that are gone back over."""

KINDS: tuple[Kind, ...] = ("views", "softmax", "attention", "recurrent", "convolution", "statistics", "other")
"""In the order in which they are tried."""

_KIND_OF: dict[str, Kind] = {
    **dict.fromkeys(ATTENTION | (PRODUCTS - {"linear"}) | {"__matmul__", "baddbmm"}, "attention"),
    **dict.fromkeys(RECURRENT, "recurrent"),
    **dict.fromkeys(CONVOLUTIONS - {"conv3d", "conv_transpose3d"}, "convolution"),
    **dict.fromkeys(NORMALISATIONS | {"normalize"}, "statistics"),
    **dict.fromkeys(RESHAPES, "views"),
}


@dataclass(frozen=True, slots=True)
class Ahead:
    """One operation, of which kind, and the offsets at which it looks ahead (none known where two axes are as long)."""

    op: Op
    kind: Kind
    offsets: frozenset[int] = frozenset()


def look_ahead(ops: Sequence[Op], length: int) -> Iterator[Ahead]:
    """Those that look ahead, in order. Inputs and outputs count that have one axis of so many positions; of a softmax
    over two such axes it is asked whether later keys, or queries, are in its sums."""
    for op in ops:
        if op.name in SOFTMAXES:
            if (kind := _softmax(op, length)) is not None:
                yield Ahead(op, kind)
            continue
        if op.name in STATISTICS and takes_away(op, length):
            yield Ahead(op, "statistics")
            continue
        if op.name in RESHAPES and not scrambles(op, length):
            continue
        offsets = _offsets(op, length)
        if op.name in RESHAPES or any(o > 0 for o in offsets):
            yield Ahead(op, _KIND_OF.get(op.name, "other"), frozenset(offsets))


def first_seeing(ops: Sequence[Op], leaf: torch.Tensor, length: int) -> Ahead | None:
    """The first operation whose result at a position depends on later inputs: it, or, where it only joins or cuts what
    others made, the one behind it that gathered over positions."""
    made_by = {id(t): op for op in ops for t in op.gave}
    for op in ops:
        if op.name in SOFTMAXES or not any(_sees_later(t, leaf, length) for t in op.gave):
            continue
        kind = _KIND_OF.get(op.name)
        if kind is not None and (kind != "recurrent" or any(o > 0 for o in _offsets(op, length))):
            return Ahead(op, kind)
        return _behind(op, made_by, length) or Ahead(op, "other")
    return None


def _behind(op: Op, made_by: Mapping[int, Op], length: int) -> Ahead | None:
    todo = [op]
    for _ in range(FARTHEST):
        if not todo:
            break
        at = todo.pop(0)
        for given in at.given:
            maker = made_by.get(id(given))
            if maker is None or axis_of(given, length) is not None or not given.requires_grad:
                continue
            if maker.name in STATISTICS and takes_away(maker, length):
                return Ahead(maker, "statistics")
            if maker.name in _KIND_OF and maker.name not in RESHAPES and _KIND_OF[maker.name] == "convolution":
                return Ahead(maker, "convolution")
            todo.append(maker)
    return None


def _sees_later(out: torch.Tensor, leaf: torch.Tensor, length: int) -> bool:
    axis = axis_of(out, length) if out.requires_grad and out.is_floating_point() else None
    if axis is None:
        return False
    at = length // 2
    (slope,) = slopes(weighed(out.select(axis, at)), [leaf])
    return slope is not None and bool((slope[:, at + 1 :] != 0).any())


def changes(looking: Sequence[Ahead], length: int) -> Mapping[int, Change]:
    """What takes the place of their results, so that they cannot look ahead any more."""
    return {a.op.number: moved_first(length) if a.kind == "views" else as_a_constant for a in looking}


def _offsets(op: Op, length: int) -> set[int]:
    if not any(t.requires_grad and axis_of(t, length) is not None for t in op.gave):
        return set()
    given, gave = alone(op)
    given = [t for t in given if axis_of(t, length) is not None]
    found: set[int] = set()
    for out in gave:
        to = axis_of(out, length) if out.requires_grad else None
        for at in sorted({length // 4, length // 2}) if to is not None else ():
            for t, slope in zip(given, slopes(weighed(out.select(to or 0, at)), given), strict=True):
                if slope is not None:
                    felt = (slope.movedim(axis_of(t, length) or 0, 0).flatten(1) != 0).any(1)
                    found |= {p - at for p in felt.nonzero().flatten().tolist()}
    return found


def _softmax(op: Op, length: int) -> Kind | None:
    """Whether a softmax over pairs of positions has later ones in its sums."""
    sizes = [d for d, size in enumerate(op.gave[0].shape) if size == length]
    if len(sizes) != 2 or sizes != [op.gave[0].dim() - 2, op.gave[0].dim() - 1] or not op.gave[0].requires_grad:
        return None
    at = length // 2
    given, gave = alone(op)
    if not given:
        return None
    (slope,) = slopes(weighed(gave[0][..., at, : at + 1]), given[:1])
    if slope is None:
        return None
    if bool((slope[..., at + 1 :, :] != 0).any()):
        return "softmax"
    return "attention" if bool((slope[..., at, at + 1 :] != 0).any()) else None


def reach(looking: Sequence[Ahead]) -> tuple[int, int] | None:
    """The least and the greatest offset at which they look, where it is known."""
    offsets = [o for a in looking for o in a.offsets]
    return (min(offsets), max(offsets)) if offsets else None


def attentions(ops: Sequence[Op], length: int) -> int:
    """How many products join different ones of so many positions."""
    return sum(1 for op in ops if _KIND_OF.get(op.name) == "attention" and _offsets(op, length) - {0})
