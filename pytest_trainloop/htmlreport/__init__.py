"""The report as one HTML page that needs nothing else: jinja2 for the page, matplotlib for its pictures."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def page(document: Mapping[str, Any], *, folders: Sequence[Path]) -> str:
    """The page of a JSON report; source lines are read in ``folders``, the first that has a file."""
    folders = tuple(folders)
    loops = "".join(f"<h2>{html.escape(loop['nodeid'])}</h2>" for loop in document["loops"])
    return f"<!doctype html><title>Training loops</title>{loops}"
