"""The report as one HTML page that needs nothing else: jinja2 for the page, matplotlib for its pictures."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PACKAGES = ("jinja2", "matplotlib", "pygments")
"""What a page is made with: the extra ``report``."""


def missing() -> str:
    """The packages that are not installed, with the command that installs them; empty where none is missing."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)}: pip install 'pytest-trainloop[report]'" if absent else ""


def page(document: Mapping[str, Any], *, folders: Sequence[Path]) -> str:
    """The page of a JSON report; source lines are read in ``folders``, the first that has a file."""
    import jinja2
    import markupsafe

    from pytest_trainloop.views.htmlreport.breaks import breakable
    from pytest_trainloop.views.htmlreport.view import view

    loader = jinja2.PackageLoader(__name__)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["breakable"] = breakable
    _load_matplotlib()
    script = loader.get_source(environment, "script.js")[0]
    shown = view(document, folders)
    return environment.get_template("page.html").render(
        page=shown,
        rules={check for check, _ in shown.rules},
        script=markupsafe.Markup(script),  # ours, without a field: nothing of the user's is in it
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _load_matplotlib() -> None:
    """Import it without ``MPLBACKEND``: a notebook passes its own to what it starts, and where that backend is not
    installed matplotlib cannot be imported. A page needs none."""
    if "matplotlib" in sys.modules or (backend := os.environ.pop("MPLBACKEND", None)) is None:
        return
    try:
        import matplotlib  # noqa: F401
    finally:
        os.environ["MPLBACKEND"] = backend
