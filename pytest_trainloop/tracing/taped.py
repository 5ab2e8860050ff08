"""What a tape notes while a run goes on, and the slice that is made of it for one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.recording.torch_names import ACTIVATIONS, CASTS, EQUALITIES, INDEXING, VIEWS
from pytest_trainloop.tracing.loss_slice import Call, Kind, Ref, Slice, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.events import Place

LONGEST = 3_000
"""Calls of one slice."""


@dataclass(slots=True, eq=False)
class Live:
    """One tensor between two writes to it, while the run goes on."""

    tensor: torch.Tensor
    version: int
    kind: Kind
    made_by: Seen | None = None
    path: Path | None = None
    name: str = ""
    kept: torch.Tensor | None = None
    """A copy, once it was about to be overwritten."""

    @property
    def weights(self) -> bool:
        return self.kind == "weights"


@dataclass(slots=True, eq=False)
class Seen:
    """One call, with ``Live`` tensors in its arguments."""

    number: int
    name: str
    func: Callable[..., Any] | None
    args: Any
    kwargs: Any
    inputs: tuple[Live, ...]
    place: Place
    module: str
    writes: bool = False
    outputs: list[Live] = field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        """Whether weights meet something else."""
        return any(v.weights and v.tensor.numel() > 1 for v in self.inputs) and not all(v.weights for v in self.inputs)


def slice_of(root: Live, lives: list[Live], seen: list[Seen], step: int, place: Place) -> Slice:
    """The slice of what ``behind`` gave for a root."""
    lives, seen, stands_for = _once(lives, seen)
    numbers = {id(live): number for number, live in enumerate(lives)}
    numbers |= {twin: numbers[id(live)] for twin, live in stands_for.items()}
    made_by = {id(s): number for number, s in enumerate(seen)}
    calls = tuple(_call(s, number, numbers) for number, s in enumerate(seen))
    values = tuple(_value(v, number, made_by) for number, v in enumerate(lives))
    return Slice(values, calls, numbers[id(root)], step, place)


def behind(root: Live) -> tuple[list[Live], list[Seen]]:
    """The values that a root was computed from, up to layers, and the calls between in order."""
    lives: dict[int, Live] = {}
    calls: dict[int, Seen] = {}
    todo = [root]
    while todo and len(calls) <= LONGEST:
        live = todo.pop()
        if id(live) in lives:
            continue
        lives[id(live)] = live
        seen = live.made_by
        if seen is None or live.kind in ("layer", "constant", "weights", "batch") or id(seen) in calls:
            continue
        calls[id(seen)] = seen
        todo.extend(seen.inputs)
        todo.extend(seen.outputs)
    ordered = sorted(calls.values(), key=lambda s: s.number)
    return list(lives.values()), ordered


_PURE = VIEWS | CASTS | INDEXING | ACTIVATIONS | EQUALITIES | frozenset({"one_hot", "normalize"})


def _once(lives: list[Live], calls: list[Seen]) -> tuple[list[Live], list[Seen], dict[int, Live]]:
    """Values and calls without those that repeat an earlier call with the same arguments, and what stands for the
    results of these: ``p[:, 0]`` that is written twice is one value."""
    stands_for: dict[int, Live] = {}
    first: dict[str, Seen] = {}
    kept = []

    def named(value: Any) -> Any:
        return f"value {id(stands_for.get(id(value), value))}" if isinstance(value, Live) else value

    for seen in calls:
        if seen.name in _PURE and not seen.writes:
            key = f"{seen.name} {tree_map(named, (seen.args, seen.kwargs))!r}"
            twin = first.setdefault(key, seen)
            same = len(twin.outputs) == len(seen.outputs) and all(
                a.kept is None and b.kept is None for a, b in zip(twin.outputs, seen.outputs, strict=True)
            )
            if twin is not seen and same:
                stands_for.update((id(b), a) for a, b in zip(twin.outputs, seen.outputs, strict=True))
                continue
        kept.append(seen)
    return [v for v in lives if id(v) not in stands_for], kept, stands_for


def _call(seen: Seen, number: int, numbers: dict[int, int]) -> Call:
    def put(value: Any) -> Any:
        return Ref(numbers[id(value)]) if isinstance(value, Live) else value

    args, kwargs = tree_map(put, (seen.args, seen.kwargs))
    return Call(
        number,
        seen.name,
        seen.func,
        args,
        kwargs,
        tuple(numbers[id(v)] for v in seen.inputs),
        tuple(numbers[id(v)] for v in seen.outputs),
        seen.place,
        seen.module,
        seen.writes,
    )


def _value(live: Live, number: int, made_by: dict[int, int]) -> Value:
    seen = live.made_by
    tensor = live.tensor.detach().clone() if live.kept is None else live.kept
    names = [v.name for v in _parameters(seen)] if seen is not None and live.kind == "layer" else []
    return Value(
        number,
        tensor,
        live.kind,
        live.tensor.requires_grad,
        None if seen is None else made_by.get(id(seen)) if live.kind in ("made", "unknown") else None,
        live.path,
        tuple(names),
        None if seen is None else seen.place,
        "" if seen is None else seen.module,
        "" if seen is None else seen.name,
        live.name,
    )


def _parameters(seen: Seen) -> list[Live]:
    """The parameters of a layer."""
    found: dict[int, Live] = {}
    todo = [v for v in seen.inputs if v.weights]
    while todo:
        live = todo.pop()
        if live.made_by is None:
            found[id(live)] = live
        else:
            todo.extend(v for v in live.made_by.inputs if id(v) not in found)
    return list(found.values())


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
