"""Predictions and targets that meet entry by entry, whatever is made of them: entries that belong to different places,
errors that cancel in a mean, a distance that is made larger, scores of one position spread over several."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_formula.causes import found
from pytest_trainloop.checks.loss.loss_formula.values import culprits_of, others_train, plays_a_game, slope_of, trained
from pytest_trainloop.instruments.formulas.cut import close
from pytest_trainloop.instruments.formulas.origins import origin
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, Ref
from pytest_trainloop.recording.torch_names import (
    ACTIVATIONS,
    BINARY_LOSSES,
    CASTS,
    CLAMPS,
    DISTANCE_LOSSES,
    EQUALITIES,
    MULTIPLICATIONS,
    NEGATIONS,
    ORDER_COMPARISONS,
    RESHAPES,
    SUBTRACTIONS,
    TRANSPOSES,
)
from pytest_trainloop.runs.weight_origins import pretrained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.formulas.trial import Step
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice
    from pytest_trainloop.runs.evidence import Evidence

_MEETINGS = SUBTRACTIONS | MULTIPLICATIONS | DISTANCE_LOSSES | BINARY_LOSSES
"""Functions that compare or multiply entry by entry."""

_LOOKUPS = frozenset({"gather", "take_along_dim"})

_BIJECTIVE = RESHAPES | TRANSPOSES | frozenset({"contiguous", "squeeze", "unsqueeze", "ravel"})
"""Every entry goes somewhere, and none is repeated; as casts do."""

_MOVES = _BIJECTIVE | frozenset({"select", "unbind"})
_ENTRYWISE = (
    CASTS | ACTIVATIONS | CLAMPS | NEGATIONS | EQUALITIES
    | frozenset({"log", "log1p", "exp", "sqrt", "square", "pow", "__pow__", "abs", "long", "int", "bool"})
    | ORDER_COMPARISONS | frozenset({"rsub", "__rsub__"})
)  # fmt: skip
"""Functions whose entries belong to the same position as those that they were computed from."""

_SPREAD = Aim("the spread of the differences", lambda error: (error - error.mean()).abs(), best=0.0)
_DISTANCE = Aim("the distance between prediction and target", lambda error: error.abs())

ZERO_MEAN = 3
"""Errors of mean 0 that are added."""


def entries(part: Slice, step: Step, evidence: Evidence) -> Iterator[Finding]:
    yield from _misaligned(part, step)
    yield from _spread_scores(part, step)
    for call, _, _ in _meetings(part, SUBTRACTIONS):
        (number,) = call.outputs
        if _cancels(part, call):
            level, text = trained(step, (number,), number, _SPREAD)
            if level is not None:
                yield _found(part, call, "errors_cancel", level=level, trained=text)
    for call, _, _ in _meetings(part, SUBTRACTIONS):
        (number,) = call.outputs
        counted = _grows(part, call)
        if counted and not plays_a_game(part, number, evidence):
            level, text = trained(step, (number,), number, _DISTANCE)
            if level is not None:
                level = "advice" if evidence.shared(pretrained) else level
                yield _found(part, call, "sign_flipped", "distance", level=level, trained=text, counted=counted)


def _found(part: Slice, call: Call, cause: str, variant: str = "", **facts: Any) -> Finding:
    """A finding at the line of a call, whose culprits are behind its inputs."""
    facts |= {"function": call.name, "entries": part.values[call.outputs[0]].tensor.numel()}
    return found(cause, call, culprits_of(part, call.inputs) or (call.name,), variant, **facts)


def _meetings(part: Slice, names: Set[str]) -> Iterator[tuple[Call, int, int]]:
    """The calls of these functions that are given a learned value and one of the batch, of one shape, and both of
    these. A lookup has its index second, of any shape."""
    needed = part.ancestors(part.root)
    for call in part.calls:
        if call.name not in names or not needed.intersection(call.outputs) or len(call.inputs) < 2:
            continue
        one, other = call.inputs[:2]
        looks_up = call.name in _LOOKUPS
        learned, data = (one, other) if looks_up or part.values[one].requires_grad else (other, one)
        if part.values[data].requires_grad or not part.trained(learned) or not part.from_batch(data):
            continue
        if looks_up or part.values[learned].tensor.shape == part.values[data].tensor.shape:
            yield call, learned, data


@dataclass(frozen=True, slots=True)
class _Entries:
    """Which entry of the value ``source`` each entry of another value was computed from."""

    source: int
    shape: tuple[int, ...]
    """That of the source."""
    places: torch.Tensor
    reshaped: bool = False


def _whole(part: Slice, number: int) -> _Entries:
    tensor = part.values[number].tensor
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return _Entries(number, tuple(tensor.shape), places)


def _misaligned(part: Slice, step: Step) -> Iterator[Finding]:
    """Comparisons, entry by entry, of values whose entries lie in another order."""
    for call, learned, data in _meetings(part, _MEETINGS):
        theirs, mine = _layout(part, data), _layout(part, learned)
        if theirs is None or mine is None:
            continue
        at_mine, at_theirs = (torch.unravel_index(e.places.flatten(), e.shape) for e in (mine, theirs))
        # axes of both that are surely the same: those whose length no other axis has
        sizes = {n for n in mine.shape if n > 1 and mine.shape.count(n) == 1}
        same = sizes if sorted(mine.shape) == sorted(theirs.shape) else set()
        if all(torch.equal(at_mine[mine.shape.index(n)], at_theirs[theirs.shape.index(n)]) for n in same):
            continue
        target = torch.empty_like(part.values[data].tensor, dtype=torch.float64).flatten()
        target[theirs.places.flatten()] = part.values[data].tensor.double().flatten()
        aligned = []  # what belongs to each entry of the learned side, for each way to pair axes of one length
        for order in itertools.permutations(range(len(theirs.shape))):
            if all(mine.shape[a] == theirs.shape[b] for a, b in enumerate(order)):
                strides = [math.prod(theirs.shape[b + 1 :]) for b in order]
                aligned.append(target[sum(c * s for c, s in zip(at_mine, strides, strict=True))])

        def distance(value: torch.Tensor, aligned: list[torch.Tensor] = aligned) -> torch.Tensor:
            return torch.stack([(value.flatten() - t).abs().mean() for t in aligned]).amin(0)

        aim = Aim("the distance of each entry from the target of its own place", distance, best=0.0)
        level, text = trained(step, (learned,), learned, aim, otherwise="advice")
        facts = {"mine": str(mine.shape), "theirs": str(theirs.shape), "trained": text}
        yield _found(part, call, "entries_misaligned", level=level, **facts)


def _layout(part: Slice, number: int) -> _Entries | None:
    """Where entries come from in what a value is a reshaped or transposed copy of."""
    source = _whole(part, origin(part, number, _BIJECTIVE | CASTS)[0].number)
    moved = _moved(part, source, source.source, number)
    return moved if moved is not None and moved.places.numel() == source.places.numel() else None


def _moved(part: Slice, inner: _Entries, before: int, number: int) -> _Entries | None:
    """Where the entries of a later value come from, by the same calls made with the places of the entries."""
    if before == number:
        return inner
    try:
        (made,) = part.replay({before: inner.places.double()}, [number])
    except CannotReplay:
        return None
    return _Entries(inner.source, inner.shape, made.detach().long(), inner.reshaped)


def _spread_scores(part: Slice, step: Step) -> Iterator[Finding]:
    """Labels, one for each position, that meet scores of other positions."""
    for call, learned, data in _meetings(part, _MEETINGS | _LOOKUPS):
        scores, labels = _entries(part, learned), _entries(part, data)
        if scores is None or labels is None:
            continue
        if call.name in _LOOKUPS:
            axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
            index = part.values[data].tensor
            if not isinstance(axis, int) or index.dim() != scores.places.dim() or index.is_floating_point():
                continue
            picked = scores.places.gather(axis, index.long())
            scores = _Entries(scores.source, scores.shape, picked, scores.reshaped)
        if not scores.reshaped or not _never_meet(scores, labels):
            continue
        number = next(n for n in call.inputs if part.values[n].requires_grad)
        while (made := part.call_of(number)) is not None and made.inputs and made.name not in RESHAPES:
            number = made.inputs[0]
        reshaped = tuple(part.values[number].tensor.shape)
        aim_of = "the share of positions whose highest score is at their label"
        aim = Aim(aim_of, _right_share(part.values[labels.source].tensor), rises=True, best=1.0)
        level, text = trained(step, (scores.source,), scores.source, aim, otherwise="advice")
        facts = {"mine": str(reshaped), "theirs": str(scores.shape), "trained": text}
        yield _found(part, call, "entries_misaligned", "scores", level=level, **facts)


def _right_share(labels: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The share of positions whose highest score is at the label, in the best way to read the axes."""

    def share(scores: torch.Tensor) -> torch.Tensor:
        turned = (
            scores.argmax(axis).permute(order)
            for axis in _class_axes(tuple(scores.shape), tuple(labels.shape))
            for order in itertools.permutations(range(labels.dim()))
        )
        return torch.stack([(t == labels).double().mean() for t in turned if t.shape == labels.shape]).amax(0)

    return share


def _class_axes(scores: tuple[int, ...], labels: tuple[int, ...]) -> list[int]:
    return [d for d, size in enumerate(scores) if size > 1 and scores[:d] + scores[d + 1 :] == labels]


def _entries(part: Slice, number: int) -> _Entries | None:
    """Where entries come from, past functions of single entries, reshapes, and picks by whole numbers."""
    call, value = part.call_of(number), part.values[number]
    if call is None or value.kind == "layer" or not call.inputs:
        return _whole(part, number)
    before = call.inputs[0]
    alone = all(part.values[n].tensor.numel() == 1 for n in call.inputs[1:])  # the only one of more than one entry
    one_hot = call.name == "one_hot"
    entrywise = call.name in _ENTRYWISE and part.values[before].tensor.shape == value.tensor.shape
    moves = call.name in _MOVES or (call.name == "__getitem__" and _picks_whole_numbers(part, call))
    if not alone or not (one_hot or entrywise or moves):
        return _whole(part, number)
    inner = _entries(part, before)
    if inner is None or (entrywise and not one_hot):
        return inner
    if one_hot:
        places = inner.places.unsqueeze(-1).expand(value.tensor.shape)
        return _Entries(inner.source, inner.shape, places, inner.reshaped)
    moved = _moved(part, inner, before, number)
    reshaped = inner.reshaped or call.name in RESHAPES
    return None if moved is None else _Entries(inner.source, inner.shape, moved.places, reshaped)


def _picks_whole_numbers(part: Slice, call: Call) -> bool:
    """Whether an index picks whole numbers of some axes, and all of the others."""
    index = call.args[1] if len(call.args) > 1 else None
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, Ref):
            tensor = part.values[each.number].tensor
            if tensor.dim() or tensor.is_floating_point() or tensor.dtype is torch.bool:
                return False
        elif not (each is None or each is Ellipsis or each == slice(None) or type(each) is int):
            return False
    return True


def _never_meet(scores: _Entries, labels: _Entries) -> bool:
    """Whether scores have one axis more than labels, and whichever it is, and however axes of one length are paired,
    some label meets the scores of another position."""
    classes, shape = _class_axes(scores.shape, labels.shape), labels.shape
    if not classes or len(shape) < 2 or scores.places.shape != labels.places.shape:
        return False
    at_label, at_score = (torch.unravel_index(e.places, e.shape) for e in (labels, scores))
    for axis in classes:
        rest = [at for d, at in enumerate(at_score) if d != axis]
        for order in itertools.permutations(range(len(shape))):
            fits = all(shape[a] == shape[b] for a, b in enumerate(order))
            if fits and all(torch.equal(rest[b], at_label[a]) for a, b in enumerate(order)):
                return False
    return True


def _cancels(part: Slice, call: Call) -> bool:
    """Whether only the mean of differences is used: with any errors of mean 0 added, the value is the same."""
    (number,) = call.outputs
    error = part.values[number].tensor
    if error.numel() < 2 or not error.is_floating_point() or others_train(part, number):
        return False
    if any(_is_reduced(part, side) for side in call.inputs[:2]):
        return False  # a difference of costs, as a logarithm of one less a logarithm of another
    value = part.values[part.root].tensor
    size = 10 * error.numel() * float(error.abs().max() + 1) + float(value.abs().max())
    try:
        for seed in range(ZERO_MEAN):
            noise = torch.randn(error.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            noise = (noise - noise.mean()).to(error.device) * (error.abs().max() + 1)
            made = part.replay({number: error + noise}, [part.root])[0].detach()
            if not close(made.sum(), value.sum(), size):
                return False
        (moved,) = part.replay({number: error + 1}, [part.root])
    except CannotReplay:
        return False
    return bool((moved - value).abs().sum() > 0)


def _is_reduced(part: Slice, number: int) -> bool:
    """Whether a value has fewer entries than what it was computed of, back to the layers and the batch."""
    size, seen, todo = part.values[number].tensor.numel(), {number}, [number]
    while todo:
        value = part.values[todo.pop()]
        if value.tensor.numel() > size:
            return True
        if value.kind not in ("layer", "batch") and value.made_by is not None:
            new = [n for n in part.calls[value.made_by].inputs if n not in seen]
            seen.update(new)
            todo.extend(new)
    return False


def _grows(part: Slice, call: Call) -> int:
    """How many differences have a gradient, where what is backpropagated falls as each of them grows, above 0 and
    below; else 0."""
    (number,) = call.outputs
    error = part.values[number].tensor
    if not error.is_floating_point() or not bool((error > 0).any() and (error < 0).any()):
        return 0
    gradient = slope_of(part, number)
    if gradient is None:
        return 0
    along = gradient * error.flatten()
    counted = along != 0
    signs = torch.sign(error.flatten()[counted])
    falls = bool((along <= 0).all()) and bool((signs > 0).any() and (signs < 0).any())
    return int(counted.sum()) if falls and not others_train(part, number) else 0
