"""The JSON report, schema version 1 (``report/schema.json``). No torch, no pytest."""

from __future__ import annotations

import json
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.report.entry import by_loop
from pytest_trainloop.core.report.schema import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.core.report import Report
    from pytest_trainloop.core.report.entry import Entry

VERSION = 1


def document(
    report: Report,
    environment: dict[str, Any],
    cards: Mapping[str, dict[str, Any]] | None = None,
    pictures: Mapping[str, list[dict[str, Any]]] | None = None,
    tests: Mapping[str, tuple[str, int]] | None = None,
    failure: str = "",
) -> dict[str, Any]:
    """The whole report as plain data; ``cards`` and ``pictures`` are those of the loops, where they were asked for;
    ``tests`` has file and line of each test by its node id.

    ``failure`` is how a watched script ended, where it failed by itself.

    ``rates`` of a loop are those of its watched run: for each optimizer its class and its groups, and for each group
    the learning rate at every step.
    """
    loops = dict(by_loop(report.entries))
    loops.update({loop: [] for loop in cards or () if loop not in loops})
    return {
        "$schema": NAME,
        "version": VERSION,
        "environment": environment,
        **({"failure": failure} if failure else {}),
        "loops": [
            {
                "nodeid": loop,
                **_at(entries, tests or {}),
                "steps": sum(entry.result.steps for entry in entries),
                "checks": [_check(entry) for entry in entries],
                "learning_rates": next(
                    (list(entry.result.learning_rates) for entry in entries if entry.result.learning_rates), []
                ),
                **({"card": cards[loop]} if cards and loop in cards else {}),
                **({"pictures": pictures[loop]} if pictures and loop in pictures else {}),
            }
            for loop, entries in loops.items()
        ],
    }


def text(document: Mapping[str, Any]) -> str:
    """A document as JSON that every reader takes: a number that is not finite is ``null``."""
    try:
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(document), indent=2, allow_nan=False) + "\n"


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


def _at(entries: list[Entry], tests: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """The line of the test, ``test_train.py:12``, relative to the root directory; nothing where it is not known."""
    known = next((tests[entry.nodeid] for entry in entries if entry.nodeid in tests), None)
    return {} if known is None else {"at": f"{known[0]}:{known[1]}"}


def _check(entry: Entry) -> dict[str, Any]:
    data = entry.result.to_json()
    data.pop("learning_rates", None)  # they are the loop's
    return {"check": data.pop("check"), "nodeid": entry.nodeid, **data}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
