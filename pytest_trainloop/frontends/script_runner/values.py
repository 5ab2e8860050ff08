"""Values of a running script as source code: what can be written down, and what cannot."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import io
import itertools
import math
import pathlib
import pickle
import sys
import types
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils.data import RandomSampler, default_collate

from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.core.whose import project_may_raise
from pytest_trainloop.declare import nested

LONGEST = 2000
"""Characters of one value: longer ones are data."""

MOST_ROWS = 8
"""Rows of a batch that is made up."""

BATCHES = 16
"""Batches that are made up."""

KEPT = 4
"""Batches of the script's own that are kept next to the test, at most."""

MOST_KEPT = 1_000_000
"""Bytes of them, at most."""

LOOKED_AT = 8
"""Batches of the script's own that are looked at for the range of whole numbers."""

FEW_NUMBERS = 1000
"""Different whole numbers that floating-point targets hold, at most."""

OF_THE_TEST = frozenset({"batches", "batch", "data", "fit", "load"})
"""Names that the written test gives to its own parts."""

_WORDS = (bool, int, str, bytes, type(None), type(...))


class Unknown(Exception):
    """A value that cannot be written down; the message says which."""


class Imports:
    """The imports that the written code needs, by the name that it uses."""

    def __init__(self, script: types.ModuleType, alias: str, variables: Collection[str] = ()) -> None:
        self._script = script
        self._alias = alias
        self._variables = {*variables, *OF_THE_TEST}
        self.lines: dict[str, None] = {}
        self.script_used = False

    def module(self, module: types.ModuleType) -> str:
        """The module's full name, imported; another one where a variable hides its first part."""
        if module is self._script:
            self.script_used = True
            return self._alias
        name = module.__name__
        if name.partition(".")[0] in self._variables:
            name = f"{name.replace('.', '_')}_module"
            self.lines[f"import {module.__name__} as {name}"] = None
        else:
            self.lines[f"import {name}"] = None
        return name

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
        if name == "Accelerator" and str(home).partition(".")[0] == "accelerate":
            self.lines["from pytest_trainloop.adapters import fresh_accelerator"] = None
            return "fresh_accelerator"  # a second one in a process does not take other settings
        return f"{self.module(_shortest(module, name, thing))}.{name}"


def _shortest(module: types.ModuleType, name: str, thing: Any) -> types.ModuleType:
    """The outermost package that offers the thing by the same name: ``torch.optim`` of ``torch.optim.adam``."""
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:count]))
        with warnings.catch_warnings(), project_may_raise():
            warnings.simplefilter("ignore")
            if getattr(package, name, None) is thing:  # which some packages load only when asked
                return package or module
    return module


def code_of(value: Any, imports: Imports) -> str:
    """An expression that gives an equal value. Raises ``Unknown``."""
    text = _code(value, imports)
    if len(text) > LONGEST:
        raise Unknown(f"{type(value).__name__} of {len(text)} characters")
    return text


def _code(value: Any, imports: Imports) -> str:
    if is_ours(value) and not isinstance(value, type) and not inspect.isroutine(value):
        raise Unknown(type(value).__name__)
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
        return _keywords(value, _not_default(value), imports)
    raise Unknown(type(value).__name__)


def _not_default(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that have other values than they have by themselves."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init and (type(own) is not type(default) or own != default):
            found[field.name] = own
    return found


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


def loader_code(loader: Any, imports: Imports) -> tuple[str, Any]:
    """An expression that makes a DataLoader of the same kind, and the data that it reads from a file next to the test:
    rows of the first batches, or these batches, where they are small. Else they are made up: the same nest, dtypes and
    shapes, whole numbers from the range that was seen. Raises ``Unknown``, and what the loader raises."""
    seen = list(itertools.islice(loader, LOOKED_AT))
    if not seen:
        raise Unknown("a loader that gives nothing")
    imports.lines["import torch.utils.data"] = None
    batch = seen[0]
    rows = next((t.shape[0] for _, t in nested.paths(batch) if t.dim()), 0)
    by_rows = (
        rows
        and loader.collate_fn is default_collate
        and all(t.dim() and t.shape[0] == rows for _, t in nested.paths(batch))
    )
    shuffle = ", shuffle=True" if isinstance(loader.sampler, RandomSampler) else ""
    dropped = ", drop_last=True" if loader.drop_last else ""
    size = min(rows, MOST_ROWS)
    how = f"batch_size={size}{shuffle}{dropped}" if by_rows else "batch_size=None"
    if (kept := _kept(seen[:KEPT], by_rows=bool(by_rows))) is not None:
        imports.lines["import torch"] = None
        return f'torch.utils.data.DataLoader(torch.load(Path(__file__).with_suffix(".pt")), {how})', kept
    made = _Made(imports, _ranges(seen), rows, keep=not by_rows).code(batch)
    count = BATCHES * size if by_rows else BATCHES
    return f"torch.utils.data.DataLoader([{made} for _ in range({count})], {how})", None


def _kept(batches: list[Any], *, by_rows: bool) -> list[Any] | None:
    """The batches, or their rows, as plain data, at most ``MOST_KEPT`` bytes of them; None where these are too few, or
    hold what a file of tensors does not."""
    try:
        kept = [_plain_nest(batch) for batch in batches]
        if by_rows:
            kept = [_row(batch, at) for batch in kept for at in range(next(nested.paths(batch))[1].shape[0])]
        size = sum(t.numel() * t.element_size() for _, t in nested.paths(kept[:1])) or 1
        kept = kept[: max(MOST_KEPT // size, 0)]
        file = io.BytesIO()
        torch.save(kept, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (Unknown, pickle.UnpicklingError):
        return None
    return kept if len(kept) >= (2 * MOST_ROWS if by_rows else 2) else None


def _plain_nest(value: Any) -> Any:
    """A batch as tensors and plain values in lists, tuples and dicts. Raises ``Unknown``."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        inner = [_plain_nest(v) for v in value]
        return inner if isinstance(value, list) else tuple(inner)
    if isinstance(value, Mapping):  # transformers' BatchEncoding too
        return {k: _plain_nest(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise Unknown(type(value).__name__)


def _row(batch: Any, at: int) -> Any:
    """One row of a batch that ``default_collate`` made."""
    if isinstance(batch, torch.Tensor):
        return batch[at].clone()
    if isinstance(batch, dict):
        return {k: _row(v, at) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        if batch and all(isinstance(v, str) for v in batch):
            return batch[at]  # one a row
        return type(batch)(_row(v, at) for v in batch)
    raise Unknown(type(batch).__name__)


def _ranges(batches: list[Any]) -> dict[Any, tuple[float, float]]:
    """The smallest and the largest entry of each tensor by its path, over several batches."""
    found: dict[Any, tuple[float, float]] = {}
    for batch in batches:
        for path, tensor in nested.paths(batch):
            if tensor.numel() and not tensor.is_complex():
                low, high = float(tensor.min()), float(tensor.max())
                known = found.get(path, (low, high))
                found[path] = min(low, known[0]), max(high, known[1])
    return found


class _Made:
    """Code for made-up batches, or for single rows of them."""

    def __init__(self, imports: Imports, ranges: dict[Any, tuple[float, float]], rows: int, *, keep: bool) -> None:
        self._imports, self._ranges, self._rows, self._keep = imports, ranges, rows, keep

    def code(self, value: Any, path: tuple[object, ...] = ()) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            if len(value) == self._rows and all(isinstance(v, (str, int, float)) for v in value):
                if not self._keep:
                    return _code(value[0], self._imports)  # one a row
                value = value[:MOST_ROWS]
            inner = ", ".join(self.code(v, (*path, i)) for i, v in enumerate(value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, Mapping):  # transformers' BatchEncoding too
            inner = ", ".join(f"{_code(k, self._imports)}: {self.code(v, (*path, k))}" for k, v in value.items())
            return "{" + inner + "}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if f.init]
            inner = ", ".join(f"{name}={self.code(getattr(value, name), (*path, name))}" for name in names)
            return f"{self._imports.named(type(value))}({inner})"
        return _code(value, self._imports)

    def _tensor(self, value: torch.Tensor, path: tuple[object, ...]) -> str:
        self._imports.lines["import torch"] = None
        shape = list(value.shape)
        if not self._keep:
            shape = shape[1:]
        elif shape and shape[0] == self._rows:
            shape[0] = min(self._rows, MOST_ROWS)
        size = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        low, high = self._ranges.get(path, (0.0, 0.0))
        if value.is_complex():
            return f"torch.randn({size}, dtype={value.dtype})"
        if value.dtype == torch.bool:
            return f"torch.rand({size}) < 0.5" if low < high else f"torch.full({size}, {bool(low)})"
        if not value.is_floating_point():
            kind = "" if value.dtype == torch.int64 else f", dtype={value.dtype}"
            return f"torch.randint({int(low)}, {int(high) + 1}, {size}{kind})"
        kind = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
        if value.numel() > 1 and bool((value == value.round()).all()) and high - low < FEW_NUMBERS:
            return f"torch.randint({int(low)}, {int(high) + 1}, {size}).to({value.dtype})"
        return f"torch.{'rand' if low >= 0.0 and high <= 1.0 else 'randn'}({size}{kind})"
