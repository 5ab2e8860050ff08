"""Questions to the tape: what a value was made of, through what, where its entries lie, and what others would give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.instruments.tracing.tape import Gone
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.torch_names import (
    ACTIVATIONS,
    ADDITIONS,
    CASTS,
    CLAMPS,
    CONVOLUTIONS,
    DIVISIONS,
    DRAWS,
    DROPOUTS,
    INDEXING,
    JOINS,
    MASKING,
    MULTIPLICATIONS,
    NEGATIONS,
    PRODUCTS,
    RECIPROCALS,
    SAMPLES,
    SUBTRACTIONS,
    TRANSPOSES,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set

    from pytest_trainloop.instruments.tracing.tape import Call, Value

FARTHEST = 200
"""Values that one way back is followed for."""

LAYERS = CONVOLUTIONS | PRODUCTS | {"addmm"}
MOVES = VIEWS | INDEXING | CASTS | {"contiguous"}
"""They move or cast entries, and change none."""

_PLUS = ADDITIONS | (SUBTRACTIONS - {"rsub", "__rsub__"})
_PATCHES = MASKING | {"write"}
"""Some entries are replaced; "write" is by way of a view."""
_SAME_SHAPE = MULTIPLICATIONS | DIVISIONS | _PLUS | CLAMPS | _PATCHES | NEGATIONS | {"dropout"}
_BY_MEMORY = {"view": torch.Tensor.reshape, "view_as": torch.Tensor.reshape_as}
"""What does the same as a view, and does not mind how the numbers lie in memory."""


# What it was made of


def made_of(value: Value | None, most: int = 400) -> Iterator[Value]:
    """The value and what it was made of, nearest first."""
    todo, seen = [value] if value is not None else [], set[int]()
    for at in todo:
        if len(seen) >= most:
            return
        if id(at) not in seen:
            seen.add(id(at))
            yield at
            todo.extend(at.parents)


def inner(value: Value) -> Value | None:
    """The first floating value that it was made of."""
    return next((p for p in value.parents if p.floating), None)


def unmoved(value: Value | None, through: Set[str] = MOVES) -> Value | None:
    """What lies behind operations of these names, each followed by its first input."""
    while value is not None and value.op in through and value.parents:
        value = value.parents[0]
    return value


def statement(value: Value | None) -> str:
    """The project's statement that computed a value, past moves and casts; empty for one from outside, and for what a
    library computed."""
    made = unmoved(value)
    return str(made.call.place) if made is not None and made.call is not None and made.call.is_the_projects else ""


@dataclass(frozen=True, slots=True)
class Found:
    """The first value on the way back that something other than moves, masks, dropout, clamps and constants made, with
    the product of the constants (``learned``: one of them trains; ``multiplied``: one above 1 was multiplied with)."""

    value: Value
    scale: float = 1.0
    shifted: bool = False
    dropped: Value | None = None
    low: float = -math.inf
    high: float = math.inf
    multiplied: bool = False
    learned: bool = False

    @property
    def op(self) -> str:
        return self.value.op

    @property
    def clamped(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)

    @property
    def is_layer(self) -> bool:
        return self.op in LAYERS


def behind(value: Value | None) -> Found | None:
    if value is None:
        return None
    found = Found(value)
    for _ in range(FARTHEST):
        value = found.value
        call, parent = value.call, inner(value)
        if call is None or parent is None:
            return found
        if call.op in MOVES or (call.op in _PATCHES and parent.shape == value.shape and parent.history):
            found = replace(found, value=parent)
        elif call.op == "dropout":
            found = replace(found, value=parent, dropped=value if dropout_rate(call) > 0 else found.dropped)
        elif call.op in CLAMPS:
            low, high = bounds_of(call)
            found = replace(found, value=parent, low=max(low, found.low), high=min(high, found.high))
        elif call.op in MULTIPLICATIONS | DIVISIONS | _PLUS:
            big = [p for p in call.inputs if p.floating and not p.is_number]
            small = [p for p in call.inputs if p not in big]
            if len(big) != 1 or len(small) > 1:
                return found
            number = small[0].number if small else next(iter(call.numbers), math.nan)
            if call.op in _PLUS:
                found = replace(found, value=big[0], shifted=True)
                continue
            times = call.op in MULTIPLICATIONS
            found = replace(
                found,
                value=big[0],
                scale=found.scale * (number if times else 1 / number if number else math.nan),
                multiplied=found.multiplied or (times and number > 1),
                learned=found.learned or bool(small and small[0].history),
            )
        else:
            return found
    return found


def addends(root: Value, through: Set[str], most: int = 400) -> Iterator[tuple[Value, bool]]:
    """The terms of a sum, and whether the way to each has a history. What is in ``through`` is followed: additions,
    moves, and what scales by a plain number."""
    todo, seen = [(root, True)], 0
    while todo and seen < most:
        value, alive = todo.pop()
        seen, alive = seen + 1, alive and value.history
        made = [p for p in value.parents if p.op]
        scales = value.op in MULTIPLICATIONS | DIVISIONS and len(made) > 1
        if value.op in MOVES or (value.op in through and not scales):
            todo.extend((p, alive) for p in value.parents if p.floating)
        else:
            yield value, alive


def is_sigmoid(value: Value) -> bool:
    """A sigmoid, by name or written out as 1 / (1 + exp(-x))."""
    if value.op == "sigmoid":
        return True
    total = value.parents[0] if value.op in RECIPROCALS | DIVISIONS and len(value.parents) == 1 else None
    if total is None or total.call is None or total.op not in _PLUS or len(total.parents) != 1:
        return False
    power = total.parents[0]
    negated = power.op == "exp" and bool(power.parents) and power.parents[0].op in NEGATIONS | {"mul", "rmul"}
    return negated and 1.0 in total.call.numbers


def by_weights(layer: Value) -> bool:
    """Whether a layer multiplies with weights: a product of two results has no axis of features."""

    def of_parameters(value: Value) -> bool:
        leaves = [v for v in made_of(value) if not v.parents]
        return value.history and bool(leaves) and all(v.parameter or not v.shape for v in leaves)

    return layer.op in CONVOLUTIONS or any(p.parameter or of_parameters(p) for p in layer.parents)


def of_unit_rows(product: Value) -> bool:
    """Whether both factors of a product are vectors of length 1 along the axis that is summed over."""
    factors = [f for f in (p.tensor for p in product.parents[:2]) if f is not None]
    if len(factors) < 2 or product.op not in PRODUCTS | {"baddbmm"}:
        return False
    if any(f.dim() < 2 or not f.is_floating_point() or not readable(f) for f in factors):
        return False

    def ones(tensor: Any, axis: int) -> bool:
        lengths = tensor.detach().double().norm(dim=axis)
        allowed = 16 * torch.finfo(tensor.dtype).eps * math.sqrt(tensor.shape[axis])
        return bool(lengths.numel()) and bool((lengths - 1).abs().max() <= allowed)

    left, right = factors
    if product.op == "einsum":
        return all(any(ones(f, axis) for axis in range(f.dim())) for f in (left, right))
    return ones(left, -1) and ones(right, -1 if product.op == "linear" else -2)


# The arguments of some calls


def axis_of(value: Value) -> int | None:
    """The axis of a softmax or a normalisation, from 0 on; torch's own choice where none was given."""
    if value.call is None:
        return None
    own = value.op == "normalize"
    given = value.call.argument("dim", 2 if own else 1, 1 if own else None)
    if given is None:
        given = 0 if len(value.shape) in (0, 1, 3) else 1
    plain = isinstance(given, int) and not isinstance(given, bool)
    return given % max(len(value.shape), 1) if plain else None


def dropout_rate(call: Call) -> float:
    return float(call.argument("p", 1, 0.5)) if call.argument("training", 2, True) else 0.0


def bounds_of(clamp: Call) -> tuple[float, float]:
    low = clamp.argument("min", 1 if clamp.op != "clamp_max" else 9)
    high = clamp.argument("max", 1 if clamp.op == "clamp_max" else 2)
    plain = [v if isinstance(v, (int, float)) else None for v in (low, high)]
    return -math.inf if plain[0] is None else float(plain[0]), math.inf if plain[1] is None else float(plain[1])


def picks(value: Value) -> bool:
    """Whether an index takes other entries than whole axes, single entries and unbroken slices."""
    if value.op not in INDEXING or value.call is None:
        return False
    index = value.call.argument("", 1) if value.op == "__getitem__" else ()
    index = index if isinstance(index, tuple) else (index,)
    plain = (
        i is None or i is Ellipsis or type(i) is int or (isinstance(i, slice) and i.step in (None, 1)) for i in index
    )
    return value.op != "__getitem__" or not all(plain)


# Replay


def again(value: Value, given: Mapping[Value, torch.Tensor], calls: Mapping[Call, Callable[..., Any]] = {}) -> Any:
    """The value made again with other tensors in the place of some that it was made of; ``calls`` has what takes the
    place of some calls' functions. What was freed is made again too, but for what was drawn. Raises ``Gone``, and what
    torch raises."""
    made = {id(one): tensor for one, tensor in given.items()}
    order: dict[int, tuple[Call, Value]] = {}
    todo = [value]
    while todo:
        one = todo.pop()
        if one.call is None or id(one) in made or id(one) in order:
            continue
        if depends(one, given) or (one.tensor is None and one.op not in DRAWS | DROPOUTS | SAMPLES):
            order[id(one)] = one.call, one
            todo.extend(one.parents)

    def put(one: Any) -> Any:
        if type(one) in (tuple, list):
            return type(one)(map(put, one))
        if isinstance(one, dict):
            return {key: put(v) for key, v in one.items()}
        if not hasattr(one, "parents"):
            return one
        found = made.get(id(one), one.tensor)
        if found is None:
            raise Gone(one)
        return found

    for call, one in sorted(order.values(), key=lambda made_by: made_by[0].number):
        args, kwargs = put(call.args), put(call.kwargs)
        device = next((t.device for t in given.values()), None)
        args = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
        if call.writes:
            args = (args[0].clone(), *args[1:])
        func = calls.get(call) or _BY_MEMORY.get(one.op, call.func)
        out = func(*args, **kwargs)
        made[id(one)] = args[0] if call.writes else out if isinstance(out, torch.Tensor) else out[one.slot]
    return made[id(value)]


def depends(value: Value, given: Mapping[Value, torch.Tensor]) -> bool:
    """Whether a value lies on a way to one of those that are given."""
    first = min((one.call.number if one.call else -1 for one in given), default=-1)
    todo, seen = [value], set[int]()
    for at in todo:
        if at in given:
            return True
        for parent in at.parents:
            if id(parent) not in seen and (parent in given or (parent.call and parent.call.number > first)):
                seen.add(id(parent))
                todo.append(parent)
    return False


# Where entries come from


class Layout(NamedTuple):
    """Where the entries of a tensor come from in what a layer gave: of each the feature, and the position on all other
    axes of the layer's output, flat. ``picked`` tells of an index on the way, ``moved`` of a transposition."""

    layer: Value
    position: torch.Tensor
    feature: torch.Tensor
    picked: bool
    moved: bool

    @property
    def features(self) -> int:
        return self.layer.shape[_features(self.layer)]

    @property
    def leading(self) -> tuple[int, ...]:
        axis = _features(self.layer)
        return (*self.layer.shape[:axis], *self.layer.shape[axis + 1 :])

    def coordinates(self, position: torch.Tensor) -> list[torch.Tensor]:
        """Flat positions as one coordinate for each leading axis."""
        sizes = self.leading
        return [(position // math.prod(sizes[d + 1 :])) % size for d, size in enumerate(sizes)]


def _features(layer: Value) -> int:
    return 1 if layer.op in CONVOLUTIONS else len(layer.shape) - 1


def last_layer(value: Value | None) -> tuple[Value | None, list[Value]]:
    """The layer that the entries come from, one by one, and the moves on the way, the last one first."""
    moves: list[Value] = []
    for _ in range(FARTHEST):
        if value is None or value.op in LAYERS:
            break
        if value.op in MOVES:
            if value.op not in CASTS:
                moves.append(value)
            value = value.parents[0] if value.parents else None
        elif value.op in _SAME_SHAPE or value.op in ACTIVATIONS:
            same = [p for p in value.parents if p.floating and p.shape == value.shape]
            same = [p for p in same if p.history and not p.parameter] or same
            value = same[0] if len(same) == 1 else None
        else:
            value = None
    return (value if value is not None and value.op in LAYERS else None), moves


def layout(value: Value | None) -> Layout | None:
    """How the entries lie in the output of the layer that made them; None where no one layer did."""
    layer, moves = last_layer(value)
    if layer is None or len(layer.shape) < 2:
        return None
    if layer.op in CONVOLUTIONS and not any(len(p.shape) == len(layer.shape) for p in layer.parents):
        return None
    axis, shape = _features(layer), layer.shape
    count = shape[axis]
    rest = (*shape[:axis], *shape[axis + 1 :])
    position = torch.arange(math.prod(rest)).reshape(rest).unsqueeze(axis).expand(shape)
    feature = torch.arange(count).reshape([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)
    for move in reversed(moves):
        source = move.parents[0]
        if position.shape != source.shape:
            return None
        try:
            position, feature = again(move, {source: position}), again(move, {source: feature})
        except Gone:
            return None
        except (RuntimeError, TypeError) as error:  # a move that numbers cannot make, as to another dtype
            reraise_raised(error)
            return None
    return Layout(layer, position, feature, any(map(picks, moves)), any(m.op in TRANSPOSES for m in moves))


def constant(values: torch.Tensor, axis: int) -> bool:
    """Whether the entries are the same all along an axis."""
    return values.stride(axis) == 0 or bool((values == values.narrow(axis, 0, 1)).all())


def across_rows(softmax: Value) -> bool:
    """Whether a softmax over what a layer with weights gave runs over its rows, each feature by itself."""
    axis, at = axis_of(softmax), layout(softmax.parents[0]) if softmax.parents else None
    if axis is None or at is None or at.layer.op != "linear" or at.picked or at.feature.shape != softmax.shape:
        return False
    if at.features < 2 or not any(p.parameter for p in at.layer.parents) or softmax.shape[axis] < 2:
        return False
    return constant(at.feature, axis)


SUMS = ADDITIONS | JOINS | {"sub", "__sub__", "sum", "mean"}
SCALES = (MULTIPLICATIONS - {"multiply", "__rmul__"}) | (DIVISIONS - {"true_divide", "divide", "__div__"}) | NEGATIONS
