"""The file of a baseline: written whole or not at all, and only where it is another one."""

from __future__ import annotations

import pytest

from pytest_trainloop import UsageError
from pytest_trainloop.declare.baseline_file import BaselineFile, write


def test_a_file_is_recorded_updated_and_left_alone(tmp_path):
    file = tmp_path / "new" / "folder" / "a.kept"
    assert write(file, "1\n") == "recorded"
    assert write(file, "2\n") == "updated"
    before = file.stat().st_mtime_ns
    assert write(file, "2\n") == "unchanged"
    assert file.stat().st_mtime_ns == before
    assert [path.name for path in file.parent.iterdir()] == ["a.kept"]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "a.kept").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"the baseline a\.kept cannot be read: it is no text in UTF-8; restore it"):
        BaselineFile(path=tmp_path / "a.kept", shown="a.kept").read()


@pytest.mark.parametrize(
    ("mode", "there", "records"),
    [("check", False, False), ("update", True, True), ("new", True, False), ("new", False, True)],
)
def test_when_it_is_recorded(tmp_path, mode, there, records):
    file = tmp_path / "a.kept"
    if there:
        file.touch()
    assert BaselineFile(path=file, shown="a.kept", mode=mode).is_to_be_recorded is records
