"""What modules themselves keep from decay: ``no_weight_decay()``, as vision transformers have it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop import members
from pytest_trainloop.whose import project_may_raise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.runs.evidence import Evidence

METHOD = "no_weight_decay"


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
