"""One watched run, in full or light density; every hook and patch is removed at its end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.recording.backward import Gradients
from pytest_trainloop.recording.built_schedulers import BuiltSchedulers
from pytest_trainloop.recording.checkpoints import Checkpoints
from pytest_trainloop.recording.clips import Clips
from pytest_trainloop.recording.copied_lrs import StateDicts
from pytest_trainloop.recording.forward import Modules
from pytest_trainloop.recording.function_mode import aside
from pytest_trainloop.recording.graphs import Graphs
from pytest_trainloop.recording.mistakes import PASSING_OVER, noted_on
from pytest_trainloop.recording.mode_stack import asked_without_ours, exporters, without_ours
from pytest_trainloop.recording.parameters import ParameterTable
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.record import Record
from pytest_trainloop.recording.samples import Reader, readable
from pytest_trainloop.recording.schedulers import Scalers, Schedules
from pytest_trainloop.recording.shards import local
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.steps import Optimizers
from pytest_trainloop.recording.threads import Suspended, Thread, Trained
from pytest_trainloop.recording.torch_functions import Functions
from pytest_trainloop.recording.train_mode import Modes
from pytest_trainloop.recording.weight_changes import WeightChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from pytest_trainloop.recording.events import Backward, Event, Step
    from pytest_trainloop.recording.record import Optimizer

FULL_ROUNDS = 12
"""Optimizer steps that are watched in full (docs/how-it-decides.md#what-observing-costs)."""

FULL_BACKWARDS = 400
"""Backward passes after which a run is watched at light density, whatever its steps."""


class Watch:
    """Watches whatever trains inside its ``with`` block; ``record`` is complete once the block is left.

    ``modules`` and ``optimizers`` that are not given are found from what runs. ``before_step`` is called before each
    optimizer step and ``before_backward`` before each backward pass; both may raise to end the run. ``schedulers`` are
    those that were built before. Hooks are removed after an exception too.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        optimizers: Sequence[Any] = (),
        *,
        before_step: Callable[[Watch], None] | None = None,
        before_backward: Callable[[Watch], None] | None = None,
        full_rounds: int = FULL_ROUNDS,
        schedulers: BuiltSchedulers | None = None,
    ) -> None:
        self._declared = (dict(modules or {}), list(optimizers))
        self._before_step = before_step
        self._before_backward = before_backward
        self._full_rounds = full_rounds
        self._clock = itertools.count(1)
        self._counts: dict[int, int] = {}
        self.record = Record()
        self._built = BuiltSchedulers() if schedulers is None else schedulers
        self.reader = Reader()
        self.table = ParameterTable(self.reader)
        self.trained = Trained()
        self.full = True
        self.items: Callable[[], int] = lambda: 0
        self.at_light_density: list[Callable[[], None]] = []
        """Called when the run changes to light density, and after each step from then on."""
        self.over = False
        """Whether the run was asked to end: what a loop that swallows the exception still does is not recorded, since
        how much that is depends on when a timer ends it."""
        self.backward_passes = 0
        self.thread = Thread()
        self.steps_on: dict[int, int] = defaultdict(int)
        self.steps_at_forward: dict[int, int] = {}

    def __enter__(self) -> Watch:
        self._patches = Patches()
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.enter_context(noted_on(self.record.mistakes))
            undo.callback(self._patches.remove)
            self.graphs = Graphs(self)
            self.gradients = Gradients(self, self._patches)
            undo.callback(self.gradients.remove)
            self.weight_changes = WeightChanges(self)
            self.optimizers = Optimizers(self, self._on_step)
            undo.callback(self.optimizers.remove)
            self._built.tick = self.tick
            undo.enter_context(self._built.watching())
            self._schedules = Schedules(self, self._patches, self._built)
            self._scalers = Scalers(self, self._patches)
            self._modes = Modes(self, self._patches)
            self._checkpoints = Checkpoints(self, self._patches)
            self._state_dicts = StateDicts(self, self._patches)
            undo.callback(self._state_dicts.remove)
            self.clips = Clips(self)
            undo.callback(self.clips.remove)
            self._leave_exports_alone()
            self._patches.put(torch.overrides, "has_torch_function", asked_without_ours)
            self._enter_declared()
            self._modules = Modules(self)
            undo.callback(self._modules.remove)
            undo.enter_context(_compiled_models_run_eagerly())
            self.functions = Functions(self)
            self.functions.put_on()
            undo.callback(self.functions.take_off)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with PASSING_OVER, self.suspended():
                self._note_end()
            with PASSING_OVER:
                self._finish()
        finally:
            self._exit.close()
            self.items = lambda: 0  # the batches hold the project's DataLoader

    def _leave_exports_alone(self) -> None:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def export(*args: Any, **kwargs: Any) -> Any:
                with without_ours(), torch.compiler.set_stance("default"):  # torch 2.6 traces in no other one
                    return original(*args, **kwargs)

            return export

        for owner, name in exporters():
            self._patches.put(owner, name, around)

    def _enter_declared(self) -> None:
        modules, optimizers = self._declared
        self.table.declaring = True
        for prefix, module in modules.items():
            self.enter_module(module, prefix)
        self.table.declaring = not modules
        for optimizer in optimizers:
            self.optimizers.index(optimizer, declared=True)

    def _note_end(self) -> None:
        self.weight_changes.look()
        self._enter_waiting()
        self.record.schedulers = self._built.finish(self.optimizers.known)
        self.clips.settle()
        self._state_dicts.look()
        self.table.note_gone()
        elsewhere = self.trained.elsewhere()
        if self.trained.by_several:
            self.record.notes.append("several threads train: of each, the tensors that it trains itself were looked at")
        for index, tensor in enumerate(self.table.tensors):
            if index not in elsewhere and readable(local(tensor)):
                self.record.end[index] = self.reader.sample_entries(tensor)
        self.record.statistics = self.table.statistics()

    def _finish(self) -> None:
        self.record.parameters = self.table.entries
        self.reader.resolve()
        self.record.moves = self.weight_changes.resolve()
        if self.full:
            self.record.full_until = self.tick()

    def suspended(self) -> Suspended:
        """Suspend the recording: torch calls in here are those of this package."""
        return Suspended(self.thread)

    @contextlib.contextmanager
    def data_is_drawn(self) -> Iterator[None]:
        """Suspend the recording, and all modes of this package: calls in here are the project's, and make its data."""
        thread = self.thread
        thread.suspended += 1
        try:
            with aside():
                yield
        finally:
            thread.suspended -= 1

    @property
    def is_suspended(self) -> bool:
        """Whether this thread makes torch calls that are not recorded: in code of this package, or where data is
        drawn."""
        return self.thread.suspended > 0

    @property
    def stepping(self) -> int:
        return self.thread.stepping

    @property
    def backward(self) -> Backward | None:
        """The backward pass that this thread is in."""
        return self.trained.backward

    @backward.setter
    def backward(self, event: Backward | None) -> None:
        self.trained.backward = event

    def tick(self) -> int:
        return next(self._clock)

    def add(self, event: Event) -> None:
        if not self.over:
            self.record.events.append(event)

    def enter_module(self, module: nn.Module, prefix: str = "") -> None:
        """Watch a module's parameters."""
        self._counts[id(module)] = sum(1 for _ in members.parameters(module))
        self.table.add_module(module, prefix)
        self.hook_gradients(range(len(self.table.tensors)))

    def enter_replaced(self, module: nn.Module, parameter: torch.Tensor) -> int | None:
        """Watch a parameter that a known module was given inside of a forward pass; its index. None for one that is
        lent for a call."""
        if not self.full or not isinstance(parameter, nn.Parameter) or not parameter.is_leaf:
            return None
        name = next((n for n, p in members.named_parameters(module, recurse=False) if p is parameter), "")
        index = self.table.add_later(module, name, parameter)
        self.table.entries[index].came_in = here()[0]
        self.hook_gradients([index])
        return index

    def table_may_be_stale(self, module: nn.Module) -> bool:
        """Whether a known module has other parameters than when it was entered, or some that require grad only now."""
        if not self.full:
            return False
        count = 0
        for parameter in members.parameters(module):
            count += 1
            index = self.table.index(parameter)
            if index is None or self.table.entries[index].role == "foreign":
                if isinstance(parameter, nn.Parameter):
                    return True
            elif parameter.requires_grad and not self.gradients.hooked(index):
                return True
        return count != self._counts.get(id(module), count)

    def module_path(self) -> str:
        """The innermost module being called, in the user's names."""
        modules = self.thread.modules
        return self.table.path_of(modules[-1]) if modules else ""

    def inside_parameters(self) -> bool:
        """Whether a module that holds parameters is being called."""
        return any(True for module in self.thread.modules for _ in members.parameters(module))

    def hook_gradients(self, indices: Any) -> None:
        if self.full:
            self.gradients.hook(indices)

    def _on_step(self) -> None:
        if self._before_step is not None:
            self._before_step(self)

    def step_done(self, step: Step) -> None:
        """Count a step, and change to light density once enough were watched in full."""
        if step.nested:
            return
        record = self.record
        record.steps += 1
        optimizer = record.optimizers[step.optimizer]
        optimizer.steps += 1
        record.rounds = max(record.rounds, optimizer.steps)
        record.begun = record.begun or self._trains_the_model(optimizer)
        self.graphs.look(record.rounds)
        if self.full:
            self._enter_waiting()
        for index, grad in (step.reads[-1].grads if step.reads else {}).items():
            if grad is not None:
                self.steps_on[index] += 1
        if self.full and record.rounds >= self._full_rounds:
            self._lighten()
        elif not self.full:
            self._take_off()

    def _enter_waiting(self) -> None:
        """Enter the optimizers that were built and have not stepped yet: they hold what they hold. After ``fit`` those
        that it built are gone."""
        for optimizer in self._built.optimizers():
            self.optimizers.enter_waiting(optimizer)

    def _trains_the_model(self, optimizer: Optimizer) -> bool:
        known = optimizer.declared or not any(o.declared for o in self.record.optimizers)
        return known or any(self.table.entries[i].declared for i in optimizer.parameters)

    def backward_opened(self) -> None:
        """Count a backward pass: a run that makes an optimizer for every batch changes to light density too."""
        self.backward_passes += 1
        if self.full and self.backward_passes > FULL_BACKWARDS:
            self._lighten()
        if self._before_backward is not None:
            self._before_backward(self)

    def _lighten(self) -> None:
        """Record roots, learning rates and counts only from here on."""
        self.weight_changes.look()
        self.full = False
        self.record.full_until = self.tick()
        self.gradients.remove()
        self._modules.remove()
        self._take_off()

    def _take_off(self) -> None:
        """What slows every call of torch down, until it is off: a call that is under way keeps its modes."""
        self.functions.take_off()
        for take_off in self.at_light_density:
            take_off()


@contextlib.contextmanager
def _compiled_models_run_eagerly() -> Iterator[None]:
    """Under a function mode they would be compiled again, and they warn of global module hooks."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        yield
