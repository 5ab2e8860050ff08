"""What the wrapper that ``torch.compile`` puts around a model changes by itself: the names of parameters."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import members
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = "_orig_mod."


_STATE_DICT = nn.Module.state_dict
"""As torch has it, whatever stands in its place during a run."""


def without_prefix(name: str) -> str:
    """The name of a parameter, or of a module, in a model that is not compiled."""
    return "" if name == PREFIX[:-1] else name.replace(PREFIX, "").removesuffix(f".{PREFIX[:-1]}")


@contextlib.contextmanager
def plain_names() -> Iterator[None]:
    """Wrappers give and take the names that the models in them have."""
    with Patches() as patches:
        for name in ("named_parameters", "named_buffers", "named_modules"):
            patches.put(nn.Module, name, _renamed)
            patches.put(members, name, _renamed)
        patches.put(nn.Module, "state_dict", _plain_state)
        patches.put(nn.Module, "load_state_dict", _loading_plain_names)
        yield


def _renamed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return ((without_prefix(name), thing) for name, thing in original(*args, **kwargs))

    return named


def _plain_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if args or kwargs.get("destination") is not None:  # of a part
            return found
        for name in list(found):
            found[without_prefix(name)] = found.pop(name)
        return found

    return state_dict


def _loading_plain_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        actual = {without_prefix(name): name for name in _STATE_DICT(self)}
        renamed = OrderedDict((actual.get(without_prefix(n), n), value) for n, value in state_dict.items())
        return original(self, renamed, *args, **kwargs)

    return load_state_dict


@dataclass(slots=True)
class NotLoaded:
    """What a call of ``load_state_dict(strict=False)`` left as it was, since only the prefix of its name is another."""

    place: str
    values: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """By plain name: the tensor, and what the state has for it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those that still have other values than the state."""
        return tuple(n for n, (tensor, value) in self.values.items() if not _equal(tensor, value))


class Loads:
    """Notes calls of ``load_state_dict`` in which names differ by the prefix only."""

    def __init__(self) -> None:
        self.not_loaded: list[NotLoaded] = []

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For ``Patches.put``, of ``nn.Module.load_state_dict``."""

        @functools.wraps(original)
        def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            place = str(here()[0])
            out = original(module, state_dict, *args, **kwargs)
            missing = dict.fromkeys(getattr(out, "missing_keys", ()))  # in torch's order, which findings keep
            unexpected = set(getattr(out, "unexpected_keys", ()))
            tensors = module.state_dict(keep_vars=True)
            loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
            for earlier in self.not_loaded:
                earlier.values = {n: pair for n, pair in earlier.values.items() if id(pair[0]) not in loaded}
            given = {without_prefix(name): state_dict[name] for name in unexpected}
            values = {
                plain: (tensors[name], given[plain])
                for name in missing
                if (plain := without_prefix(name)) in given and isinstance(tensors.get(name), torch.Tensor)
            }
            if values:
                self.not_loaded.append(NotLoaded(place, values))
            return out

        return load_state_dict

    def left(self) -> tuple[str, tuple[str, ...]]:
        """Line and names of the first call whose values are not there; both empty where there is none."""
        return next(((one.place, names) for one in self.not_loaded if (names := one.names)), ("", ()))


def _equal(tensor: torch.Tensor, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or tensor.shape != value.shape:
        return True  # another layer, that the state has nothing for
    return torch.equal(tensor.detach().double(), value.detach().to(tensor.device).double())
