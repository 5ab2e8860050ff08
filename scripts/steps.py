"""How many optimizer steps each odd but correct loop needs until one batch is judged, and the verdict.

python scripts/steps.py [NAME ...]
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.frontends.api import check_loop
from tests.loops.corpus import ODD

BINS = (8, 12, 16, 24, 48, 100, 200, 300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a loop's name; without any, all odd loops")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps: collections.Counter[int] = collections.Counter()
    verdicts: collections.Counter[str] = collections.Counter()
    for name, loop in ODD.items():
        if names and name not in names:
            continue
        report = check_loop(loop.make, only=["update_ratio", "overfit_one_batch"], raises=False)
        used = sum(r.steps for r in report.results)
        verdict = report.results[-1]
        advice = " with advice" if verdict.advice else ""
        print(f"{name:50} {used:4}  {verdict.outcome}{advice}  {verdict.reason}")
        verdicts[f"{verdict.outcome}{advice}"] += 1
        if verdict.outcome == "passed":
            steps[next((b for b in BINS if used - 12 <= b), BINS[-1])] += 1
    print("\n| steps on the batch, at most | loops |\n|---|---|")
    for most in BINS:
        print(f"| {most} | {steps[most]} |")
    print("  ".join(f"{what}: {count}" for what, count in verdicts.most_common()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
