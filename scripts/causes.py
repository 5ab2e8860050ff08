"""A table of the causes, from the code and the corpora: for each its loops, pairs, source, status and lines.

python scripts/causes.py [CHECK,...] [--public FILE]

"fault" and "advice" count the loops of the corpora on which it is stored as such (tests/verdicts.tsv). "lines" are the
lines of the check's folder, divided by the number of its causes. ``--public`` adds how a cause came up on public loops,
from a Markdown table: the first column is a check, the fifth its causes that came up as faults, the sixth those as
advice.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trainloop.core import registry  # noqa: E402
from scripts.verdicts import STORED, Stored  # noqa: E402
from tests.loops.corpus import PAIRS  # noqa: E402
from tests.losses.corpus import PAIRS as LOSS_PAIRS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="?", default="", help="separated by commas; default: all")
    parser.add_argument("--public", type=Path, help="a table of causes that were seen on public loops")
    given = parser.parse_args()
    chosen = set(given.checks.split(",")) if given.checks else set(registry.registered())
    if unknown := sorted(chosen - set(registry.registered())):
        raise SystemExit(f"{unknown[0]} is no check")
    levels, pairs, seen = stored(), Counter((p.check, p.cause) for p in (*PAIRS.values(), *LOSS_PAIRS.values())), {}
    if given.public:
        seen = public(given.public.read_text(encoding="utf-8"))
    print("check\tcause\tstatus\tsource\tpairs\tfault\tadvice\tlines\tpublic")
    for name, check in registry.registered().items():
        lines = lines_of(check) // len(check.causes)
        for slug, cause in check.causes.items() if name in chosen else ():
            counted = [pairs[name, slug], levels[name, slug, "fault"], levels[name, slug, "advice"], lines]
            known = seen.get((name, slug), "never") if given.public else "-"
            print(name, slug, cause.status, cause.source or "-", *counted, known, sep="\t")
    return 0


def stored() -> Counter[tuple[str, str, str]]:
    """By check, cause and level, the loops with such a stored verdict."""
    counted: Counter[tuple[str, str, str]] = Counter()
    if not STORED.exists():
        raise SystemExit("no verdicts are stored: run python scripts/verdicts.py run --store")
    for verdicts in Stored.parsed(STORED.read_text(encoding="utf-8")).loops.values():
        for check, verdict in verdicts.items():
            found = re.findall(r"(?<=; )(fault|advice) (\w+)", verdict)
            counted.update((check, cause, level) for level, cause in set(found))
    return counted


def lines_of(check: registry.Check) -> int:
    """Lines of the check's own folder."""
    folder = ROOT.joinpath(*check.module.split(".")[:-1])
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in folder.glob("*.py"))


def public(text: str) -> dict[tuple[str, str], str]:
    """By check and cause, how it came up on public loops."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            for column, level in ((4, "fault"), (5, "advice")):
                found |= {(cells[0].strip("`"), cause): level for cause in cells[column].split() if cause != "-"}
    return found


if __name__ == "__main__":
    raise SystemExit(main())
