"""Recomputations that repeat the forward pass: generators of random numbers are restored, and calls are compared.

Torch preserves the state of its own generators, unless ``preserve_rng_state=False``. Python's, numpy's and those that a
loop creates advance, so that the recomputation draws other numbers than the forward pass did.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.core.ours import holds_alone
from pytest_trainloop.recording.changed_at import ChangedAt
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.samples import readable, spaced
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ATTRIBUTES
from pytest_trainloop.runs.checkpoint_bypass import Asked, Piece, switched, without_cut_off
from pytest_trainloop.runs.reachable_state.copies import set_state, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch


class Call(NamedTuple):
    """One call of torch, with sampled entries of its results."""

    op: str
    module: str
    place: Place
    results: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        return f"{self.op}()" + (f" in {self.module}" if self.module else "")


class OtherCall(NamedTuple):
    """A call of torch that a recomputation makes otherwise."""

    call: Call
    place: str
    instead: str = ""
    """What the recomputation calls in its place, at ``place``."""
    by: float = 0.0
    """By how much the result differs."""


class Repeated:
    """Checkpoints whose recomputation finds all generators as the forward pass found them.

    ``moved`` names those that drew under a checkpoint and that it does not restore. With a bound, calls are compared as
    well, under checkpoints through which gradients can flow: ``other`` is the first that differs.
    """

    def __init__(self, bound: float | None = None) -> None:
        self.bound = bound
        self.moved: dict[str, None] = {}
        self.drawn_at = ""
        """The first line that draws from one of these."""
        self.other: OtherCall | None = None

    def during(self, watch: Watch) -> contextlib.AbstractContextManager[None]:
        """Around a run."""

        def how(asked: Asked) -> Piece:
            return (self.bound is not None and without_cut_off(asked)) or _Repeated(self, asked, watch)

        return switched(how)


class _Repeated(Piece):
    preserves = True

    def __init__(self, checkpoints: Repeated, asked: Asked, watch: Watch) -> None:
        self._all, self._watch, self._of_torch = checkpoints, watch, not asked.preserves
        self._owners: list[Any] = []
        self._states: list[Any] = []
        self._private: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._calls: list[Call] | None = None if checkpoints.bound is None else []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        self._owners = _owners()
        self._states = [state_of(owner) for owner in self._owners]
        before = torch.get_rng_state()
        line = ChangedAt(self._moved)
        try:
            with Calls(self._watch, self._calls, self._note), contextlib.ExitStack() as lines:
                if not self._all.drawn_at and self._calls is None:
                    lines.enter_context(line.watching())
                yield
        finally:
            self._all.drawn_at = self._all.drawn_at or line.where
            kept = zip(self._owners, self._states, strict=True)
            moved = [owner for owner, state in kept if pickle.dumps(state_of(owner)) != pickle.dumps(state)]
            del kept  # it would hold them, too
            for owner in moved:
                if not holds_alone(owner, (id(moved),)):
                    self._all.moved[_name(owner)] = None
            for generator, state in self._private.values():
                if not torch.equal(generator.get_state(), state):
                    self._all.moved["a torch.Generator of its own"] = None
            if self._of_torch and not torch.equal(before, torch.get_rng_state()):
                self._all.moved["torch's generator"] = None

    def _moved(self) -> bool:
        """Whether a generator that a checkpoint does not restore has advanced in the forward pass."""
        states = zip(self._owners, self._states, strict=True)
        return any(not torch.equal(g.get_state(), at) for g, at in self._private.values()) or any(
            pickle.dumps(state_of(owner)) != pickle.dumps(at) for owner, at in states
        )

    def _note(self, generator: torch.Generator) -> None:
        self._private.setdefault(id(generator), (generator, generator.get_state()))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        since = [state_of(owner) for owner in self._owners]
        private = [(generator, generator.get_state()) for generator, _ in self._private.values()]
        self._set(self._states, self._private.values())
        now: list[Call] | None = None if self._calls is None else []
        try:
            with Calls(self._watch, now):
                yield
        finally:
            self._set(since, private)
            # as far as both go: a recomputation may stop early
            for before, after in zip(self._calls or (), now or (), strict=False):
                self._all.other = self._all.other or _differs(before, after, self._all.bound or 0.0)

    def _set(self, states: Iterable[Any], private: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
        for owner, state in zip(self._owners, states, strict=True):
            set_state(owner, state)
        for generator, at in private:
            generator.set_state(at)


class Calls(FunctionMode):
    """Adds every call to ``calls``, also inside a backward pass, where checkpoints recompute. ``note`` is called with
    each generator among the arguments, before it draws."""

    def __init__(
        self, watch: Watch, calls: list[Call] | None, note: Callable[[torch.Generator], None] = lambda generator: None
    ) -> None:
        super().__init__()
        self._watch, self._calls, self._note = watch, calls, note

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._note(value)
        out = passed_on(func, args, kwargs)
        if self._calls is not None and name not in ATTRIBUTES:
            with self._watch.suspended(), torch.no_grad():
                plain = (t for t in tensors_in(out) if readable(t) and t.layout is torch.strided and not t.is_nested)
                if results := tuple(spaced(t.detach()).clone() for t in plain):
                    self._calls.append(Call(name, self._watch.module_path(), here()[0], results))
        return out


def _differs(a: Call, b: Call, bound: float) -> OtherCall | None:
    if a.op != b.op or [t.shape for t in a.results] != [t.shape for t in b.results]:
        return OtherCall(a, str(b.place), instead=b.op if a.op != b.op else f"{b.op} of another shape")
    for first, again in zip(a.results, b.results, strict=True):
        if torch.equal(first, again):
            continue
        wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (first, again)]
        by = float((wide[0] - wide[1]).abs().max())
        if not by <= bound * float(torch.stack(wide).abs().max()):
            return OtherCall(a, str(a.place), by=by)
    return None


def _owners() -> list[Any]:
    """Python's and numpy's generators, those of the project's own included."""
    kinds: tuple[type, ...] = (random.Random,)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return [o for o in gc.get_objects() if issubclass(type(o), kinds) and type(o) is not random.SystemRandom]


def _name(owner: Any) -> str:
    if isinstance(owner, random.Random):
        return "python's random" if owner is getattr(random, "_inst", None) else "a random.Random of its own"
    shared = owner is getattr(sys.modules["numpy"].random.mtrand, "_rand", None)
    return "numpy's np.random" if shared else "a numpy generator of its own"
