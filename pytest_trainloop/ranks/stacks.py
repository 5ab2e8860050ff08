"""The part of faulthandler's stacks that is the project's."""

from __future__ import annotations

import re

from pytest_trainloop.recording.source import layer, place_of

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_CHILD = "ranks/child.py"


def users_part(text: str) -> str:
    """Stacks with the innermost frame outside this package and torch, and below it those of the project; nothing of
    what lies above the launched function."""
    kept: list[str] = []
    above = inner = False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is None:
            above = inner = False
            kept.append(line)
            continue
        above = above or frame["file"].replace("\\", "/").endswith(_CHILD)
        shown = layer(frame["file"]) == 2 or (layer(frame["file"]) == 1 and not inner)
        if shown and not above:
            inner = True
            kept.append(line)
    return "\n".join(kept).strip()


def users_line(text: str) -> str:
    """The project's innermost line in such stacks, as "train.py:57", that of the main thread where it is known; empty
    where there is none."""
    current = text.rpartition("Current thread")[2]
    for part in (current, text):
        for frame in _FRAME.finditer(part):
            if layer(frame["file"]) == 2:
                place = place_of(frame["file"], int(frame["line"]))
                return f"{place.file}:{place.line}"
    return ""
