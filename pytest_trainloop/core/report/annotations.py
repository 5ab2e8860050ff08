"""Commands for the runner of GitHub Actions: annotations at the user's lines. No torch, no pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.report.alerts import Alert

_COMMANDS = {"error": "error", "warning": "warning"}
_MOST_CHARACTERS = 4096
"""Characters of a message; GitHub shows fewer."""


def commands(alerts: Sequence[Alert], *, errors: bool = True, nothing: str = "") -> Iterator[str]:
    """One command for each fault and each piece of advice that the project does not know of, faults first.

    GitHub shows ten of a kind for each step. ``errors`` is False where another plugin annotates failed tests;
    ``nothing`` says why nothing was checked.
    """
    if nothing:
        yield f"::warning title=NOTHING WAS CHECKED::{_data(nothing)}"
    for alert in alerts:
        command = _COMMANDS.get(alert.level)
        if command is None or alert.accepted or (command == "error" and not errors):
            continue
        place = {"file": alert.at.file, "line": str(alert.at.number)} if alert.at else {}
        properties = {**place, "title": alert.title}
        fields = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
        yield f"::{command} {fields}::{_data(message(alert))}"


def message(alert: Alert) -> str:
    """What is shown next to the line: the text of the failure, and whom else it concerns."""
    lines = [alert.text[:_MOST_CHARACTERS]]
    if alert.also:
        lines.append(f"also fails for it: {', '.join(alert.also)}")
    if alert.loops:
        lines.append(f"{'loop' if len(alert.loops) == 1 else 'loops'}: {', '.join(alert.loops)}")
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
