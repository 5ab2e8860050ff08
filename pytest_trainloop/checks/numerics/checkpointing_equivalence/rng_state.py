"""Generators of random numbers that a checkpoint does not restore, restored for the recomputation of its function.

Torch preserves the state of its own generators, unless ``preserve_rng_state=False``. Python's, numpy's and those that a
loop creates advance, so that the recomputation draws other numbers than the forward pass did.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.ours import holds_alone
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.runs.checkpoint_bypass import Asked, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class RestoreGenerators:
    """For ``switched``; ``moved`` names the generators that drew under a checkpoint and that it does not restore."""

    def __init__(self) -> None:
        self.moved: dict[str, None] = {}

    def __call__(self, asked: Asked) -> Piece:
        return _Restored(asked, self.moved)


class _Restored(Piece):
    preserves = True

    def __init__(self, asked: Asked, moved: dict[str, None]) -> None:
        self._moved = moved
        self._of_torch = not asked.preserves
        self._owners: list[Any] = []
        self._states: list[Any] = []
        self._private: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        self._owners = list(_owners())
        self._states = [_state(owner) for owner in self._owners]
        before = torch.get_rng_state()
        try:
            with _Private(self._note):
                yield
        finally:
            kept = zip(self._owners, self._states, strict=True)
            moved = [owner for owner, state in kept if pickle.dumps(_state(owner)) != pickle.dumps(state)]
            del kept  # it would hold them, too
            for owner in moved:
                if not holds_alone(owner, (id(moved),)):
                    self._moved[_name(owner)] = None
            for generator, state in self._private.values():
                if not torch.equal(generator.get_state(), state):
                    self._moved["a torch.Generator of its own"] = None
            if self._of_torch and not torch.equal(before, torch.get_rng_state()):
                self._moved["torch's generator"] = None

    def _note(self, generator: torch.Generator) -> None:
        self._private.setdefault(id(generator), (generator, generator.get_state()))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        since = [_state(owner) for owner in self._owners]
        private = [(generator, generator.get_state()) for generator, _ in self._private.values()]
        self._set(self._states, self._private.values())
        try:
            yield
        finally:
            self._set(since, private)

    def _set(self, states: Iterable[Any], private: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
        for owner, state in zip(self._owners, states, strict=True):
            _set_state(owner, state)
        for generator, at in private:
            generator.set_state(at)


class _Private(FunctionMode):
    """Calls ``note`` for every generator among the arguments of a torch call, before it draws."""

    def __init__(self, note: Callable[[torch.Generator], None]) -> None:
        super().__init__()
        self._note = note

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._note(value)
        return passed_on(func, args, kwargs)


def _owners() -> Iterator[Any]:
    """Python's and numpy's generators, those of the project's own included."""
    kinds: tuple[type, ...] = (random.Random,)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    for held in gc.get_objects():
        if issubclass(type(held), kinds) and type(held) is not random.SystemRandom:
            yield held


def _state(owner: Any) -> Any:
    if isinstance(owner, random.Random):
        return owner.getstate()
    return owner.get_state() if hasattr(owner, "get_state") else owner.bit_generator.state


def _set_state(owner: Any, state: Any) -> None:
    if isinstance(owner, random.Random):
        owner.setstate(state)
    elif hasattr(owner, "set_state"):
        owner.set_state(state)
    else:
        owner.bit_generator.state = state


def _name(owner: Any) -> str:
    if isinstance(owner, random.Random):
        shared = owner is getattr(random, "_inst", None)
        return "python's random" if shared else "a random.Random of its own"
    shared = owner is getattr(sys.modules["numpy"].random.mtrand, "_rand", None)
    return "numpy's np.random" if shared else "a numpy generator of its own"
