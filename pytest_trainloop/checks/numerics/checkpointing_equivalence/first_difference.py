"""The first call of torch whose result differs when a checkpoint recomputes its function."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.checkpointing_equivalence.rng_state import RestoreGenerators
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.samples import readable, spaced
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ATTRIBUTES
from pytest_trainloop.runs.checkpoint_bypass import Asked, Piece, without_cut_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch


@dataclass(frozen=True, slots=True)
class OtherCall:
    """A call whose recomputation differs."""

    op: str
    module: str
    place: str
    instead: str = ""
    """What the recomputation calls in its place, at ``place``."""
    by: float = 0.0
    """Largest difference of the results."""


@dataclass(frozen=True, slots=True)
class _Call:
    op: str
    module: str
    place: Place
    results: tuple[torch.Tensor, ...]


class CompareRecomputation:
    """For ``switched``: compares each recomputation, with every generator restored, with the call before it. ``other``
    is the first call that differs, in checkpoints through which gradients can flow."""

    def __init__(self, watch: Watch, bound: float) -> None:
        self._watch = watch
        self._bound = bound
        self.other: OtherCall | None = None

    def __call__(self, asked: Asked) -> Piece:
        return without_cut_off(asked) or _Compared(self, RestoreGenerators()(asked))

    def logging(self, log: list[_Call]) -> _Logging:
        return _Logging(self._watch, log)

    def compare(self, before: list[_Call], now: list[_Call]) -> None:
        """As far as both go: a recomputation may stop early."""
        if self.other is None:
            pairs = zip(before, now, strict=False)
            self.other = next((o for a, b in pairs if (o := _differs(a, b, self._bound)) is not None), None)


class _Compared(Piece):
    preserves = True

    def __init__(self, comparison: CompareRecomputation, restored: Piece) -> None:
        self._comparison = comparison
        self._restored = restored
        self._before: list[_Call] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with self._restored.first(), self._comparison.logging(self._before):
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        now: list[_Call] = []
        try:
            with self._restored.again(), self._comparison.logging(now):
                yield
        finally:
            self._comparison.compare(self._before, now)


class _Logging(FunctionMode):
    """Logs every call, also inside a backward pass, where checkpoints recompute."""

    def __init__(self, watch: Watch, log: list[_Call]) -> None:
        super().__init__()
        self._watch = watch
        self._log = log

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name not in ATTRIBUTES:
            with self._watch.suspended(), torch.no_grad():
                results = tuple(spaced(t.detach()).clone() for t in tensors_in(out) if _plain(t))
                if results:
                    self._log.append(_Call(name, self._watch.module_path(), here()[0], results))
        return out


def _plain(tensor: torch.Tensor) -> bool:
    return readable(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def _differs(a: _Call, b: _Call, bound: float) -> OtherCall | None:
    if a.op != b.op or [t.shape for t in a.results] != [t.shape for t in b.results]:
        return OtherCall(a.op, a.module, str(b.place), instead=b.op if a.op != b.op else f"{b.op} of another shape")
    for first, again in zip(a.results, b.results, strict=True):
        if torch.equal(first, again):
            continue
        wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (first, again)]
        by = float((wide[0] - wide[1]).abs().max())
        if not by <= bound * float(torch.stack(wide).abs().max()):
            return OtherCall(a.op, a.module, str(a.place), by=by)
    return None
