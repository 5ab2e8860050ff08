"""The operations that let a position see later ones, each found by its own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.instruments.tracing.forward_pass import axis_of, grads, recomputed, weighted_sum
from pytest_trainloop.instruments.tracing.operation_fixes import STATISTICS, scrambles, takes_away
from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    CONVOLUTIONS,
    NORMALISATIONS,
    PRODUCTS,
    RECURRENT,
    RESHAPES,
    SOFTMAXES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_trainloop.instruments.tracing.forward_pass import Op

Kind = Literal["views", "attention", "softmax", "recurrent", "convolution", "statistics", "other"]

MOST_OPERATIONS = 40
"""Operations that are followed back, at most."""

_KIND_OF: dict[str, Kind] = {
    **dict.fromkeys(ATTENTION | (PRODUCTS - {"linear"}) | {"__matmul__", "baddbmm"}, "attention"),
    **dict.fromkeys(RECURRENT, "recurrent"),
    **dict.fromkeys(CONVOLUTIONS - {"conv3d", "conv_transpose3d"}, "convolution"),
    **dict.fromkeys(NORMALISATIONS | {"normalize"}, "statistics"),
    **dict.fromkeys(RESHAPES, "views"),
}


@dataclass(frozen=True, slots=True)
class OperationAhead:
    """One operation that looks ahead."""

    op: Op
    kind: Kind
    offsets: frozenset[int] = frozenset()
    """The positions that it looks at, from its own; unknown where two axes are as long."""


def look_ahead(ops: Sequence[Op], length: int) -> Iterator[OperationAhead]:
    """The operations that look ahead, in order. Inputs and outputs count that have one axis of this length; a softmax
    over two such axes looks ahead where later keys, or queries, are in its sums."""
    for op in ops:
        if op.name in SOFTMAXES:
            if (kind := _softmax(op, length)) is not None:
                yield OperationAhead(op, kind)
            continue
        if op.name in STATISTICS and takes_away(op, length):
            yield OperationAhead(op, "statistics")
            continue
        if op.name in RESHAPES and not scrambles(op, length):
            continue
        offsets = _offsets_of(op, length)
        if op.name in RESHAPES or any(o > 0 for o in offsets):
            yield OperationAhead(op, _KIND_OF.get(op.name, "other"), frozenset(offsets))


def first_seeing(ops: Sequence[Op], leaf: torch.Tensor, length: int) -> OperationAhead | None:
    """The first operation whose result at a position depends on later inputs. Where that only joins or slices results
    of others, the operation behind it that gathered over positions."""
    made_by = {id(t): op for op in ops for t in op.outputs}
    for op in ops:
        if op.name in SOFTMAXES or not any(_sees_later(t, leaf, length) for t in op.outputs):
            continue
        kind = _KIND_OF.get(op.name)
        if kind is not None and (kind != "recurrent" or any(o > 0 for o in _offsets_of(op, length))):
            return OperationAhead(op, kind)
        return _behind(op, made_by, length) or OperationAhead(op, "other")
    return None


def _behind(op: Op, made_by: Mapping[int, Op], length: int) -> OperationAhead | None:
    todo = [op]
    for _ in range(MOST_OPERATIONS):
        if not todo:
            break
        at = todo.pop(0)
        for given in at.inputs:
            maker = made_by.get(id(given))
            if maker is None or axis_of(given, length) is not None or not given.requires_grad:
                continue
            if maker.name in STATISTICS and takes_away(maker, length):
                return OperationAhead(maker, "statistics")
            if maker.name in _KIND_OF and maker.name not in RESHAPES and _KIND_OF[maker.name] == "convolution":
                return OperationAhead(maker, "convolution")
            todo.append(maker)
    return None


def _sees_later(out: torch.Tensor, leaf: torch.Tensor, length: int) -> bool:
    axis = axis_of(out, length) if out.requires_grad and out.is_floating_point() else None
    if axis is None:
        return False
    at = length // 2
    (gradient,) = grads(weighted_sum(out.select(axis, at)), [leaf])
    return gradient is not None and bool((gradient[:, at + 1 :] != 0).any())


def _offsets_of(op: Op, length: int) -> set[int]:
    if not any(t.requires_grad and axis_of(t, length) is not None for t in op.outputs):
        return set()
    inputs, outputs = recomputed(op)
    inputs = [t for t in inputs if axis_of(t, length) is not None]
    offsets: set[int] = set()
    for out in outputs:
        to = axis_of(out, length) if out.requires_grad else None
        for at in sorted({length // 4, length // 2}) if to is not None else ():
            for t, gradient in zip(inputs, grads(weighted_sum(out.select(to or 0, at)), inputs), strict=True):
                if gradient is not None:
                    nonzero = (gradient.movedim(axis_of(t, length) or 0, 0).reshape(length, -1) != 0).any(1)
                    offsets |= {p - at for p in nonzero.nonzero().flatten().tolist()}
    return offsets


def _softmax(op: Op, length: int) -> Kind | None:
    """Whether a softmax over pairs of positions has later ones in its sums."""
    sizes = [d for d, size in enumerate(op.outputs[0].shape) if size == length]
    if (
        len(sizes) != 2
        or sizes != [op.outputs[0].dim() - 2, op.outputs[0].dim() - 1]
        or not op.outputs[0].requires_grad
    ):
        return None
    at = length // 2
    inputs, outputs = recomputed(op)
    if not inputs:
        return None
    (gradient,) = grads(weighted_sum(outputs[0][..., at, : at + 1]), inputs[:1])
    if gradient is None:
        return None
    if bool((gradient[..., at + 1 :, :] != 0).any()):
        return "softmax"
    return "attention" if bool((gradient[..., at, at + 1 :] != 0).any()) else None


def attentions(ops: Sequence[Op], length: int) -> int:
    """How many products join different positions."""
    return sum(1 for op in ops if _KIND_OF.get(op.name) == "attention" and _offsets_of(op, length) - {0})
