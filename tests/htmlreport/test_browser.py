"""The page in a real browser: nothing in its console, no request, everything reachable at both widths."""

from __future__ import annotations

import itertools

import pytest

from pytest_trainloop.views.htmlreport import page
from tests.htmlreport import documents

pytestmark = pytest.mark.processes

WIDTHS = (375, 1280)


def silent(opened):
    return [said for said in opened.heard if not said.startswith("request: data:")] == []


def overflow(shown):
    return shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def shows(shown, anchor):
    """Whether the place is laid out and in the part of the page that is seen."""
    return shown.evaluate(
        """(id) => { const at = document.getElementById(id).getBoundingClientRect();
        return at.height > 0 && at.top < innerHeight && at.bottom > 0; }""",
        anchor,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_from_disk_without_a_request_and_fits_the_width(opened, usual, width, scheme):
    shown = opened(usual, width=width, color_scheme=scheme)
    assert shown.locator("h1").inner_text() == "1 of 2 training loops fails"
    assert overflow(shown) == 0
    shown.locator("#folds").click()
    assert shown.locator("main details:not([open])").count() == 0
    assert overflow(shown) == 0
    dark = shown.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (scheme == "dark")
    assert silent(opened)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_link_leads_to_a_place_that_is_then_seen(opened, usual, width):
    shown = opened(usual, width=width)
    shown.evaluate("document.getElementById('contents').open = true")
    links = shown.evaluate("[...document.querySelectorAll('a')].map(each => each.getAttribute('href'))")
    assert len(links) > 8
    for number, href in enumerate(links):
        assert href.startswith("#"), "nothing leads out of the file"
        shown.evaluate("(number) => document.querySelectorAll('a')[number].click()", number)
        assert shows(shown, href[1:]), href
    assert silent(opened)


def test_a_link_into_what_is_folded_unfolds_it(opened, usual):
    folded = "loop.test_train.py-test_wrong.schedule.rate_stuck"
    shown = opened(usual, anchor=f"#{folded}")
    assert shown.locator(f'[id="{folded}"]').get_attribute("open") is not None
    assert shows(shown, folded)


def test_every_fold_opens_and_closes_by_mouse_and_keyboard(opened, usual):
    shown = opened(usual)
    folds = shown.evaluate(
        """[...document.querySelectorAll('details')].map(fold => {
            const summary = fold.querySelector(':scope > summary'), states = [fold.open];
            for (const _ of [1, 2]) { summary.click(); states.push(fold.open); }
            return states;
        })"""
    )
    assert len(folds) > 10
    assert all(before is again is not between for before, between, again in folds)
    summary = shown.locator("main summary:visible").first
    before = summary.evaluate("each => each.parentElement.open")
    summary.focus()
    shown.keyboard.press("Enter")
    assert summary.evaluate("each => each.parentElement.open") is not before


def test_names_of_places_are_there_once_and_headings_go_down_by_one(opened, usual):
    shown = opened(usual)
    ids = shown.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    named = shown.evaluate(
        "[...document.querySelectorAll('[aria-labelledby]')].map(e => e.ariaLabelledByElements?.length)"
    )
    assert set(named) == {1}
    levels = shown.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    unlabelled = "[...document.querySelectorAll('[role=img]')].filter(each => !each.ariaLabel).length"
    assert shown.evaluate(unlabelled) == 0


def test_the_button_changes_the_colours_of_page_and_pictures(opened, usual):
    shown = opened(usual, color_scheme="light")
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.plot text')).fill]"
    )
    before = shown.evaluate(colours)
    assert shown.locator("#theme").inner_text() == "Dark"
    shown.locator("#theme").click()
    after = shown.evaluate(colours)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert shown.locator("#theme").inner_text() == "Light"


def test_words_choose_the_loops_that_have_them(opened, usual):
    shown = opened(usual)
    shown.locator("#search").fill("wrong  ZERO_GRAD")
    assert shown.locator("main > .loop:visible").count() == 1
    assert shown.locator(".contents li a:visible").count() == 1
    assert shown.locator("#found").inner_text() == "1 found"
    shown.locator("#search").fill("no such word")
    assert shown.locator("#none").is_visible()
    shown.locator("#search").fill("")
    assert shown.locator("main > .loop:visible").count() == 2


def test_it_can_be_read_without_scripts(opened, usual):
    shown = opened(usual, java_script_enabled=False)
    assert shown.locator("[data-script]:visible").count() == 0
    assert shown.get_by_text("a step uses the gradients of the step before").first.is_visible()


HOSTILE = (
    "<script>alert(1)</script> \"><img src=x onerror=alert(2)> '</style></script><svg onload=alert(3)> "
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; javascript:alert(4)"
)


def poisoned(value, text):
    """The same data with other text in every string that is the user's."""
    if isinstance(value, dict):
        fixed = {"kind", "role", "scale", "level", "outcome", "axis", "check", "version", "$schema", "key"}
        return {name: each if name in fixed else poisoned(each, text) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, text) for each in value]
    return text if isinstance(value, str) and value else value


def test_whatever_text_it_is_given_stays_text(opened, tmp_path):
    code = f'x = """{HOSTILE}"""'
    name = "<script>alert(5)<script>.py"
    (tmp_path / name).write_text(f"{code}\n", encoding="utf-8")
    data = poisoned(documents.usual(), HOSTILE)
    data["loops"][1]["checks"][0]["findings"][0]["where"] = f"{name}:1   {code}"
    shown = opened(page(data, folders=(tmp_path,)))
    shown.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    count = "(what) => document.querySelectorAll(what).length"
    assert shown.evaluate(count, "script") == 1
    assert shown.evaluate(count, "img, iframe, object, embed, form, b") == 0
    assert shown.evaluate(count, "svg") == 8, "the drawings, and no other"
    names = "[...new Set([...document.querySelectorAll('*')].flatMap(each => each.getAttributeNames()))]"
    assert [attribute for attribute in shown.evaluate(names) if attribute.startswith("on")] == []
    assert shown.locator(".source .code").first.inner_text().strip() == code
    assert shown.locator(".source figcaption").first.inner_text() == name
    assert HOSTILE in shown.locator(".block .summary").first.inner_text()
    assert silent(opened)


def test_long_names_and_lines_do_not_widen_it(opened, tmp_path):
    long = "a" * 300
    (tmp_path / "train.py").write_text(f"{long}\n", encoding="utf-8")
    data = poisoned(documents.usual(), long)
    data["loops"][1]["checks"][0]["findings"][0]["where"] = f"train.py:1   {long}"
    shown = opened(page(data, folders=(tmp_path,)))
    shown.locator("#folds").click()
    for width in WIDTHS:
        shown.set_viewport_size({"width": width, "height": 900})
        assert overflow(shown) == 0
