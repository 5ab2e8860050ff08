"""Small things of the page that need no browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pytest_trainloop.views.htmlreport import page
from pytest_trainloop.views.htmlreport.breaks import breakable
from tests.htmlreport import documents


@pytest.fixture
def shown(source):
    return lambda loop, results: page(documents.report({loop: results}, card=None, pictures=()), folders=(source,))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("test_train.py::test_it", "test_train.py::<wbr>test_it"),
        (
            "project/unit/models/test_train.py::test_it",
            "project/<wbr>unit/<wbr>models/<wbr>test_train.py::<wbr>test_it",
        ),
        ("test_with_a_very_long_name_indeed", "test_<wbr>with_<wbr>a_<wbr>very_<wbr>long_<wbr>name_<wbr>indeed"),
        ("test_a.py::test_it[<a_b>&amp;_c]", "test_a.py::<wbr>test_<wbr>it[&lt;a_<wbr>b&gt;&amp;amp;_c]"),
    ],
)
def test_long_names_may_be_broken_where_they_are_joined(name, broken):
    assert str(breakable(name)) == broken


def test_captions_say_that_they_tell_the_healthy_case(usual):
    assert "<strong>Healthy:</strong> rows are alike. 2 of 2 tensors." in usual


def test_a_tensor_that_does_not_move_is_told_below_the_ramp(source):
    colour = replace(documents.UPDATES.colour, zero="did not move")
    data = documents.report({"test_a": documents.PASSING}, pictures=(replace(documents.UPDATES, colour=colour),))
    assert '<i class="zero"></i><span>did not move</span>' in page(data, folders=(source,))


def test_a_change_of_the_card_is_shown_as_a_difference(source):
    text = page(documents.report({"test_a": documents.PASSING}, changes=["-old", "+new", " same"]), folders=(source,))
    assert '<span class="removed">-old</span>' in text
    assert '<span class="added">+new</span>' in text


def test_a_script_that_was_watched_is_not_told_to_be_run_by_pytest(shown):
    assert "again:" not in shown("train.py", documents.FAILING)
    assert "pytest --trainloop &#39;test_a.py::test_it[step_order]&#39;" in shown(
        "test_a.py::test_it", documents.FAILING
    )


def test_colours_of_a_terminal_are_left_out_of_tracebacks(shown):
    error = documents.UserError(stage="fit", summary="\x1b[31mValueError\x1b[0m", traceback="\x1b[1;33mFile\x1b[0m")
    text = shown("test_a", (documents.Result(check="finite", outcome="error", error=error),))
    assert "\x1b" not in text
    assert "fit raised ValueError" in text


def test_a_picture_that_cannot_be_drawn_costs_the_page_only_that_picture(source):
    data = documents.report({"test_a": documents.PASSING})
    data["loops"][0]["pictures"][1]["kind"] = "<pie>"
    text = page(data, folders=(source,))
    assert "This could not be drawn; KeyError: &#39;&lt;pie&gt;&#39;; please report it." in text
    assert text.count("<svg") == 3


@pytest.mark.processes
def test_the_backend_of_a_notebook_is_not_asked_for(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(documents.usual()), encoding="utf-8")
    command = [sys.executable, "-m", "pytest_trainloop.views.htmlreport", str(file)]
    subprocess.run(command, env={**os.environ, "MPLBACKEND": "module://of_a_notebook"}, check=True)
    assert "could not be drawn" not in (tmp_path / "report.html").read_text(encoding="utf-8")
