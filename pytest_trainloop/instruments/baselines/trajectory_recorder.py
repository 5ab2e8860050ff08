"""What is seen of one run: digests of batches, module calls, gradients, updates and weights, by step. Digests are
computed in float64 on their device and read once, after the run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.baselines.trajectory import IN_FULL, LATER, Call, Digest, Environment, Leaf, Tensor
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.samples import as_real, readable
from pytest_trainloop.recording.torch_internals import no_dispatch_modes
from pytest_trainloop.runs.hooks import around_steps, hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording import events
    from pytest_trainloop.recording.parameters import ParameterTable
    from pytest_trainloop.recording.watch import Watch

MOST_CALLS = 400
"""Calls of modules in one step that are kept."""

SAMPLED = 1 << 16
"""Entries that ``Digest.ordered`` looks at, at most, at even spacing."""

_GOLDEN = 0.6180339887498949

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
        self._endings: dict[int, str] = {}
        self._taken: set[str] = set()
        self._watch: Watch | None = None
        self._calls: list[Call] = []
        self._steps: Counter[int] = Counter()
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
            self.environment = _environment([tensor.device for tensor in watch.table.tensors])
            self._note_modules(watch)

    def drawn(self, _number: int, item: Any) -> None:
        """Note a batch that the loop is given."""
        if self._watch is None or self._watch.over:
            return
        with self._watch.suspended(), no_dispatch_modes(), torch.no_grad():
            leaves: list[Leaf] = []
            self.batches.append(leaves)
            for path, tensor in nested.paths(item):
                shown, shape = nested.shown(path), tuple(tensor.shape)
                leaves.append(Leaf(path=shown, shape=shape, dtype=_dtype(tensor), values=_NOT_YET))
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
            dtype = next((_dtype(t) for t in gave if t.is_floating_point()), "")
            path, kind, on = self._path(module, watch.table), type(module).__name__, module.training
            call = Call(path=path, kind=kind, training=on, grad=grad, dtype=dtype, given=_NOT_YET, gave=_NOT_YET)
            self._calls.append(call)
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
        moment, before = self._open = Moment(event, len(self.batches)), {}
        for group in getattr(optimizer, "param_groups", ()) if self._is_recorded(event.optimizer, 1) else ():
            for parameter in group["params"]:
                index = watch.table.index(parameter) if _is_there(parameter) else None
                if index is not None:
                    name = watch.table.entries[index].name
                    before[name] = parameter.detach().clone()
                    if parameter.grad is not None:
                        self._digests.take([parameter.grad], _into(moment.gradients, name))
        return self._open

    def _use(self, _optimizer: Any, taken: tuple[Moment, dict[str, torch.Tensor]]) -> None:
        moment, before = taken
        watch, self._open = self._watch, None
        if watch is None or moment.event.nested:
            return  # the step inside is the one that reads gradients
        self._steps[moment.event.optimizer] += 1
        moment.calls, self._calls = self._calls, []
        self.moments.append(moment)
        for name, tensor in self._present(watch) if self._is_recorded(moment.event.optimizer) else ():
            self._digests.take([tensor], _into(moment.weights, name))
            if name in before and before[name].shape == tensor.shape:
                self._digests.norm(tensor.detach() - before[name], _into(moment.updates, name))

    def _is_recorded(self, optimizer: int, later: int = 0) -> bool:
        step = self._steps[optimizer] + later
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
                    yield (f"{path}.{name}" if path else name) + self._ending(module, watch.table), buffer

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

    def _note_modules(self, watch: Watch) -> None:
        """Note the further names of tied weights, and what layers of torch's own were built with."""
        for path, module in watch.table.named_modules():
            for own, parameter in members.named_parameters(module, recurse=False, remove_duplicate=False):
                index = watch.table.index(parameter)
                name = f"{path}.{own}" if path else own
                known = "" if index is None else watch.table.entries[index].name
                if known in self.tensors and name != known and name not in self.tensors[known].also:
                    self.tensors[known] = replace(self.tensors[known], also=(*self.tensors[known].also, name))
            if type(module).__module__.startswith("torch.nn.modules.") and (text := module.extra_repr()):
                self.layers[self._path(module, watch.table)] = text

    def _path(self, module: nn.Module, table: ParameterTable) -> str:
        """The path of a module; its class where it is the root of a model."""
        return table.path_of(module) + self._ending(module, table)

    def _ending(self, module: nn.Module, table: ParameterTable) -> str:
        """`` (2)`` for the parts of a second model of one class, as the names of its parameters end. Models without a
        tensor (a loss module that is made in each step) share their paths."""
        if id(module) in self._endings:
            return self._endings[id(module)]
        for _, model in list(table.named_modules()):  # a model is entered before its parts
            if id(model) in self._endings:
                continue
            parts = [part for part in members.modules(model) if id(part) not in self._endings and table.knows(part)]
            paths = [table.path_of(part) for part in parts]
            ending = ""
            if any(True for _ in (*members.parameters(model), *members.buffers(model))):
                numbers = ("", *(f" ({number})" for number in range(2, len(self._taken) + 3)))
                ending = next(n for n in numbers if not any(path + n in self._taken for path in paths))
                self._taken.update(path + ending for path in paths)
            self._endings.update((id(part), ending) for part in parts)
        return self._endings.get(id(module), "")


def _environment(devices: list[torch.device]) -> Environment:
    cuda = next((device for device in devices if device.type == "cuda"), None)
    other = next((device.type for device in devices if device.type != "cpu"), "cpu")
    return Environment(
        torch=str(torch.__version__),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=f"{platform.system()}-{platform.machine()}",
        device=other if cuda is None else torch.cuda.get_device_name(cuda),
        threads=torch.get_num_threads(),
        cpu=torch.backends.cpu.get_cpu_capability(),
    )


def _into(held: Any, key: Any, name: str = "") -> Callable[[Any], None]:
    """Puts a value under ``key``, or in the field of that name of the frozen entry there."""

    def use(value: Any) -> None:
        held[key] = replace(held[key], **{name: value}) if name else value

    return use


def _is_there(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not nn.parameter.is_lazy(tensor) and not tensor.is_meta


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module takes or returns; objects of other classes (configurations, caches) are ignored."""
    inside: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        inside = value.values() if isinstance(value, Mapping) else value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, one.name, None) for one in fields(value)]
    for child in inside:
        yield from _tensors(child)


class Digests:
    """Collects numbers on their devices; ``resolve`` reads all of them, with one transfer a device."""

    def __init__(self) -> None:
        self._pending: dict[torch.device, list[tuple[torch.Tensor, Callable[[list[float]], None]]]] = defaultdict(list)

    def take(self, tensors: Iterable[torch.Tensor], use: Callable[[Digest], None]) -> None:
        """Call ``use`` with the digest of the tensors joined as they are now, when the numbers are read."""
        parts = [(number, rows) for number, t in enumerate(tensors, 1) if (rows := _entries(t)) is not None]
        sums = [torch.stack(_sums(rows, factor=n)) for n, rows in parts if rows.device == parts[0][1].device]
        if not sums:
            use(Digest(0.0, 0.0, 0.0, 0.0))
            return
        joined = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        self._pending[joined.device].append((joined, lambda numbers: use(Digest(*numbers))))

    def norm(self, tensor: torch.Tensor, use: Callable[[float], None]) -> None:
        """Call ``use`` with the Euclidean norm of a tensor as it is now, when the numbers are read."""
        rows = _entries(tensor)
        if rows is None:
            use(0.0)
        else:
            norm = torch.linalg.vector_norm(rows).reshape(1)
            self._pending[norm.device].append((norm, lambda numbers: use(numbers[0])))

    def resolve(self) -> None:
        """Read everything that is pending."""
        for pending in self._pending.values():
            read = iter(torch.cat([numbers for numbers, _ in pending]).tolist())
            for numbers, use in pending:
                use(list(itertools.islice(read, numbers.numel())))
        self._pending.clear()


def _entries(tensor: torch.Tensor) -> torch.Tensor | None:
    """The entries in float64, in rows of the first dimension; None where there are none that can be read."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
    if tensor.is_meta or tensor.is_nested or not (tensor.is_sparse or readable(tensor)):
        return None
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.numel() == 0:
        return None
    values = as_real(values)
    if values.device.type == "mps":  # it has no float64
        values = values.cpu()
    return values.to(torch.float64).reshape(values.shape[0] if values.dim() > 1 else values.numel(), -1)


def _sums(rows: torch.Tensor, *, factor: int) -> list[torch.Tensor]:
    """The four numbers of a digest; ``factor`` differs for the tensors of one digest."""
    flat = rows.reshape(-1)
    count = flat.numel()
    sampled = flat[:: -(-count // SAMPLED)]
    total = flat.sum()
    by_row = torch.dot(rows.sum(0), _weights(rows.shape[1], rows.device)) if rows.shape[1] > 1 else total
    ordered = torch.dot(sampled, _weights(sampled.numel(), flat.device)) * factor
    return [torch.dot(flat, flat), total, ordered, by_row]


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Fixed numbers between -1 and 1 by position: those of any two positions differ. Exact on every machine, since only
    products and differences of float64 numbers are taken."""
    with torch.inference_mode(False):
        position = torch.arange(1, count + 1, dtype=torch.float64, device=device)
        turns = position * position * _GOLDEN
        return 2.0 * (turns - turns.floor()) - 1.0
