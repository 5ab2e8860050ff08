"""Texts that users see have none of the words at which readers stopped who could not see the code."""

from __future__ import annotations

import ast
from pathlib import Path

from pytest_trainloop.core import registry
from tests.helpers.findings import STOPPING_WORDS

PACKAGE = Path(registry.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_no_text_of_the_package_has_a_word_that_stops_a_reader():
    read = {file: (PACKAGE / file).read_text(encoding="utf-8") for file in FILES}
    found = [
        (file, text)
        for file, source in read.items()
        if STOPPING_WORDS.search(source)
        for text in texts(ast.parse(source))
        if STOPPING_WORDS.search(text) and " " in text
    ]
    assert found == []


def texts(tree: ast.Module) -> list[str]:
    """Every string of a module that is no docstring; of an f-string the parts between its fields."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in strings if id(node) not in docstrings]


def test_what_a_cause_says_of_itself_is_plain_too():
    for check in registry.registered().values():
        for slug, cause in check.causes.items():
            assert not STOPPING_WORDS.search(f"{cause.proof}\n{cause.repair}\n{cause.do_not}"), f"{check.name}:{slug}"
