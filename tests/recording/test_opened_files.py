"""Files opened for writing are told to whoever listens, by one audit hook however many listen."""

from __future__ import annotations

import sys

from pytest_trainloop.recording import opened_files


def test_what_is_written_is_told_until_the_end(tmp_path):
    told = []
    opened_files.listen(told.append)
    (tmp_path / "a").write_text("1", encoding="utf-8")
    (tmp_path / "a").read_text(encoding="utf-8")
    opened_files.stop(told.append)
    (tmp_path / "b").write_text("1", encoding="utf-8")
    assert [path for path in told if str(tmp_path) in str(path)] == [str(tmp_path / "a")]


def test_a_process_has_one_hook(monkeypatch):
    opened_files.listen(str)
    added = []
    monkeypatch.setattr(sys, "addaudithook", added.append)
    opened_files.listen(str)
    opened_files.stop(str)
    opened_files.stop(str)
    opened_files.stop(str)
    assert added == []
