"""The schema of the JSON report, for whoever reads it. Standard library only."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "urn:pytest-trainloop:report:1"
"""Identifies the schema: its ``$id``, and the ``$schema`` of a report. A further version has another number."""


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) that every report of ``--trainloop-json`` conforms to."""
    text = resources.files("pytest_trainloop.core.report").joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def lacking(document: Any) -> str:
    """What a document lacks to be a report, or has of another kind, the first of all: "loops[0] lacks 'checks'". Empty
    where there is nothing of that; further keys are not looked at, nor is the name of the schema."""
    known = schema()
    required = [name for name in known["required"] if name != "$schema"]
    return next(_lacking(document, {**known, "required": required}, known["$defs"], ""), "")


_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def _lacking(value: Any, known: dict[str, Any], named: dict[str, Any], at: str) -> Iterator[str]:
    if "$ref" in known:
        known = named[known["$ref"].rpartition("/")[2]]
    if "anyOf" in known:
        every = [list(_lacking(value, one, named, at)) for one in known["anyOf"]]
        if all(every):
            yield from every[0]  # the fuller kind precedes null
        return
    kinds = known.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and not any(isinstance(value, _KINDS[kind]) for kind in kinds):
        yield f"{at or 'it'} is no {' or '.join(kinds)}"
    elif isinstance(value, dict):
        for name in known.get("required", ()):
            if name not in value:
                yield f"{at or 'it'} lacks {name!r}"
        for name, one in known.get("properties", {}).items():
            if name in value:
                yield from _lacking(value[name], one, named, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and "items" in known:
        for i, each in enumerate(value):
            yield from _lacking(each, known["items"], named, f"{at}[{i}]")
