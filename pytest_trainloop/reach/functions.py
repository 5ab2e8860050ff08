"""What a function keeps: the variables of its closure, arguments given beforehand, globals that its code names."""

from __future__ import annotations

import enum
import functools
import sys
import types
from typing import TYPE_CHECKING, Any

from pytest_trainloop.reach import streams
from pytest_trainloop.reach.places import Place
from pytest_trainloop.reach.slots import MISSING, Fixed, OfCell, OfClass, OfDict
from pytest_trainloop.reach.sorts import attributes, is_plain, is_project, sort_of

if TYPE_CHECKING:
    from pytest_trainloop.reach.graph import Graph
    from pytest_trainloop.reach.sorts import Sort


def enter(graph: Graph, place: Place, sort: Sort) -> None:
    if sort == "function":
        _function(graph, place)
    elif sort == "method":
        _method(graph, place)
    elif sort == "partial":
        _partial(graph, place)
    else:
        _stream(graph, place)


def _function(graph: Graph, place: Place) -> None:
    function = place.value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        _variable(graph, place, name, OfCell(cell), key=id(cell))
    given = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    for name, value in zip(arguments[len(arguments) - len(given) :], given, strict=False):
        if not is_plain(value):
            _named(graph, place, name, Fixed(value))
    for name, value in (function.__kwdefaults__ or {}).items():
        if not is_plain(value):
            _named(graph, place, name, OfDict(function.__kwdefaults__, name))
    held = attributes(function)
    if isinstance(held.get("__wrapped__"), types.FunctionType):
        _enter_once(graph, place, held["__wrapped__"])
    if _is_project_file(function.__code__.co_filename, str(function.__globals__.get("__name__", ""))):
        for name in [name for name in held if name != "__wrapped__"]:
            graph.child(f"{function.__name__}.{name}", OfDict(held, name), held[name], place)
        _globals(graph, place, function)


def _globals(graph: Graph, place: Place, function: types.FunctionType) -> None:
    held = function.__globals__
    for name in _names(function.__code__):
        value = held.get(name, MISSING)
        if value is MISSING or isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            continue
        if name.isupper() and is_plain(value):
            continue  # a constant
        if sort_of(value) == "function":
            _enter_once(graph, place, value)
        else:
            _variable(graph, place, name, OfDict(held, name), key=(id(held), name))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code may read from its globals, also code inside it."""
    found = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(_names(inner)))
    return tuple(found)


_NOT_PROJECTS = ("site-packages", "dist-packages", "<frozen")


@functools.lru_cache(maxsize=4096)
def _is_project_file(filename: str, module: str) -> bool:
    """Whether code is the project's, and its globals are looked at."""
    return is_project(module) and not any(part in filename for part in _NOT_PROJECTS)


def _enter_once(graph: Graph, place: Place, function: Any) -> None:
    known = graph.known.get(id(function))
    if known is not None:
        graph.edges[place.node].append(known[0])
        return
    below = Place(f"<{function.__name__}>", Fixed(function), function, within=place, waits=True)
    below.node = graph.node(function, below.path)
    graph.edges[place.node].append(below.node)
    graph.queue.append(below)


def _variable(graph: Graph, place: Place, name: str, slot: OfCell | OfDict, key: Any) -> None:
    """A variable that several functions may share: one place for all of them."""
    node = graph.variables.get(key)
    if node is not None:
        graph.edges[place.node].append(node)
        return
    graph.edges.append([])
    graph.variables[key] = node = len(graph.edges) - 1
    graph.edges[place.node].append(node)
    if name != "__class__":
        _named(graph, place, name, slot, owner=node)


def _named(graph: Graph, place: Place, name: str, slot: Any, owner: int = -1) -> None:
    """A variable under its own name; after the function's name where another variable has it."""
    value = slot.get()
    path = _self_name(graph, value) if name == "self" else name
    if path in graph.places:
        path = f"{getattr(place.value, '__name__', 'fit')}:{name}"
    graph.child(path, slot, value, place, owner=owner)


def _self_name(graph: Graph, value: Any) -> str:
    """What the object of a method is called: by a variable of one of the loop's functions, else by its class."""
    return graph.variable_names.get(id(value)) or type(value).__name__


def _method(graph: Graph, place: Place) -> None:
    value = place.value.__self__
    known = graph.known.get(id(value))
    if known is not None:
        graph.edges[place.node].append(known[0])
    elif not isinstance(value, (type, types.ModuleType)):
        graph.child(_self_name(graph, value), Fixed(value), value, place)
    if isinstance(place.value.__func__, types.FunctionType):
        _enter_once(graph, place, place.value.__func__)


def _partial(graph: Graph, place: Place) -> None:
    given = place.value
    code = getattr(given.func, "__code__", None)
    names = code.co_varnames if code is not None else ()
    for i, value in enumerate(given.args):
        _named(graph, place, names[i] if i < len(names) else f"args[{i}]", Fixed(value))
    for name in given.keywords:
        _named(graph, place, name, OfDict(given.keywords, name))
    if isinstance(given.func, types.FunctionType):
        _enter_once(graph, place, given.func)
    else:
        graph.child(_self_name(graph, given.func), Fixed(given.func), given.func, place)


def _stream(graph: Graph, place: Place) -> None:
    """What an iterator iterates over: the variables of a generator that has begun and not ended, the inside of
    another."""
    frame = getattr(place.value, "gi_frame", None)
    if isinstance(frame, types.FrameType):
        for name, value in list(frame.f_locals.items()):
            if not is_plain(value):
                graph.child(f"{place.path}:{name}", Fixed(value), value, place, component=place.component)
        return
    for number, inner in enumerate(streams.inside(place.value)):
        if not is_plain(inner):
            graph.child(f"{place.path}[{number}]", Fixed(inner), inner, place, component=place.component)


def of_class(graph: Graph, place: Place) -> None:
    """What the classes of an object keep themselves, and what their methods read from their globals."""
    for kind in type(place.value).__mro__:
        if kind is object or not _is_project_class(kind):
            continue
        if id(kind) in graph.known:
            graph.edges[place.node].append(graph.known[id(kind)][0])
            continue
        node = graph.node(kind, kind.__name__)
        graph.edges[place.node].append(node)
        below = Place(f"<{kind.__name__}>", None, kind, node=node, within=place)
        defaults = vars(kind).get("__dataclass_fields__", ())
        for name, member in list(vars(kind).items()):
            if isinstance(member, (staticmethod, classmethod, property)):
                member = member.fget if isinstance(member, property) else member.__func__
            if isinstance(member, types.FunctionType):
                if _is_project_file(member.__code__.co_filename, str(member.__globals__.get("__name__", ""))):
                    _enter_once(graph, below, member)
            elif not name.startswith("__") and _changes(member) and name not in defaults:
                graph.child(f"{kind.__name__}.{name}", OfClass(kind, name), member, below)


def _is_project_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return _is_project_file(str(getattr(module, "__file__", "")), kind.__module__)


def _changes(value: Any) -> bool:
    """Whether an attribute of a class may be kept there to be changed: a number or what holds others, no constant."""
    sort = sort_of(value)
    if sort == "scalar":
        return isinstance(value, (int, float)) and not isinstance(value, enum.Enum)
    return sort in ("tensor", "array", "generator", "dict", "list", "set", "module", "optimizer")
