"""Write the cards of the loops in tests/card/loops anew: ``python scripts/cards.py [NAME ...]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from tests.card.golden_cards import card_of, golden, loops  # noqa: E402


def main(names: list[str]) -> None:
    for name in names or loops():
        file = golden(name)
        stored = file.read_text(encoding="utf-8") if file.exists() else ""
        card = card_of(name)
        file.write_text(f"{card}\n", encoding="utf-8")
        sys.stdout.write("\n".join([f"{name}:", *card.changes(stored), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
