"""Property tests for PyTorch training loops. PYTEST_DONT_REWRITE

The public names are loaded when first used: pytest imports this package at every start, and torch must stay out of it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.checks import check
    from pytest_trainloop.errors import CheckFailed, TrainLoopError, UsageError
    from pytest_trainloop.finding import Finding, Result
    from pytest_trainloop.loop import LossContract, Padding, TrainLoop
    from pytest_trainloop.runner import check_loop, check_loss, observe

    __version__: str

__all__ = [
    "CheckFailed",
    "Finding",
    "LossContract",
    "Padding",
    "Result",
    "TrainLoop",
    "TrainLoopError",
    "UsageError",
    "__version__",
    "check",
    "check_loop",
    "check_loss",
    "observe",
]

_HOMES = {
    "CheckFailed": "errors",
    "Finding": "finding",
    "LossContract": "loop",
    "Padding": "loop",
    "Result": "finding",
    "TrainLoop": "loop",
    "TrainLoopError": "errors",
    "UsageError": "errors",
    "check": "checks",
    "check_loop": "runner",
    "check_loss": "runner",
    "observe": "runner",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("pytest-trainloop")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds the subpackage `observe` here, which would hide the public function of that name.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
