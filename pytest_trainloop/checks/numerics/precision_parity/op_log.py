"""What every operation of a forward pass gave, and which gradient came back to it: one run's journal.

The same code makes the same calls in every precision, so that the journals of two runs are compared call by call. Up
to 256 entries of a tensor are kept, always at the same places.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.patches import tapped
from pytest_trainloop.recording.source import NOWHERE, here, place_of
from pytest_trainloop.recording.torch_internals import apply_of, function_class, no_dispatch_modes
from pytest_trainloop.recording.torch_names import ATTRIBUTES, AUTOGRAD_CALLS, FINITENESS_TESTS, SIZES
from pytest_trainloop.tracing.arguments import floats, in_place
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

ENTRIES = 256
MOST = 20_000
"""Calls that are kept at most."""

_NO_WORK = (
    ATTRIBUTES
    | AUTOGRAD_CALLS
    | FINITENESS_TESTS
    | SIZES
    | {"__deepcopy__", "detach", "detach_", "requires_grad_", "item", "tolist", "numpy", "is_floating_point"}
)
"""They compute nothing that may be rounded."""


@dataclass(slots=True)
class Sample:
    """Some entries of a tensor, in float64, its largest finite absolute value, and shares of entries that are zero and
    that are not finite."""

    entries: torch.Tensor
    peak: float
    zeros: float
    lost: float
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sample:
        flat = tensor.detach().reshape(-1)
        entries = flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].to(torch.float64)
        finite = torch.isfinite(flat)
        kept = flat[finite].to(torch.float64)
        count = max(1, flat.numel())
        return cls(
            entries.clone(),
            float(kept.abs().max()) if kept.numel() else 0.0,
            float((flat == 0).sum()) / count,
            1.0 - float(finite.sum()) / count,
            tensor.dtype,
        )

    def distance(self, other: Sample) -> float:
        """The length of the difference over the other's, where both are finite; infinite where more of this one is
        not finite."""
        if self.entries.shape != other.entries.shape:
            return 0.0
        if self.lost > other.lost:
            return math.inf
        both = self.entries.isfinite() & other.entries.isfinite()
        length = float(torch.linalg.vector_norm(other.entries[both]))
        apart = float(torch.linalg.vector_norm((self.entries - other.entries)[both]))
        return apart / length if length else 0.0


@dataclass(slots=True)
class Call:
    """One operation, the ``number``th: ``given`` are the numbers of the calls that made its inputs, ``inputs`` and
    ``output`` what went in and came out, ``gradient`` what came back; ``own`` says that it is an autograd.Function of
    the project's."""

    number: int
    name: str
    place: Place
    module: str
    own: bool
    inputs: list[Sample]
    given: tuple[int, ...]
    output: Sample
    gradient: Sample | None = None


@dataclass(slots=True)
class Journal:
    """The calls of one run before its first step; after the first backward pass only those that a loss can depend on:
    what clips or counts gradients is none of them."""

    calls: list[Call] = field(default_factory=list)

    def unscale(self, factor: float) -> None:
        """Take a scaler's factor out of the gradients, as its unscale does."""
        for call in self.calls:
            if call.gradient is not None:
                call.gradient.entries /= factor
                call.gradient.peak /= factor

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        mode = _Writing(self, watch)
        return (mode.functions_of_the_project(), mode)


class _Writing(WatchingMode):
    def __init__(self, journal: Journal, watch: Watch) -> None:
        super().__init__(watch)
        self._calls = journal.calls
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._nodes: dict[Any, int] = {}

    def active(self) -> bool:
        """Until the first step."""
        return super().active() and not self.watch.record.steps and len(self._calls) < MOST

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "backward":
            with self._unseen():
                self._note_functions(floats(tensors_in(args)))
        if name in _NO_WORK:
            return func(*args, **kwargs)
        return self._noted(name, False, lambda: func(*args, **kwargs), args, kwargs)

    def functions_of_the_project(self) -> contextlib.AbstractContextManager[None]:
        """``autograd.Function.apply`` passes no function mode."""
        return tapped(torch.autograd.Function, "apply", self._tapped)

    def _tapped(self, original: Callable[..., Any]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                return apply_of(cls, original)(*args, **kwargs)

            if cls.__module__.startswith("torch.") or not self.active():
                return run()
            return self._noted(cls.__name__, True, run, args, kwargs)

        return classmethod(apply)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        with self.watch.quietly(), torch.no_grad(), no_dispatch_modes():
            yield

    def _noted(self, name: str, own: bool, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        with self._unseen():
            given = floats(tensors_in(args, kwargs))
            self._note_functions(given)
            inputs = [Sample.of(t) for t in given]
            makers = tuple(self._made[id(t)][1] for t in given if id(t) in self._made)
        out = run()
        with self._unseen():
            made = floats(tensors_in(args[0] if in_place(name) and args else out))
            if made and (any(t.requires_grad for t in made) or not self.watch.record.autograd_passes()):
                number, place, module = len(self._calls), here(2)[0], self.watch.module_path()
                call = Call(number, name, place, module, own, inputs, makers, Sample.of(made[0]))
                self._keep(call, made)
        return out

    def _keep(self, call: Call, made: list[torch.Tensor]) -> None:
        self._calls.append(call)
        for tensor in made:
            self._made[id(tensor)] = (tensor, call.number)
            if tensor.grad_fn is not None:
                self._nodes[tensor.grad_fn] = call.number
        self._hook(call, made[0])

    def _note_functions(self, given: list[torch.Tensor]) -> None:
        """Tensors that a Function of the project's made unseen: ``f = MyFunction.apply`` passes no mode and no tap."""
        for tensor in given:
            node: Any = tensor.grad_fn
            function = function_class(node)
            if function is None or node in self._nodes:
                continue
            if function.__module__.startswith("torch."):
                continue
            makers = tuple(self._nodes[n] for n, _ in node.next_functions if n in self._nodes)
            name, module = function.__name__, self.watch.module_path()
            call = Call(len(self._calls), name, _backward_of(function), module, True, [], makers, Sample.of(tensor))
            self._keep(call, [tensor])

    def _hook(self, call: Call, tensor: torch.Tensor) -> None:
        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None and call.gradient is None and floats([gradient]):
                with self._unseen():
                    call.gradient = Sample.of(gradient)

        if tensor.requires_grad:
            with contextlib.suppress(RuntimeError):
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]


def _backward_of(function: Any) -> Place:
    """The line on which a Function's backward is defined."""
    code = getattr(function.backward, "__code__", None)
    return NOWHERE if code is None else place_of(code.co_filename, code.co_firstlineno)
