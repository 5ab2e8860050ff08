"""Where a value sits, and how it is read, replaced and taken out there without running the project's code."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final

from pytest_trainloop.ours import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CellType, MemberDescriptorType

    import torch


class Missing:
    """What a slot holds that holds nothing."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = Missing()


class Slot:
    """A place that holds one value. ``put`` and ``take_out`` say whether they could."""

    __slots__ = ()

    def get(self) -> Any:
        return MISSING

    def put(self, value: Any) -> bool:
        return False

    def take_out(self) -> bool:
        return False

    def same(self) -> tuple[object, ...] | None:
        """What is equal for two slots that are one place; None where a place cannot be told again."""
        return None


class OfDict(Slot):
    """An entry of a dict, also an attribute in an object's ``__dict__``; methods of subclasses are not called."""

    __slots__ = ("held", "key")

    def __init__(self, held: dict[Any, Any], key: Any) -> None:
        self.held, self.key = held, key

    def same(self) -> tuple[object, ...]:
        return id(self.held), _key(self.key)

    def get(self) -> Any:
        return dict.get(self.held, self.key, MISSING)

    def put(self, value: Any) -> bool:
        _base(self.held).__setitem__(self.held, self.key, value)
        return True

    def take_out(self) -> bool:
        if self.get() is not MISSING:
            _base(self.held).__delitem__(self.held, self.key)
        return True


def _key(key: Any) -> object:
    """A key that is compared as it is, or by identity where comparing might run the project's code."""
    return key if type(key) in (str, int) else id(key)


def _base(held: dict[Any, Any]) -> Any:
    return OrderedDict if isinstance(held, OrderedDict) else dict


class OfList(Slot):
    """An entry of a list or a deque."""

    __slots__ = ("held", "index")

    def __init__(self, held: Any, index: int) -> None:
        self.held, self.index = held, index

    def same(self) -> tuple[object, ...]:
        return id(self.held), self.index

    def get(self) -> Any:
        base = deque if isinstance(self.held, deque) else list
        return base.__getitem__(self.held, self.index) if self.index < base.__len__(self.held) else MISSING

    def put(self, value: Any) -> bool:
        base = deque if isinstance(self.held, deque) else list
        if self.index < base.__len__(self.held):
            base.__setitem__(self.held, self.index, value)
        elif self.index == base.__len__(self.held):
            base.append(self.held, value)
        else:
            return False
        return True

    def take_out(self) -> bool:
        base = deque if isinstance(self.held, deque) else list
        if self.index < base.__len__(self.held):
            base.__delitem__(self.held, self.index)
        return True


class OfCell(Slot):
    """A variable that a function keeps in its closure."""

    __slots__ = ("cell",)

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def same(self) -> tuple[object, ...]:
        return (id(self.cell),)

    def get(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not assigned yet
            return MISSING

    def put(self, value: Any) -> bool:
        self.cell.cell_contents = value
        return True

    def take_out(self) -> bool:
        if self.get() is not MISSING:
            del self.cell.cell_contents
        return True


class OfMember(Slot):
    """An attribute that a class keeps in ``__slots__``."""

    __slots__ = ("member", "owner")

    def __init__(self, member: MemberDescriptorType, owner: Any) -> None:
        self.member, self.owner = member, owner

    def same(self) -> tuple[object, ...]:
        return id(self.owner), self.member.__name__

    def get(self) -> Any:
        try:
            return self.member.__get__(self.owner, type(self.owner))
        except AttributeError:
            return MISSING

    def put(self, value: Any) -> bool:
        self.member.__set__(self.owner, value)
        return True

    def take_out(self) -> bool:
        if self.get() is not MISSING:
            self.member.__delete__(self.owner)
        return True


class OfClass(Slot):
    """An attribute of a class itself."""

    __slots__ = ("kind", "name")

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def same(self) -> tuple[object, ...]:
        return id(self.kind), self.name

    def get(self) -> Any:
        return vars(self.kind).get(self.name, MISSING)

    def put(self, value: Any) -> bool:
        type.__setattr__(self.kind, self.name, value)
        return True

    def take_out(self) -> bool:
        if self.get() is not MISSING:
            type.__delattr__(self.kind, self.name)
        return True


class OfScripted(Slot):
    """An attribute of a scripted module, which torch keeps outside of Python."""

    __slots__ = ("module", "name")

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name

    def same(self) -> tuple[object, ...]:
        return id(self.module), self.name

    def get(self) -> Any:
        return getattr(self.module, self.name, MISSING)

    def put(self, value: Any) -> bool:
        setattr(self.module, self.name, value)
        return True


class Fixed(Slot):
    """An entry of what cannot be written to: a tuple, a set, the variables of a generator. The container that holds it
    can be put back as a whole."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


class OfTensor(Slot):
    """The gradient of a tensor, or whether it wants one."""

    __slots__ = ("name", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name

    def same(self) -> tuple[object, ...]:
        return id(self.tensor), f".{self.name}"

    def get(self) -> Any:
        return getattr(self.tensor, self.name)

    def put(self, value: Any) -> bool:
        try:
            setattr(self.tensor, self.name, value)
        except RuntimeError:  # an integer tensor, or one with a history
            return False
        return True

    def take_out(self) -> bool:
        return self.put(None) if self.name == "grad" else False


class OfProcess(Slot):
    """A switch of the whole process."""

    __slots__ = ("read", "write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.read, self.write = read, write

    def get(self) -> Any:
        return self.read()

    def put(self, value: Any) -> bool:
        self.write(value)
        return True


class Entries(Slot):
    """All entries of a container in their order. What is put is a shallow copy of another state of it."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

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

    __slots__ = ("held",)

    def __init__(self, held: dict[Any, Any]) -> None:
        self.held = held

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
