"""Write the cards of the loops in tests/card/loops again, and the page docs/cards.md that shows them.

python scripts/cards.py              # all loops whose libraries are installed
python scripts/cards.py NAME ...     # these; the page is written from the stored cards in any case
python scripts/cards.py --check      # write nothing; exit 1 where a card or the page is stale, and say what changed
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="loops; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is stale")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)  # files on a card are relative to it
    from tests.card.golden_cards import LIBRARIES, PAGE, card_of, golden, loops, page

    stale = False
    for name in given.names or loops():
        if missing := [library for library in LIBRARIES.get(name, ()) if importlib.util.find_spec(library) is None]:
            print(f"{name}: left as it is, without {', '.join(missing)}")
            continue
        file = golden(name)
        stored = file.read_text(encoding="utf-8") if file.exists() else ""
        card = card_of(name)
        changes = card.changes(stored)
        stale |= bool(changes)
        print("\n".join([f"{name}: {'changed' if changes else 'unchanged'}", *changes]))
        if not given.check:
            file.write_text(f"{card}\n", encoding="utf-8")
    wanted = page()
    if PAGE.read_text(encoding="utf-8") != wanted:
        stale = True
        print(f"{'stale' if given.check else 'written'}: {PAGE.relative_to(ROOT)}")
        if not given.check:
            PAGE.write_text(wanted, encoding="utf-8")
    return int(stale and given.check)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
