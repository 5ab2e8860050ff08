"""``--trainloop-card``: the item, the closing section, the JSON, stored cards; with the real runner."""

from __future__ import annotations

import json

import pytest

from tests.helpers.plugin_sessions import HEAD, all_of_torch_is_loaded  # noqa: F401

LOOPS = (
    HEAD
    + """
    @pytest.mark.trainloop(only=["step_order", "finite"])
    def test_it(): return loop()

    @pytest.mark.trainloop(only=["step_order"])
    @pytest.mark.parametrize("width", [8])
    def test_wide(width): return loop(model=nn.Linear(4, 1))

    def test_by_hand(trainloop):
        assert "49 weights" in trainloop.card(loop)["model"]

    def test_other(): pass
"""
)

STORED = "trainloop_baselines/test_a/test_it.card.txt"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    pytester.makepyfile(test_a=LOOPS)

    def ran(*options: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", "--trainloop", *options)

    return ran


def cards(result: pytest.RunResult) -> dict[str, list[str]]:
    """The lines that are shown of each card."""
    found: dict[str, list[str]] = {}
    loop = ""
    for line in result.outlines:
        if line.startswith("---") and "card of" in line:
            loop = line.strip("- ").removeprefix("card of ")
            found[loop] = []
        elif line.startswith("==="):
            loop = ""
        elif loop:
            found[loop].append(line)
    return found


def test_each_loop_has_its_card_behind_the_closing_section(run, pytester):
    result = run("--trainloop-card")
    result.assert_outcomes(passed=5)  # three checks, two tests
    assert result.parseoutcomes()["cards"] == 2
    shown = cards(result)
    assert list(shown) == ["test_a.py::test_by_hand", "test_a.py::test_it", "test_a.py::test_wide[8]"]
    assert shown["test_a.py::test_it"][0].startswith("model       49 weights in 4 tensors")
    assert shown["test_a.py::test_it"][-2] == "decided     2 checks passed"
    assert shown["test_a.py::test_it"][-1].endswith(STORED)
    assert not (pytester.path / "trainloop_baselines").exists()


def test_the_card_is_an_item_of_its_own_and_no_check_is_renamed(run):
    plain = [line for line in run("--collect-only", "-q").outlines if "::" in line]
    carded = [line for line in run("--collect-only", "-q", "--trainloop-card").outlines if "::" in line]
    assert [line for line in carded if "card]" not in line] == plain
    assert [line for line in carded if "card]" in line] == ["test_a.py::test_it[card]", "test_a.py::test_wide[8-card]"]
    assert run("--trainloop-card", "test_a.py::test_it[card]").ret == 0


def test_a_stored_card_is_compared_and_only_written_when_asked_for(run, pytester):
    run("--trainloop-card", "--trainloop-update")
    stored = pytester.path / STORED
    text = stored.read_text(encoding="utf-8")
    assert text.startswith("model       49 weights")
    assert (pytester.path / "trainloop_baselines/test_a/test_wide[8].card.txt").exists()
    assert cards(run("--trainloop-card"))["test_a.py::test_it"] == [f"unchanged: {STORED}"]

    pytester.makepyfile(test_a=LOOPS.replace("lr=0.1", "lr=0.2").replace("import os", "\n    import os"))
    result = run("--trainloop-card")
    assert result.ret == 0
    shown = cards(result)["test_a.py::test_it"]
    assert any(line.startswith("-  group 0") and "rate 0.1" in line for line in shown)
    assert any(line.startswith("+  group 0") and "rate 0.2" in line for line in shown)
    assert shown[-1] == f"differs from {STORED}"
    assert stored.read_text(encoding="utf-8") == text

    assert cards(run("--trainloop-card", "--trainloop-update"))["test_a.py::test_it"][-1] == f"stored in {STORED}"
    assert "rate 0.2" in stored.read_text(encoding="utf-8")


def test_the_json_has_the_card_and_its_changes(run, pytester):
    run("--trainloop-card", "--trainloop-json=r.json")
    loops = json.loads((pytester.path / "r.json").read_text("utf-8"))["loops"]
    made = {loop["nodeid"]: loop["card"] for loop in loops}["test_a.py::test_it"]
    assert made["file"] == STORED
    assert made["changes"] is None
    assert made["lines"][0]["label"] == "model"
    assert made["lines"][0].keys() == {"label", "text", "where", "odd", "seen"}
    run("--trainloop-json=r.json")
    loops = json.loads((pytester.path / "r.json").read_text("utf-8"))["loops"]
    assert not any("card" in loop for loop in loops)


@pytest.mark.processes
def test_cards_and_pictures_come_from_the_workers_of_xdist(run, pytester):
    for needed in ("xdist", "jinja2", "matplotlib"):
        pytest.importorskip(needed)
    result = run("--trainloop-card", "--trainloop-report=r.html", "--trainloop-json=r.json", "-n", "2")
    assert set(cards(result)) == {"test_a.py::test_by_hand", "test_a.py::test_it", "test_a.py::test_wide[8]"}
    loops = json.loads((pytester.path / "r.json").read_text("utf-8"))["loops"]
    drawn = {loop["nodeid"] for loop in loops if loop.get("pictures")}
    assert drawn == {"test_a.py::test_it", "test_a.py::test_wide[8]"}


def test_the_card_comes_last_whoever_orders_the_items(run, pytester):
    pytester.makeconftest("def pytest_collection_modifyitems(items): items.reverse()")
    names = [line for line in run("--collect-only", "-q", "--trainloop-card").outlines if "test_it[" in line]
    assert names[-1] == "test_a.py::test_it[card]"


def test_a_loop_that_is_refused_has_a_card_that_says_so(run, pytester):
    pytester.makepyfile(test_a=HEAD + "    @pytest.mark.trainloop\n    def test_it(): return 3\n")
    result = run("--trainloop-card", "--trainloop-only=finite")
    result.assert_outcomes(failed=1)
    assert cards(result)["test_a.py::test_it"][0].startswith("run         none seen: ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--trainloop-update",), "*--trainloop-update records the baselines of loops that are run*"),
        (("--trainloop-card",), "*--trainloop-card takes the cards of loops that are run*"),
    ],
)
def test_an_option_without_the_one_it_needs_is_an_error(pytester, options, sentence):
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([sentence])
