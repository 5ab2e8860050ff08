"""The loss functions that a module tests by themselves: their contracts count for its loops too."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING

import pytest

from pytest_trainloop.core.errors import TrainLoopError

if TYPE_CHECKING:
    from types import ModuleType

    from pytest_trainloop.declare.losscontract import LossContract

_CONTRACTS = pytest.StashKey[dict[str, list["LossContract"]]]()


def contracts_beside(item: pytest.Function) -> list[LossContract]:
    """The contracts of the functions with our marker in the module of an item, each built once a session.

    Left out are those that need fixtures and those that cannot be built: their own tests say why.
    """
    module: ModuleType = item.module
    known = item.config.stash.setdefault(_CONTRACTS, {})
    if module.__name__ not in known:
        known[module.__name__] = _built(module)
    return known[module.__name__]


def _built(module: ModuleType) -> list[LossContract]:
    marked = [f for f in vars(module).values() if inspect.isfunction(f) and _is_marked(f) and _needs_nothing(f)]
    if not marked:
        return []
    from pytest_trainloop.instruments.losses.evidence import LossEvidence

    found = []
    for function in marked:
        with contextlib.suppress(TrainLoopError):
            found.append(LossEvidence(function).contract)
    return found


def _is_marked(function: object) -> bool:
    marks = getattr(function, "pytestmark", [])
    return any(mark.name == "trainloop_loss" for mark in marks)


def _needs_nothing(function: object) -> bool:
    if not callable(function):
        return False
    return all(p.default is not p.empty for p in inspect.signature(function).parameters.values())
