"""The lines on which the parts of a loop are made: optimizers, groups, modules, schedulers, scalers, loaders, freezes.

A fault of the wiring is seen at ``optimizer.step()`` and repaired where the optimizer was built. Nothing is noted in
ordinary runs: ``Construction.watching`` is entered around building and ``fit`` of a further run, once something failed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from pytest_trainloop.core import members
from pytest_trainloop.core.paths import BUILD_CALLER, FIT_CALLER
from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.recording.events import Place

_DRAWS = ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "zero_", "fill_", "constant_")
"""What the other functions of nn.init end in."""

_CASTS = ("to", "half", "bfloat16", "float", "double")


class Lines:
    """The line of each object, found by the object itself and not by an id that may recur."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}

    def note(self, thing: Any, place: Place) -> None:
        self._places[id(thing)] = (weakref.ref(thing), place)

    def drop(self, thing: Any) -> None:
        self._places.pop(id(thing), None)

    def of(self, thing: Any) -> Place | None:
        reference, place = self._places.get(id(thing), (None, None))
        return place if reference is not None and reference() is thing else None

    def last(self, kind: type) -> Place | None:
        """The line of the object of this kind that was noted last and is still there."""
        places = [place for reference, place in self._places.values() if isinstance(reference(), kind)]
        return places[-1] if places else None


class Construction:
    """Notes the user's line at which each object was made."""

    def __init__(self) -> None:
        self.made = Lines()
        self.groups = Lines()
        """The last ``add_param_group`` of each optimizer after its constructor."""
        self.frozen = Lines()
        """The last line that set ``requires_grad`` of a tensor to False."""
        self.thawed = Lines()
        """The last line that set ``requires_grad`` of a tensor to True, where that is later than any that froze it."""
        self.drawn = Lines()
        """The last line that drew the values of a parameter."""
        self.drawn_memory: dict[int, Place] = {}
        """The same by the memory that was drawn in: of ``weight.data``, or of some of its rows."""
        self.casts = Lines()
        """The last line that cast the module of a parameter."""
        self.loaded = Lines()
        """The last line that loaded the module of a parameter from a state dict."""
        self.switched = Lines()
        """The last line that put a module into training mode by a call of ``train()`` on it."""
        self.attributes: dict[tuple[int, str], Place] = {}
        """The last line that set an attribute of a module, or registered a buffer, by ``id`` and name."""
        self._switching = 0
        self.prepared: Place | None = None
        """The line of Accelerate's ``prepare``."""
        self.trainer: Place | None = None
        """The line that made the framework's trainer, which makes optimizer and scheduler inside ``fit``."""

    @contextlib.contextmanager
    def watching(self, *, freezes: bool = True) -> Iterator[None]:
        """Note what is made in this block; ``freezes`` adds a function mode, which sees ``requires_grad = False``,
        and the attributes of modules."""
        with Patches() as patches, contextlib.ExitStack() as modes:
            for kind in (nn.Module, Optimizer, LRScheduler, GradScaler, DataLoader):
                patches.put(kind, "__init__", self._noting)
            patches.put(Optimizer, "add_param_group", self._grouping)
            patches.put(nn.Module, "load_state_dict", self._loading)
            patches.put(nn.Module, "train", self._switching_on)
            for name in _CASTS:
                patches.put(nn.Module, name, self._casting)
            accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
            if accelerator is not None:
                patches.put(accelerator, "prepare", self._preparing)
            trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
            if trainer is not None:
                patches.put(trainer, "__init__", self._noting_trainer)
            if freezes:
                patches.put(nn.Module, "__setattr__", self._setting)
                patches.put(nn.Module, "register_buffer", self._setting)
                modes.enter_context(_Freezes(self))
            yield

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            if self.made.of(made) is None and (place := maker(made)):
                self.made.note(made, place)
            original(made, *args, **kwargs)

        return init

    def _noting_trainer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            self.trainer = maker(made) or self.trainer
            original(made, *args, **kwargs)

        return init

    def _preparing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            self.prepared = maker(accelerator) or self.prepared
            return original(accelerator, *args, **kwargs)

        return prepare

    def _grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            place = maker(optimizer)
            if place and place != self.made.of(optimizer):
                self.groups.note(optimizer, place)
            original(optimizer, *args, **kwargs)

        return add_param_group

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            if place := maker(module):
                for parameter in members.parameters(module):
                    self.loaded.note(parameter, place)
            return result

        return load_state_dict

    def _setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setting(module: Any, name: str, *args: Any, **kwargs: Any) -> None:
            if place := maker(None):
                self.attributes[id(module), name] = place
            original(module, name, *args, **kwargs)

        return setting

    def _switching_on(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            if mode and not self._switching and (place := maker(module)):
                self.switched.note(module, place)
            self._switching += 1
            try:
                return original(module, mode)
            finally:
                self._switching -= 1

        return train

    def _casting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cast(module: Any, *args: Any, **kwargs: Any) -> Any:
            before = {id(p): p.dtype for p in members.parameters(module)}
            result = original(module, *args, **kwargs)
            changed = [p for p in members.parameters(module) if before.get(id(p), p.dtype) != p.dtype]
            if changed and (place := maker(module)):
                for parameter in changed:
                    self.casts.note(parameter, place)
            return result

        return cast


class _Freezes(FunctionMode):
    """Sees ``requires_grad_(False)`` and ``requires_grad = False``, on tensors and through modules, and values drawn in
    place."""

    def __init__(self, found: Construction) -> None:
        super().__init__()
        self._found = found

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        setter = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.requires_grad
        if (setter or name == "requires_grad_") and args and isinstance(args[0], torch.Tensor):
            on = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            for lines, switched in ((self._found.frozen, on is False), (self._found.thawed, on is True)):
                lines.drop(args[0])
                if switched and (place := maker(None)):
                    lines.note(args[0], place)
        if name in _DRAWS and (drawn := next(tensors_in(args, kwargs), None)) is not None and (place := maker(None)):
            self._found.drawn.note(drawn, place)
            self._found.drawn_memory[memory_of(drawn)] = place
        return super().call(name, func, args, kwargs)


def memory_of(tensor: Any) -> int:
    """Where the values of a tensor are; 0 where it has none of its own."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return int(tensor.untyped_storage().data_ptr()) if plain and tensor.device.type != "meta" else 0


def maker(made: Any) -> Place | None:
    """The user's line that makes an object from the inside of its constructor: the object's own methods, torch, this
    package and libraries are passed over."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename in (FIT_CALLER, BUILD_CALLER):
            return None
        # the frame that this function replaces is further up
        if (
            layer(code.co_filename) == 2
            and not is_stand_in(code)
            and not (made is not None and _is_method_of(frame, made))
        ):
            return place_of(code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def _is_method_of(frame: FrameType, made: Any) -> bool:
    code = frame.f_code
    return code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is made
