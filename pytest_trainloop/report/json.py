"""The JSON report, schema version 1. No torch, no pytest."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pytest_trainloop.report.entry import by_loop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.report import Report
    from pytest_trainloop.report.entry import Entry

VERSION = 1


def document(
    report: Report,
    environment: dict[str, Any],
    cards: Mapping[str, dict[str, Any]] | None = None,
    pictures: Mapping[str, list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """The whole report as plain data; ``cards`` and ``pictures`` are those of the loops, where they were asked for.

    ``rates`` of a loop are those of its watched run: for each optimizer its class and its groups, and for each group
    the learning rate at every step.
    """
    loops = dict(by_loop(report.entries))
    loops.update({loop: [] for loop in cards or () if loop not in loops})
    return {
        "version": VERSION,
        "environment": environment,
        "loops": [
            {
                "nodeid": loop,
                "steps": sum(entry.result.steps for entry in entries),
                "checks": [_check(entry) for entry in entries],
                "rates": next((list(entry.result.rates) for entry in entries if entry.result.rates), []),
                **({"card": cards[loop]} if cards and loop in cards else {}),
                **({"pictures": pictures[loop]} if pictures and loop in pictures else {}),
            }
            for loop, entries in loops.items()
        ],
    }


def environment(*, device: str, seed: int) -> dict[str, Any]:
    """What the loops ran under; versions come from the installed packages, so that torch stays unimported."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "pytest": _version("pytest"),
        "pytest_trainloop": _version("pytest-trainloop"),
        "platform": platform.platform(),
        "device": device,
        "seed": seed,
    }


def _check(entry: Entry) -> dict[str, Any]:
    data = entry.result.to_json()
    data.pop("rates", None)  # they are the loop's
    return {"check": data.pop("check"), "nodeid": entry.nodeid, **data}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
