"""Which row of the table a function, a module or a running frame belongs to.

Libraries are known by the first part of their modules' names and by the names of functions and classes: nothing is
imported for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_trainloop.instruments.losses.table import (
    classification,
    detection,
    distributions,
    images,
    metric_learning,
    segmentation,
    torch_losses,
)
from pytest_trainloop.instruments.losses.table.registered import code_of, plain, registered

if TYPE_CHECKING:
    from types import FrameType

    from pytest_trainloop.declare.callcontract import CallContract
    from pytest_trainloop.instruments.losses.table.entry import Entry

OF_TORCH: dict[str, Entry] = {entry.name: entry for entry in torch_losses.ENTRIES}
"""Torch's losses by the name of the function, which a function mode sees."""

IN_FRAMES: tuple[Entry, ...] = (
    *distributions.ENTRIES,
    *detection.ENTRIES,
    *segmentation.ENTRIES,
    *metric_learning.ENTRIES,
    *classification.ENTRIES,
    *images.ENTRIES,
)
"""Functions of libraries, which are known while they run."""


def of_torch(word: str, labels: tuple[float, float] = (0.0, 1.0)) -> tuple[str, ...]:
    """Torch's losses whose target, or another argument, holds this; of binary targets those with these labels."""
    contracts = ((name, entry.contracts[0]) for name, entry in OF_TORCH.items())
    return tuple(n for n, c in contracts if word in c.arguments.values() and (word != "binary" or c.labels == labels))


class Known(NamedTuple):
    """A running call of a function in the table."""

    entry: Entry
    contract: CallContract
    name: str
    """What the function or class is called."""
    given: dict[str, Any]
    """Its arguments by name."""
    owner: Any
    """The module, or the distribution, whose method it is."""


def _by_names() -> tuple[dict[tuple[str, str], Entry], dict[tuple[str, str, str], Entry]]:
    functions: dict[tuple[str, str], Entry] = {}
    methods: dict[tuple[str, str, str], Entry] = {}
    for entry in IN_FRAMES:
        for name in entry.names:
            root, *path, last = name.split(".")
            owner = path[-1] if path else ""
            if owner[:1].isupper():
                methods[root, owner, last] = entry
            elif last[:1].isupper() and not last.startswith("For"):
                methods[root, last, "forward"] = entry
            else:
                functions[root, last] = entry
    return functions, methods


_FUNCTIONS, _METHODS = _by_names()
_ROOTS = frozenset(root for root, *_ in (*_FUNCTIONS, *_METHODS))
_METHOD_NAMES = frozenset((root, method) for root, _, method in _METHODS)


def lookup(function: Any) -> Entry | None:
    """The row of a function, a class of modules or a module; None where the table has none."""
    code = code_of(function)
    found = registered(code) if code is not None else None
    if found is not None:
        return found.entries[0]
    name, home = getattr(function, "__name__", ""), str(getattr(function, "__module__", "") or "")
    if name in OF_TORCH and home.partition(".")[0] in ("torch", ""):
        return OF_TORCH[name]
    if isinstance(function, type) or not name:
        kind = function if isinstance(function, type) else type(function)
        return _of_class(kind, home.partition(".")[0], "forward")
    return _FUNCTIONS.get((home.partition(".")[0], name))


def may_be_known(frame: FrameType) -> bool:
    """Whether a frame's code may belong to a row: to be asked once for each code."""
    code = frame.f_code
    if registered(code) is not None:
        return True
    root = _root(frame)
    return root in _ROOTS and ((root, code.co_name) in _FUNCTIONS or (root, code.co_name) in _METHOD_NAMES)


def of_frame(frame: FrameType) -> Known | None:
    """The running call of a function in the table, with its arguments: to be asked before they are written to."""
    code = frame.f_code
    of_project = registered(code)
    values = frame.f_locals
    owner = values.get("self")
    if of_project is not None:
        for entry, like in zip(of_project.entries, of_project.like, strict=True):
            contract = _fitting(entry, owner, values)
            if contract is not None and _shared(like, owner, values):
                return Known(entry, contract, _called(owner, code.co_name), _given(contract, owner, values), owner)
        return None
    root = _root(frame)
    found = _FUNCTIONS.get((root, code.co_name)) if owner is None else _of_class(type(owner), root, code.co_name)
    contract = None if found is None else _fitting(found, owner, values)
    if found is None or contract is None:
        return None
    return Known(found, contract, _called(owner, code.co_name), _given(contract, owner, values), owner)


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _of_class(kind: type[Any], root: str, method: str) -> Entry | None:
    """The row of the nearest class that has one; ``root`` is the library in which the method is written."""
    for base in kind.__mro__:
        entry = _METHODS.get((root, base.__name__, method))
        if entry is not None and base.__module__.partition(".")[0] == root:
            return entry
    return None


def _called(owner: Any, name: str) -> str:
    if owner is None:
        return name
    return type(owner).__name__ if name in ("forward", "__init__") else f"{type(owner).__name__}.{name}"


_ABSENT = object()


def _flag(name: str, owner: Any, values: dict[str, Any]) -> Any:
    if name in values:
        return values[name]
    return getattr(owner, name, _ABSENT)


def _fitting(entry: Entry, owner: Any, values: dict[str, Any]) -> CallContract | None:
    for contract in entry.contracts:
        flags = ((_flag(name, owner, values), wanted) for name, wanted in contract.when.items())
        if all(_same(found, wanted) for found, wanted in flags):
            return contract
    return None


def _same(found: Any, wanted: object) -> bool:
    """Whether a flag has the value. Of a release without the flag it is not known what it does; an argument that a
    release does not take was not given."""
    if found is _ABSENT:
        return wanted is None
    return bool(found is wanted or (plain(found) and found == wanted))


def _shared(like: Any, owner: Any, values: dict[str, Any]) -> bool:
    """Whether a call has the flags with which its contract was tested."""
    return all(_same(_flag(name, owner, values), wanted) for name, wanted in like.items())


def _given(contract: CallContract, owner: Any, values: dict[str, Any]) -> dict[str, Any]:
    given = {name: values.get(name) for name in contract.arguments}
    for name in (contract.ignore_index, contract.value_range):
        if isinstance(name, str):
            found = _flag(name, owner, values)
            given[name] = None if found is _ABSENT else found
    return given
