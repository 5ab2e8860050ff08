"""Lines that messages name, and their files."""

from __future__ import annotations

import pytest

from pytest_trainloop.core.report.lines import Line, Places, repository


@pytest.fixture
def project(tmp_path):
    """A repository with a project below its root, in whose tests pytest is called."""
    (tmp_path / ".git").mkdir()
    for name in ("ml/src/train.py", "ml/checks/test_train.py", "other/train.py", ".venv/lib/site-packages/train.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"import torch\n\n    loss.backward()  # {name}\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train.py:57   loss.backward()", Line("train.py", 57, "loss.backward()")),
        ("src/a b/train.py:5", Line("src/a b/train.py", 5)),
        (r"C:\work\train.py:5   x", Line(r"C:\work\train.py", 5, "x")),
        ("train.py:3   a[1:2]\ntrain.py:9   b", Line("train.py", 3, "a[1:2]")),
        ("", None),
        ("in the loader", None),
        ("train.py:0   x", None),
    ],
)
def test_a_line_is_read(text, line):
    assert Line.read(text) == line


def test_a_path_is_looked_for_where_pytest_was_called_then_at_the_roots(project):
    places = Places(project / "ml" / "checks", project / "ml")
    assert places.root == project
    for text, file in (
        ("test_train.py:3", "ml/checks/test_train.py"),
        ("src/train.py:3", "ml/src/train.py"),
        ("other/train.py:3", "other/train.py"),
    ):
        assert places.at(Line.read(text)).file == file
    assert places.at(Line("gone.py", 3)) is None
    assert places.at(None) is None


def test_of_files_with_one_name_the_line_tells_which(project):
    places = Places(project / "ml" / "checks")
    at = places.at(Line("train.py", 3, "loss.backward()  # ml/src/train.py"))
    assert (at.file, at.number, at.source) == ("ml/src/train.py", 3, "    loss.backward()  # ml/src/train.py")
    assert places.at(Line("train.py", 3, "loss.backward()  # other/train.py")).file == "other/train.py"


def test_a_line_that_its_file_has_no_more_keeps_the_text_of_the_message(project):
    assert Places(project).at(Line("other/train.py", 99, "step()")).source == "step()"


def test_without_a_repository_the_workspace_of_the_job_is_the_root(tmp_path, monkeypatch):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    if repository(tmp_path) != tmp_path:
        pytest.skip("the folder for temporary files lies in a repository")
    assert repository(below) == below
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert repository(below) == tmp_path
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    assert repository(below) == below
