"""The JSON reports and SARIF files of sessions, against their schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft4Validator, Draft202012Validator, FormatChecker

from pytest_trainloop.core.report.schema import NAME, schema

SARIF = Path(__file__).parents[1] / "data" / "sarif" / "sarif-schema-2.1.0.json"


@cache
def of_reports() -> Draft202012Validator:
    return Draft202012Validator(schema())


@cache
def of_sarif() -> Draft4Validator:
    return Draft4Validator(json.loads(SARIF.read_text(encoding="utf-8")), format_checker=FormatChecker())


def strict(text: str) -> Any:
    """JSON without ``NaN`` and ``Infinity``, which Python alone reads."""

    def refused(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


def assert_valid(folder: Path) -> None:
    """Every report and every SARIF file below the folder is as its schema says; other files are passed over."""
    for file in sorted((*folder.rglob("*.json"), *folder.rglob("*.sarif"))):
        text = file.read_text(encoding="utf-8")
        if f'"{NAME}"' in text[:200]:
            of_reports().validate(strict(text))
        elif "sarif-schema-2.1.0.json" in text[:200]:
            of_sarif().validate(strict(text))
