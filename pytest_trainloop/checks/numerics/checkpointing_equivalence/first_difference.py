"""The first call of torch that gives something else where a checkpoint runs its function again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.checkpointing_equivalence.rng_state import PutBack
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.samples import readable, spaced
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ATTRIBUTES
from pytest_trainloop.runs.checkpoint_bypass import Asked, Piece, without_cut_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch


@dataclass(frozen=True, slots=True)
class Other:
    """A call that went otherwise when its checkpoint ran it again: ``instead`` is what was called in its place, and
    ``place`` where; ``by`` is the largest difference of what it gave."""

    op: str
    module: str
    place: str
    instead: str = ""
    by: float = 0.0


@dataclass(frozen=True, slots=True)
class _Call:
    op: str
    module: str
    place: Place
    gave: tuple[torch.Tensor, ...]


class Recalled:
    """To be used by ``switched``; ``other`` is the first call that went otherwise with every generator put back, where
    gradients can come through."""

    def __init__(self, watch: Watch, bound: float) -> None:
        self._watch = watch
        self._bound = bound
        self.other: Other | None = None

    def __call__(self, asked: Asked) -> Piece:
        return without_cut_off(asked) or _Recalling(self, PutBack()(asked))

    def noting(self, log: list[_Call]) -> _Noting:
        return _Noting(self._watch, log)

    def compare(self, before: list[_Call], now: list[_Call]) -> None:
        """As far as both go: what is run again may stop early."""
        if self.other is None:
            pairs = zip(before, now, strict=False)
            self.other = next((o for a, b in pairs if (o := _otherwise(a, b, self._bound)) is not None), None)


class _Recalling(Piece):
    preserves = True

    def __init__(self, recalled: Recalled, drawing: Piece) -> None:
        self._recalled = recalled
        self._drawing = drawing
        self._before: list[_Call] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with self._drawing.first(), self._recalled.noting(self._before):
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        now: list[_Call] = []
        try:
            with self._drawing.again(), self._recalled.noting(now):
                yield
        finally:
            self._recalled.compare(self._before, now)


class _Noting(FunctionMode):
    """Notes every call that it is on for: inside a backward pass too, where the checkpoint makes them again."""

    def __init__(self, watch: Watch, log: list[_Call]) -> None:
        super().__init__()
        self._watch = watch
        self._log = log

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if name not in ATTRIBUTES:
            with self._watch.quietly(), torch.no_grad():
                gave = tuple(spaced(t.detach()).clone() for t in tensors_in(out) if _plain(t))
                if gave:
                    self._log.append(_Call(name, self._watch.module_path(), here(2)[0], gave))
        return out


def _plain(tensor: torch.Tensor) -> bool:
    return readable(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def _otherwise(a: _Call, b: _Call, bound: float) -> Other | None:
    if a.op != b.op or [t.shape for t in a.gave] != [t.shape for t in b.gave]:
        return Other(a.op, a.module, str(b.place), instead=b.op if a.op != b.op else f"{b.op} of another shape")
    for first, again in zip(a.gave, b.gave, strict=True):
        if torch.equal(first, again):
            continue
        wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (first, again)]
        by = float((wide[0] - wide[1]).abs().max())
        if not by <= bound * float(torch.stack(wide).abs().max()):
            return Other(a.op, a.module, str(a.place), by=by)
    return None
