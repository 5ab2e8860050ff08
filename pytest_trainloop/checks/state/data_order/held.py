"""What callables and loaders hold: data loaders, stored tensors and arrays, lists of records.

A walk over closures, globals that code names, bound objects, attributes and items. It reads no property and calls
nothing of the project's; each object is entered once, and the walk ends after ``MOST`` of them.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST = 20_000
"""Objects that are entered, at most."""

ITEMS = 512
"""Items of one container that are entered, at most."""

_ITERATORS = (itertools.cycle, itertools.islice, itertools.chain, itertools.repeat, map, zip, filter, enumerate)
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, range, slice)
_OF_MODULES = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Held:
    """What was found, each with the path by which it was reached."""

    loaders: list[tuple[str, Any]] = field(default_factory=list)
    stored: list[tuple[str, Any]] = field(default_factory=list)
    """Tensors, arrays and lists of numbers."""
    records: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    """Lists and deques of anything else."""
    generators: list[str] = field(default_factory=list)
    """Random generators."""
    names: set[str] = field(default_factory=set)
    """The names that the code of functions reads: globals, attributes, methods."""

    @classmethod
    def by(cls, *roots: tuple[str, Any]) -> Held:
        """What these hold, themselves included."""
        found = cls()
        todo = collections.deque(roots)
        seen: set[int] = set()
        kept: list[Any] = []  # what is made on the way: no other object may take its identity
        while todo and len(seen) < MOST:
            path, value = todo.popleft()
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen.add(id(value))
            kept.append(value)
            if found._take(path, value):
                todo.extend(_children(path, value, found.names))
        return found

    def _take(self, path: str, value: Any) -> bool:
        """Note what is looked for; whether to go on into it."""
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self.stored.append((path, value))
            return isinstance(value, np.ndarray) and value.dtype == object and value.size <= ITEMS
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState)) or (
            type(value).__name__ == "Random" and type(value).__module__ == "random"
        ):
            self.generators.append(path)
            return False
        if isinstance(value, DataLoader):
            self.loaders.append((path, value))
        if isinstance(value, (list, collections.deque)) and value:
            numbers = isinstance(value[0], (int, float, np.generic)) and not isinstance(value[0], bool)
            (self.stored if numbers else self.records).append((path, value))
            return not numbers
        return True


def _children(path: str, value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in itertools.islice(list(dict.items(value)), ITEMS):
            yield f"{path}[{key!r}]", child
    if isinstance(value, (list, tuple, collections.deque, set, frozenset)):
        for number, child in enumerate(itertools.islice(list(value), ITEMS)):
            yield f"{path}[{number}]", child
    elif isinstance(value, functools.partial):
        yield path, value.func
        yield path, value.args
        yield path, value.keywords
    elif isinstance(value, types.MethodType):
        yield _joined(path, _named(value.__self__)), value.__self__
        yield path, value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, names)
    elif isinstance(value, types.GeneratorType):
        yield from () if value.gi_frame is None else list(value.gi_frame.f_locals.items())
    elif isinstance(value, _ITERATORS):
        yield from ((path, child) for child in gc.get_referents(value))
    yield from _attributes(path, value, names)


def _attributes(path: str, value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if not _entered(kind):
        return
    held = getattr(value, "__dict__", None) if not isinstance(value, types.FunctionType) else None
    for name, child in list(held.items()) if isinstance(held, dict) else ():
        if not (isinstance(value, nn.Module) and name.endswith("_hooks")):
            yield (path if name in _OF_MODULES else _joined(path, str(name))), child
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else list(slots):
            member = vars(base).get(slot)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield _joined(path, slot), member.__get__(value, kind)
                except AttributeError:
                    continue
    if _of_project(kind):
        for name, member in list(vars(kind).items()):
            if isinstance(member, types.FunctionType):
                names.update(_names(member.__code__))
                yield from (pair for pair in _of_function(member, names) if not isinstance(pair[1], types.FunctionType))
            del name


def _entered(kind: type) -> bool:
    """Whether an object's attributes are looked at: the project's own, and what serves data or modules."""
    return _of_project(kind) or issubclass(kind, (nn.Module, DataLoader)) or kind.__module__.startswith(
        ("torch.utils.data", "lightning", "pytorch_lightning", "accelerate", "transformers", "datasets", "torchdata")
    )  # fmt: skip


def _of_project(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root not in _LIBRARIES


_LIBRARIES = frozenset(
    "builtins torch numpy collections itertools functools threading queue types random abc typing re pathlib logging "
    "io os sys weakref contextlib dataclasses enum multiprocessing concurrent asyncio pytest_trainloop pytest _pytest "
    "pandas scipy sklearn PIL tqdm transformers accelerate lightning pytorch_lightning datasets torchdata".split()
)


def _of_function(function: types.FunctionType, names: set[str]) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield function.__name__, value
    used = _names(code)
    names.update(used)
    if _of_library(function):
        return
    for name in used:
        value = function.__globals__.get(name)
        if value is not None and not isinstance(value, _PLAIN):
            yield name, value


def _of_library(function: types.FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _named(value: Any) -> str:
    return type(value).__name__


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
