"""Training and evaluation mode: who switches what, and which modules act differently in the two."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.events import ModeCall
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import DROPOUT_MODULES, NORM_MODULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.patches import Patches
    from pytest_trainloop.recording.protocol import Observed


class Modes:
    """A patch of ``nn.Module.train``, which ``eval()`` and an overridden ``train()`` call as well."""

    def __init__(self, watch: Observed, patches: Patches) -> None:
        self._watch = watch
        self._inside = threading.local()
        patches.put(nn.Module, "train", self._patched)

    def _patched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> Any:
            if getattr(self._inside, "depth", 0):
                return as_caller(original, (module, mode), {})
            self._inside.depth = 1
            try:
                self._note(module, mode)
                return as_caller(original, (module, mode), {})
            finally:
                self._inside.depth = 0

        return train

    def _note(self, module: nn.Module, mode: bool) -> None:
        watch = self._watch
        if not watch.full:
            watch.record.evaluates_late |= not mode and id(module) in watch.table.modules
            return
        with watch.suspended():
            place, site = here()
            path = watch.table.modules.get(id(module))
            if path is not None:
                watch.add(ModeCall(at=watch.tick(), place=place, site=site, below=path, on=bool(mode)))


def trains(module: nn.Module) -> bool:
    """Whether a module is in training mode; a frozen script has no mode."""
    return bool(getattr(module, "training", False))


def acts_by_mode(module: nn.Module) -> bool:
    """Whether a module computes differently in training mode and in evaluation mode."""
    if isinstance(module, DROPOUT_MODULES):
        return bool(module.p > 0)
    if isinstance(module, NORM_MODULES):
        return bool(module.track_running_stats)
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0 and module.num_layers > 1)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, nn.RReLU) or _reads_mode(module)


def _reads_mode(module: nn.Module) -> bool:
    """Whether a class outside torch reads ``self.training`` in its forward pass."""
    if type(module).__module__.startswith("torch.nn."):
        return False
    code = getattr(inspect.getattr_static(type(module), "forward", None), "__code__", None)
    return code is not None and "training" in code.co_names
