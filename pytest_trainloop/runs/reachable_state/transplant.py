"""Values of one loop into another that the same function built."""

from __future__ import annotations

from collections import defaultdict, deque
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import reraise_ours, reraise_raised
from pytest_trainloop.declare import memory_layout
from pytest_trainloop.recording.shards import local
from pytest_trainloop.runs.reachable_state.copies import restore_tensor, set_state
from pytest_trainloop.runs.reachable_state.graph import joined
from pytest_trainloop.runs.reachable_state.slots import (
    MISSING,
    Entries,
    Fixed,
    Hooks,
    OfClass,
    OfDict,
    OfList,
    OfMember,
    OfTensor,
)
from pytest_trainloop.runs.reachable_state.value_kinds import attributes, is_plain, set_back, sort_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_trainloop.runs.reachable_state.copies import Copy
    from pytest_trainloop.runs.reachable_state.slots import Place, Slot
    from pytest_trainloop.runs.reachable_state.walker import Walked


class CannotCarryError(Exception):
    """A part of one loop has no like in the other, and cannot be made there."""


class Carrying:
    """Writes copies of a snapshot's values into the leaves of another loop."""

    def __init__(self, copies: Mapping[str, Copy], into: Walked) -> None:
        self.copies, self.into = copies, into
        self.made: dict[int, Any] = {}
        self.storages: dict[int, object] = {}
        self.refilled: dict[tuple[int, torch.Size], torch.Tensor] = {}
        self.by_object: dict[int, list[str]] = {}
        for path, copy in copies.items():
            if not is_plain(copy.place.value):
                self.by_object.setdefault(id(copy.place.value), []).append(path)

        self.memory_here = _by_memory(copy.place for copy in copies.values())
        self.memory_there = _by_memory(into.places.values())

    def carry(self, paths: list[str]) -> list[str]:
        lengths = [path for path in paths if path in self.copies and self.copies[path].place.kind == "length"]
        rest = [path for path in paths if path not in lengths]
        return [path for path in [*lengths, *rest] if not self._tried(path)]

    def _tried(self, path: str) -> bool:
        try:
            return self._carried(path)
        except CannotCarryError:
            return False
        except (RuntimeError, TypeError, ValueError) as error:  # other shapes, a class that makes no empty one
            reraise_raised(error)
            return False

    def _carried(self, path: str) -> bool:
        if path not in self.copies:  # not there when the snapshot was taken: nor may it be there
            place = self.into.places.get(path)
            if place is None:
                return True
            referred = self._referred(place)
            if referred is not None:
                return referred not in self.copies or self._carried(referred)
            return place.slot is not None and place.slot.take_out()
        done = [self._write(self.copies[path], place) for place in self._targets(path)]
        if done:
            return all(done)
        place = self.copies[path].place
        if isinstance(place.slot, OfClass):  # the same class in both loops
            return self._write(self.copies[path], place)
        return self._create(place)

    def _targets(self, path: str) -> list[Place]:
        """Where a leaf is in the other loop: under its own path, and under those of the names that its owner has."""
        found = {}
        for candidate in self._paths(path):
            place = self.into.places.get(candidate)
            if place is not None:
                found[id(place.node), place.path] = place
        return list(found.values())

    def _referred(self, place: Place) -> str | None:
        """The path here of what lies below an object of its own there, where there is a reference here."""
        begin, above = "len(" if place.path.startswith("len(") else "", place.within
        while above is not None:
            copy = self.copies.get(above.path)
            if copy is not None and copy.place.kind == "reference":
                return f"{begin}{copy.value}{place.path[len(begin) + len(above.path) :]}"
            above = above.within
        return None

    def _paths(self, path: str) -> list[str]:
        """A path, and what it is where an object above it is taken by another name that leads elsewhere in the other
        loop: ``optimizer`` may be what was declared, and ``trainer.optimizer`` the one that a load made."""
        found = [path]
        begin = "len(" if path.startswith("len(") else ""
        above = self.copies[path].place.within
        while above is not None:
            same = self.into.places.get(above.path)
            for name in self.by_object.get(id(above.value), []):
                other = self.into.places.get(name)
                if other is not None and name != above.path and (same is None or other.value is not same.value):
                    real = self.into.objects.get(id(other.value)) or name
                    found.append(f"{begin}{real}{path[len(begin) + len(above.path) :]}")
            above = above.within
        return list(dict.fromkeys(found))

    def _write(self, copy: Copy, place: Place) -> bool:
        slot, kind = place.slot, copy.place.kind
        if slot is None or kind is None:
            return kind is None
        if isinstance(slot, Entries):
            same_memory = kind == "length" and self._has_the_entries(copy.kept, slot.get())
            return same_memory or slot.put(self._entries(copy.kept))
        if isinstance(slot, Hooks):
            return bool(len(slot.get()) == copy.value)  # functions of the other loop's objects
        if kind == "reference":
            target = self.into.places.get(copy.value)
            return target is not None and (slot.get() is target.value or slot.put(target.value))
        held = slot.get()
        if copy.sort == "tensor":
            same_memory = (
                isinstance(held, torch.Tensor) and held.shape == copy.raw.shape and held.dtype == copy.raw.dtype
            )
            if same_memory and _memory(held, self.memory_there) <= _memory(copy.place.value, self.memory_here):
                return restore_tensor(held, copy.value, None)
            return self._replace(place, self._tensor(copy))
        if copy.sort == "array":
            if sort_of(held) == "array" and held.shape == copy.value.shape and held.flags.writeable:
                held[...] = copy.value
                return True
            return self._replace(place, copy.value.copy())
        if copy.sort == "stream":
            return sort_of(held) == "stream" and set_back(held, copy.kept)
        if copy.sort == "generator":
            if sort_of(held) != "generator":
                return False
            set_state(held, copy.kept)
            return True
        return held is copy.value or self._replace(place, copy.value)

    def _has_the_entries(self, kept: Any, there: Any) -> bool:
        """Whether a container has as many entries, or entries by the same names: those are carried one by one."""
        if isinstance(kept, dict) and isinstance(there, dict):
            return list(map(_same_key, there)) == [_same_key(self._rebuilt(key)) for key in kept]
        return len(kept) == len(there) and not isinstance(kept, set)

    def _replace(self, place: Place, value: Any) -> bool:
        if isinstance(place.slot, Fixed):
            return self._create(self.copies[place.path].place) if place.path in self.copies else False
        return place.slot is not None and place.slot.put(value)

    def _create(self, place: Place) -> bool:
        """Make what is missing in the other loop: the place itself, or the nearest container above it."""
        if isinstance(place.slot, (OfTensor, Hooks, Entries, Fixed)):
            above = place.within
            if above is None or isinstance(place.slot, Hooks):
                return False
            if isinstance(place.slot, OfTensor) and isinstance(held := self._there(above.path), torch.Tensor):
                return OfTensor(held, place.slot.key).put(self._value(place))
            return self._create(above)
        if place.within is None or place.slot is None or place.within.kind == "hooks":
            return False
        owner = self._there(place.within.path)
        if not _of_one_class(owner, place.within.value):
            return self._create(place.within)
        slot = self._slot(place.slot, owner)
        return slot is not None and slot.put(self._value(place))

    def _there(self, path: str) -> Any:
        """What is at a place of the other loop by now."""
        place = self.into.places.get(path)
        if place is None:
            return MISSING
        return place.value if place.slot is None or place.kind in ("hooks", "length") else place.slot.get()

    def _slot(self, slot: Slot, owner: Any) -> Slot | None:
        """The like slot of another object."""
        if isinstance(slot, OfList) and sort_of(owner) == "list":
            return OfList(owner, slot.key)
        if isinstance(slot, OfMember):
            name = slot.key.__name__
            member = next((vars(base)[name] for base in type(owner).__mro__ if name in vars(base)), None)
            return OfMember(owner, member) if isinstance(member, MemberDescriptorType) else None
        if not isinstance(slot, OfDict):
            return None
        if isinstance(owner, dict) and not isinstance(slot.key, str):
            return OfDict(owner, self._rebuilt(slot.key))
        if isinstance(owner, dict):
            return OfDict(owner, slot.key)
        held = attributes(owner)
        for name in ("_parameters", "_buffers", "_modules"):
            if sort_of(owner) == "module" and slot.key in held.get(name, ()):
                return OfDict(held[name], slot.key)
        return OfDict(held, slot.key)

    def _value(self, place: Place) -> Any:
        copy = self.copies[place.path]
        if place.kind == "gradient" and copy.raw is None:
            return None
        return self._rebuilt(place.value)

    def _tensor(self, copy: Copy) -> Any:
        if copy.emptied:  # it had its memory to itself, or shared all of it
            key = _address(copy.place.value), copy.raw.shape
            if key not in self.refilled:
                self.refilled[key] = copy.value
            value = self.refilled[key].detach()
        else:
            value = memory_layout.copied(copy.place.value, copy.value, self.storages)
        if isinstance(copy.place.value, torch.nn.Parameter):
            return torch.nn.Parameter(value, requires_grad=copy.place.value.requires_grad)
        return value.requires_grad_(copy.place.value.requires_grad and copy.place.value.is_leaf)

    def _entries(self, kept: Any) -> Any:
        if isinstance(kept, dict):
            return {self._rebuilt(key): self._rebuilt(value) for key, value in kept.items()}
        return type(kept)(self._rebuilt(value) for value in kept)

    def _rebuilt(self, value: Any) -> Any:
        """The counterpart of an object in the other loop: the object of its path there, else a copy made of the values
        in the snapshot."""
        if is_plain(value):
            return value
        if id(value) in self.made:
            return self.made[id(value)]
        for path in self.by_object.get(id(value), []):
            other = self.into.places.get(path)
            if other is not None and _of_one_class(other.value, value):
                return other.value
        before = dict(self.made)
        try:
            made = self._made(value)
        except BaseException:
            self.made = before  # nothing half-made
            raise
        self.made[id(value)] = made
        return made

    def _made(self, value: Any) -> Any:
        paths = self.by_object.get(id(value), [])
        copies = [self.copies[path] for path in paths]
        sort = sort_of(value)
        if sort == "tensor":
            copy = next((copy for copy in copies if copy.raw is not None and copy.sort == "tensor"), None)
            return value.detach().clone() if copy is None else self._tensor(copy)
        if sort == "array":
            return next((copy.value for copy in copies if copy.sort == "array"), value).copy()
        if sort == "tuple":
            entries = [self._rebuilt(entry) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if sort in ("dict", "list", "set"):
            kept = next((copy.kept for path in paths if (copy := self.copies.get(f"len({path})"))), None)
            return _filled(value, self._entries(_plain_copy(value) if kept is None else kept))
        if sort == "ours" or (sort in ("function", "opaque") and _shared(value)):
            return value
        if sort == "object" and paths:
            return self._made_object(value, paths[0])
        raise CannotCarryError

    def _made_object(self, value: Any, path: str) -> Any:
        """An object of the same class with the attributes that this one had, unless something else is within it."""
        kind: Any = type(value)
        made = self.made[id(value)] = object.__new__(kind)
        for name in attributes(value):
            copy = self.copies.get(joined(path, name))
            if copy is None:
                raise CannotCarryError
            OfDict(attributes(made), name).put(self._held(copy))
        for base in kind.__mro__:
            for name, member in vars(base).items():
                copy = self.copies.get(joined(path, name)) if isinstance(member, MemberDescriptorType) else None
                if copy is not None:
                    OfMember(made, member).put(self._held(copy))
        return made

    def _held(self, copy: Copy) -> Any:
        """What one place held, for a new object."""
        return copy.value if is_plain(copy.place.value) else self._rebuilt(copy.place.value)


def _by_memory(places: Iterable[Place]) -> dict[int, set[str]]:
    """The weights and buffers in each piece of memory."""
    found: dict[int, set[str]] = {}
    for place in places:
        if place.kind in ("weight", "buffer") and isinstance(place.value, torch.Tensor):
            found.setdefault(_address(place.value), set()).add(place.path)
    return found


def _memory(tensor: Any, known: dict[int, set[str]]) -> set[str]:
    """The weights and buffers that writing to a tensor would change."""
    return known.get(_address(tensor), set())


def _address(tensor: torch.Tensor) -> int:
    try:
        return local(tensor).untyped_storage().data_ptr() or id(tensor)
    except Exception as error:  # sparse, or without memory
        reraise_ours(error)
        return id(tensor)


def _shared(value: Any) -> bool:
    """Whether two loops may use the same object: a class, a module, a function without a closure."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, (type, ModuleType, BuiltinFunctionType))


def _of_one_class(a: Any, b: Any) -> bool:
    """Also where each call of the project's function makes a new class."""
    mine, others = type(a), type(b)
    return mine is others or (mine.__module__, mine.__qualname__) == (others.__module__, others.__qualname__)


def _same_key(key: Any) -> Any:
    """A key as it is compared: a tensor or another object by identity."""
    return key if is_plain(key) else id(key)


def _plain_copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _filled(like: Any, entries: Any) -> Any:
    """A container of the class of another one with these entries."""
    if isinstance(like, deque):
        return deque(entries, like.maxlen)
    kind: Any = type(like)
    made = kind.__new__(kind)
    if isinstance(like, defaultdict):
        made.default_factory = like.default_factory
    if isinstance(made, dict):
        made.update(entries)
    elif isinstance(made, list):
        made.extend(entries)
    else:
        made = type(like)(entries)
    return made
