"""Which tensors are watched as parameters, by name: declared, found in modules that run, or held by an optimizer."""

from __future__ import annotations

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.recording.record import Parameter, Role, Statistics
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.recording.samples import Reader


RUNNING = ("running_mean", "running_var")


class ParameterTable:
    """The watched parameters, found by ``id``. Their tensors are held until the run ends, so that no id recurs."""

    def __init__(self, reader: Reader) -> None:
        self.entries: list[Parameter] = []
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}
        self._names: set[str] = set()
        self._reader = reader
        self._lazy: list[int] = []
        self.declaring = False
        self._declared: set[int] = set()
        self._within_declared = False
        self.modules: dict[int, str] = {}
        self._kept: list[nn.Module] = []
        self._statistics: list[tuple[Statistics, nn.Module, str]] = []

    def index(self, tensor: torch.Tensor) -> int | None:
        return self._index.get(id(tensor))

    def add(self, tensor: torch.Tensor, name: str, role: Role, owner: str = "") -> int:
        """The tensor's index; a tensor that is not known gets an entry."""
        known = self._index.get(id(tensor))
        if known is not None:
            self._adopt(self.entries[known], name, role, owner)
            return known
        index = len(self.entries)
        entry = Parameter(
            index=index,
            name=self._unique(name),
            role=role,
            shape=(),
            dtype="",
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            owner=owner,
            declared=self.declaring or self._within_declared,
        )
        self._index[id(tensor)] = index
        self.entries.append(entry)
        self.tensors.append(tensor)
        self._lazy.append(index)
        self.settle()
        return index

    def settle(self) -> list[int]:
        """Note shape and initial values of lazy parameters once the first forward pass has made them; their indices."""
        made = [i for i in self._lazy if not nn.parameter.is_lazy(self.tensors[i])]
        for index in made:
            tensor, entry = self.tensors[index], self.entries[index]
            entry.shape, entry.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            entry.contiguous = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous()
            entry.start = self._reader.sample(tensor)
        self._lazy = [i for i in self._lazy if i not in made]  # another thread may have settled some
        return made

    def take_as_start(self) -> None:
        """Take the present values as the initial ones: a run has displaced the weights before ``fit``."""
        for index, entry in enumerate(self.entries):
            if index not in self._lazy:
                entry.start = self._reader.sample(self.tensors[index])

    def _adopt(self, entry: Parameter, name: str, role: Role, owner: str) -> None:
        """Name a tensor that was seen in an optimizer first as the module names in which it is found later."""
        if entry.role == "foreign" and role != "foreign":
            self._names.discard(entry.name)
            entry.name, entry.role, entry.owner = self._unique(name), role, owner

    def _unique(self, name: str) -> str:
        if name in self._names:
            name = next(f"{name} ({n})" for n in range(2, 10_000) if f"{name} ({n})" not in self._names)
        self._names.add(name)
        return name

    def knows(self, module: nn.Module) -> bool:
        return id(module) in self.modules

    def add_module(self, root: nn.Module, prefix: str = "") -> list[int]:
        """Enter a module with its parameters, registered or kept in plain lists and dicts; the indices of new ones."""
        before = len(self.entries)
        if self.declaring:
            self._declared.update(id(module) for module in members.modules(root))
        self._within_declared = id(root) in self._declared
        for path, module in members.named_modules(root, prefix=prefix):
            if id(module) not in self.modules:
                self.modules[id(module)] = path
                self._kept.append(module)
                self._add_statistics(module, path)
            for name, parameter in members.named_parameters(module, recurse=False):
                if isinstance(parameter, nn.Parameter):  # functional_call puts plain tensors there for one call
                    self._add_registered(module, path, name, parameter)
        registered = {id(m) for m in members.modules(root)}
        for path, module in list(members.named_modules(root, prefix=prefix)):
            for name, hidden, _ in _hidden(module):
                self._add_hidden(f"{path}.{name}" if path else name, hidden, registered)
        return list(range(before, len(self.entries)))

    def add_later(self, module: nn.Module, name: str, parameter: nn.Parameter) -> int:
        """Enter one more parameter of a module that is known; its index."""
        path = self.modules[id(module)]
        self._within_declared = id(module) in self._declared
        return self._add_registered(module, path, name, parameter)

    def _add_registered(self, module: nn.Module, path: str, name: str, parameter: nn.Parameter) -> int:
        index = self.add(parameter, f"{path}.{name}" if path else name, "model", owner=path)
        self.entries[index].layer = type(module).__module__.startswith("torch.")
        self.entries[index].module = type(module).__name__
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            self.entries[index].pad_row = module.padding_idx
        return index

    def _add_statistics(self, module: nn.Module, path: str) -> None:
        for name in RUNNING:
            buffer = getattr(module, name, None)
            if isinstance(buffer, torch.Tensor) and readable(buffer):
                known = Statistics(f"{path}.{name}" if path else name, path, self._reader.sample_entries(buffer))
                self._statistics.append((known, module, name))

    def statistics(self) -> list[Statistics]:
        """Running statistics as they were when their module was entered, and as they are now."""
        for known, module, name in self._statistics:
            buffer = getattr(module, name, None)
            known.end = self._reader.sample_entries(buffer) if isinstance(buffer, torch.Tensor) else known.start
        return [known for known, _, _ in self._statistics]

    def _add_hidden(self, path: str, hidden: nn.Module | torch.Tensor, registered: set[int]) -> None:
        if isinstance(hidden, torch.Tensor):
            if hidden.requires_grad and hidden.is_leaf:
                self.add(hidden, path, "unregistered", owner=path)
            return
        if id(hidden) in registered:
            return
        for sub, module in members.named_modules(hidden, prefix=path):
            if id(module) not in self.modules:
                self.modules[id(module)] = sub
                self._kept.append(module)
            for name, parameter in members.named_parameters(module, recurse=False):
                self.add(parameter, f"{sub}.{name}", "unregistered", owner=sub)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module entered so far, by its path."""
        for module in self._kept:
            yield self.modules[id(module)], module

    def note_gone(self) -> None:
        """Mark the registered parameters that no module holds any more."""
        present = {id(p) for module in self._kept for p in members.parameters(module, recurse=False)}
        for entry, tensor in zip(self.entries, self.tensors, strict=True):
            entry.gone = entry.role == "model" and id(tensor) not in present

    def path_of(self, module: nn.Module) -> str:
        """The module's path in the user's names; its class where it is the root or unknown."""
        return self.modules.get(id(module), "") or type(module).__name__


class PlainObject(NamedTuple):
    """An object that is no module and carries layers: its path, and its class."""

    path: str
    kind: type


def plain_objects(module: nn.Module, path: str) -> Iterator[tuple[str, PlainObject]]:
    """What plain objects among a module's attributes carry, by its path, with the nearest such object."""
    prefix = f"{path}." if path else ""
    for name, _, within in _hidden(module):
        if within is not None:
            yield prefix + name, PlainObject(prefix + within.path, within.kind)


def _hidden(module: nn.Module) -> Iterator[tuple[str, nn.Module | torch.Tensor, PlainObject | None]]:
    """Modules and parameters in the plain lists, tuples, dicts and objects among a module's attributes, with the
    nearest object."""
    for name, value in list(vars(module).items()):
        if name.startswith("_") and name in _NN_INTERNALS:
            continue
        for path, item, within in _items(name, value):
            if isinstance(item, (nn.Module, nn.Parameter)):
                yield path, item, within


def _items(
    name: str, value: Any, depth: int = 2, within: PlainObject | None = None
) -> Iterable[tuple[str, Any, PlainObject | None]]:
    if depth == 0:
        return
    dotted = False
    if isinstance(value, dict):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    elif _is_plain_object(value):
        pairs, dotted, within = vars(value).items(), True, PlainObject(name, type(value))
    else:
        return
    for key, item in list(pairs)[:256]:
        path = f"{name}.{key}" if dotted else f"{name}[{key!r}]"
        if isinstance(item, (nn.Module, nn.Parameter)):
            yield path, item, within
        else:
            yield from _items(path, item, depth - 1, within)


def _is_plain_object(value: Any) -> bool:
    """An object of the project's own (or a namespace) that may carry layers; not a tensor, module, class or function,
    nor a library's."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or inspect.isroutine(value) or is_ours(value):
        return False
    if not hasattr(value, "__dict__"):
        return False
    return (
        isinstance(value, types.SimpleNamespace)
        or layer(getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<frozen>") == 2
    )


_NN_INTERNALS = frozenset(vars(nn.Module()))
