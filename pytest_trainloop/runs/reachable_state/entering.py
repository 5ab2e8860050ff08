"""What lies below one object: a module's weights, an optimizer's state, the entries of a container, the attributes of
anything else; of a function the variables of its closure, arguments given beforehand, globals that its code names."""

from __future__ import annotations

import enum
import functools
import sys
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.recording.torch_internals import hooks_of
from pytest_trainloop.runs.reachable_state.graph import entry_path, joined
from pytest_trainloop.runs.reachable_state.slots import (
    MISSING,
    Entries,
    Fixed,
    Hooks,
    OfCell,
    OfClass,
    OfDict,
    OfList,
    OfMember,
    OfScripted,
    OfTensor,
    Place,
    shallow,
)
from pytest_trainloop.runs.reachable_state.value_kinds import (
    all_plain,
    attributes,
    inside,
    is_plain,
    is_project,
    sort_of,
    sort_of_root,
)

if TYPE_CHECKING:
    from pytest_trainloop.runs.reachable_state.graph import Graph
    from pytest_trainloop.runs.reachable_state.leaves import Kind
    from pytest_trainloop.runs.reachable_state.slots import Slot

PLAIN_MOST = 64
"""A container of more plain entries is one leaf, not one an entry."""

ENTRIES_MOST = 2_000
"""So many entries of a container are looked at."""

NAMESPACE_MOST = 16
"""A dict of at most so many names is several variables in one, each a component of its own."""

_MODULE_OWN = frozenset(vars(nn.Module()))
_MODULE_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith("_hooks") and isinstance(vars(nn.Module())[name], dict)
)
_OF_TENSOR: dict[str, Kind] = {"grad": "gradient", "requires_grad": "requires_grad"}
_OPTIMIZER_OWN = ("defaults", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called")


class Entering:
    """Adds the places below one place to a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.child = graph, graph.child

    def enter(self, place: Place) -> None:
        sort = sort_of_root(place.value)
        if sort == "module":
            self._rest_of_module(place) if place.rest else self._module(place)
        elif sort == "optimizer":
            self._optimizer(place)
        elif sort in ("scheduler", "scaler"):
            self._kept_together(place, "scheduler" if sort == "scheduler" else "scaler")
        elif sort == "dict":
            self._dict(place)
        elif sort == "list":
            self._list(place)
        elif sort == "tuple":
            self._tuple(place)
        elif sort == "set":
            self._set(place)
        elif sort == "function":
            _function(self.graph, place)
        elif sort == "method":
            _method(self.graph, place)
        elif sort == "partial":
            _partial(self.graph, place)
        elif sort == "stream":
            _stream(self.graph, place)
        elif sort == "object":
            self._object(place)
        elif sort == "tensor":
            self._tensor(place)

    def _module(self, place: Place) -> None:
        """Its own parameters, buffers and mode now, the modules below it in their order, hooks and other attributes
        once everything declared was entered. The component of a module's place is the path of the topmost module."""
        module, path, top = place.value, place.path, place.component
        held = attributes(module)
        if isinstance(module, torch.jit.ScriptModule):
            self._scripted(place)
        for name, slot, value in _entries(held, "_parameters"):
            below = self.child(joined(path, name), slot, value, place, component=f"weights of {top}")
            if below is not None and isinstance(value, torch.Tensor) and below.kind == "tensor":
                below.kind = "weight"
        left_out = held.get("_non_persistent_buffers_set") or ()
        for name, slot, value in _entries(held, "_buffers"):
            below = self.child(joined(path, name), slot, value, place, component=f"buffers of {path}")
            if below is not None and isinstance(value, torch.Tensor) and below.kind == "tensor":
                below.kind, below.persistent = "buffer", name not in left_out
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or isinstance(held.get("training"), bool):
            where: Slot = OfScripted(module, "training") if scripted else OfDict(held, "training")
            mode = Place(f"{path}.training", where, where.get(), "mode", f"mode of {path}", place.node, place)
            self.graph.add(mode)
        for name, slot, value in _entries(held, "_modules"):
            below = self.child(joined(path, name), slot, value, place)
            if below is not None and below.kind is None:
                below.component = top
        self.graph.queue.append(replace(place, waits=True, rest=True))

    def _scripted(self, place: Place) -> None:
        """A scripted module keeps nothing in Python: its weights, buffers and mode are asked for."""
        module, path, top = place.value, place.path, place.component
        kinds: tuple[tuple[Kind | None, str, Any], ...] = (
            ("weight", f"weights of {top}", module.named_parameters(recurse=False)),
            ("buffer", f"buffers of {path}", module.named_buffers(recurse=False)),
            (None, "", module.named_children()),
        )
        for kind, component, held in kinds:
            for name, value in held:
                below = self.child(joined(path, name), Fixed(value), value, place, component=component)
                if below is not None and kind is not None and below.kind == "tensor":
                    below.kind = kind
                elif below is not None and kind is None and below.kind is None:
                    below.component = top

    def _rest_of_module(self, place: Place) -> None:
        held = attributes(place.value)
        for name in _MODULE_HOOKS:
            if held.get(name):
                self._hooks(f"{place.path}.{name}", held[name], place)
        for name in [name for name in held if isinstance(name, str) and name not in _MODULE_OWN]:
            self.child(joined(place.path, name), OfDict(held, name), held[name], place)
        _of_class(self.graph, place)

    def _hooks(self, path: str, held: dict[Any, Any], within: Place) -> None:
        slot = Hooks(held)
        hooks = slot.get()
        if not hooks:
            return
        component = f"hooks of {within.path}"
        place = self.graph.add(Place(path, slot, held, "hooks", component, within.node, within))
        for number, (key, hook) in enumerate(hooks.items()):  # keys count the hooks of the whole process
            self.child(f"{path}[{number}]", OfDict(held, key), hook, place, component=component, waits=True)

    def _tensor(self, place: Place) -> None:
        """Gradient, whether it wants one, and hooks of a leaf tensor that may train."""
        tensor = place.value
        of = place.component.removeprefix("weights of ")
        for name, kind in _OF_TENSOR.items():
            slot, component = OfTensor(tensor, name), f"{'gradients' if name == 'grad' else name} of {of}"
            self.graph.add(Place(f"{place.path}.{name}", slot, slot.get(), kind, component, place.node, place))
        for number, hooks in enumerate(hooks_of(tensor)):
            self._hooks(f"{place.path}.{'_post_accumulate_grad_hooks' if number else '_backward_hooks'}", hooks, place)
        for name, value in list(attributes(tensor).items()):
            if isinstance(name, str) and not name.startswith("_"):
                self.child(f"{place.path}.{name}", OfDict(attributes(tensor), name), value, place, waits=True)

    def _optimizer(self, place: Place) -> None:
        optimizer, path = place.value, place.path
        held = attributes(optimizer)
        for i, group in enumerate(held["param_groups"]):
            listed = group.get("params") if isinstance(group, dict) else None
            for j, parameter in enumerate(listed if isinstance(listed, (list, tuple)) else ()):
                if id(parameter) not in self.graph.names:
                    self.graph.parameters.setdefault(id(parameter), f"param_groups[{i}]['params'][{j}]")
        groups = self.child(
            f"{path}.param_groups", OfDict(held, "param_groups"), held["param_groups"], place,
            component=f"{path}.param_groups", as_kind="group_value",
        )  # fmt: skip
        state = self.child(
            f"{path}.state", OfDict(held, "state"), held["state"], place,
            component=f"{path}.state", as_kind="optimizer_state",
        )  # fmt: skip
        for below in (groups, state):
            if below is not None:
                below.waits = False
        for name in [str(name) for name in held if name not in ("param_groups", "state", *_OPTIMIZER_OWN)]:
            if name in held and not name.startswith("_optimizer_"):
                self.child(joined(path, name), OfDict(held, name), held[name], place)
        _of_class(self.graph, place)

    def _kept_together(self, place: Place, kind: Kind) -> None:
        """A scheduler or a scaler: all its attributes are one component."""
        component = place.component if place.as_kind else place.path
        for name, slot, value in _attributes(place.value):
            if name != "_per_optimizer_states":  # by id, and new with every step
                self.child(joined(place.path, name), slot, value, place, component=component, as_kind=kind)
        _of_class(self.graph, place)

    def _length(self, place: Place, held: Any) -> None:
        path = f"len({place.path})"
        below = Place(path, Entries(held), held, "length", place.component, place.node, place)
        self.graph.add(below)

    def _whole(self, place: Place, held: Any, values: list[Any]) -> bool:
        """Whether a container of many plain entries was added as one leaf."""
        if len(held) <= PLAIN_MOST and not isinstance(held, (set, frozenset)):
            return False
        if len(held) > 100 * ENTRIES_MOST or not all_plain(values):
            return False
        leaf = Place(
            f"{place.path}[:]", Entries(held), held, place.as_kind or "array", place.component, place.node, place
        )
        self.graph.add(leaf)
        return True

    def _dict(self, place: Place) -> None:
        held = place.value
        self._length(place, held)
        pairs = list(dict.items(held))
        if not self._whole(place, held, [value for _, value in pairs]):
            self.graph.shorten(place, len(pairs), ENTRIES_MOST)
            namespace = place.as_kind is None and _is_namespace(pairs)
            for number, (key, value) in enumerate(pairs[:ENTRIES_MOST]):
                path = entry_path(place.path, key, self._key(key, number))
                component = path if namespace else place.component
                self.child(path, OfDict(held, key), value, place, component=component, as_kind=place.as_kind)
        if type(held).__module__ not in ("builtins", "collections"):
            self._object(place)

    def _key(self, key: Any, number: int) -> str:
        if is_plain(key):
            return repr(key)
        return self.graph.parameters.get(id(key)) or self.graph.names.get(id(key)) or f"key {number}"

    def _list(self, place: Place) -> None:
        held = place.value
        self._length(place, held)
        entries = shallow(held)
        if not self._whole(place, held, entries):
            self.graph.shorten(place, len(entries), ENTRIES_MOST)
            for i, value in enumerate(entries[:ENTRIES_MOST]):
                path = f"{place.path}[{i}]"
                self.child(path, OfList(held, i), value, place, component=place.component, as_kind=place.as_kind)
        if type(held).__module__ not in ("builtins", "collections"):
            self._object(place)

    def _tuple(self, place: Place) -> None:
        entries = list(tuple.__iter__(place.value))
        names = getattr(type(place.value), "_fields", ())
        self.graph.shorten(place, len(entries), ENTRIES_MOST)
        for i, value in enumerate(entries[:ENTRIES_MOST]):
            path = f"{place.path}.{names[i]}" if i < len(names) else f"{place.path}[{i}]"
            self.child(path, Fixed(value), value, place, component=place.component, as_kind=place.as_kind)

    def _set(self, place: Place) -> None:
        held = place.value
        if isinstance(held, set):
            self._length(place, held)
            if self._whole(place, held, list(set.__iter__(held))):
                return
        for i, value in enumerate(list(held)[:ENTRIES_MOST]):
            if not is_plain(value):
                path = f"{place.path}[{i}]"
                self.child(path, Fixed(value), value, place, component=place.component, as_kind=place.as_kind)

    def _object(self, place: Place) -> None:
        for name, slot, value in _attributes(place.value):
            path = joined(place.path, name)
            component = place.component if place.as_kind else path
            self.child(path, slot, value, place, component=component, as_kind=place.as_kind)
        _of_class(self.graph, place)


def _entries(held: dict[str, Any], name: str) -> list[tuple[str, Slot, Any]]:
    """The entries of one of a module's dicts; none where the module keeps them elsewhere."""
    inner = held.get(name)
    if not isinstance(inner, dict):
        return []
    return [(str(key), OfDict(inner, key), value) for key, value in dict.items(inner)]


def _attributes(value: Any) -> list[tuple[str, Slot, Any]]:
    """The attributes in ``__dict__`` and ``__slots__``."""
    held = attributes(value)
    names = [name for name in list(held) if isinstance(name, str) and not name.startswith("__")]
    found: list[tuple[str, Slot, Any]] = [(name, OfDict(held, name), held[name]) for name in names]
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if type(member) is types.MemberDescriptorType and not name.startswith("__"):
                slot = OfMember(value, member)
                found.append((name, slot, slot.get()))
    return found


def _is_namespace(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether a dict holds a few things under names, rather than many of one sort."""
    named = all(isinstance(key, str) and key.isidentifier() for key, _ in pairs)
    return named and len(pairs) <= NAMESPACE_MOST and sum(isinstance(v, torch.Tensor) for _, v in pairs) <= 2


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
    for number, inner in enumerate(inside(place.value)):
        if not is_plain(inner):
            graph.child(f"{place.path}[{number}]", Fixed(inner), inner, place, component=place.component)


def _of_class(graph: Graph, place: Place) -> None:
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
