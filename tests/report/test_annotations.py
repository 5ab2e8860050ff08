"""The commands that GitHub's runner reads, line by line."""

from __future__ import annotations

import re

import pytest

from pytest_trainloop.core.report.annotations import commands
from tests.helpers.report_data import plain, raised, report, result, stale


def read(command: str) -> tuple[str, dict[str, str], str]:
    """A command as the runner reads it."""
    name, properties, data = re.fullmatch(r"::(\w+) (.*?)::(.*)", command).groups()
    pairs = (pair.split("=", 1) for pair in properties.split(",") if pair)

    def plain_again(text: str, *more: tuple[str, str]) -> str:
        for escaped, mark in (("%0D", "\r"), ("%0A", "\n"), *more, ("%25", "%")):
            text = text.replace(escaped, mark)
        return text

    return name, {key: plain_again(value, ("%3A", ":"), ("%2C", ",")) for key, value in pairs}, plain_again(data)


@pytest.mark.parametrize("text", ["100 % :: of, a\r\nb", "::error::no", "%0A is no line", "x\n::set-output name=a::b"])
def test_whatever_a_message_says_is_one_line_and_no_command(told, text):
    finding = plain("finite", "a", summary=text, measured=text)
    (command,) = commands(told(report({f"t::{text}": [result(finding)]})))
    assert len(command.splitlines()) == 1
    assert text in read(command)[2]


def test_a_file_with_odd_characters_keeps_its_name(told, project):
    (project / "a,b:c%.py").write_text("x\n", encoding="utf-8")
    (command,) = commands(told(report({"t::a": [result(stale(change="a,b:c%.py:1   x"))]})))
    assert read(command)[1]["file"] == "a,b:c%.py"


def test_advice_is_a_warning_and_a_note_says_nothing(told):
    found = [
        result(plain("finite", "a", level="note"), plain("finite", "b", level="advice")),
        raised(),
        result(stale()),
    ]
    all_of_them = report({"t::a": found})
    assert [read(c)[0] for c in commands(told(all_of_them))] == ["error", "error", "warning"]
    assert [read(c)[0] for c in commands(told(all_of_them), errors=False)] == ["warning"]


def test_what_the_project_knows_of_is_not_annotated(told):
    assert list(commands(told(report({"t::a": [result(stale(), outcome="xfailed", reason="issue 12")]})))) == []


def test_a_loop_without_a_file_is_told_without_one(told):
    (command,) = commands(told(report({"by hand": [result(plain("finite", "a"))]}, at="")))
    assert read(command)[1] == {"title": "finite:a"}


def test_a_long_message_is_cut(told):
    (command,) = commands(told(report({"t::a": [result(stale(measured="x" * 10_000))]})))
    assert len(command) < 6000
    assert command.endswith("loop: t::a")
