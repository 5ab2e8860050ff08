"""Measure what the battery costs by check on five sizes of one project, and write the tables of docs/cost.md.

python scripts/costs.py                    # all sizes: some minutes, and half an hour for steps of 2 s
python scripts/costs.py "1 ms" "20 ms"     # these again; the others stay as they were measured

The figures are kept in benchmarks/costs.json. Each size is measured in a process of its own, its bare steps between the
checks: a ratio holds on a machine that does other work too, seconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "costs.json"
SIZES = ("1 ms", "5 ms", "20 ms", "200 ms", "2 s")
LEAST = 0.02
"""The share of the battery, in any size, below which a check has no row of its own."""


def measured(size: str) -> dict[str, Any]:
    """The figures of one size, by a new process that reads compiled bytecode as a user's does."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "check_costs.py"), size]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def by_size(kept: dict[str, Any]) -> str:
    """A row for each size: the whole battery, against as many bare steps as its runs take batches."""
    rows = ["| steps of | parameters | bare step | own steps | the battery | in bare steps | times its own steps |"]
    rows.append("|" + "---|" * 7)
    for size, figures in kept.items():
        checks, bare = figures["checks"].values(), figures["bare"]
        seconds, own = sum(c["seconds"] for c in checks), sum(c["batches"] for c in checks)
        rows.append(
            f"| {size} | {figures['parameters']:,} | {1e3 * bare:,.1f} ms | {own} | {seconds:,.1f} s |"
            f" {seconds / bare:,.0f} | {seconds / bare / own:.2f} |"
        )
    return "\n".join(rows) + "\n"


def by_check(kept: dict[str, Any]) -> str:
    """A row for each check that costs much: bare steps, and own steps, by size."""
    totals = {size: sum(c["seconds"] for c in figures["checks"].values()) for size, figures in kept.items()}
    names = [
        name
        for name in next(iter(kept.values()))["checks"]
        if any(f["checks"].get(name, {"seconds": 0})["seconds"] > LEAST * totals[size] for size, f in kept.items())
    ]
    rows = ["| check | " + " | ".join(kept) + " |", "|---|" + "---|" * len(kept)]
    rows += [f"| `{name}` | " + " | ".join(_cell(f, name) for f in kept.values()) + " |" for name in names]
    rest = [_cell(f, *(n for n in f["checks"] if n not in names)) for f in kept.values()]
    return "\n".join([*rows, f"| all others | {' | '.join(rest)} |"]) + "\n"


def _cell(figures: dict[str, Any], *names: str) -> str:
    of = [figures["checks"][name] for name in names if name in figures["checks"]]
    return f"{sum(c['seconds'] for c in of) / figures['bare']:,.0f} ({sum(c['batches'] for c in of)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(SIZES)}; default: all")
    given = parser.parse_args()
    unknown = sorted(set(given.sizes) - set(SIZES))
    if unknown:
        parser.error(f"{unknown[0]!r} is no size; one of {', '.join(SIZES)} is needed")
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for size in given.sizes or SIZES:
        kept[size] = measured(size)
        kept = {one: kept[one] for one in SIZES if one in kept}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(by_size({size: kept[size]}).splitlines()[-1], flush=True)
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs.py"), "--fast"], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
