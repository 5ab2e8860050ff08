"""What ``check_loop`` says of a baseline= or update= that cannot be: one sentence, before any loop runs."""

from __future__ import annotations

import pytest

from pytest_trainloop import UsageError, check_loop


def make():
    raise AssertionError("no loop is built")


BAD = {
    "update without a file": ({"update": True}, "check_loop got update= without baseline=, the file to write"),
    "another update": ({"update": "all", "baseline": "a.x"}, "update='all'; True, False or \"new\" is needed"),
    "no path": ({"baseline": 3}, "check_loop got baseline=an int; the path of a file is needed"),
    "a folder": ({"baseline": "."}, "baseline='.', a folder; the path of a file is needed"),
    "nothing": ({"baseline": ""}, "baseline='', a folder; the path of a file is needed"),
    "the check left out": (
        {"baseline": "a.x", "update": True, "only": ["finite"]},
        "check_loop got update=, and only= or skip= leaves out the check baseline, which records",
    ),
    "the check skipped": (
        {"baseline": "a.x", "update": "new", "skip": {"baseline": "why"}},
        "check_loop got update=, and only= or skip= leaves out the check baseline, which records",
    ),
    "a damaged file": ({"baseline": "damaged.x"}, "the baseline damaged.x is damaged: it is no JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_it_is_refused_in_one_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.x").write_text("{", encoding="utf-8")
    given, sentence = BAD[case]
    with pytest.raises(UsageError) as raised:
        check_loop(make, **given)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
