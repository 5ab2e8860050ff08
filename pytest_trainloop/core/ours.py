"""What belongs to this package: it is never judged. Standard library only.

A project holds what it was given: the batches and their iterators, hooks, a ``TrainLoop``. Every walk over objects
asks ``is_ours`` before it looks at one, so that no finding is about our own state. Whose mistake an exception is, is
another question: ``whose``.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import types
from collections import deque
from typing import Any

from pytest_trainloop.core.paths import PACKAGE

NAME = __name__.partition(".")[0]


class StandsIn:
    """What takes the place of a value of the project's for one run, and is judged as that value."""

    __slots__ = ()


def is_our_file(filename: str) -> bool:
    """Whether a file is one of this package."""
    return filename.startswith(PACKAGE)


def is_our_module(name: object) -> bool:
    """Whether a module of this name is one of this package."""
    return isinstance(name, str) and name.partition(".")[0] == NAME


def is_our_class(kind: type) -> bool:
    """Whether the instances of a class are ours: a class of this package, except what replaces the project's."""
    return is_our_module(getattr(kind, "__module__", "")) and not issubclass(kind, StandsIn)


def is_ours(thing: Any) -> bool:
    """Whether something belongs to this package.

    That is an instance of one of its classes, a class, a module or its namespace, a function (also under the name of
    one that it wraps), a method, a partial, a generator or a frame of its code, an iterator over what is ours, a thread
    that runs its code, and the handle of one of its hooks.
    """
    kind = type(thing)
    if is_our_class(kind):
        return True
    look = _LOOKS.get(kind)
    if look is not None:
        return bool(look(thing))
    if issubclass(kind, type):
        return is_our_class(thing)
    if issubclass(kind, threading.Thread):
        return is_ours(getattr(thing, "_target", None))
    if kind.__name__ == "RemovableHandle":
        return _is_our_handle(thing)
    return False


def holds_alone(thing: Any, ignored: tuple[int, ...] = ()) -> bool:
    """Whether we alone hold an object: whatever refers to it is ours, or a container that we alone hold.

    It searches the heap, a few levels up. ``ignored`` are containers by ``id``, made by whoever asks.
    """
    level = [thing]
    seen = {id(thing), *ignored}
    for _ in range(MOST_LEVELS):
        asked, given = {id(one) for one in level}, tuple(level)  # Python 3.13 finds the arguments of a call, too
        held: set[int] = set()
        above = []
        for holder in gc.get_referrers(*given):
            if id(holder) in seen or holder is level or holder is given:
                continue
            if is_ours(holder):
                held |= asked.intersection(map(id, gc.get_referents(holder)))
            elif isinstance(holder, _CONTAINERS):
                held |= asked.intersection(map(id, gc.get_referents(holder)))
                above.append(holder)
            else:
                return False
        if asked - held:
            return False  # held by what the heap does not show: a variable of a function that runs
        if not above:
            return True
        seen |= asked | {id(one) for one in above}
        level = above
    return False


MOST_LEVELS = 6
"""Containers between an object and who holds it."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)


def _of_function(function: types.FunctionType) -> bool:
    return is_our_module(function.__globals__.get("__name__"))


def _of_builtin(function: Any) -> bool:
    """Of a method that is written in C, as ``list.append``: the object that it is bound to."""
    return function.__self__ is not None and is_ours(function.__self__)


def _of_iterator(iterator: Any) -> bool:
    """An iterator of Python itself refers to what it goes over; those of several ones keep these in a tuple."""
    inside = gc.get_referents(iterator)
    if type(iterator) in _OF_SEVERAL:
        inside += [one for held in inside if type(held) is tuple for one in held]
        inside += [one for held in inside if type(held) is _OF_TUPLE for one in next(iter(gc.get_referents(held)), ())]
    return any(is_ours(inner) for inner in inside)


def _is_our_handle(handle: Any) -> bool:
    hooks = getattr(handle, "hooks_dict_ref", lambda: None)()
    return hooks is not None and is_ours(hooks.get(handle.id))


_OF_TUPLE = type(iter(()))
_OF_SEVERAL: tuple[Any, ...] = (type(zip(())), type(map(len, ())), itertools.chain)
_OF_ONE: tuple[Any, ...] = (type(enumerate(())), type(filter(None, ())), itertools.cycle, itertools.islice)
"""Iterators of Python itself that go over other ones."""

_LOOKS: dict[type, Any] = {
    types.FunctionType: _of_function,
    types.MethodType: lambda method: is_ours(method.__self__) or is_ours(method.__func__),
    types.BuiltinFunctionType: _of_builtin,
    types.MethodWrapperType: _of_builtin,
    functools.partial: lambda partial: is_ours(partial.func),
    types.GeneratorType: lambda generator: is_our_file(generator.gi_code.co_filename),
    types.CoroutineType: lambda coroutine: is_our_file(coroutine.cr_code.co_filename),
    types.AsyncGeneratorType: lambda generator: is_our_file(generator.ag_code.co_filename),
    types.FrameType: lambda frame: is_our_file(frame.f_code.co_filename),
    types.CodeType: lambda code: is_our_file(code.co_filename),
    types.ModuleType: lambda module: is_our_module(module.__name__),
    dict: lambda held: "__spec__" in held and is_our_module(held.get("__name__")),
    **dict.fromkeys((*_OF_SEVERAL, *_OF_ONE), _of_iterator),
}
