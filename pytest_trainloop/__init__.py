"""Property tests for PyTorch training loops. PYTEST_DONT_REWRITE

The public names are loaded when first used: pytest imports this package at every start, and torch must stay out of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.core.errors import CheckFailed, TrainLoopError, UsageError
    from pytest_trainloop.core.finding import Finding, Result
    from pytest_trainloop.core.registry import Cause, check
    from pytest_trainloop.core.report import Report
    from pytest_trainloop.declare.callcontract import CallContract
    from pytest_trainloop.declare.loop import Padding, Roles, TrainLoop
    from pytest_trainloop.declare.losscontract import LossContract
    from pytest_trainloop.declare.script import Script
    from pytest_trainloop.frontends.api import Observation, card, check_loop, check_loss, observe
    from pytest_trainloop.instruments import strategies as strategies
    from pytest_trainloop.instruments.losses.table import register_contract
    from pytest_trainloop.views.loop_facts.page import Card

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
    "Script",
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
    "CallContract": "declare.callcontract",
    "Card": "views.loop_facts.page",
    "Cause": "core.registry",
    "CheckFailed": "core.errors",
    "Finding": "core.finding",
    "LossContract": "declare.losscontract",
    "Observation": "frontends.api",
    "Padding": "declare.loop",
    "Report": "core.report",
    "Result": "core.finding",
    "Roles": "declare.loop",
    "Script": "declare.script",
    "TrainLoop": "declare.loop",
    "TrainLoopError": "core.errors",
    "UsageError": "core.errors",
    "card": "frontends.api",
    "check": "core.registry",
    "check_loop": "frontends.api",
    "check_loss": "frontends.api",
    "observe": "frontends.api",
    "register_contract": "instruments.losses.table",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("pytest-trainloop")
    elif name == "strategies":
        value = import_module(f"{__name__}.instruments.strategies")
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
