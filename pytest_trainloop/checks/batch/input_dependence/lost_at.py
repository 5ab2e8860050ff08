"""The line at which an input stops to matter: what it is given differs between two runs, and what it gives does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ATTRIBUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_CALLS = 2_000
"""Calls of torch that are compared, at most."""


class _Seen(NamedTuple):
    """A call of torch: its function, its line, and what tells its tensors from others."""

    name: str
    place: str
    given: tuple[Any, ...]
    gave: tuple[Any, ...]


class CallsSeen(WatchingMode):
    """The calls of torch that give tensors, from the first batch to the first step of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False
        self.calls: list[_Seen] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if not self.begun or self.watch.record.begun or len(self.calls) >= MOST_CALLS or name in ATTRIBUTES:
            return passed_on(func, args, kwargs)
        with self.watch.suspended(), torch.no_grad():
            given = tuple(map(_digest, tensors_in(args, kwargs)))
        out = passed_on(func, args, kwargs)
        with self.watch.suspended(), torch.no_grad():
            written = args[:1] if name == "__setitem__" else (out,)
            if gave := tuple(map(_digest, tensors_in(written))):
                self.calls.append(_Seen(name, str(here()[0]), given, gave))
        return out


def lost_at(one: Sequence[_Seen], other: Sequence[_Seen]) -> str:
    """The only line whose calls are given other values in two runs and give the same ones; empty where several lines
    do, or a call is made in one run alone."""
    lines: dict[str, None] = {}
    for mine, theirs in zip(one, other, strict=False):
        if (mine.name, mine.place) != (theirs.name, theirs.place):
            return ""
        if mine.given != theirs.given and mine.gave == theirs.gave:
            lines[mine.place] = None
    return next(iter(lines)) if len(lines) == 1 else ""


def _digest(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Two sums over the entries, by which tensors of one shape are told from each other."""
    if not readable(tensor) or tensor.is_complex() or tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    flat = tensor.detach().double().flatten()
    return (
        tuple(tensor.shape),
        float(flat.sum()),
        float(flat @ torch.arange(1.0, len(flat) + 1, dtype=flat.dtype).sin()),
    )
