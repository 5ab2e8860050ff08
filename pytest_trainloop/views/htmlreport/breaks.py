"""Where a long name may be broken, so that it fits a phone."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

_LONG = 24
"""Letters that fit into a line on every screen."""


def breakable(text: str) -> Markup:
    """A text whose long names may be broken: behind a folder or a file, and where that is not enough within a name."""
    return Markup(re.sub(rf"\S*::\w\S*|\S{{{_LONG + 1},}}", _broken, str(escape(text))))


def _broken(name: re.Match[str]) -> str:
    parts = re.split(r"(?<=/)(?=\w)|(?<=::)(?=\w)", name[0])
    return "<wbr>".join(re.sub(r"(?<=\w)([_.:=])(?=\w)", r"\1<wbr>", p) if len(p) > _LONG else p for p in parts)
