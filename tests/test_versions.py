"""One truth about versions: pyproject.toml, the workflows and the documentation name the same ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CI = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
MATRIX = re.findall(r'{ python: "([\d.]+)", torch: "([\d.]+)" }', CI)


def by_number(versions):
    return sorted(set(versions), key=lambda version: [int(part) for part in version.split(".")])


TORCH = by_number(torch for _, torch in MATRIX)
PYTHON = by_number(python for python, _ in MATRIX)


def test_ci_begins_with_the_least_versions_of_the_package():
    assert f'"torch>={TORCH[0]}"' in PROJECT
    assert f'requires-python = ">={PYTHON[0]}"' in PROJECT
    assert (PYTHON[0], TORCH[0]) in MATRIX


def test_ci_runs_on_every_python_that_the_package_names():
    assert re.findall(r"Python :: (3\.\d+)", PROJECT) == PYTHON


def test_developers_have_one_of_the_two_newest_torches_of_ci():
    assert any(f'"torch=={torch}.' in PROJECT for torch in TORCH[-2:])


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "Python {python} or later, torch {least} or later; tested with torch {tested}."),
        ("docs/index.md", "Python {python} or later, torch {least} or later; tested with torch {tested}."),
        ("docs/contributing/torch-versions.md", "torch {least} (`pyproject.toml`). Tested: {tested}."),
    ],
)
def test_the_documentation_names_the_versions_of_ci(page, words):
    tested = f"{', '.join(TORCH[:-1])} and {TORCH[-1]}"
    text = (ROOT / page).read_text(encoding="utf-8")
    assert words.format(python=PYTHON[0], least=TORCH[0], tested=tested) in text
