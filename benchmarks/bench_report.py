"""The HTML report of 50 loops with their cards and pictures: size, time to make it, and time until a browser shows it.

Figures are medians: milliseconds from the start of the navigation to ``DOMContentLoaded``, the first paint and the end
of loading, of a page on disk in a new tab of Chromium; processor time for making the page.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.views.htmlreport import page
from tests.htmlreport.conftest import browser  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPS = 50
ROUNDS = 9
BOUND = 1000.0

STORED = os.environ.get("TRAINLOOP_REPORT", "")
"""A JSON report to take the loops from, repeated up to 50: that of examples/ has all pictures. Else the tests' own."""

TIMES = """() => {
    const at = performance.getEntriesByType('navigation')[0];
    const paint = performance.getEntriesByName('first-contentful-paint')[0];
    return [at.domContentLoadedEventEnd, paint ? paint.startTime : NaN, at.loadEventEnd];
}"""


def document() -> dict[str, Any]:
    if STORED:
        data = json.loads(Path(STORED).read_text(encoding="utf-8"))
    else:
        from tests.htmlreport import documents

        data = documents.usual()
    loops = []
    for number in range(LOOPS):
        loop = copy.deepcopy(data["loops"][number % len(data["loops"])])
        loop["nodeid"] += f"[{number}]"
        loops.append(loop)
    return {**data, "loops": loops}


def test_a_page_of_50_loops(
    benchmark: Any,
    tmp_path: Path,
    browser: Any,  # noqa: F811
    figures: Callable[..., None],
) -> None:
    data = document()
    page(data, folders=(tmp_path,))  # matplotlib is imported and its fonts are read
    began = time.process_time()
    text = page(data, folders=(tmp_path,))
    making = time.process_time() - began
    file = tmp_path / "report.html"
    file.write_text(text, encoding="utf-8")
    taken: list[list[float]] = []

    def load() -> None:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        shown = context.new_page()
        shown.goto(file.as_uri())
        shown.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        taken.append(shown.evaluate(TIMES))
        context.close()

    benchmark.pedantic(load, rounds=ROUNDS)
    parsed, painted, loaded = (statistics.median(column) for column in zip(*taken, strict=True))
    drawings = text.count("<svg")
    figures(
        f"report of {LOOPS} loops, {drawings} drawings, {len(text) / 1e6:.1f} MB: DOMContentLoaded {parsed:.0f} ms, "
        f"first paint {painted:.0f} ms, loaded {loaded:.0f} ms (bound {BOUND:g} ms); made in {making:.1f} s",
        parsed_ms=parsed,
        painted_ms=painted,
        loaded_ms=loaded,
        making_s=making,
    )
