"""Initial values that a loop's code chooses for its parameters, and that are drawn again before training begins.

While a loop is built, each write into a parameter is recorded with its line. Values that are loaded or set by hand are
*chosen*. Random numbers, zeros and ones over the whole parameter are *general*: a function for all layers writes them.
A chosen value is lost if a general one overwrites it and no code has read it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.core.paths import BUILD_CALLER
from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.construction import maker, memory_of
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import frames_called, layer
from pytest_trainloop.recording.torch_names import ATEN_FILLS, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence

MOST_BYTES = 2**28
"""Of chosen values that are kept. What is chosen after that is not looked at."""

_DRAWS = ATEN_FILLS | {"trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"}
_CONSTANTS = frozenset({"fill_", "constant_", "zero_"})
_NO_VALUES = SIZES | frozenset(
    "__get__ __set__ __repr__ __format__ __len__ __hash__ nelement stride storage_offset data_ptr untyped_storage "
    "element_size get_device is_contiguous is_floating_point is_complex requires_grad_ detach_ register_hook "
    "register_post_accumulate_grad_hook has_names".split()
)
"""Calls that read no values."""

_INSIDE_INIT = ("torch/nn/init.py", "torch/overrides.py", "torch/utils/_contextlib.py")


class Chosen(NamedTuple):
    """A write that chose values."""

    place: Place
    loaded: bool
    """From a state dict or a tensor, and not one number."""
    values: torch.Tensor


class Lost(NamedTuple):
    """A parameter that begins with other values than those that were chosen for it."""

    name: str
    chosen: Chosen
    again: Place
    """The line that wrote over them."""


class Load(NamedTuple):
    """One ``load_state_dict``: the keys it was given, and those that the module has."""

    place: Place
    module: nn.Module
    given: list[str]
    own: list[str]

    @property
    def found(self) -> bool:
        return not set(self.given).isdisjoint(self.own)


class _Written:
    """What is known of one parameter while the loop is built."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = weakref.ref(parameter)
        self.chosen: Chosen | None = None
        self.lost: tuple[Chosen, Place] | None = None


class InitialValues(FunctionMode):
    """The writes of one building."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, _Written] = {}
        self._bytes = 0
        self.lost: list[Lost] = []
        self.kept: set[str] = set()
        """The lines of chosen values that some parameter begins with."""
        self.chose = False
        """Whether any line chose values."""
        self.loads: list[Load] = []

    @classmethod
    def of(cls, evidence: Evidence) -> InitialValues:
        """What a further building of the loop shows."""
        noted = cls()
        with noted.watching():
            loop = evidence.fresh_loop()
        for prefix, module in loop.modules.items():
            for name, parameter in members.named_parameters(module, prefix):
                noted._read_at_the_end(name, parameter)
        noted._written.clear()
        return noted

    @property
    def unmatched(self) -> list[Load]:
        """Those that found no key, where no other one loaded the module, or the same keys into another module."""
        found = [load for load in self.loads if load.found]
        elsewhere = [set(load.given) for load in found]
        return [
            load
            for load in self.loads
            if not load.found and set(load.given) not in elsewhere and all(f.module is not load.module for f in found)
        ]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is written in this block."""
        with Patches() as patches:
            patches.put(nn.Module, "load_state_dict", self._loading)
            patches.put(nn.Module, "register_parameter", self._registering)
            with self:
                yield

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sets = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data
        if sets:
            self._written.pop(memory_of(args[0]), None)
        out = super().call(name, func, args, kwargs)
        if sets:
            known, (by_hand, _) = self._known(args[0]), _by_hand()
            if known is not None and by_hand:
                self._chose(known, args[0], maker(None), loaded=True)
            return out
        first = args[0] if args else kwargs.get("tensor")
        known = self._known(first) if isinstance(first, torch.Tensor) else None
        writes = known is not None and (name == "__setitem__" or name[-1:] == "_" != name[-2:-1])
        if known is not None and writes and name not in _NO_VALUES:
            self._wrote(known, name, first, args, kwargs)
        elif name not in _NO_VALUES and known is not None and known.chosen is not None:
            made = list(tensors_in(out))
            if not made or any(memory_of(t) != memory_of(first) for t in made):
                known.chosen = None  # somebody has read it
        for other in tensors_in(args[1:], kwargs):
            if other is not first and (read := self._known(other)) is not None:
                read.chosen = None
        return out

    def _wrote(self, known: _Written, name: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameter = known.parameter()
        if parameter is None:
            return
        by_hand, in_init = _by_hand()
        whole = name != "__setitem__" and tensor.numel() == parameter.numel()
        value = 0.0 if name == "zero_" else next((v for v in (*args[1:], *kwargs.values()) if _is_number(v)), None)
        if name in _DRAWS or (name == "copy_" and in_init):
            general = True
        elif name in _CONSTANTS and value is not None:
            # zeros for a matrix are a choice: the last layer of a residual branch, the second factor of LoRA
            general = (value == 0.0 and not (whole and tensor.dim() > 1)) or (value == 1.0 and whole)
        elif name in ("copy_", "__setitem__"):
            general = False
        else:
            known.chosen = None  # computed from what was there
            return
        if not general:
            if by_hand:
                self._chose(known, parameter, maker(None), loaded=value is None)
        elif whole:
            again = maker(None)
            if known.chosen is not None and again is not None and str(again) != str(known.chosen.place):
                known.lost = known.chosen, again
            known.chosen = None

    def _chose(self, known: _Written, parameter: nn.Parameter, place: Place | None, *, loaded: bool) -> None:
        known.lost = known.chosen = None
        size = parameter.numel() * parameter.element_size()
        if place is not None and self._bytes + size <= MOST_BYTES:
            self._bytes, self.chose = self._bytes + size, True
            known.chosen = Chosen(place, loaded, parameter.detach().clone())

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            result, place = original(module, *args, **kwargs), maker(module)
            given, own = list(args[0] if args else kwargs["state_dict"]), list(module.state_dict())
            if (line := maker(None)) is not None and given and own:
                self.loads.append(Load(line, module, given, own))
                self.chose = True
            for parameter in members.parameters(module):
                self._given(parameter, place)
            return result

        return load_state_dict

    def _registering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register_parameter(module: Any, name: str, parameter: Any) -> Any:
            before = vars(module).get("_parameters", {}).get(name)
            result = original(module, name, parameter)
            # a model that was built without memory, and gets its values from a file
            filled = before is not None and before.is_meta
            table = (
                isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and frames_called("from_pretrained", 4) is not None
            )
            if filled or table:
                self._given(parameter, maker(module))
            return result

        return register_parameter

    def _given(self, parameter: Any, place: Place | None) -> None:
        known = self._known(parameter)
        if known is not None:
            self._chose(known, parameter, place, loaded=True)

    def _known(self, tensor: Any) -> _Written | None:
        """What is known of the parameter whose memory a tensor has."""
        at = memory_of(tensor)
        known = self._written.get(at) if at else None
        if known is not None and known.parameter() is None:
            del self._written[at]
            known = None
        if known is None and at and type(tensor) is nn.Parameter:
            known = self._written[at] = _Written(tensor)
        return known

    def _read_at_the_end(self, name: str, parameter: nn.Parameter) -> None:
        known = self._written.get(memory_of(parameter))
        if known is None or known.parameter() is not parameter:
            return
        if known.chosen is not None:
            self.kept.add(str(known.chosen.place))
        elif known.lost is not None and not torch.equal(known.lost[0].values, parameter.detach()):
            self.lost.append(Lost(name, *known.lost))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _by_hand() -> tuple[bool, bool]:
    """Whether the project's own code, and no layer of torch or of a library, makes this call; whether a function of
    ``torch.nn.init`` does for it."""
    frame: FrameType | None = sys._getframe(1)
    in_init = False
    while frame is not None and frame.f_code.co_filename != BUILD_CALLER:
        filename, rank = frame.f_code.co_filename.replace("\\", "/"), layer(frame.f_code.co_filename)
        if filename.endswith(_INSIDE_INIT):
            in_init = in_init or filename.endswith("nn/init.py")
        elif rank and not is_stand_in(frame.f_code):
            return rank == 2, in_init
        elif "torch/" in filename and "pytest_trainloop" not in filename:
            return False, in_init
        frame = frame.f_back
    return False, in_init
