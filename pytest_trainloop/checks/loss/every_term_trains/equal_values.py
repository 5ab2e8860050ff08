"""Which values of a slice are one value by the way they are computed: the same calls with the same arguments.

Nothing is concluded from numbers that agree: what is equal here is equal for every batch and every state of the
weights. Numbers are compared all the same, so that a call that draws is never taken for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.tracing.loss_slice import Ref
from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.recording.torch_names import CASTS, DRAWS, DROPOUTS, RESHAPES, SAMPLES, SHAPE_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice

_DRAWN = DRAWS | DROPOUTS | SAMPLES | SHAPE_ONLY | frozenset({"rrelu", "gumbel_softmax", "rsample", "sample"})
_SAME_ENTRIES = CASTS | RESHAPES | frozenset({"contiguous", "expand", "expand_as", "squeeze", "broadcast_to"})
_OF_DERIVATIVES = frozenset({"detach", "data", "requires_grad_"})


class EqualValues:
    """``equal`` tells whether two values are the same number for number, ``same_slope`` whether their derivatives are
    too.

    Outputs of layers, draws, tensors of the batch and tensors that were written to are each like themselves alone.
    """

    def __init__(self, found: Slice) -> None:
        self._slice = found
        self._by_value = self._numbered(_value_key)
        self._by_slope = self._numbered(_slope_key)

    def equal(self, one: int, other: int) -> bool:
        """Whether two values are computed by the same operations, with a history or without."""
        return self._by_value[one] == self._by_value[other] and self._agree(one, other)

    def same_slope(self, one: int, other: int) -> bool:
        """Whether two values are equal and were detached, if at all, at the same places."""
        return self._by_slope[one] == self._by_slope[other] and self.equal(one, other)

    def key(self, value: int) -> Hashable:
        """The same for values that are equal."""
        return self._by_value[value]

    def _agree(self, one: int, other: int) -> bool:
        a, b = (self._slice.values[n].tensor for n in (one, other))
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)

    def _numbered(self, kept: Callable[[Call, bool], bool]) -> list[int]:
        """A number for each value, the same for those that the same operations made; ``kept`` tells which calls give
        their argument back."""
        numbers = [v.number for v in self._slice.values]
        first: dict[str, tuple[int, ...]] = {}

        def put(value: Any) -> Any:
            return f"value {numbers[value.number]}" if isinstance(value, Ref) else value

        for call in self._slice.calls:
            if call.func is None or call.writes or call.name in _DRAWN or not call.inputs:
                continue
            outputs = [self._slice.values[n] for n in call.outputs]
            if any(v.kind != "made" for v in outputs):
                continue
            same_shape = (
                len(outputs) == 1 and outputs[0].tensor.shape == self._slice.values[call.inputs[0]].tensor.shape
            )
            if same_shape and kept(call, outputs[0].requires_grad):
                numbers[call.outputs[0]] = numbers[call.inputs[0]]
                continue
            live = kept is _slope_key and tuple(v.requires_grad for v in outputs)
            key = f"{call.name} {tree_map(put, (call.args, call.kwargs))!r} {live}"
            made = first.setdefault(key, call.outputs)
            if len(made) == len(call.outputs):
                for number, twin in zip(call.outputs, made, strict=True):
                    numbers[number] = numbers[twin]
        return numbers


def _value_key(call: Call, _live: bool) -> bool:
    return call.name in _SAME_ENTRIES or _takes_everything(call)


def _slope_key(call: Call, live: bool) -> bool:
    return _value_key(call, live) and (live or call.name not in _OF_DERIVATIVES)


def _takes_everything(call: Call) -> bool:
    """Whether an index takes parts from first to last alone: with the shape kept, that is all."""
    if call.name != "__getitem__" or len(call.args) != 2 or len(call.inputs) != 1:
        return False
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    return all(part is Ellipsis or isinstance(part, slice) for part in index)
