"""What the check ``baseline`` says of refactors: those that keep the mathematics, and those that do not.

python scripts/refactors.py run OUT.jsonl [--shard I/N] [-k TEXT]
python scripts/refactors.py show OUT.jsonl ... [--texts]

``run`` records the baseline of each loop before its refactor and compares the loop after it; one line a refactor.
``show`` counts them. "right place": the check fails and names the place that the author wrote down; whether another
place that it names is right as well is for a reader to say: ``--texts`` prints both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop import check_loop
from tests.blind.refactors.cases import BREAKS, KEEPS, Breaks, Keeps

ROOT = Path(__file__).parents[1]


def run(out: Path, shard: str, text: str) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for file in sorted((ROOT / "tests" / "blind" / "refactors").glob("*_*.py")):
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    index, count = map(int, shard.split("/"))
    with out.open("w", encoding="utf-8") as file:
        for number, case in enumerate([*KEEPS, *BREAKS]):
            if number % count == index and text in case.name:
                file.write(json.dumps(judged(case)) + "\n")
                file.flush()
    return 0


def judged(case: Keeps | Breaks) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "baseline.json"
        recorded = _result(case.before, stored, update=True)
        compared = _result(case.after, stored, update=False)
    return {
        "name": case.name,
        "what": case.what,
        "thread": case.thread,
        "first": getattr(case, "first", ""),
        "place": getattr(case, "place", ""),
        "recorded": recorded.outcome,
        "outcome": compared.outcome,
        "reason": recorded.reason or compared.reason or (compared.error.summary if compared.error else ""),
        "findings": [
            {name: getattr(f, name) for name in ("cause", "level", "summary", "measured", "culprits", "where")}
            for f in compared.findings
        ],
    }


def _result(make: Any, stored: Path, *, update: bool) -> Any:
    report = check_loop(make, only=["baseline"], baseline=stored, update=update, raises=False)
    return report.results[0]


def standing(entry: dict[str, Any]) -> str:
    """How the check stands to one refactor, in a few words."""
    faults = [f for f in entry["findings"] if f["level"] == "fault"]
    if entry["recorded"] not in ("passed",) or entry["outcome"] in ("skipped", "unreliable", "error"):
        return f"not compared ({entry['outcome']})"
    if not entry["first"]:
        return "accused" if faults else "passed"
    if not faults:
        return "missed"
    return "right place" if any(_names(f, entry["place"]) for f in faults) else "failed, place to be read"


def _names(finding: dict[str, Any], place: str) -> bool:
    told = " ".join((finding["summary"], finding["measured"], *finding["culprits"]))
    return bool(place) and place in told


def show(files: list[Path], *, texts: bool) -> int:
    entries = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    for kind, breaks in (("that keep the mathematics", False), ("that do not", True)):
        chosen = [entry for entry in entries if bool(entry["first"]) is breaks]
        print(f"\n{len(chosen)} refactors {kind}: {dict(Counter(map(standing, chosen)))}")
    for entry in entries:
        if texts or standing(entry) not in ("passed", "right place"):
            print(f"\n{entry['name']} ({standing(entry)}): {entry['what']} [{entry['first']} {entry['place']}]")
            for found in entry["findings"]:
                print(f"    {found['level']} {found['cause']}: {found['summary']} ({', '.join(found['culprits'])})")
            if entry["reason"]:
                print(f"    {entry['reason']}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--shard", default="0/1", help="I/N: every Nth refactor, from the Ith on")
    running.add_argument("-k", default="", help="only refactors whose name contains this")
    showing = commands.add_parser("show")
    showing.add_argument("files", type=Path, nargs="+")
    showing.add_argument("--texts", action="store_true", help="print every refactor with what was found")
    given = parser.parse_args()
    return run(given.out, given.shard, given.k) if given.command == "run" else show(given.files, texts=given.texts)


if __name__ == "__main__":
    raise SystemExit(main())
