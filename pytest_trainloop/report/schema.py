"""The schema of the JSON report, for whoever reads it. Standard library only."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

NAME = "urn:pytest-trainloop:report:1"
"""Identifies the schema: its ``$id``, and the ``$schema`` of a report. A further version has another number."""


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) that every report of ``--trainloop-json`` conforms to."""
    text = resources.files("pytest_trainloop.report").joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
