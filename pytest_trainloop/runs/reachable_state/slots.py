"""Where a value sits, and how it is read, replaced and taken out there without running the project's code.

A place that a walk comes by is a slot, with what it holds and what a leaf there would be.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.recording.autocast import leave_open, open_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.runs.reachable_state.leaves import Kind


class Missing:
    """What a slot holds that holds nothing."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = Missing()


class Slot:
    """A place that holds one value: the entry ``key`` of ``held``. ``put`` and ``take_out`` say whether they could."""

    __slots__ = ("held", "key")

    def __init__(self, held: Any, key: Any = None) -> None:
        self.held, self.key = held, key

    def same(self) -> tuple[object, ...] | None:
        """What is equal for two slots that are one place; None where a place cannot be identified again."""
        return id(self.held), _key(self.key)

    def get(self) -> Any:
        return MISSING

    def put(self, value: Any) -> bool:
        return False

    def take_out(self) -> bool:
        return False


class Deletable(Slot):
    """A slot that may hold nothing."""

    __slots__ = ()

    def take_out(self) -> bool:
        if self.get() is not MISSING:
            self._delete()
        return True

    def _delete(self) -> None:
        raise NotImplementedError


class OfDict(Deletable):
    """An entry of a dict, also an attribute in an object's ``__dict__``; methods of subclasses are not called."""

    __slots__ = ()

    def get(self) -> Any:
        return dict.get(self.held, self.key, MISSING)

    def put(self, value: Any) -> bool:
        _base(self.held).__setitem__(self.held, self.key, value)
        return True

    def _delete(self) -> None:
        _base(self.held).__delitem__(self.held, self.key)


def _key(key: Any) -> object:
    """A key that is compared as it is, or by identity where comparing might run the project's code."""
    return key if type(key) in (str, int) else id(key)


def _base(held: Any) -> Any:
    """The class whose methods read and write a container, past those of the project's subclass."""
    return next(base for base in (OrderedDict, dict, deque, list) if isinstance(held, base))


class OfList(Deletable):
    """An entry of a list or a deque."""

    __slots__ = ()

    def get(self) -> Any:
        base = _base(self.held)
        return base.__getitem__(self.held, self.key) if self.key < base.__len__(self.held) else MISSING

    def put(self, value: Any) -> bool:
        base = _base(self.held)
        if self.key < base.__len__(self.held):
            base.__setitem__(self.held, self.key, value)
        elif self.key == base.__len__(self.held):
            base.append(self.held, value)
        else:
            return False
        return True

    def _delete(self) -> None:
        _base(self.held).__delitem__(self.held, self.key)


class OfCell(Deletable):
    """A variable that a function keeps in its closure."""

    __slots__ = ()

    def get(self) -> Any:
        try:
            return self.held.cell_contents
        except ValueError:  # not assigned yet
            return MISSING

    def put(self, value: Any) -> bool:
        self.held.cell_contents = value
        return True

    def _delete(self) -> None:
        del self.held.cell_contents


class OfMember(Deletable):
    """An attribute that a class keeps in ``__slots__``; the key is its descriptor."""

    __slots__ = ()

    def same(self) -> tuple[object, ...]:
        return id(self.held), self.key.__name__

    def get(self) -> Any:
        try:
            return self.key.__get__(self.held, type(self.held))
        except AttributeError:
            return MISSING

    def put(self, value: Any) -> bool:
        self.key.__set__(self.held, value)
        return True

    def _delete(self) -> None:
        self.key.__delete__(self.held)


class OfClass(Deletable):
    """An attribute of a class itself."""

    __slots__ = ()

    def get(self) -> Any:
        return vars(self.held).get(self.key, MISSING)

    def put(self, value: Any) -> bool:
        type.__setattr__(self.held, self.key, value)
        return True

    def _delete(self) -> None:
        type.__delattr__(self.held, self.key)


class OfScripted(Slot):
    """An attribute of a scripted module, which torch keeps outside of Python."""

    __slots__ = ()

    def get(self) -> Any:
        return getattr(self.held, self.key, MISSING)

    def put(self, value: Any) -> bool:
        setattr(self.held, self.key, value)
        return True


class Fixed(Slot):
    """An entry of what cannot be written to: a tuple, a set, the variables of a generator. The container that holds it
    can be put back as a whole."""

    __slots__ = ()

    def same(self) -> None:
        return None

    def get(self) -> Any:
        return self.held


class OfTensor(Slot):
    """The gradient of a tensor, or whether it wants one."""

    __slots__ = ()

    def same(self) -> tuple[object, ...]:
        return id(self.held), f".{self.key}"

    def get(self) -> Any:
        return getattr(self.held, self.key)

    def put(self, value: Any) -> bool:
        try:
            setattr(self.held, self.key, value)
        except RuntimeError:  # an integer tensor, or one with a history
            return False
        return True

    def take_out(self) -> bool:
        return self.put(None) if self.key == "grad" else False


class OfProcess(Slot):
    """A switch of the whole process: a function that reads it, and one that writes it."""

    __slots__ = ()

    def same(self) -> None:
        return None

    def get(self) -> Any:
        return self.held()

    def put(self, value: Any) -> bool:
        self.key(value)
        return True


class Entries(Slot):
    """All entries of a container in their order. What is put is a shallow copy of another state of it."""

    __slots__ = ()

    def same(self) -> tuple[object, ...]:
        return id(self.held), "entries"

    def get(self) -> Any:
        return shallow(self.held)

    def put(self, value: Any) -> bool:
        held = self.held
        if isinstance(held, dict):
            if list(map(_ids, dict.items(held))) != list(map(_ids, dict.items(value))):
                base = _base(held)
                base.clear(held)
                for key, entry in dict.items(value):
                    base.__setitem__(held, key, entry)
        elif isinstance(held, list):
            list.__setitem__(held, slice(None), value)
        elif isinstance(held, deque):
            deque.clear(held)
            deque.extend(held, value)
        elif isinstance(held, set):
            set.clear(held)
            set.update(held, value)
        else:
            return False
        return True


def _ids(entry: tuple[Any, Any]) -> tuple[int, int]:
    return id(entry[0]), id(entry[1])


def shallow(held: Any) -> Any:
    """A container of the same entries, of a plain type."""
    if isinstance(held, dict):
        return dict(dict.items(held))
    if isinstance(held, (list, deque)):
        base: Any = deque if isinstance(held, deque) else list
        return list(base.__iter__(held))
    return set(set.__iter__(held)) if isinstance(held, set) else held


class Hooks(Slot):
    """The hooks of a module or a tensor, without those of this package. What is put is a copy of their dict."""

    __slots__ = ()

    def same(self) -> tuple[object, ...]:
        return id(self.held), "hooks"

    def get(self) -> Any:
        return {key: hook for key, hook in dict.items(self.held) if not is_ours(hook)}

    def put(self, value: Any) -> bool:
        for key in [key for key in self.get() if key not in value]:
            del self.held[key]
        for key, hook in value.items():
            self.held[key] = hook
        return True

    def take_out(self) -> bool:
        return self.put({})


def switches() -> Iterator[tuple[str, OfProcess]]:
    """The switches of the process that change how a model trains, each as it is read in code."""
    yield "torch.is_grad_enabled()", OfProcess(torch.is_grad_enabled, torch.set_grad_enabled)
    yield "torch.get_default_dtype()", OfProcess(torch.get_default_dtype, torch.set_default_dtype)
    yield "torch.is_anomaly_enabled()", OfProcess(torch.is_anomaly_enabled, _set_anomaly)
    read = torch.are_deterministic_algorithms_enabled
    yield "torch.are_deterministic_algorithms_enabled()", OfProcess(read, _set_deterministic)
    precision = OfProcess(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    yield "torch.get_float32_matmul_precision()", precision
    for device in ("cpu", "cuda"):
        enabled = functools.partial(torch.is_autocast_enabled, device)
        yield f"torch.is_autocast_enabled({device!r})", OfProcess(enabled, functools.partial(_set_autocast, device))
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "enabled"):
        get, put = (functools.partial(access, cudnn, name) for access in (getattr, setattr))
        yield f"torch.backends.cudnn.{name}", OfProcess(get, put)


def _set_anomaly(on: bool) -> None:
    torch.autograd.set_detect_anomaly(on, torch.is_anomaly_check_nan_enabled())


def _set_deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_autocast(device: str, on: bool) -> None:
    """Also leave the block that was entered and not left: while it is open, casts of weights outlive the weights."""
    if torch.is_autocast_enabled(device) != on:
        torch.set_autocast_enabled(device, on)
        leave_open(max(0, open_blocks() + (1 if on else -1)))


@dataclass(slots=True, eq=False)
class Place:
    """``slot`` is None for what was declared; ``kind`` is None where there is no leaf; ``within`` is the place whose
    value holds this one. ``as_kind`` is the kind of the leaves below (those of a scheduler), ``waits`` says that the
    place is entered after everything declared was, ``rest`` that this is a module's second turn."""

    path: str
    slot: Slot | None
    value: Any
    kind: Kind | None = None
    component: str = ""
    node: int = -1
    within: Place | None = None
    as_kind: Kind | None = None
    persistent: bool = True
    waits: bool = False
    rest: bool = False


def shown_value(place: Place, names: Mapping[int, str]) -> Any:
    """The value of a leaf: of a reference the path that it leads to, of a length or of hooks their number."""
    if place.kind == "reference":
        return names.get(id(place.value), "")
    if place.kind in ("length", "hooks") and isinstance(place.slot, (Entries, Hooks)):
        return len(place.slot.get())
    if isinstance(place.slot, Entries):
        return place.slot.get()
    return place.value
