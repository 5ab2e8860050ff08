"""Every verdict of the whole battery over both corpora, as JSON lines; and what differs between two sets of them.

python scripts/verdicts.py run OUT.jsonl [--shard I/N]
python scripts/verdicts.py compare --before A.jsonl ... --after B.jsonl ... [--renames RENAMES.json]

A refactor keeps its verdicts if ``run`` on the commit before it and on the commit after it compare as equal: the same
outcome of every check on every loop, and the same level and cause of every finding. ``--renames`` maps what was renamed
between them: {"checks": {old: new}, "causes": {check: {old: new}}}, with the checks' old names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop import check_loop, check_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.report import Report

TIMEOUT = 600.0
"""Seconds that one run of ``fit`` may take: no verdict shall depend on how busy the machine is."""


def subjects() -> Iterator[tuple[str, Callable[[], Report]]]:
    """Every loop and loss of the corpora by a name of its own, with the battery on it."""
    from tests.loops.corpus import ODD, PAIRS
    from tests.losses.corpus import MODULES
    from tests.losses.corpus import ODD as ODD_LOSSES
    from tests.losses.corpus import PAIRS as LOSS_PAIRS

    loops = {f"odd:{name}": loop.make for name, loop in ODD.items()}
    losses = {f"odd loss:{name}": loss for name, loss in {**ODD_LOSSES, **MODULES}.items()}
    for kind in ("faulty", "fixed"):
        loops |= {f"{kind}:{name}": getattr(pair, kind) for name, pair in PAIRS.items()}
        losses |= {f"{kind} loss:{name}": getattr(pair, kind) for name, pair in LOSS_PAIRS.items()}
    for name, make in sorted(loops.items()):
        yield name, lambda make=make: check_loop(make, raises=False, timeout=TIMEOUT)  # type: ignore[misc]
    for name, loss in sorted(losses.items()):
        yield name, lambda loss=loss: check_loss(loss, raises=False)  # type: ignore[misc]


def verdicts(report: Report) -> dict[str, Any]:
    """Outcome, reason and findings of each check, without what a machine decides (seconds) or a line number."""
    return {
        r.check: {"outcome": r.outcome, "findings": sorted([f.level, f.cause] for f in r.findings), "reason": r.reason}
        for r in report.results
    }


def run(out: Path, index: int, count: int) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = set(read([out])) if out.exists() else set()
    with out.open("a", encoding="utf-8") as file:
        for number, (name, judge) in enumerate(subjects()):
            if number % count != index or name in done:
                continue
            began = time.perf_counter()
            found = verdicts(judge())
            seconds = round(time.perf_counter() - began, 2)
            file.write(json.dumps({"subject": name, "seconds": seconds, "verdicts": found}) + "\n")
            file.flush()
    return 0


def read(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {entry["subject"]: entry["verdicts"] for entry in map(json.loads, lines)}


def renamed(found: dict[str, Any], renames: dict[str, Any]) -> dict[str, Any]:
    """The verdicts on one subject with the new names of checks and causes."""
    checks, causes = renames.get("checks", {}), renames.get("causes", {})
    return {
        checks.get(check, check): {
            "outcome": verdict["outcome"],
            "findings": sorted([level, causes.get(check, {}).get(c, c)] for level, c in verdict["findings"]),
        }
        for check, verdict in found.items()
    }


def compare(before: Sequence[Path], after: Sequence[Path], renames: dict[str, Any]) -> int:
    old, new = read(before), read(after)
    differing = sorted(set(old) ^ set(new))
    for name in differing:
        print(f"{name}: only {'before' if name in old else 'after'}")
    for name in sorted(set(old) & set(new)):
        was, now = renamed(old[name], renames), renamed(new[name], {})
        for check in sorted({*was, *now}):
            if was.get(check) != now.get(check):
                differing.append(name)
                print(f"{name}: {check}: {was.get(check)} -> {now.get(check)}")
    verdicts_made = sum(len(found) for found in new.values())
    print(
        f"{len(old)} subjects before, {len(new)} after, {verdicts_made} verdicts, {len(set(differing))} subjects differ"
    )
    return int(bool(differing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--shard", default="0/1", help="I/N: every Nth subject, from the Ith on")
    comparing = commands.add_parser("compare")
    comparing.add_argument("--before", type=Path, nargs="+", required=True)
    comparing.add_argument("--after", type=Path, nargs="+", required=True)
    comparing.add_argument("--renames", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        index, count = map(int, given.shard.split("/"))
        return run(given.out, index, count)
    renames = json.loads(given.renames.read_text(encoding="utf-8")) if given.renames else {}
    return compare(given.before, given.after, renames)


if __name__ == "__main__":
    raise SystemExit(main())
