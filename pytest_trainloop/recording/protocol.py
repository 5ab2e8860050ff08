"""The interface of a watch, and of its observers, for the observers themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from pytest_trainloop.recording.events import Backward, Event, Step
    from pytest_trainloop.recording.parameters import ParameterTable
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.samples import Reader
    from pytest_trainloop.recording.threads import Thread, Trained


class GradientObserver(Protocol):
    """Sees gradients arrive."""

    @property
    def originals(self) -> Mapping[Any, str]:
        """Torch's own functions that start a pass, and the name of each."""

    def during(self, kind: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one of these functions, and record the pass."""


class OptimizerObserver(Protocol):
    """Sees optimizers step."""

    def index(self, optimizer: Any, declared: bool = False) -> int:
        """The number of an optimizer in the record; one that is not known gets an entry."""

    def drop_aborted(self) -> None:
        """Forget steps that an exception ended."""


class WeightObserver(Protocol):
    """Sees weights change outside of steps."""

    def look(self) -> None:
        """Sample every watched parameter."""


class GraphObserver(Protocol):
    """Sees the graphs of backward passes."""

    def mark(self, roots: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor], *, retained: bool) -> None:
        """Mark the graphs that a pass goes through."""

    def refused(self, event: Backward, error: RuntimeError) -> None:
        """Note a pass that raised."""


class Observed(Protocol):
    """One watched run, as its observers see it."""

    full: bool
    trained: Trained
    items: Callable[[], int]
    record: Record
    reader: Reader
    table: ParameterTable
    thread: Thread
    steps_on: dict[int, int]
    steps_at_forward: dict[int, int]

    @property
    def graphs(self) -> GraphObserver: ...
    @property
    def gradients(self) -> GradientObserver: ...
    @property
    def weight_changes(self) -> WeightObserver: ...
    @property
    def optimizers(self) -> OptimizerObserver: ...
    @property
    def backward(self) -> Backward | None: ...
    @backward.setter
    def backward(self, event: Backward | None) -> None: ...
    @property
    def is_suspended(self) -> bool: ...
    @property
    def stepping(self) -> int: ...

    def suspended(self) -> contextlib.AbstractContextManager[None]: ...
    def tick(self) -> int: ...
    def add(self, event: Event) -> None: ...
    def enter_module(self, module: nn.Module, prefix: str = "") -> None: ...
    def enter_replaced(self, module: nn.Module, parameter: torch.Tensor) -> int | None: ...
    def table_may_be_stale(self, module: nn.Module) -> bool: ...
    def hook_gradients(self, indices: Any) -> None: ...
    def step_done(self, step: Step) -> None: ...
    def backward_opened(self) -> None: ...
