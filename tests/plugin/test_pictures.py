"""``--trainloop-report`` and what it draws from: the item, the JSON, JUnit XML; with the real runner."""

from __future__ import annotations

import json

import pytest

from tests.helpers.plugin_sessions import HEAD, all_of_torch_is_loaded  # noqa: F401

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

LOOPS = (
    HEAD
    + """
    @pytest.mark.trainloop(only=["step_order", "finite"])
    def test_it(): return loop()

    @pytest.mark.trainloop(only=["step_order"])
    def test_refused(): return 3
"""
)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    pytester.makepyfile(test_a=LOOPS)

    def ran(*options: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", "--trainloop", *options)

    return ran


def loops(pytester) -> dict[str, dict]:
    found = json.loads((pytester.path / "r.json").read_text("utf-8"))["loops"]
    return {loop["nodeid"].partition("::")[2]: loop for loop in found}


def test_the_json_has_pictures_and_cards_and_the_terminal_shows_no_card(run, pytester):
    result = run("--trainloop-report=r.html", "--trainloop-json=r.json", "--junit-xml=r.xml")
    result.assert_outcomes(passed=2, failed=1)  # two checks, a usage error; two cards
    assert not any("card of" in line for line in result.outlines)
    made = loops(pytester)
    keys = [picture["key"] for picture in made["test_it"]["pictures"]]
    assert keys == ["one_step", "loss", "gradient_norm", "updates", "outputs", "gradients", "weights"]
    assert made["test_it"]["pictures"][0]["calls"][0]["where"].startswith("test_a.py:")
    assert made["test_it"]["card"]["lines"][0]["label"] == "model"
    assert made["test_refused"]["pictures"] == []
    assert "pictures" not in (pytester.path / "r.xml").read_text("utf-8")
    assert not (pytester.path / "trainloop_baselines").exists()


def test_nothing_is_drawn_without_a_report(run, pytester):
    run("--trainloop-card", "--trainloop-json=r.json")
    assert not any("pictures" in loop for loop in loops(pytester).values())


def test_a_mistake_in_a_picture_is_a_warning_and_the_session_goes_on(run, pytester, monkeypatch):
    def broken(_facts, _looked):
        raise RuntimeError("a mistake")
        yield

    monkeypatch.setattr("pytest_trainloop.views.pictures.make.KINDS", (broken,))
    result = run("--trainloop-report=r.html", "--trainloop-json=r.json", "-k", "test_it", "-W", "default")
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*a picture could not be made; RuntimeError: a mistake; please report it*"])
    made = loops(pytester)["test_it"]
    assert made["pictures"] == []
    assert made["card"]["lines"][0]["label"] == "model"
