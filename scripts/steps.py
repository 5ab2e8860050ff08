"""How many own steps each odd but correct loop of the tests needed until one batch was judged, and what was said.

python scripts/steps.py [NAME ...]
"""

from __future__ import annotations

import collections
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.api import check_loop
from tests.loops.corpus import ODD

BINS = (8, 12, 16, 24, 48, 100, 200, 300)


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps: collections.Counter[int] = collections.Counter()
    said: collections.Counter[str] = collections.Counter()
    for name, loop in ODD.items():
        if wanted and name not in wanted:
            continue
        report = check_loop(loop.make, only=["update_ratio", "overfit_one_batch"], raises=False)
        used = sum(r.steps for r in report.results)
        verdict = report.results[-1]
        advice = " with advice" if verdict.advice else ""
        print(f"{name:50} {used:4}  {verdict.outcome}{advice}  {verdict.reason}")
        said[f"{verdict.outcome}{advice}"] += 1
        if verdict.outcome == "passed":
            steps[next((b for b in BINS if used - 12 <= b), BINS[-1])] += 1
    print("\n| own steps on the batch, at most | loops |\n|---|---|")
    for most in BINS:
        print(f"| {most} | {steps[most]} |")
    print("  ".join(f"{what}: {count}" for what, count in said.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
