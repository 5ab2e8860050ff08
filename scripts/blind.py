"""What the battery says of the loops that were written blind (tests/blind): faults found, right loops accused.

python scripts/blind.py run OUT.jsonl [--of FOLDER] [--shard I/N] [--only CHECK,...] [-k TEXT]
python scripts/blind.py show OUT.jsonl ... [--texts]

``run`` judges each loop and writes one line a loop; what it finds in OUT.jsonl already is not judged again. ``show``
counts them. A fault counts as found where the check that should name it fails; whether the cause that it names is the
one that the author wrote down is for a reader to say: ``--texts`` prints both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop import check_loop
from pytest_trainloop.errors import UsageError
from tests.blind.cases import CASES, Case

ROOT = Path(__file__).parents[1]

TIMEOUT = 600.0
"""Seconds that one run of ``fit`` may take: no verdict shall depend on how busy the machine is."""


def run(out: Path, folder: str, shard: str, only: list[str] | None, text: str) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for file in sorted((ROOT / "tests" / "blind").glob(f"{folder}/*.py")):
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    index, count = map(int, shard.split("/"))
    done = {entry["name"] for entry in read([out])} if out.exists() else set()
    with out.open("a", encoding="utf-8") as file:
        for number, case in enumerate(CASES.values()):
            if number % count == index and case.name not in done and text in case.name:
                file.write(json.dumps(judged(case, only)) + "\n")
                file.flush()
    return 0


def judged(case: Case, only: list[str] | None) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        results = list(check_loop(case.make, only=only, raises=False, timeout=TIMEOUT).results)
        refused = ""
    except UsageError as error:
        results, refused = [], str(error)
    return {
        "name": case.name,
        "subject": case.subject,
        "what": case.what,
        "thread": case.thread,
        "expected": case.check,
        "place": case.place,
        "seconds": round(time.perf_counter() - began, 2),
        "findings": [
            {"check": r.check, "cause": f.cause, "level": f.level, "summary": f.summary, "where": f.where}
            for r in results
            for f in r.findings
        ],
        "errors": {r.check: r.error.summary if r.error else r.reason for r in results if r.outcome == "error"},
        "reason": next((r.reason for r in results if r.check == case.check), refused),
    }


def read(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def standing(entry: dict[str, Any]) -> str:
    """How the battery stands to one loop, in one word or two."""
    faults = {f["check"] for f in entry["findings"] if f["level"] == "fault"} | set(entry["errors"])
    if not entry["expected"]:
        return "accused" if faults else "silent"
    if entry["expected"] in faults:
        return "found"
    if faults:
        return "found by another check"
    advised = any(f["level"] == "advice" and f["check"] == entry["expected"] for f in entry["findings"])
    return "advice" if advised else "missed"


def show(files: list[Path], *, texts: bool) -> int:
    entries = read(files)
    for kind, wanted in (("faults", True), ("right loops", False)):
        chosen = [entry for entry in entries if bool(entry["expected"]) is wanted]
        print(f"\n{len(chosen)} {kind}: {dict(Counter(map(standing, chosen)))}")
        for subject in sorted({entry["subject"] for entry in chosen}):
            counted = Counter(standing(entry) for entry in chosen if entry["subject"] == subject)
            print(f"    {subject:12} {dict(counted)}")
    for entry in entries:
        if texts or standing(entry) not in ("silent", "found"):
            _print(entry)
    return 0


def _print(entry: dict[str, Any]) -> None:
    print(f"\n{entry['name']} ({standing(entry)}, {entry['seconds']} s): {entry['what']}")
    if entry.get("place"):
        print(f"    at {entry['place']}")
    for found in entry["findings"]:
        print(f"    {found['level']} {found['check']}:{found['cause']}: {found['summary']}")
    for check, error in entry["errors"].items():
        print(f"    error {check}: {error}")
    if entry["reason"]:
        print(f"    skipped: {entry['reason']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--of", default="*", help="the folder of tests/blind, default all")
    running.add_argument("--shard", default="0/1", help="I/N: every Nth loop, from the Ith on")
    running.add_argument("--only", help="checks, separated by commas")
    running.add_argument("-k", default="", help="only loops whose name contains this")
    showing = commands.add_parser("show")
    showing.add_argument("files", type=Path, nargs="+")
    showing.add_argument("--texts", action="store_true", help="print every loop with what was found")
    given = parser.parse_args()
    if given.command == "run":
        return run(given.out, given.of, given.shard, given.only.split(",") if given.only else None, given.k)
    return show(given.files, texts=given.texts)


if __name__ == "__main__":
    raise SystemExit(main())
