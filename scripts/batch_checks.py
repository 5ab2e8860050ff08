"""What the checks that compose batches cost on the corpora and say of them, as JSON lines; and two such sets compared.

python scripts/batch_checks.py run OUT.jsonl [--shard I/N]
python scripts/batch_checks.py compare --before A.jsonl ... --after B.jsonl ...

Each runs with evidence that it shares with the others of these and with no other check. ``compare`` prints the sums of
the loops' own steps (the watched run's too) and seconds over the loops in both sets, the largest numbers of steps where
all are green, and each verdict that differs.
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
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))

from pytest_trainloop import UsageError, check_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHECKS = [
    "accumulation_equivalence",
    "batch_independence",
    "padding_invariance",
    "edge_batches",
    "input_dependence",
    "segment_independence",
    "every_row_teaches",
]

TIMEOUT = 600.0


def subjects() -> Iterator[tuple[str, Callable[..., Any]]]:
    from examples.char_gpt.test_char_gpt import test_gpt
    from tests.loops.corpus import ODD, PAIRS

    yield "char_gpt", test_gpt
    loops: dict[str, Callable[..., Any]] = {f"odd:{name}": loop.make for name, loop in ODD.items()}
    for kind in ("faulty", "fixed"):
        loops |= {f"{kind}:{name}": getattr(pair, kind) for name, pair in PAIRS.items()}
    yield from sorted(loops.items())


def run(out: Path, index: int, count: int) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = set(read([out])) if out.exists() else set()
    with out.open("a", encoding="utf-8") as file:
        for number, (name, make) in enumerate(subjects()):
            if (number % count == index or name == "char_gpt") and name not in done:
                file.write(json.dumps({"subject": name, **judged(make)}) + "\n")
                file.flush()
    return 0


def judged(make: Callable[..., Any]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        results = check_loop(make, only=CHECKS, raises=False, timeout=TIMEOUT).results
    except UsageError as error:
        return {"steps": 0, "seconds": 0.0, "verdicts": {"usage": str(error)}}
    verdicts = {r.check: [r.outcome, *sorted(f"{f.level}:{f.cause}" for f in r.findings)] for r in results}
    steps = sum(r.steps for r in results)
    return {"steps": steps, "seconds": round(time.perf_counter() - began, 3), "verdicts": verdicts}


def read(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {entry["subject"]: entry for entry in map(json.loads, lines)}


def compare(before: Sequence[Path], after: Sequence[Path]) -> int:
    old, new = read(before), read(after)
    both = [name for name in old if name in new]
    for what in ("steps", "seconds"):
        print(f"{what}: {sum(old[n][what] for n in both):.0f} before, {sum(new[n][what] for n in both):.0f} after")
    for words, found in (("before", old), ("after", new)):
        green = sorted((e["steps"] for n, e in found.items() if n in new and n in old and _green(e)), reverse=True)
        print(f"own steps where all are green, {words}: {green[:5]}, median {green[len(green) // 2]}")
    if "char_gpt" in both:
        print("char_gpt:", *(f"{e['steps']} steps in {e['seconds']} s;" for e in (old["char_gpt"], new["char_gpt"])))
    for name in both:
        for check in sorted({*old[name]["verdicts"], *new[name]["verdicts"]}):
            a, b = (e[name]["verdicts"].get(check) for e in (old, new))
            if a != b and not (a is None and b in (["passed"], ["skipped"])):
                print(f"{name}[{check}]: {a} -> {b}")
    print(f"{len(both)} loops in both")
    return 0


def _green(entry: dict[str, Any]) -> bool:
    return all(verdict[0] in ("passed", "skipped") for verdict in entry["verdicts"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--shard", default="0/1")
    comparing = commands.add_parser("compare")
    comparing.add_argument("--before", type=Path, nargs="+", required=True)
    comparing.add_argument("--after", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after)
    index, count = map(int, given.shard.split("/"))
    return run(given.out, index, count)


if __name__ == "__main__":
    raise SystemExit(main())
