"""The name under which a project's code reaches an object: ``losses``, ``Trainer.total_loss``, ``cache['outputs']``."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.ours import is_ours
from pytest_trainloop.paths import FIT_CALLER
from pytest_trainloop.recording.source import layer
from pytest_trainloop.recording.torch_internals import hooks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_trainloop.recording.watch import Watch

MOST_LEVELS = 8
"""Objects between a name and what it leads to."""

MOST_AT_A_LEVEL = 64

HOOKS = "_backward_hooks"
"""The hooks of a tensor."""

_CONTAINERS = (list, tuple, deque)


class _Step(NamedTuple):
    """An object that leads to the one that is looked for, and what is written after its name."""

    at: Any
    suffix: str


class Names:
    """Looks names up from the frames that are running now: what a step's hook was called from."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.files: list[str] = []
        """The files of the project's running functions, the innermost first."""
        self._locals: dict[int, str] = {}
        self._ignored: set[int] = {id(self._locals)}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != FIT_CALLER:
            values = frame.f_locals
            self._ignored |= {id(frame), id(values)}
            if layer(frame.f_code.co_filename):
                self.files.append(frame.f_code.co_filename)
                for name, value in values.items():
                    if not isinstance(value, ModuleType):
                        self._locals.setdefault(id(value), name)
            frame = frame.f_back
        self._modules = {id(vars(m)): name for name, m in list(sys.modules.items()) if isinstance(m, ModuleType)}

    def of(self, target: Any) -> str:
        """The shortest name; empty where none is found."""
        steps, seen = [_Step(target, "")], {id(target)}
        for _ in range(MOST_LEVELS):
            for step in steps:
                name = self._named(step.at)
                if name:
                    return name + step.suffix
            steps = [step for step in self._above(steps) if id(step.at) not in seen][:MOST_AT_A_LEVEL]
            seen |= {id(step.at) for step in steps}
            if not steps:
                break
        return ""

    def is_local(self, value: Any) -> bool:
        """Whether a variable of a running function has this very value."""
        return id(value) in self._locals

    def _named(self, value: Any) -> str:
        """The name of an object that stands for itself."""
        if isinstance(value, _Variable):
            return str(value)
        if isinstance(value, nn.Module) and self._watch.table.knows(value):
            return self._watch.table.path_of(value)
        name = self._locals.get(id(value), "")
        return type(value).__name__ if name == "self" else name

    def _above(self, steps: list[_Step]) -> list[_Step]:
        """What refers to these objects, the nearest to a name first."""
        wanted = {id(step.at): step for step in steps}
        found: list[_Step] = []
        for holder in referrers([step.at for step in steps], self._ignored | {id(steps), id(wanted)}):
            found += self._links(holder, wanted)
        return found

    def _links(self, holder: Any, wanted: dict[int, _Step]) -> list[_Step]:
        if isinstance(holder, dict):
            module = self._modules.get(id(holder))
            links = [(key, wanted[id(v)].suffix) for key, v in list(holder.items()) if id(v) in wanted]
            if module is not None:
                return [_Step(_Variable(str(key)), suffix) for key, suffix in links]
            return [_Step(holder, f"[{key!r}]{suffix}") for key, suffix in links]
        if isinstance(holder, _CONTAINERS):
            return [_Step(holder, f"[{i}]{wanted[id(v)].suffix}") for i, v in enumerate(holder) if id(v) in wanted]
        if isinstance(holder, FunctionType):
            return self._free_variables(holder, wanted)
        if isinstance(holder, CellType):
            return [_Step(holder, step.suffix) for step in wanted.values() if holder.cell_contents is step.at]
        if isinstance(holder, GeneratorType) and holder.gi_frame is not None:
            values = holder.gi_frame.f_locals.items()
            return [_Step(_Variable(name), wanted[id(v)].suffix) for name, v in values if id(v) in wanted]
        return self._attributes(holder, wanted)

    def _free_variables(self, function: FunctionType, wanted: dict[int, _Step]) -> list[_Step]:
        """The variables of a closure of the project's: its cells lie in a tuple."""
        step = wanted.get(id(function.__closure__))
        if step is None or not layer(function.__code__.co_filename):
            return []
        number, _, rest = step.suffix[1:].partition("]")
        return [_Step(_Variable(function.__code__.co_freevars[int(number)]), rest)]

    def _of_class(self, kind: type, wanted: dict[int, _Step]) -> list[_Step]:
        """The attributes of a class, whose dict shows itself through a proxy only."""
        own = [s for s in wanted.values() if isinstance(s.at, dict) and "__module__" in s.at and s.at == vars(kind)]
        return [_Step(_Variable(kind.__name__), _dotted(step.suffix)) for step in own]

    def _attributes(self, holder: Any, wanted: dict[int, _Step]) -> list[_Step]:
        if isinstance(holder, type):
            return self._of_class(holder, wanted)
        if isinstance(holder, (FrameType, MethodType, ModuleType)):
            return []
        if issubclass(type(holder), torch.Tensor) and any(id(hooks) in wanted for hooks in hooks_of(holder)):
            index = self._watch.table.index(holder)
            return [] if index is None else [_Step(_Variable(f"{self._watch.table.entries[index].name}.{HOOKS}"), "")]
        own = instance_dict(holder)
        found = [_Step(holder, _dotted(step.suffix)) for step in wanted.values() if own is step.at]
        found += [_Step(holder, f".{key}{wanted[id(v)].suffix}") for key, v in own.items() if id(v) in wanted]
        for slot in slots(holder):
            value = getattr(holder, slot, None)
            if id(value) in wanted:
                found.append(_Step(holder, f".{slot}{wanted[id(value)].suffix}"))
        return found


def _dotted(suffix: str) -> str:
    """``.key`` where a suffix begins with ``['key']``, the key of an object's or a class's dict."""
    key, _, rest = suffix[1:].partition("]")
    return f".{key[1:-1]}{rest}"


class _Variable(str):
    """A name that needs no further one: of a module's variable, or of a closure's."""

    __slots__ = ()


def referrers(values: list[Any], ignored: Iterable[int] = ()) -> list[Any]:
    """The objects that refer to these, but for frames, for what is ours and for what was made on the way."""
    left_out = {id(values), *ignored}
    found = gc.get_referrers(*values)
    return [o for o in found if id(o) not in left_out and not isinstance(o, FrameType) and not is_ours(o)]


def instance_dict(value: Any) -> dict[str, Any]:
    """The attributes of an object, without those that code would have to run for."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}


def slots(value: Any) -> list[str]:
    """The names of the slots of an object's classes."""
    found: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        found += [own] if isinstance(own, str) else list(own)
    return [name for name in found if not name.startswith("__")]
