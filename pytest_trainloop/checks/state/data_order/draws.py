"""Who draws an order: the permutations that torch, numpy and python draw in a block."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORDERS = frozenset({"randperm", "multinomial", "randint"})
"""What torch draws an order with. ``random_`` is not among them: a DataLoader draws the seed of its workers so."""

IN_SAMPLERS = ORDERS | {"rand", "randn", "rand_like", "randn_like"}
"""The same inside samplers, where whatever is drawn is for the order: ``torch.rand(n).argsort()``."""

NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli", "randperm", "uniform_",
                   "normal_"})  # fmt: skip
"""What torch augments with."""


class Draws(FunctionMode):
    """The draws of torch by these names while the mode is on, as (name, digest of the numbers)."""

    def __init__(self, names: frozenset[str] = ORDERS, least: int = 0) -> None:
        super().__init__()
        self._names, self._least = names, least
        self.seen: list[tuple[str, int]] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        drawn = name in self._names and isinstance(out, torch.Tensor) and out.numel() >= self._least
        if drawn and (name != "randint" or not self._least or _chooses(out)):
            self.seen.append((name, hash(out.detach().cpu().numpy().tobytes()) if _plain(out) else 0))
        return out


def _chooses(drawn: Any) -> bool:
    """Whether numbers that may be equal choose rows, and are no labels or tokens: one number for each row, and most of
    them are different (odd: stream_of_rows_from_fixed_seeds)."""
    try:
        numbers = torch.as_tensor(drawn)
    except (TypeError, ValueError, RuntimeError):  # numpy chooses from what is no number as well
        return True
    return numbers.dim() == 1 and 2 * len(torch.unique(numbers)) > len(numbers)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype is not torch.bfloat16


class _Here(threading.local):
    """Where the current thread notes the orders that it draws."""

    def __init__(self) -> None:
        self.into: list[tuple[str, int]] | None = None
        self.least = 0


_HERE = _Here()


@contextlib.contextmanager
def orders_drawn(into: list[tuple[str, int]], names: frozenset[str] = ORDERS, least: int = 0) -> Iterator[None]:
    """Note the permutations that this thread draws in the block: those of torch by these names, and inside
    ``others_noted`` those of numpy and python. With ``least`` only those of as many entries: where items are made as
    well, one number is no order, and a generator with a seed of its own may be an item's."""
    draws, before = Draws(names, least), (_HERE.into, _HERE.least)
    draws.seen = _HERE.into = into
    _HERE.least = least
    try:
        with draws:
            yield
    finally:
        _HERE.into, _HERE.least = before


@contextlib.contextmanager
def others_noted() -> Iterator[None]:
    """Have permutations of numpy and python noted too, in all threads.

    Of their generators those are seen that are called through the module, python's own, and the making of a new one of
    numpy's: its methods cannot be replaced.
    """
    with Patches() as patches:
        for owner, names in ((random, ("shuffle", "sample")), (random.Random, ("shuffle", "sample"))):
            for name in names:
                patches.put(owner, name, functools.partial(_noted, f"{owner.__name__}.{name}"))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            for name in ("shuffle", "permutation", "choice", "randint"):
                patches.put(numpy.random, name, functools.partial(_noted, f"np.random.{name}"))
            patches.put(numpy.random, "default_rng", functools.partial(_made, "np.random.default_rng"))
            patches.put(numpy.random, "RandomState", functools.partial(_class_noted, "np.random.RandomState"))
        yield


def _noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        order = args[-1] if out is None and args else out
        chooses = not (_HERE.least and name.endswith(("choice", "randint"))) or _chooses(order)
        if _HERE.into is not None and _length(order) >= _HERE.least and chooses:
            _HERE.into.append((name, _digest(order)))
        return out

    return call


def _made(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A generator that is made anew with a seed while an order is drawn: what it draws is the same each time."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _note_seed(name, (*args, *kwargs.values()))
        return original(*args, **kwargs)

    return call


def _class_noted(name: str, original: Any) -> Any:
    """The same for a class: what it makes are objects of the original, and these stay its instances."""

    class Meta(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, original) if cls is noted else super().__instancecheck__(thing)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            _note_seed(name, (*args, *kwargs.values()))
            return original(*args, **kwargs) if cls is noted else super().__call__(*args, **kwargs)

    noted = Meta(original.__name__, (original,), {})
    return noted


def _note_seed(name: str, given: tuple[Any, ...]) -> None:
    if _HERE.into is not None and not _HERE.least and given and isinstance(given[0], int):
        _HERE.into.append((name, hash(repr(given))))


def _length(order: Any) -> int:
    try:
        return len(order)
    except TypeError:
        return 1


def _digest(order: Any) -> int:
    """The digest of an order, also of one that was shuffled in place."""
    return hash(order.tobytes()) if hasattr(order, "tobytes") else hash(repr(order))
