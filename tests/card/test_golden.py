from __future__ import annotations

import pytest

from tests.card.golden_cards import ROOT, card_of, golden, loops


@pytest.mark.parametrize("name", loops())
def test_the_card_of_a_loop_is_the_stored_one(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    card = card_of(name)
    stored = golden(name).read_text(encoding="utf-8")
    assert not card.changes(stored), "python scripts/cards.py writes it anew"
    assert str(card) == stored.rstrip("\n"), "only line numbers differ: python scripts/cards.py"


def test_every_stored_card_has_its_loop():
    assert sorted(file.name.removesuffix(".card.txt") for file in golden("x").parent.iterdir()) == loops()
