"""The scores of one position, spread over several by a reshape: labels then meet scores of other positions."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_formula.distances import MEETINGS
from pytest_trainloop.recording.torch_names import (
    ACTIVATIONS,
    CASTS,
    CLAMPS,
    EQUALITIES,
    NEGATIONS,
    ORDER_COMPARISONS,
    RESHAPES,
    TRANSPOSES,
)
from pytest_trainloop.tracing.loss_slice import CannotReplay, Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.tracing.loss_slice import Call, Slice

_MOVES = RESHAPES | TRANSPOSES | frozenset({"contiguous", "squeeze", "unsqueeze", "ravel", "select", "unbind"})
_PICKS = frozenset({"__getitem__"})
_ENTRYWISE = (
    CASTS | ACTIVATIONS | CLAMPS | NEGATIONS | EQUALITIES
    | frozenset({"log", "log1p", "exp", "sqrt", "square", "pow", "__pow__", "abs", "long", "int", "bool"})
    | ORDER_COMPARISONS | frozenset({"rsub", "__rsub__"})
)  # fmt: skip
"""Functions whose entries belong to the same position as those that they were computed from."""

_LOOKUPS = frozenset({"gather", "take_along_dim"})


@dataclass(frozen=True, slots=True)
class _Entries:
    """Which entry of the value ``source`` each entry of another value was computed from."""

    source: int
    places: torch.Tensor
    reshaped: bool = False


def split_groups(found: Slice) -> Iterator[tuple[Call, str, int, Callable[[torch.Tensor], torch.Tensor]]]:
    """Calls in which labels, one for each position, meet scores of other positions, with both shapes in words, the
    scores, and the share of positions whose highest score they have at their own label."""
    needed = found.ancestors(found.root)
    for call in found.calls:
        if not needed.intersection(call.outputs) or len(call.inputs) < 2:
            continue
        met = _met(found, call)
        if met is None:
            continue
        scores, labels = met
        shapes = (tuple(found.values[e.source].tensor.shape) for e in (scores, labels))
        theirs, mine = next(shapes), next(shapes)
        if scores.reshaped and _never_meet(theirs, mine, scores.places, labels.places):
            right = functools.partial(_right_share, labels=found.values[labels.source].tensor)
            yield call, f"scores of shape {theirs} are reshaped to {_shape_of(found, call)}", scores.source, right


def _right_share(scores: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
    """The share of positions whose highest score is at the label, in the best way to read the axes."""
    shape, found = tuple(scores.shape), []
    for axis in _class_axes(shape, tuple(labels.shape)):
        chosen = scores.argmax(axis)
        for order in itertools.permutations(range(labels.dim())):
            turned = chosen.permute(order)
            if turned.shape == labels.shape:
                found.append((turned == labels).double().mean())
    return torch.stack(found).amax(0)


def _class_axes(scores: tuple[int, ...], labels: tuple[int, ...]) -> list[int]:
    return [d for d, size in enumerate(scores) if size > 1 and scores[:d] + scores[d + 1 :] == labels]


def _shape_of(found: Slice, call: Call) -> tuple[int, ...]:
    """The shape of the last reshape of the scores before they meet the labels."""
    number = next(n for n in call.inputs if found.values[n].requires_grad)
    while (made := found.call_of(number)) is not None and made.inputs:
        if made.name in RESHAPES:
            return tuple(found.values[number].tensor.shape)
        number = made.inputs[0]
    return tuple(found.values[number].tensor.shape)


def _met(found: Slice, call: Call) -> tuple[_Entries, _Entries] | None:
    """The learned side and that of the batch, entry by entry, of a comparison or a lookup."""
    one, other = call.inputs[:2]
    swaps = call.name not in _LOOKUPS and not found.values[one].requires_grad  # a lookup has its index second
    learned, data = (other, one) if swaps else (one, other)
    if found.values[data].requires_grad or not found.trained(learned) or not found.from_batch(data):
        return None
    if call.name in _LOOKUPS:
        scores, labels = _entries(found, learned), _entries(found, data)
        if scores is None or labels is None:
            return None
        axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
        index = found.values[data].tensor
        if not isinstance(axis, int) or index.dim() != scores.places.dim() or index.is_floating_point():
            return None
        return _Entries(scores.source, scores.places.gather(axis, index.long()), scores.reshaped), labels
    shapes = {found.values[n].tensor.shape for n in (learned, data)}
    if call.name not in MEETINGS or len(shapes) > 1:
        return None
    scores, labels = _entries(found, learned), _entries(found, data)
    return None if scores is None or labels is None else (scores, labels)


def _entries(found: Slice, number: int) -> _Entries | None:
    """Where entries come from, past functions of single entries, reshapes, and picks by whole numbers."""
    call = found.call_of(number)
    value = found.values[number]
    start = _Entries(number, torch.arange(value.tensor.numel(), device=value.tensor.device).reshape(value.tensor.shape))
    if call is None or value.kind == "layer" or not _of_one(found, call):
        return start
    before = call.inputs[0]
    entered = found.values[before].tensor.shape
    if call.name == "one_hot":
        inner = _entries(found, before)
        places = None if inner is None else inner.places.unsqueeze(-1).expand(value.tensor.shape)
        return None if inner is None or places is None else _Entries(inner.source, places, inner.reshaped)
    if call.name in _ENTRYWISE and entered == value.tensor.shape:
        return _entries(found, before)
    if call.name in _MOVES or (call.name in _PICKS and _whole(found, call)):
        inner = _entries(found, before)
        if inner is None:
            return None
        try:
            (made,) = found.replay({before: inner.places.double()}, [number])
        except CannotReplay:
            return None
        return _Entries(inner.source, made.detach().long(), inner.reshaped or call.name in RESHAPES)
    return start


def _of_one(found: Slice, call: Call) -> bool:
    """Whether a call's first argument is its only one of more than one entry."""
    return bool(call.inputs) and all(found.values[n].tensor.numel() == 1 for n in call.inputs[1:])


def _whole(found: Slice, call: Call) -> bool:
    """Whether an index picks whole numbers of some axes, and all of the others."""
    index = call.args[1] if len(call.args) > 1 else None
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Ref):
            tensor = found.values[part.number].tensor
            if tensor.dim() or tensor.is_floating_point() or tensor.dtype is torch.bool:
                return False
        elif isinstance(part, bool) or not (part is None or part is Ellipsis or isinstance(part, int) or _all_of(part)):
            return False
    return True


def _all_of(part: object) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _never_meet(scores: tuple[int, ...], labels: tuple[int, ...], mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether scores have one axis more than labels, and whichever it is, and however axes of one length are paired,
    some label meets the scores of another position."""
    classes = _class_axes(scores, labels)
    if not classes or len(labels) < 2 or mine.shape != theirs.shape:
        return False
    at_label = torch.unravel_index(theirs, labels)
    at_score = torch.unravel_index(mine, scores)
    for axis in classes:
        rest = [at for d, at in enumerate(at_score) if d != axis]
        for order in itertools.permutations(range(len(labels))):
            fits = all(labels[a] == labels[b] for a, b in enumerate(order))
            if fits and all(torch.equal(rest[b], at_label[a]) for a, b in enumerate(order)):
                return False
    return True
