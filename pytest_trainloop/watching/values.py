"""Values of a running script as source code: what can be written down, and what cannot."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import math
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

LONGEST = 400
"""Characters of one value: longer ones are data."""

MOST_ROWS = 8
"""Rows of an example batch that is made up."""

_WORDS = (bool, int, str, bytes, type(None), type(...))


class Unknown(Exception):
    """A value that cannot be written down; the message says which."""


class Imports:
    """The imports that the written code needs, by the name that it uses."""

    def __init__(self, script: types.ModuleType, alias: str) -> None:
        self._script = script
        self._alias = alias
        self.lines: dict[str, None] = {}
        self.script_used = False

    def module(self, module: types.ModuleType) -> str:
        """The module's full name, imported."""
        if module is self._script:
            self.script_used = True
            return self._alias
        self.lines[f"import {module.__name__}"] = None
        return module.__name__

    def named(self, thing: Any) -> str:
        """A function or class by its own name in the module that defines it. Raises ``Unknown`` where it is found by no
        name, as a local function."""
        name, home = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", None)
        module = sys.modules.get(home or "")
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if module is None or found is not thing:
            raise Unknown(name or repr(thing)[:60])
        if home == "builtins":
            return name
        return f"{self.module(_shortest(module, name, thing))}.{name}"


def _shortest(module: types.ModuleType, name: str, thing: Any) -> types.ModuleType:
    """The outermost package that offers the thing by the same name: ``torch.optim`` of ``torch.optim.adam``."""
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:count]))
        if package is not None and package.__dict__.get(name) is thing:
            return package
    return module


def code_of(value: Any, imports: Imports) -> str:
    """An expression that gives an equal value. Raises ``Unknown``."""
    text = _code(value, imports)
    if len(text) > LONGEST:
        raise Unknown(f"{type(value).__name__} of {len(text)} characters")
    return text


def _code(value: Any, imports: Imports) -> str:
    if isinstance(value, enum.Enum):
        return f"{imports.named(type(value))}.{value.name}"
    if type(value) in _WORDS:
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if type(value) in (list, tuple, set, frozenset):
        return _sequence(value, imports)
    if type(value) is dict:
        return "{" + ", ".join(f"{_code(k, imports)}: {_code(v, imports)}" for k, v in value.items()) + "}"
    if isinstance(value, torch.Size):
        return f"torch.Size({list(value)})"
    if isinstance(value, torch.device):
        imports.lines["import torch"] = None
        return f'torch.device("{value}")'
    if isinstance(value, torch.dtype):
        imports.lines["import torch"] = None
        return str(value)
    if isinstance(value, pathlib.PurePath):
        imports.lines["import pathlib"] = None
        return f"pathlib.Path({str(value)!r})"
    if isinstance(value, types.ModuleType):
        return imports.module(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return imports.named(value)
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return _keywords(value, vars(value), imports)
    if dataclasses.is_dataclass(value):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return _keywords(value, own, imports)
    raise Unknown(type(value).__name__)


def _sequence(value: Any, imports: Imports) -> str:
    inner = ", ".join(_code(item, imports) for item in value)
    if isinstance(value, list):
        return f"[{inner}]"
    if isinstance(value, tuple):
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f"{type(value).__name__}([{inner}])"


def _keywords(value: Any, given: dict[str, Any], imports: Imports) -> str:
    inner = ", ".join(f"{name}={_code(item, imports)}" for name, item in given.items())
    return f"{imports.named(type(value))}({inner})"


def batch_code(batch: Any, imports: Imports) -> str:
    """An expression that makes a batch of the same kind: the same nest, dtypes and shapes, with at most ``MOST_ROWS``
    rows, whole numbers from the range that was seen. Raises ``Unknown``."""
    rows = next((t.shape[0] for t in _tensors(batch) if t.dim()), 0)
    return _batch(batch, imports, rows)


def _batch(value: Any, imports: Imports, rows: int) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value, imports, rows)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        if rows and len(value) == rows and all(isinstance(v, (str, int, float)) for v in value):
            value = value[:MOST_ROWS]  # one a row
        inner = ", ".join(_batch(v, imports, rows) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, Mapping):
        items = value.items()  # also transformers' BatchEncoding
        return "{" + ", ".join(f"{_code(k, imports)}: {_batch(v, imports, rows)}" for k, v in items) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        inner = ", ".join(f"{name}={_batch(v, imports, rows)}" for name, v in own.items())
        return f"{imports.named(type(value))}({inner})"
    return _code(value, imports)


def _tensor(value: torch.Tensor, imports: Imports, rows: int) -> str:
    imports.lines["import torch"] = None
    shape = list(value.shape)
    if shape and rows and shape[0] == rows:
        shape[0] = min(rows, MOST_ROWS)
    size = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    if value.is_floating_point():
        drawn = "rand" if _is_unit(value) else "randn"
        kind = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
        return f"torch.{drawn}(({size}){kind})"
    if value.dtype == torch.bool or not value.numel():
        return f"torch.ones(({size}), dtype={value.dtype})"
    if value.is_complex():
        return f"torch.randn(({size}), dtype={value.dtype})"
    low, high = int(value.min()), int(value.max())
    kind = "" if value.dtype == torch.int64 else f", dtype={value.dtype}"
    return f"torch.randint({low}, {high + 1}, ({size}){kind})"


def _is_unit(value: torch.Tensor) -> bool:
    return bool(value.numel()) and float(value.min()) >= 0.0 and float(value.max()) <= 1.0


def _tensors(value: Any) -> list[torch.Tensor]:
    from pytest_trainloop import nested

    return [tensor for _, tensor in nested.paths(value)]
