"""What an object is to the walk, by its class alone, and how far an iterator of Python itself has come.

Nothing of the project's is called.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import itertools
import pathlib
import random
import sys
import types
import warnings
import weakref
from collections import deque
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pytest_trainloop.core.ours import is_our_class, is_our_module, is_ours
from pytest_trainloop.core.whose import reraise_ours

Sort = Literal[
    "scalar",
    "tensor",
    "array",
    "generator",
    "stream",
    "module",
    "optimizer",
    "scheduler",
    "scaler",
    "dict",
    "list",
    "tuple",
    "set",
    "function",
    "method",
    "partial",
    "object",
    "opaque",
    "ours",
]
"""An object is entered for its attributes; what is opaque or ours is not entered."""

_SCALARS = (
    *(int, float, complex, str, bytes, type(None), enum.Enum, pathlib.PurePath, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, datetime.datetime, datetime.timedelta),
    *(datetime.date, decimal.Decimal, fractions.Fraction),
)

_FUNCTIONS = (types.FunctionType,)

_MADE: tuple[Any, ...] = (
    *(iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), iter(set()), iter(range(0)), iter("")),
    *(iter(b""), iter(range(2**70)), enumerate(()), zip(()), map(len, ()), filter(None, ()), reversed([])),
)
_STREAMS = (types.GeneratorType, *map(type, _MADE))
"""Iterators that are part of Python: how far they have come is all that changes in them."""

_OPAQUE = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, weakref.ref)

_ENTERED_IN = {
    "torch": ("torch.optim", "torch.amp", "torch.cuda.amp", "torch.utils.data", "torch.distributions", "torch.nn"),
    "collections": ("collections",),
    "types": ("types",),
    "argparse": ("argparse",),
    "itertools": ("itertools",),
    "builtins": (),
}
"""Of these packages, which in the standard library or torch are not entered else, objects of these modules are."""

_LIBRARIES = (
    "torch numpy pandas PIL matplotlib tqdm wandb tensorboard tensorboardX tensorflow jax pyarrow tokenizers scipy cv2 "
    "sentencepiece sklearn requests pytest _pytest pluggy hypothesis"
)
_NOT_ENTERED = frozenset(sys.stdlib_module_names) | frozenset(_LIBRARIES.split())


def sort_of_class(kind: type) -> Sort:
    """The sort of a class's instances."""
    known = _SORTS.get(kind)
    if known is None:
        known = _SORTS[kind] = _sort_of_class(kind)
    return known


_SORTS: weakref.WeakKeyDictionary[type, Sort] = weakref.WeakKeyDictionary()


def _sort_of_class(kind: type) -> Sort:
    if is_our_class(kind):
        return "ours"
    if issubclass(kind, torch.Tensor):
        return "tensor"
    if issubclass(kind, nn.Module):
        return "module"
    if issubclass(kind, _SCALARS):
        return "scalar"
    if issubclass(kind, (torch.Generator, random.Random)):
        return "generator"
    if kind.__module__.partition(".")[0] == "numpy":
        return _sort_of_numpy(kind)
    for sort, kinds in _CONTAINERS:
        if issubclass(kind, kinds):
            return sort
    if issubclass(kind, _STREAMS) or kind.__module__ == "itertools":
        return "stream"
    if issubclass(kind, _FUNCTIONS):
        return "function"
    if issubclass(kind, types.MethodType):
        return "method"
    if issubclass(kind, functools.partial):
        return "partial"
    if kind.__name__ in ("_lru_cache_wrapper", "partialmethod") and kind.__module__ == "functools":
        return "object"
    if issubclass(kind, _OPAQUE) or kind.__name__ in _PROXIES:
        return "opaque"
    if issubclass(kind, (LRScheduler, ReduceLROnPlateau)) or _has(kind, "get_last_lr", "step"):
        return "scheduler"
    if _has(kind, "scale", "unscale_", "update") and not issubclass(kind, Optimizer):
        return "scaler"
    if issubclass(kind, Optimizer):
        return "object"  # an optimizer only with groups and state of its own: wrappers have those of another
    return "object" if is_entered(kind) else "opaque"


_CONTAINERS: tuple[tuple[Sort, tuple[type, ...]], ...] = (
    ("dict", (dict,)),
    ("list", (list, deque)),
    ("tuple", (tuple,)),
    ("set", (set, frozenset)),
)

_PROXIES = ("weakproxy", "weakcallableproxy", "weakref", "ReferenceType", "ProxyType", "CallableProxyType")


def _has(kind: type, *names: str) -> bool:
    """Whether a class defines these functions itself or inherits them; nothing is looked up on an instance."""
    return all(any(callable(vars(base).get(name)) for base in kind.__mro__) for name in names)


def _sort_of_numpy(kind: type) -> Sort:
    import numpy as np

    if issubclass(kind, np.ndarray):
        return "array"
    if issubclass(kind, (np.generic, np.dtype)):
        return "scalar"
    kinds = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    return "generator" if issubclass(kind, kinds) else "opaque"


def is_entered(kind: type) -> bool:
    """Whether the attributes of a class's instances are looked at: not where they are the inside of a library that
    training's own state is not kept in."""
    for base in kind.__mro__:
        if base is object:
            continue
        module = str(getattr(base, "__module__", ""))
        top = module.partition(".")[0]
        if top not in _NOT_ENTERED:
            return True
        if any(module == name or module.startswith(f"{name}.") for name in _ENTERED_IN.get(top, ())):
            return True
    return False


def is_project(module: str) -> bool:
    """Whether code of a module of this name may be the project's: not the standard library's, torch's or ours."""
    return module.partition(".")[0] not in _NOT_ENTERED and not is_our_module(module)


_CODE = ("function", "method", "partial", "stream")
"""Objects of classes of Python's, whose code may be ours."""


def sort_of(value: Any) -> Sort:
    """The sort of an object."""
    sort = sort_of_class(type(value))
    if sort in _CODE and is_ours(value):
        return "ours"
    if sort == "generator" and _is_global(value):
        return "opaque"  # seeded by the runs
    if sort in ("object", "opaque"):
        held = attributes(value)
        if isinstance(held.get("param_groups"), list) and isinstance(held.get("state"), dict):
            return "optimizer"
    return sort


def sort_of_root(value: Any) -> Sort:
    """The sort of what a walk begins with: a function of ours in the place of one of the project's is entered."""
    sort = sort_of(value)
    return sort_of_class(type(value)) if sort == "ours" else sort


def _is_global(generator: Any) -> bool:
    """Whether a generator is the one that torch, numpy or random draws from by default."""
    numpy = sys.modules.get("numpy")
    owners = [random.random, *([] if numpy is None else [numpy.random.rand])]
    known = [getattr(function, "__self__", None) for function in owners]
    return any(generator is other for other in (torch.default_generator, *torch.cuda.default_generators, *known))


def attributes(value: Any) -> dict[str, Any]:
    """An object's own ``__dict__``, past any ``__getattribute__`` of its class; an empty one where it has none."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    except Exception as error:  # of a property of that name in a class of the project's
        reraise_ours(error)
        return {}
    return held if type(held) is dict else {}


def all_plain(values: list[Any]) -> bool:
    """Whether all of many values are plain."""
    kinds = set(map(type, values))
    return all(sort_of_class(kind) == "scalar" for kind in kinds - {tuple}) and (
        tuple not in kinds or all(is_plain(value) for value in values if type(value) is tuple)
    )


def is_plain(value: Any) -> bool:
    """Whether a value is one that cannot change itself: a number, text, None, or a tuple of those."""
    kind = type(value)
    if kind is tuple:
        return all(map(is_plain, value))
    return sort_of_class(kind) == "scalar"


_ITERTOOLS = (itertools.count, itertools.cycle, itertools.islice, itertools.chain, itertools.repeat)


def position(stream: Any) -> Any:
    """How far an iterator has come: something to compare, and for ``set_back``; None where it is not known."""
    if isinstance(stream, types.GeneratorType):
        frame = stream.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, tuple(v for v in frame.f_locals.values() if isinstance(v, (int, float, str)))
    reduced = _reduced(stream)
    if reduced is None:
        return None
    state = reduced[2] if len(reduced) > 2 else None
    plain = tuple(part for part in reduced[1] if isinstance(part, (int, float)))
    return (state if isinstance(state, (int, tuple)) else None, plain)


def set_back(stream: Any, kept: Any) -> bool:
    """Set an iterator to where it was. Only those over a list, a tuple, text or a range can be."""
    if position(stream) == kept:
        return True
    if isinstance(stream, _SETTABLE) and isinstance(kept, tuple) and isinstance(kept[0], int):
        if _reduced(stream) is None or len(_reduced(stream)[1]) == 0 or not _reduced(stream)[2:]:
            return False  # at its end, where it has dropped what it went over
        stream.__setstate__(kept[0])
        return True
    return False


def inside(stream: Any) -> tuple[Any, ...]:
    """What an iterator goes over, also further iterators."""
    reduced = _reduced(stream)
    return () if reduced is None else tuple(reduced[1])


_SETTABLE: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter(b"")))

_PLAIN: tuple[Any, ...] = (*_SETTABLE, type(enumerate(())), type(zip(())), type(map(len, ())), type(filter(None, ())))


def _reduced(stream: Any) -> Any:
    """What pickle would get of an iterator of Python itself; of others nothing, since theirs may be anybody's."""
    if type(stream) not in _PLAIN + _ITERTOOLS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return stream.__reduce__()
    except (TypeError, AttributeError):
        return None
