"""Property tests for PyTorch training loops. PYTEST_DONT_REWRITE

The public names are loaded when first used: pytest imports this package at every start, and torch must stay out of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.api import Observation, card, check_loop, check_loss, observe
    from pytest_trainloop.callcontract import CallContract
    from pytest_trainloop.cards.page import Card
    from pytest_trainloop.errors import CheckFailed, TrainLoopError, UsageError
    from pytest_trainloop.finding import Finding, Result
    from pytest_trainloop.loop import Padding, Roles, TrainLoop
    from pytest_trainloop.losscontract import LossContract
    from pytest_trainloop.losses.table import register_contract
    from pytest_trainloop.registry import Cause, check
    from pytest_trainloop.report import Report

    __version__: str

__all__ = [
    "CallContract",
    "Card",
    "Cause",
    "CheckFailed",
    "Finding",
    "LossContract",
    "Observation",
    "Padding",
    "Report",
    "Result",
    "Roles",
    "TrainLoop",
    "TrainLoopError",
    "UsageError",
    "__version__",
    "card",
    "check",
    "check_loop",
    "check_loss",
    "observe",
    "register_contract",
]

_HOMES = {
    "CallContract": "callcontract",
    "Card": "cards.page",
    "Cause": "registry",
    "CheckFailed": "errors",
    "Finding": "finding",
    "LossContract": "losscontract",
    "Observation": "api",
    "Padding": "loop",
    "Report": "report",
    "Result": "finding",
    "Roles": "loop",
    "TrainLoop": "loop",
    "TrainLoopError": "errors",
    "UsageError": "errors",
    "card": "api",
    "check": "registry",
    "check_loop": "api",
    "check_loss": "api",
    "observe": "api",
    "register_contract": "losses.table",
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
