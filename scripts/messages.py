"""Write the failure texts of the corpus to a folder, one file a pair: to read them as someone who cannot see the code.

python scripts/messages.py FOLDER                    # one pair a cause, each under its own check
python scripts/messages.py FOLDER --all              # every pair
python scripts/messages.py FOLDER --whole            # each under the whole battery, with the closing section
python scripts/messages.py FOLDER -k step_order      # pairs whose check, cause or name contains the text

Each file has the name of its pair, and holds no source but what the failure itself quotes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.core import registry
from pytest_trainloop.core.report.text import failure_texts, finding_text
from pytest_trainloop.frontends.api import check_loop
from tests.helpers.every_pair import quick
from tests.loops.corpus import PAIRS

if TYPE_CHECKING:
    from collections.abc import Iterator


def texts(pair: Any, *, whole: bool) -> Iterator[str]:
    """What a user reads of this pair's faulty loop."""
    report = check_loop(pair.faulty, only=None if whole else [pair.check], raises=False)
    proofs = {name: check.proofs for name, check in registry.registered().items()}
    failed = [r for r in report.results if r.outcome in ("failed", "error")]
    if failed:
        yield failure_texts(failed, proofs)
    for result in report.results:
        yield from (f"advice\n{finding_text(advice, proofs[result.check])}" for advice in result.advice)
    if whole:
        yield str(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="", help="part of a check, a cause or a name")
    parser.add_argument("--all", action="store_true", help="every pair, and not one a cause")
    parser.add_argument("--whole", action="store_true", help="under all checks")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    chosen = set(PAIRS) if given.all else quick(PAIRS)
    for name, pair in PAIRS.items():
        label = f"{pair.check}.{pair.cause}.{name}"
        if name in chosen and given.k in label:
            text = "\n\n".join(texts(pair, whole=given.whole))
            (given.folder / f"{label}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
