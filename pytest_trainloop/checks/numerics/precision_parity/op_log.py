"""A log of the operations of one run's forward pass: inputs, outputs, and the gradients at the outputs.

The same code makes the same calls in every precision, so that the logs of two runs are compared call by call. Up to 256
entries of a tensor are kept, always at the same places.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import NOWHERE, here, place_of
from pytest_trainloop.recording.torch_internals import apply_of, function_class, no_dispatch_modes
from pytest_trainloop.recording.torch_names import ATTRIBUTES, AUTOGRAD_CALLS, FINITENESS_TESTS, SIZES, UNSET
from pytest_trainloop.tracing.arguments import floats, in_place
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

ENTRIES = 256
MOST = 20_000
"""Operations that are logged."""

_NO_WORK = (
    ATTRIBUTES
    | AUTOGRAD_CALLS
    | FINITENESS_TESTS
    | SIZES
    | UNSET
    | {"__deepcopy__", "detach", "detach_", "requires_grad_", "item", "tolist", "numpy", "is_floating_point"}
)
"""Functions that compute nothing that may be rounded."""


@dataclass(slots=True)
class Sample:
    """Some entries of a tensor, and what all of them have in common."""

    entries: torch.Tensor
    """In float64."""
    peak: float
    """Largest finite absolute value."""
    zeros: float
    """Share of entries that are zero."""
    lost: float
    """Share of entries that are not finite."""
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
        """The length of the difference over the other's, where both are finite; infinite where more of this one's
        entries are not finite."""
        if self.entries.shape != other.entries.shape:
            return 0.0
        if self.lost > other.lost:
            return math.inf
        both = self.entries.isfinite() & other.entries.isfinite()
        length = float(torch.linalg.vector_norm(other.entries[both]))
        difference = float(torch.linalg.vector_norm((self.entries - other.entries)[both]))
        return difference / length if length else 0.0


@dataclass(slots=True)
class Operation:
    """One operation of the forward pass."""

    number: int
    name: str
    place: Place
    module: str
    custom: bool
    """Whether it is an ``autograd.Function`` of the project."""
    inputs: list[Sample]
    made_by: tuple[int, ...]
    """The numbers of the operations that made its inputs."""
    output: Sample
    gradient: Sample | None = None
    """The gradient that arrived at its output."""


@dataclass(slots=True)
class OpLog:
    """The operations of one run before its first step. After the first backward pass only those with a history are
    logged: others clip or count gradients."""

    operations: list[Operation] = field(default_factory=list)

    def unscale(self, factor: float) -> None:
        """Divide the gradients by a scaler's factor, as its unscale does."""
        for operation in self.operations:
            if operation.gradient is not None:
                operation.gradient.entries /= factor
                operation.gradient.peak /= factor

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        mode = _Logging(self, watch)
        return (mode.custom_functions(), mode)


class _Logging(WatchingMode):
    def __init__(self, log: OpLog, watch: Watch) -> None:
        super().__init__(watch)
        self._operations = log.operations
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._nodes: dict[Any, int] = {}

    def active(self) -> bool:
        """Until the first step."""
        return super().active() and not self.watch.record.steps and len(self._operations) < MOST

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "backward":
            with self._unobserved():
                self._log_unseen_functions(floats(tensors_in(args)))
        if name in _NO_WORK:
            return passed_on(func, args, kwargs)
        return self._logged(name, False, lambda: passed_on(func, args, kwargs), args, kwargs)

    def custom_functions(self) -> contextlib.AbstractContextManager[None]:
        """``autograd.Function.apply`` is not a torch function: it goes through no function mode."""
        return patched(torch.autograd.Function, "apply", self._patched)

    def _patched(self, original: Callable[..., Any]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                return passed_on(apply_of(cls, original), args, kwargs)

            if cls.__module__.startswith("torch.") or not self.active():
                return run()
            return self._logged(cls.__name__, True, run, args, kwargs)

        return classmethod(apply)

    @contextlib.contextmanager
    def _unobserved(self) -> Iterator[None]:
        with self.watch.suspended(), torch.no_grad(), no_dispatch_modes():
            yield

    def _logged(self, name: str, custom: bool, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        with self._unobserved():
            given = floats(tensors_in(args, kwargs))
            self._log_unseen_functions(given)
            inputs = [Sample.of(t) for t in given]
            made_by = tuple(self._made[id(t)][1] for t in given if id(t) in self._made)
        out = run()
        with self._unobserved():
            made = floats(tensors_in(args[0] if in_place(name) and args else out))
            if made and (any(t.requires_grad for t in made) or not self.watch.record.autograd_passes()):
                number, place, module = len(self._operations), here()[0], self.watch.module_path()
                sample = Sample.of(made[0])
                self._keep(Operation(number, name, place, module, custom, inputs, made_by, sample), made)
        return out

    def _keep(self, operation: Operation, made: list[torch.Tensor]) -> None:
        self._operations.append(operation)
        for tensor in made:
            self._made[id(tensor)] = (tensor, operation.number)
            if tensor.grad_fn is not None:
                self._nodes[tensor.grad_fn] = operation.number
        self._hook(operation, made[0])

    def _log_unseen_functions(self, given: list[torch.Tensor]) -> None:
        """Log the Functions of the project that made these tensors unobserved: ``f = MyFunction.apply`` goes through
        neither mode nor patch."""
        for tensor in given:
            node: Any = tensor.grad_fn
            function = function_class(node)
            if function is None or node in self._nodes or function.__module__.startswith("torch."):
                continue
            made_by = tuple(self._nodes[n] for n, _ in node.next_functions if n in self._nodes)
            number, place, module = len(self._operations), _backward_of(function), self.watch.module_path()
            sample = Sample.of(tensor)
            self._keep(Operation(number, function.__name__, place, module, True, [], made_by, sample), [tensor])

    def _hook(self, operation: Operation, tensor: torch.Tensor) -> None:
        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None and operation.gradient is None and floats([gradient]):
                with self._unobserved():
                    operation.gradient = Sample.of(gradient)

        if tensor.requires_grad:
            on_gradient(tensor, arrived)


def _backward_of(function: Any) -> Place:
    """The line on which a Function's backward is defined."""
    code = getattr(function.backward, "__code__", None)
    return NOWHERE if code is None else place_of(code.co_filename, code.co_firstlineno)
