"""The same data handed over in four ways: as one batch, as a list, drawn as the loop asks, and drawn by the loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.runs.batch_stream import first_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop import TrainLoop

WAYS = ("batch", "list", "generator", "inside")

POOL = 13
"""Batches of a loop that gives several, which are handed over in turn."""


def handed_over(make: Callable[..., TrainLoop], way: str) -> Callable[..., TrainLoop]:
    """The function that builds the same loop and hands its data over in this way."""

    @functools.wraps(make)
    def again(*args: Any, **kwargs: Any) -> TrainLoop:
        loop = make(*args, **kwargs)
        return loop if way == "batch" else _CHANGES[way](loop)

    return again


def draws(loop: TrainLoop) -> Callable[[], Any]:
    """Draws a batch from the loop's own: their rows in the order of a random permutation."""
    axis = loop.batch_dim if isinstance(loop.batch_dim, int) else 0
    pool = itertools.cycle(_pool(loop))

    def draw() -> Any:
        batch = next(pool)
        return nested.take(batch, torch.randperm(nested.rows(batch, axis)).tolist(), axis)

    return draw


def _as_list(loop: TrainLoop) -> TrainLoop:
    return _changed(loop, batch=None, batches=[nested.copy(batch) for batch in _pool(loop)])


def _pool(loop: TrainLoop) -> list[Any]:
    return first_batches(loop, 1 if loop.batches is None else POOL)


def _as_generator(loop: TrainLoop) -> TrainLoop:
    draw = draws(loop)
    return _changed(loop, batch=None, batches=lambda n: (draw() for _ in range(n)))


def _inside(loop: TrainLoop) -> TrainLoop:
    draw, fit, step = draws(loop), loop.fit, loop.step
    dummy = {"batch": torch.arange(4.0), "batches": None}
    if fit is not None:
        return _changed(loop, fit=lambda batches: fit(Drawn(batches, draw)), **dummy)
    if step is not None:
        return _changed(loop, step=lambda _count: step(draw()), **dummy)
    return loop


def _changed(loop: TrainLoop, **fields: Any) -> TrainLoop:
    return dataclasses.replace(loop, **fields)


class Drawn:
    """Drawn batches, one for each that the plugin gives: what ``for _ in batches: batch = get_batch()`` trains on."""

    def __init__(self, batches: Any, draw: Callable[[], Any]) -> None:
        self._batches, self._draw = batches, draw

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for _ in self._batches:
            yield self._draw()

    def __getitem__(self, index: Any) -> Any:
        given = self._batches[index]
        return [self._draw() for _ in given] if isinstance(index, slice) else self._draw()


_CHANGES: dict[str, Callable[[TrainLoop], TrainLoop]] = {
    "list": _as_list,
    "generator": _as_generator,
    "inside": _inside,
}
