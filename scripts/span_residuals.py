"""How much of a whole batch's gradient lies outside the span of its micro-batches' gradients
(docs/how-it-decides.md#accumulation-as-weights), on the correct loops of the tests that have a knob ``accumulate``.

python scripts/span_residuals.py [NAME ...]
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import OUTSIDE
from pytest_trainloop.checks.batch.accumulation_equivalence.windows import Accumulation
from pytest_trainloop.core.errors import CannotDecide, TrainLoopError
from pytest_trainloop.runs.evidence import Evidence
from tests.loops.corpus import ODD, PAIRS


def residuals(evidence: Evidence) -> dict[int, float]:
    """By number of micro-batches."""
    made = evidence.shared(Accumulation.of)
    found = {}
    for k in made.cut.sizes():
        try:
            split = made.split(k)
            found[k] = made.weighted(split.one, split.optimizer, split.composition).residual
        except CannotDecide as reason:
            print(f"  {k} micro-batches: {reason}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a loop's name; without any, all loops")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    makes = {name: loop.make for name, loop in ODD.items()} | {f"fixed {name}": p.fixed for name, p in PAIRS.items()}
    inside: list[float] = []
    outside: list[float] = []
    for name, make in makes.items():
        knob = "accumulate" in inspect.signature(make).parameters
        if not knob or (names and not any(part in name for part in names)):
            continue
        try:
            found = residuals(Evidence(make, knobs={"accumulate": "accumulate"}))
        except TrainLoopError as reason:
            print(f"{name}: {reason}")
            continue
        print(f"{name}: {', '.join(f'{k}: {r:.1e}' for k, r in found.items())}")
        for residual in found.values():
            (inside if residual <= OUTSIDE else outside).append(residual)
    print(f"{len(inside)} comparisons inside, at most {max(inside, default=0.0):.1e}")
    print(f"{len(outside)} outside, at least {min(outside, default=0.0):.1e}; the bound is {OUTSIDE:.0e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
