from __future__ import annotations

import warnings

import pytest

from tests.card.golden_cards import LIBRARIES, PAGE, ROOT, SHOWN, card_of, golden, loops, page

QUICK = {"finetune"}
"""Judged by default: it has groups, a clip, a schedule and a checkpoint, and takes a second."""


def cases():
    for name in loops():
        marks = [pytest.mark.integration] if name in LIBRARIES else [] if name in QUICK else [pytest.mark.corpus]
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(cases()))
def test_the_card_of_a_loop_is_the_stored_one(name, monkeypatch):
    for library in LIBRARIES.get(name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of lightning about torch
        card = card_of(name)
    stored = golden(name).read_text(encoding="utf-8")
    assert not card.changes(stored), "python scripts/cards.py writes it again"
    if name not in LIBRARIES:
        assert str(card) == stored.rstrip("\n"), "only line numbers differ: python scripts/cards.py"


def test_every_stored_card_has_its_loop():
    assert sorted(file.name.removesuffix(".card.txt") for file in golden("x").parent.iterdir()) == loops()


def test_the_page_shows_the_stored_cards():
    assert set(SHOWN) <= set(loops())
    assert PAGE.read_text(encoding="utf-8") == page(), "python scripts/cards.py"


def test_the_card_in_the_docs_is_the_stored_one():
    page = (ROOT / "docs" / "card.md").read_text(encoding="utf-8")
    assert f"```text\n{golden('cnn').read_text(encoding='utf-8')}```" in page
