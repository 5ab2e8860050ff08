"""What one run is looked at for: digests of batches, module calls, gradients, updates and weights, by step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import members, nested
from pytest_trainloop.baselines.digests import Digests
from pytest_trainloop.baselines.environment import environment
from pytest_trainloop.baselines.paths import Paths
from pytest_trainloop.baselines.trajectory import IN_FULL, LATER, Call, Digest, Environment, Leaf, Tensor
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.torch_internals import no_dispatch_modes
from pytest_trainloop.runs.hooks import around_steps, hooked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording import events
    from pytest_trainloop.recording.watch import Watch

MOST_CALLS = 400
"""Calls of modules in one step that are kept."""

_NOT_YET = Digest(0.0)


@dataclass(slots=True)
class Moment:
    """What was seen of one step of an optimizer."""

    event: events.Step
    batches: int
    gradients: dict[str, Digest] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Digest] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


class Looking:
    """Hooks of one run; what they saw is complete once ``on`` is left."""

    def __init__(self) -> None:
        self.batches: list[list[Leaf]] = []
        self.moments: list[Moment] = []
        self.tensors: dict[str, Tensor] = {}
        self.layers: dict[str, str] = {}
        self.environment: Environment | None = None
        self._digests = Digests()
        self._paths = Paths()
        self._watch: Watch | None = None
        self._calls: list[Call] = []
        self._steps: dict[int, int] = {}
        self._started: set[int] = set()
        self._open: tuple[Moment, dict[str, torch.Tensor]] | None = None

    @contextlib.contextmanager
    def on(self, watch: Watch) -> Iterator[None]:
        self._watch = watch
        with watch.suspended(), no_dispatch_modes(), torch.no_grad():
            self._note_starts(watch)
        with hooked(after_modules(self._called, with_kwargs=True)), around_steps(watch, self._take, self._use):
            yield
        with watch.suspended(), no_dispatch_modes(), torch.no_grad():
            self._digests.resolve()
            self.environment = environment(tensor.device for tensor in watch.table.tensors)
            self._name_ties(watch)
            self._note_layers(watch)

    def drawn(self, _number: int, item: Any) -> None:
        """Note a batch that the loop is given."""
        if self._watch is None or self._watch.over:
            return
        with self._watch.suspended(), no_dispatch_modes(), torch.no_grad():
            leaves: list[Leaf] = []
            self.batches.append(leaves)
            for path, tensor in nested.paths(item):
                leaf = Leaf(path=nested.shown(path), shape=tuple(tensor.shape), dtype=_dtype(tensor), values=_NOT_YET)
                leaves.append(leaf)
                self._digests.take([tensor], _into(leaves, len(leaves) - 1, "values"))

    def _called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch = self._watch
        if watch is None or watch.is_suspended or watch.over or watch.backward is not None:
            return  # ours, or a checkpoint that computes again
        if len(self._calls) >= MOST_CALLS or max(self._steps.values(), default=0) >= IN_FULL:
            return
        grad = torch.is_grad_enabled()
        with watch.suspended(), no_dispatch_modes(), torch.no_grad():
            given, gave = list(_tensors([*args, *kwargs.values()])), list(_tensors(output))
            self._calls.append(
                Call(
                    path=self._paths.of_call(module, watch.table),
                    kind=type(module).__name__,
                    training=module.training,
                    grad=grad,
                    dtype=next((_dtype(t) for t in gave if t.is_floating_point()), ""),
                    given=_NOT_YET,
                    gave=_NOT_YET,
                )
            )
            self._digests.take(given, _into(self._calls, len(self._calls) - 1, "given"))
            self._digests.take(gave, _into(self._calls, len(self._calls) - 1, "gave"))

    def _take(self, optimizer: Any) -> tuple[Moment, dict[str, torch.Tensor]] | None:
        """The gradients that a step reads, and the weights before it."""
        watch = self._watch
        if watch is None or watch.over or not watch.thread.open:
            return None
        event = watch.thread.open[-1]
        if self._open is not None and self._open[0].event is event:
            return self._open  # the closure again: the first gradient is that of the weights before the step
        self._note_starts(watch)
        moment = Moment(event, len(self.batches))
        before: dict[str, torch.Tensor] = {}
        self._open = moment, before
        if not self._is_recorded(self._steps.get(event.optimizer, 0) + 1):
            return moment, before
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                index = watch.table.index(parameter) if _is_there(parameter) else None
                if index is None:
                    continue
                name = watch.table.entries[index].name
                before[name] = parameter.detach().clone()
                if parameter.grad is not None:
                    self._digests.take([parameter.grad], _into(moment.gradients, name))
        return moment, before

    def _use(self, _optimizer: Any, taken: tuple[Moment, dict[str, torch.Tensor]]) -> None:
        moment, before = taken
        watch, self._open = self._watch, None
        if watch is None or moment.event.nested:
            return  # the step inside is the one that reads gradients
        optimizer = moment.event.optimizer
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        moment.calls, self._calls = self._calls, []
        self.moments.append(moment)
        if not self._is_recorded(self._steps[optimizer]):
            return
        for name, tensor in self._present(watch):
            self._digests.take([tensor], _into(moment.weights, name))
            if name in before and before[name].shape == tensor.shape:
                self._digests.norm(tensor.detach() - before[name], _into(moment.updates, name))

    def _is_recorded(self, step: int) -> bool:
        return step <= IN_FULL or step in LATER

    def _present(self, watch: Watch) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters in the order of registration, then buffers."""
        elsewhere = watch.trained.elsewhere()
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            if entry.index not in elsewhere and _is_there(tensor):
                yield entry.name, tensor
        for path, module in watch.table.named_modules():
            for name, buffer in members.named_buffers(module, recurse=False):
                if _is_there(buffer):
                    yield self._paths.of_own(module, path, name, watch.table), buffer

    def _note_starts(self, watch: Watch) -> None:
        """Note the tensors that were not there before: those of the model, and later those that are made in a call."""
        for name, tensor in self._present(watch):
            if id(tensor) in self._started or name in self.tensors:
                continue
            self._started.add(id(tensor))
            index = watch.table.index(tensor)
            entry = None if index is None else watch.table.entries[index]
            self.tensors[name] = Tensor(
                shape=tuple(tensor.shape),
                dtype=_dtype(tensor),
                start=_NOT_YET,
                trains=tensor.requires_grad,
                role="buffer" if entry is None else entry.role,
                module="" if entry is None else entry.module,
                owner=name.rpartition(".")[0] if entry is None else entry.owner,
            )
            self._digests.take([tensor], _into(self.tensors, name, "start"))

    def _name_ties(self, watch: Watch) -> None:
        """Note the further names of tied weights; the first is the one under which they are watched."""
        for path, module in watch.table.named_modules():
            for own, parameter in members.named_parameters(module, recurse=False, remove_duplicate=False):
                index = watch.table.index(parameter)
                name = f"{path}.{own}" if path else own
                known = "" if index is None else watch.table.entries[index].name
                if known in self.tensors and name != known and name not in self.tensors[known].also:
                    tensor = self.tensors[known]
                    self.tensors[known] = dataclasses.replace(tensor, also=(*tensor.also, name))

    def _note_layers(self, watch: Watch) -> None:
        """Note the numbers and switches that layers of torch's own were built with."""
        for _, module in watch.table.named_modules():
            if type(module).__module__.startswith("torch.nn.modules.") and (text := module.extra_repr()):
                self.layers[self._paths.of_call(module, watch.table)] = text


def _into(held: Any, key: Any, field_name: str = "") -> Any:
    """A function that puts a value under ``key``, or a frozen entry there with this field replaced."""

    def use(value: Any) -> None:
        held[key] = dataclasses.replace(held[key], **{field_name: value}) if field_name else value

    return use


def _is_there(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not nn.parameter.is_lazy(tensor) and not tensor.is_meta


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module is given or gives; objects of other classes (configurations, caches) are left."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _tensors(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _tensors(child)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _tensors(getattr(value, one.name, None))
