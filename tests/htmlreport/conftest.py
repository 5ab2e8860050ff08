from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.views.htmlreport import page
from tests.helpers.report_data import TRAIN
from tests.htmlreport import documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Playwright's own Chromium, or else one of the system; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium
        found = next((path for name in NAMES if (path := shutil.which(name))), None)
        own = Path(chromium.executable_path).exists()
        if not own and found is None:
            pytest.skip("no Chromium here: playwright install chromium")
        launched = chromium.launch(executable_path=None if own else found, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the project's train.py."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def usual(source: Path) -> str:
    """The page of a report that has everything."""
    return page(documents.usual(), folders=(source,))


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Open a page from disk; what it says in the console, asks of the network or throws fails the test."""
    contexts = []
    heard: list[str] = []

    def open_page(text: str, *, width: int = 1280, anchor: str = "", **options: Any) -> Any:
        file = tmp_path_factory.mktemp("report") / "report.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: heard.append(f"console: {message.text}"))
        shown.on("pageerror", lambda error: heard.append(f"error: {error}"))
        shown.on("dialog", lambda dialog: (heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        shown.on("request", lambda request: heard.append(f"request: {request.url[:100]}"))
        shown.goto(file.as_uri() + anchor)
        assert heard.pop(0).startswith("request: file://"), "its own file"
        return shown

    open_page.heard = heard  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    real = [said for said in heard if not said.startswith("request: data:")]
    assert real == []
