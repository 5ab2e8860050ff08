"""How many of the correct loops of the tests run wholly in float64 when they are asked to.

The goal is 95 % (docs/how-it-decides.md#float64-by-construction).

python scripts/float64_share.py [NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from typing import TYPE_CHECKING

from pytest_trainloop.runs.run import RunPlan, run
from tests.loops.corpus import ODD, PAIRS

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record

PLAN = RunPlan(double=True, enough=lambda record: record.rounds >= 3, count=13)


def verdict(record: Record) -> str:
    """Empty where the run was in float64 from end to end."""
    if record.raised is not None:
        return record.raised.summary
    return "" if record.double else f"lower: {', '.join(record.lower)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a loop's name; without any, all loops")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    makes = {name: loop.make for name, loop in ODD.items()} | {f"fixed {name}": p.fixed for name, p in PAIRS.items()}
    chosen = {name: make for name, make in makes.items() if not names or any(part in name for part in names)}
    left = {name: said for name, make in chosen.items() if (said := verdict(run(make, PLAN)))}
    for name, said in left.items():
        print(f"{name}: {said}")
    wide = len(chosen) - len(left)
    print(f"{wide} of {len(chosen)} loops run wholly in float64: {wide / max(1, len(chosen)):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
