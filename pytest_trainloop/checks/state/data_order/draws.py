"""Who draws an order: the permutations that torch, numpy and python draw in a block."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORDERS = frozenset({"randperm", "multinomial", "randint"})
"""What torch draws an order with. ``random_`` is not among them: a DataLoader draws the seed of its workers so."""

NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli", "randperm", "uniform_",
                   "normal_"})  # fmt: skip
"""What torch augments with."""


class Draws(FunctionMode):
    """The draws of torch by these names while the mode is on, as (name, digest of the numbers)."""

    def __init__(self, names: frozenset[str] = ORDERS) -> None:
        super().__init__()
        self._names = names
        self.seen: list[tuple[str, int]] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if name in self._names and isinstance(out, torch.Tensor):
            self.seen.append((name, hash(out.detach().cpu().numpy().tobytes()) if _plain(out) else 0))
        return out


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype is not torch.bfloat16


@contextlib.contextmanager
def orders_drawn(into: list[tuple[str, int]]) -> Iterator[None]:
    """Note the permutations that are drawn in the block.

    Of numpy's and python's generators those are seen that are called through the module, and the making of a new one:
    their own methods cannot be replaced.
    """
    draws = Draws()
    draws.seen = into
    with draws, Patches() as patches:
        patches.put(random, "shuffle", functools.partial(_shuffled, into, "random.shuffle"))
        patches.put(random, "sample", functools.partial(_noted, into, "random.sample"))
        patches.put(random.Random, "shuffle", functools.partial(_shuffled, into, "Random.shuffle"))
        patches.put(random.Random, "sample", functools.partial(_noted, into, "Random.sample"))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            patches.put(numpy.random, "shuffle", functools.partial(_shuffled, into, "np.random.shuffle"))
            for name in ("permutation", "choice", "randint"):
                patches.put(numpy.random, name, functools.partial(_noted, into, f"np.random.{name}"))
            patches.put(numpy.random, "default_rng", functools.partial(_made, into, "np.random.default_rng"))
        yield


def _digest(order: Any) -> int:
    return hash(order.tobytes()) if hasattr(order, "tobytes") else hash(repr(order))


def _noted(into: list[tuple[str, int]], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        into.append((name, _digest(out)))
        return out

    return call


def _shuffled(into: list[tuple[str, int]], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Of a shuffle in place: what is shuffled is its last argument."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        into.append((name, _digest(args[-1]) if args else 0))
        return out

    return call


def _made(into: list[tuple[str, int]], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A generator that is made anew with a seed while an order is drawn: what it draws is the same each time."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        seeded = bool(args or kwargs)
        if seeded and isinstance((args or tuple(kwargs.values()))[0], int):
            into.append((name, hash(repr((args, kwargs)))))
        return original(*args, **kwargs)

    return call
