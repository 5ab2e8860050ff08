"""The causes that a schedule's length against the plan of the run shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.registry import Cause

PLAN_CAUSES: dict[str, Cause] = {}
