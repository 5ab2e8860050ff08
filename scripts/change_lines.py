"""Whether the line that a finding says to change is the line that its repaired twin changes.

python scripts/change_lines.py [-k TEXT] [--only CHECK,...] [--share I/N] [--minutes M] [--show] [--store]
python scripts/change_lines.py --folder FOLDER REPORT.json [--show]

The faulty loop of each pair is judged by the pair's own check. Its ``change`` is *right* where it is a line of the
edit: a line that only the faulty source has, or the statement before, after or around what only the repaired one has.
An inserted statement may be anywhere in its block up to one that uses its names, or that trains, steps or zeroes.
Both loops of a pair are mostly one function that got other values, so the edit is every statement that uses such a
value, up to the function that it is passed to. Where the twins share no source, the pair is not measured.
``--folder`` reads files ``*_bad.py`` with ``*_good.py`` next to them and a report of ``--trainloop-json``.
``--store`` keeps the counts by check for the table of docs/contributing/change-lines.md.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import sys
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.edited_lines import Edit  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from scripts.edited_lines import Line

KEPT = ROOT / "scripts" / "change_lines.json"
KINDS = ("right", "wrong", "missing", "not measured")


def place(text: str) -> tuple[str, int]:
    """File and line of a ``file:line   source``."""
    file, _, number = text.partition("   ")[0].rpartition(":")
    return file, int(number) if number.isdigit() else 0


def judged(findings: Iterable[Any], edit: set[Line], root: Path) -> tuple[str, str]:
    """Of the findings of one cause the best line, and the line."""
    found = []
    for finding in findings:
        file, number = place(finding["change"])
        if not finding["change"]:
            found.append(("missing", ""))
        elif not edit:
            found.append(("not measured", finding["change"]))
        else:
            hit = any(n == number and (Path(f) == root / file or Path(f).name == file) for f, n in edit)
            found.append(("right" if hit else "wrong", finding["change"]))
    return min(found, key=lambda one: KINDS.index(one[0]), default=("", ""))


def of_pairs(given: argparse.Namespace) -> Iterator[tuple[str, str, str, str, bool, str]]:
    """Of each pair: its check, cause and name, whether the line is right, whether a repair was tried, and the line."""
    import torch

    from pytest_trainloop import check_loss
    from tests.loops.corpus import PAIRS
    from tests.loops.corpus import judged as judge
    from tests.losses.corpus import PAIRS as LOSSES

    torch.set_num_threads(1)
    began = time.monotonic()
    index, count = map(int, given.share.split("/"))

    def asked(name: str, check: str) -> bool:
        chosen = not given.only or check in given.only.split(",")
        return chosen and given.k in name and zlib.crc32(name.encode()) % count == index

    jobs: list[tuple[Any, Callable[[], Any], tuple[Any, Any]]] = [
        (p, lambda p=p: judge(p, p.faulty, only=[p.check]), (p.faulty, p.fixed))
        for p in PAIRS.values()
        if asked(p.name, p.check)
    ]
    jobs += [
        (p, lambda p=p: check_loss(p.faulty, only=[p.check], raises=False), (p.faulty.criterion, p.fixed.criterion))
        for p in LOSSES.values()
        if asked(p.name, p.check)
    ]
    for pair, run, twins in jobs:
        if given.minutes and time.monotonic() - began > 60 * given.minutes:
            break
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            report = run()
        every = [f.to_json() for r in report.results for f in r.findings]
        mine = [f for f in every if f["check"] == pair.check and f["cause"] == pair.cause]
        edit = Edit()
        edit.compare(*twins)
        kind, line = judged(mine, edit.lines, Path.cwd())
        yield pair.check, pair.cause, pair.name, kind, any(f["tried"] for f in mine), line


def of_folder(folder: Path, report: Path) -> Iterator[tuple[str, str, str, str, bool, str]]:
    """The same of files ``*_bad.py``, of every fault that no other one explains."""
    for loop in json.loads(report.read_text(encoding="utf-8"))["loops"]:
        bad = folder / loop["nodeid"].partition("::")[0]
        good = bad.with_name(bad.name.replace("_bad", "_good"))
        if bad == good or not good.is_file():
            continue
        ours, theirs = (file.read_text(encoding="utf-8").splitlines() for file in (bad, good))
        edit = Edit()
        for kind, a, b, _, _ in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if kind != "equal":
                edit._add(str(bad), range(a, a + 2) if kind == "insert" else range(a + 1, b + 1))
        faults = [f for c in loop["checks"] for f in c["findings"] if f["level"] == "fault"]
        explained = {e for f in faults for e in f["explains"]}
        for fault in faults:
            if fault["check"] not in explained and f"{fault['check']}:{fault['cause']}" not in explained:
                kind, line = judged([fault], edit.lines, folder)
                yield fault["check"], fault["cause"], bad.name, kind, bool(fault["tried"]), line


def table(kept: dict[str, dict[str, int]]) -> str:
    """The counts by check as a table."""
    head = "| check | pairs | right | wrong | no line | not measured | repair tried |\n|---|---|---|---|---|---|---|\n"
    rows = sorted(kept.items(), key=lambda row: (-row[1].get("wrong", 0) - row[1].get("missing", 0), row[0]))
    total: Counter[str] = Counter()
    for _, counted in rows:
        total.update(counted)
    parts = ("pairs", *KINDS, "tried")
    lines = [f"| `{check}` | " + " | ".join(str(of.get(p, 0)) for p in parts) + " |" for check, of in rows]
    whole = "| **all** | " + " | ".join(str(total[p]) for p in parts) + " |"
    return head + "\n".join([*lines, whole]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only pairs whose name contains this")
    parser.add_argument("--only", default="", help="checks, separated by commas")
    parser.add_argument("--share", default="0/1", help="I/N: one of N equal parts")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many")
    parser.add_argument("--show", action="store_true", help="a line for each pair")
    parser.add_argument("--store", action="store_true", help=f"write the counts to {KEPT.name}")
    parser.add_argument("--folder", nargs=2, type=Path, metavar=("FOLDER", "REPORT"))
    given = parser.parse_args()
    counted: dict[str, Counter[str]] = {}
    for check, cause, name, kind, tried, line in of_folder(*given.folder) if given.folder else of_pairs(given):
        if given.show:
            print(f"{kind or 'not found':12} {check} {cause} {name}: {line}", flush=True)
        if kind:
            counted.setdefault(check, Counter()).update(["pairs", kind, *(["tried"] if tried else [])])
    kept = {check: dict(of) for check, of in sorted(counted.items())}
    if given.store:
        before = json.loads(KEPT.read_text(encoding="utf-8")) if given.only and KEPT.is_file() else {}
        KEPT.write_text(json.dumps(before | kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(table(kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
