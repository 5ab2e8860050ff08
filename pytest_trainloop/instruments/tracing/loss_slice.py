"""The calls between what layers with weights gave, the batch, and one backpropagated value: as data, to be made again
with other values.

Every tensor is a copy, so that a slice outlives its run. Floating ones are in the precision of the run (float64).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.recording.function_mode import aside
from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    DIVISIONS,
    DROPOUTS,
    JOINS,
    MULTIPLICATIONS,
    NEGATIONS,
    SUBTRACTIONS,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.recording.events import Place

Kind = Literal["made", "layer", "batch", "weights", "constant", "unknown"]
"""What a value is: made by a call of the slice; the output of a layer with weights; a tensor of the batch; a parameter,
or made of parameters alone; a tensor that no call on the way made; one that was written to, or made, unseen."""


class CannotReplay(Exception):
    """The calls cannot be made again with these values."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Marks a value of the slice in the arguments of a call."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor, as it was between two writes to it."""

    number: int
    tensor: torch.Tensor
    kind: Kind
    requires_grad: bool = False
    made_by: int | None = None
    """The call of the slice that made it."""
    path: Path | None = None
    """Its path in the batch."""
    parameters: tuple[str, ...] = ()
    """Of a layer's output: the names of the parameters of this layer."""
    place: Place | None = None
    """The line that made it, also where that call is none of the slice."""
    module: str = ""
    op: str = ""
    """The function that made it."""
    name: str = ""
    """Of a parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a torch function. ``writes`` tells that it overwrites its first argument, which is its result."""

    number: int
    name: str
    func: Callable[..., Any] | None
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    place: Place
    module: str
    writes: bool = False

    @property
    def numbers(self) -> tuple[float, ...]:
        """The plain numbers among its arguments."""
        plain = (*self.args, *self.kwargs.values())
        return tuple(float(v) for v in plain if isinstance(v, (int, float)) and not isinstance(v, bool))


@dataclass(eq=False)
class Slice:
    """What one backpropagated value was computed by."""

    values: tuple[Value, ...]
    calls: tuple[Call, ...]
    root: int
    step: int = 0
    """The optimizer steps made before."""
    place: Place | None = None
    """The line of the backward pass."""
    _plans: dict[tuple[frozenset[int], tuple[int, ...]], list[Call]] = field(default_factory=dict, init=False)
    _before: dict[int, frozenset[int]] = field(default_factory=dict, init=False)

    def ancestors(self, number: int) -> frozenset[int]:
        """The values that this one was computed from, itself included."""
        known = self._before.get(number)
        if known is None:
            found: set[int] = set()
            todo = [number]
            while todo:
                at = todo.pop()
                if at not in found:
                    found.add(at)
                    made = self.values[at].made_by
                    todo.extend(self.calls[made].inputs if made is not None else ())
            known = self._before[number] = frozenset(found)
        return known

    def call_of(self, number: int) -> Call | None:
        """The call of the slice that made a value."""
        made = self.values[number].made_by
        return None if made is None else self.calls[made]

    def depends(self, number: int, on: int) -> bool:
        return on in self.ancestors(number)

    def of_kind(self, *kinds: Kind) -> list[Value]:
        return [v for v in self.values if v.kind in kinds]

    def trained(self, number: int) -> list[Value]:
        """The outputs of layers, with a gradient, that a value was computed from."""
        return [v for n in sorted(self.ancestors(number)) if (v := self.values[n]).kind == "layer" and v.requires_grad]

    def from_batch(self, number: int) -> list[Value]:
        """The tensors of the batch that a value was computed from, past no layer."""
        return [v for n in sorted(self.ancestors(number)) if (v := self.values[n]).kind == "batch"]

    def replay(self, given: Mapping[int, torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor]:
        """These values, with others given in place of some. What does not depend on the given ones is as it was.

        Raises ``CannotReplay`` where a call draws, was not seen, or refuses the values.
        """
        made: dict[int, torch.Tensor] = dict(given)
        with aside(), torch.enable_grad():
            for call in self._plan(frozenset(given), tuple(wanted)):
                self.again(call, made)
        return [made.get(n, self.values[n].tensor) for n in wanted]

    def _plan(self, given: frozenset[int], wanted: tuple[int, ...]) -> list[Call]:
        """The calls to be made: those between."""
        plan = self._plans.get((given, wanted))
        if plan is None:
            needed: set[int] = set()
            todo = [n for n in wanted if n not in given]
            while todo:
                at = todo.pop()
                made = self.values[at].made_by
                if made is not None and made not in needed:
                    needed.add(made)
                    todo.extend(n for n in self.calls[made].inputs if n not in given)
            changed, plan = set(given), []
            for number in sorted(needed):
                call = self.calls[number]
                if changed.intersection(call.inputs):
                    plan.append(call)
                    changed.update(set(call.outputs) - given)
            self._plans[given, wanted] = plan
        return plan

    def again(self, call: Call, made: dict[int, torch.Tensor]) -> None:
        """Make one call again with the values in ``made``, to which its results are added, and otherwise with those of
        the run.

        Raises ``CannotReplay``.
        """
        if call.func is None:
            raise CannotReplay(f"{call.place} overwrites what others read")
        if call.name in DROPOUTS:
            raise CannotReplay(f"{call.place} draws random numbers")

        def put(value: Any) -> Any:
            return made.get(value.number, self.values[value.number].tensor) if isinstance(value, Ref) else value

        args, kwargs = tree_map(put, call.args), tree_map(put, call.kwargs)
        try:
            if call.writes:
                args = (args[0].clone(), *args[1:])
                call.func(*args, **kwargs)
                out: Any = args[0]
            else:
                out = _MOVES.get(call.name, call.func)(*args, **kwargs)
        except Exception as error:  # other values than the loop's own may be refused in any way
            reraise_ours(error)
            raise CannotReplay(f"{call.name} refuses other values: {type(error).__name__}") from error
        results = [out] if isinstance(out, torch.Tensor) else [t for t in _flat(out) if isinstance(t, torch.Tensor)]
        for number, result in zip(call.outputs, results, strict=False):
            made.setdefault(number, result)


_MOVES: dict[str, Callable[..., Any]] = {
    "view": torch.Tensor.reshape,
    "view_as": torch.Tensor.reshape_as,
}
"""What takes the place of a view: other values may lie otherwise in memory."""


def _flat(out: Any) -> Iterator[Any]:
    if isinstance(out, (list, tuple)):
        for part in out:
            yield from _flat(part)
    elif isinstance(out, dict):
        yield from _flat(list(out.values()))
    else:
        yield out


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a value: the value ``number`` times ``factor`` (NaN where that is no constant number)."""

    number: int
    factor: float


_MOVED = VIEWS | CASTS | {"sum", "mean"}


def terms(found: Slice, number: int) -> Iterator[Term]:
    """What a value is the sum of: additions and subtractions of scalars are followed, with constant factors and
    divisors, and sums over lists of scalars."""
    todo: list[tuple[int, float]] = [(number, 1.0)]
    while todo:
        at, factor = todo.pop(0)
        parts = list(_parts(found, at))
        if parts:
            todo.extend((part, factor * weight) for part, weight in parts)
        else:
            yield Term(at, factor)


def _parts(found: Slice, number: int) -> Iterable[tuple[int, float]]:
    call = found.call_of(number)
    if call is None or not call.inputs:
        return ()
    if call.name in {"sum", "mean"} and len(call.inputs) == 1:
        joined = found.call_of(call.inputs[0])
        if joined is not None and joined.name in JOINS:
            weight = 1.0 if call.name == "sum" else 1 / len(joined.inputs)
            single = all(found.values[n].tensor.numel() == 1 for n in joined.inputs)
            return tuple((n, weight) for n in joined.inputs) if single else ()
    scalars = [n for n in call.inputs if found.values[n].tensor.numel() == 1]
    if len(scalars) < len(call.inputs):
        return ()
    first = call.inputs[0]
    if call.name in NEGATIONS:
        return ((first, -1.0),)
    if call.name in _MOVED:
        return ((first, 1.0),)
    if call.name in ADDITIONS or call.name == "__iadd__":
        return tuple((n, 1.0) for n in call.inputs)
    if call.name in SUBTRACTIONS:
        turned = call.name in {"rsub", "__rsub__"}
        if len(call.inputs) == 1:
            return ((first, -1.0 if turned or not isinstance(call.args[0], Ref) else 1.0),)
        signs = (-1.0, 1.0) if turned else (1.0, -1.0)
        return tuple(zip(call.inputs, signs, strict=False))
    if call.name in MULTIPLICATIONS or (call.name in DIVISIONS and isinstance(call.args[0], Ref)):
        return _scaled(found, call)
    return ()


def _scaled(found: Slice, call: Call) -> Iterable[tuple[int, float]]:
    """The one factor that has a gradient, and the number that it is multiplied with."""
    divides = call.name in DIVISIONS
    live = [n for n in call.inputs if found.values[n].requires_grad]
    still = [n for n in call.inputs if n not in live]
    if len(live) != 1 or (divides and call.inputs[0] != live[0]):
        return ()
    number = call.numbers[0] if call.numbers else float(found.values[still[0]].tensor) if still else 1.0
    if divides:
        return ((live[0], 1 / number),) if number else ()
    return ((live[0], number),)
