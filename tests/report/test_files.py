"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from pytest_trainloop.core.report.files import refusal, write


def test_folders_are_made_and_an_old_file_is_replaced(tmp_path):
    file = tmp_path / "a" / "b" / "out.json"
    write(file, "one\n")
    file.chmod(0o640)
    write(file, "two\n")
    assert file.read_bytes() == b"two\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["out.json"]


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path):
    write(tmp_path / "ours", "")
    (tmp_path / "plain").write_text("", encoding="utf-8")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target").write_text("old", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text(encoding="utf-8") == "new"


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text(encoding="utf-8")))
    reader.start()
    write(tmp_path / "pipe", "told")
    reader.join()
    assert read == ["told"]
    assert (tmp_path / "pipe").is_fifo()


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path):
    write(tmp_path / "out", "caf\udce9")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "caf\\udce9"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "out", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text(encoding="utf-8") == "old"


def test_where_nothing_can_be_written_a_sentence_says_so(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert refusal(tmp_path) == "a folder; a file to write is needed"
    assert refusal(tmp_path / "file" / "out.json") == "inside of file, which is a file; a folder is needed there"
    assert refusal(tmp_path / "new" / "out.json") == ""
    assert refusal(tmp_path / "file") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc")
def test_a_folder_in_which_nobody_makes_files():
    assert refusal(Path("/proc/out.json")) == "a place that must not be written to"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_must_not_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert refusal(tmp_path / "out.json") == "a place that must not be written to"
    tmp_path.chmod(0o700)
