"""The page asks nothing of a network, and its text can be read against what is behind it."""

from __future__ import annotations

import re
from importlib import resources

import pytest

TEMPLATES = resources.files("pytest_trainloop.views.htmlreport") / "templates"
STYLE = (TEMPLATES / "style.css").read_text(encoding="utf-8")
COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#[\da-f]{6}), (#[\da-f]{6})\)", STYLE)
}
BACKGROUNDS = ("page", "box", "raised")
TEXT = ("text", "muted", "link", "bad", "warn", "good")
CODE = ("keyword", "string", "number", "name", "text", "muted", "bad")


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: str, behind: str, scheme: int) -> float:
    one, other = sorted((luminance(COLOURS[front][scheme]), luminance(COLOURS[behind][scheme])), reverse=True)
    return (one + 0.05) / (other + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_of_small_text(scheme):
    pairs = [(front, behind) for front in TEXT for behind in BACKGROUNDS]
    pairs += [(front, behind) for front in CODE for behind in ("box", "bad-box")]
    pairs += [(tone, f"{tone}-box") for tone in ("bad", "warn", "good")]
    pairs += [("text", f"{tone}-box") for tone in ("bad", "warn", "good")] + [("muted", "warn-box")]
    low = {pair: round(ratio, 2) for pair in pairs if (ratio := contrast(*pair, scheme)) < 4.5}
    assert low == {}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_lines_of_drawings_stand_out_as_wcag_asks_of_graphics(scheme):
    lines = [name for name in COLOURS if name.startswith("series-")] + ["own", "reference", "bad"]
    low = {name: round(ratio, 2) for name in lines if (ratio := contrast(name, "box", scheme)) < 3}
    assert low == {}


def test_every_colour_that_is_named_is_there():
    for file in ("style.css", "page.html", "macros.html"):
        text = (TEMPLATES / file).read_text(encoding="utf-8")
        named = set(re.findall(r"var\(--([\w-]+)[,)]", text))
        assert named - {*COLOURS, "mono", "tone", "tone-box", "tint"} == set()


def test_it_loads_nothing_from_anywhere(usual):
    assert re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*", usual) == []
    assert "@import" not in usual
    assert "url(" not in re.sub(r"url\(#", "", usual)


def test_the_same_report_gives_the_same_page(usual, source):
    from pytest_trainloop.views.htmlreport import page
    from tests.htmlreport import documents

    assert page(documents.usual(), folders=(source,)) == usual
