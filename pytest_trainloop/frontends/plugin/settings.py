"""What the command line and the ini file say, read and checked."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.knobs import DEVICES, is_device
from pytest_trainloop.declare.selection import Selection
from pytest_trainloop.judging.battery import Settings


def read_settings(config: pytest.Config) -> Settings:
    """How loops are judged; the command line goes before the ini file."""
    seed = _number(config, "seed", int, 0)
    timeout = _number(config, "timeout", float, 120.0)
    if not 0 <= seed < 2**63:
        raise pytest.UsageError(f"--trainloop-seed is {seed}; a number from 0 to 2**63 - 1 is needed")
    if not timeout > 0:
        raise pytest.UsageError(f"--trainloop-timeout is {timeout:g}; a number of seconds above 0 is needed")
    budget = _number(config, "budget", float, math.nan)
    if not (math.isnan(budget) or budget > 0):
        raise pytest.UsageError(f"--trainloop-budget is {budget:g}; a number of seconds above 0 is needed")
    device = config.getoption("trainloop_device") or config.getini("trainloop_device") or "auto"
    if not is_device(device):
        where = "--trainloop-device" if config.getoption("trainloop_device") else "ini key trainloop_device"
        raise pytest.UsageError(f"{where} is {device!r}; {DEVICES} is needed")
    given = str(config.getoption("--hypothesis-seed", None) or "")
    return Settings(
        seed=int(seed),
        timeout=float(timeout),
        device=device,
        hypothesis_seed=given,
        budget=None if math.isnan(budget) else budget,
        preview=bool(config.getoption("trainloop_preview") or config.getini("trainloop_preview")),
    )


def is_strict(config: pytest.Config) -> bool:
    return bool(config.getoption("trainloop_strict") or config.getini("trainloop_strict"))


def read_selections(config: pytest.Config) -> tuple[Selection, Selection]:
    """What the ini file and the command line ask for; raises ``UsageError`` for a line that cannot be read."""
    only = [name.strip() for given in config.getoption("trainloop_only") or () for name in given.split(",")]
    return (
        Selection(
            where="the ini file",
            project=True,
            only=config.getini("trainloop_only") or None,
            skip=_pairs(config, "trainloop_skip"),
            xfail=_pairs(config, "trainloop_xfail"),
            options={check: _literal(check, text) for check, text in _pairs(config, "trainloop_options").items()},
            knobs=_pairs(config, "trainloop_knobs"),
        ),
        Selection(where="--trainloop-only", only=[name for name in only if name] if only else None),
    )


def _number(config: pytest.Config, name: str, kind: type[int] | type[float], default: float) -> float:
    given = config.getoption(f"trainloop_{name}")
    if given is None:
        given = config.getini(f"trainloop_{name}") or default
    try:
        return kind(given)
    except ValueError:
        raise pytest.UsageError(f"ini key trainloop_{name} is {given!r}; a number is needed") from None


def _pairs(config: pytest.Config, key: str) -> dict[str, str]:
    """Lines of ``name: text``; the name ends at the first colon before a blank, since causes have colons too."""
    pairs: dict[str, str] = {}
    for line in config.getini(key):
        name, colon, text = line.partition(": ")
        if not colon or not text.strip():
            raise UsageError(
                f"the ini file: {key} has the line {line!r}; 'name: text' is needed, with a blank after the colon"
            )
        pairs[name.strip()] = text.strip()
    return pairs


def _literal(check: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise UsageError(
            f"the ini file: trainloop_options gives {check} {text!r}; a dict of values is needed: {{'steps': 400}}"
        ) from None
