"""What lies below one object: a module's weights, an optimizer's state, the entries of a container, the variables of a
function, the attributes of anything else."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.reach import functions, naming
from pytest_trainloop.reach.places import Place
from pytest_trainloop.reach.slots import Entries, Fixed, Hooks, OfDict, OfList, OfMember, OfScripted, OfTensor, shallow
from pytest_trainloop.reach.sorts import all_plain, attributes, is_plain, sort_of_root
from pytest_trainloop.recording.torch_internals import hooks_of

if TYPE_CHECKING:
    from pytest_trainloop.reach.graph import Graph
    from pytest_trainloop.reach.leaves import Kind
    from pytest_trainloop.reach.slots import Slot

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
        elif sort in ("function", "method", "partial", "stream"):
            functions.enter(self.graph, place, sort)
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
            below = self.child(naming.joined(path, name), slot, value, place, component=f"weights of {top}")
            if below is not None and isinstance(value, torch.Tensor) and below.kind == "tensor":
                below.kind = "weight"
        left_out = held.get("_non_persistent_buffers_set") or ()
        for name, slot, value in _entries(held, "_buffers"):
            below = self.child(naming.joined(path, name), slot, value, place, component=f"buffers of {path}")
            if below is not None and isinstance(value, torch.Tensor) and below.kind == "tensor":
                below.kind, below.persistent = "buffer", name not in left_out
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted or isinstance(held.get("training"), bool):
            where: Slot = OfScripted(module, "training") if scripted else OfDict(held, "training")
            mode = Place(f"{path}.training", where, where.get(), "mode", f"mode of {path}", place.node, place)
            self.graph.add(mode)
        for name, slot, value in _entries(held, "_modules"):
            below = self.child(naming.joined(path, name), slot, value, place)
            if below is not None and below.kind is None:
                below.component = top
        self.graph.queue.append(replace(place, waits=True, rest=True))

    def _scripted(self, place: Place) -> None:
        """A scripted module keeps nothing in Python: its weights, buffers and mode are asked for."""
        module, path, top = place.value, place.path, place.component
        for name, value in module.named_parameters(recurse=False):
            below = self.child(naming.joined(path, name), Fixed(value), value, place, component=f"weights of {top}")
            if below is not None and below.kind == "tensor":
                below.kind = "weight"
        for name, value in module.named_buffers(recurse=False):
            below = self.child(naming.joined(path, name), Fixed(value), value, place, component=f"buffers of {path}")
            if below is not None and below.kind == "tensor":
                below.kind = "buffer"
        for name, value in module.named_children():
            below = self.child(naming.joined(path, name), Fixed(value), value, place)
            if below is not None and below.kind is None:
                below.component = top

    def _rest_of_module(self, place: Place) -> None:
        held = attributes(place.value)
        for name in _MODULE_HOOKS:
            if held.get(name):
                self._hooks(f"{place.path}.{name}", held[name], place)
        for name in [name for name in held if isinstance(name, str) and name not in _MODULE_OWN]:
            self.child(naming.joined(place.path, name), OfDict(held, name), held[name], place)
        functions.of_class(self.graph, place)

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
        gradient = tensor.grad
        of = place.component.removeprefix("weights of ")
        for name, kind, value in (
            ("grad", "gradient", gradient),
            ("requires_grad", "requires_grad", tensor.requires_grad),
        ):
            component = f"{'gradients' if name == 'grad' else 'requires_grad'} of {of}"
            below = Place(f"{place.path}.{name}", OfTensor(tensor, name), value, component=component, node=place.node)
            below.kind, below.within = ("gradient" if kind == "gradient" else "requires_grad"), place
            self.graph.add(below)
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
                self.child(naming.joined(path, name), OfDict(held, name), held[name], place)
        functions.of_class(self.graph, place)

    def _kept_together(self, place: Place, kind: Kind) -> None:
        """A scheduler or a scaler: all its attributes are one component."""
        component = place.component if place.as_kind else place.path
        for name, slot, value in _attributes(place.value):
            if name != "_per_optimizer_states":  # by id, and begun anew with every step
                self.child(naming.joined(place.path, name), slot, value, place, component=component, as_kind=kind)
        functions.of_class(self.graph, place)

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
            apart = place.as_kind is None and _is_namespace(pairs)
            for number, (key, value) in enumerate(pairs[:ENTRIES_MOST]):
                path = naming.entry(place.path, key, self._key(key, number))
                component = path if apart else place.component
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
            path = naming.joined(place.path, name)
            component = place.component if place.as_kind else path
            self.child(path, slot, value, place, component=component, as_kind=place.as_kind)
        functions.of_class(self.graph, place)


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
                slot = OfMember(member, value)
                found.append((name, slot, slot.get()))
    return found


def _is_namespace(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether a dict holds a few things under names, rather than many of one sort."""
    named = all(isinstance(key, str) and key.isidentifier() for key, _ in pairs)
    return named and len(pairs) <= NAMESPACE_MOST and sum(isinstance(v, torch.Tensor) for _, v in pairs) <= 2
