"""Other answers to what the loop's code asks of modules, for one run: whether one is a layer of torch's
(``isinstance``), and what it keeps from decay (``no_weight_decay()``, as vision transformers have it)."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.core.whose import project_may_raise
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here, layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.runs.evidence import Evidence

METHOD = "no_weight_decay"

BATCH_NORMS: tuple[type, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS: tuple[type, ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    *(kind for kind in (getattr(nn, "RMSNorm", None),) if kind is not None),
    *BATCH_NORMS,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def namesakes(module: str) -> tuple[type, ...]:
    """The layers of torch that a class of this name reimplements: those whose names it contains, or is."""
    lowered = module.lower()
    found = [kind for kind in (*NORMS, nn.Embedding) if kind.__name__.lower().rstrip("123d") in lowered]
    return tuple(found)


class ClaimedClass:
    """``isinstance(module, kind)`` is true of the modules of these classes, for each of ``kinds``.

    ``isinstance`` reads ``module.__class__`` where the type of the module is not a subclass of the kind; here that is a
    class derived from all of these kinds, for code outside of torch. Neither the class of the module nor the kinds are
    touched.
    """

    def __init__(self, modules: frozenset[str], kinds: tuple[type, ...]) -> None:
        self._modules = modules
        self._claimed = type("Claimed", kinds, {})
        self.places: list[str] = []
        """The lines that asked, each once."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with Patches() as patches:
            patches.put(nn.Module, "__getattribute__", self._wrapped)
            yield

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(module: Any, name: str) -> Any:
            if name == "__class__" and type(module).__name__ in self._modules:
                if layer(sys._getframe(2).f_code.co_filename) == 0:
                    return original(module, name)
                place = str(here()[0])
                if place not in self.places:
                    self.places.append(place)
                return self._claimed
            return original(module, name)

        return read


class SkipLists:
    """For one run: every module has the method, and those without one of their own pass on what the modules below them
    say."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if hasattr(nn.Module, METHOD):
            yield
            return
        setattr(nn.Module, METHOD, lambda module: {name for _, names in _below(module) for name in names})
        try:
            yield
        finally:
            delattr(nn.Module, METHOD)


def promised(evidence: Evidence) -> dict[str, str]:
    """The weights that some module of the loop names, each with the class of that module."""
    loop = evidence.fresh_loop()
    found = {}
    for prefix, root in loop.modules.items():
        dot = f"{prefix}." if prefix else ""
        for module, names in _below(root):
            found.update({f"{dot}{name}": module for name in names})
    return found


def _below(root: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The class and the names, as ``root`` would give them, of each module that has the method."""
    for path, module in members.named_modules(root):
        method: Any = getattr(type(module), METHOD, None)
        if not callable(method) or method is vars(nn.Module).get(METHOD):
            continue
        with project_may_raise():  # the method may need what only training gives
            dot = f"{path}." if path else ""
            yield type(module).__name__, [f"{dot}{name}" for name in getattr(module, METHOD)()]
