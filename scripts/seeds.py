"""The battery under many seeds on five loops, and the batch checks under many of Hypothesis': no verdict may change.

python scripts/seeds.py [SEEDS]                       the battery, the seed of every build and run changed
python scripts/seeds.py [SEEDS] --hypothesis          the batch checks, only the seed of the searches changed, on the
                                                      cheapest faulty loop of each cause and on loops that draw noise:
                                                      no cause may change either, and what is shown as smallest has at
                                                      most 3 rows
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.core.registry import registered
from pytest_trainloop.frontends.api import check_loop
from tests.loops.corpus import ODD, PAIRS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.judging.battery import Result

LOOPS = {
    "a language model": PAIRS["epoch_schedule_stepped_per_batch"].fixed,
    "a convolutional net with batch norm": PAIRS["cnn_head_forgotten"].fixed,
    "contrastive": ODD["simclr"].make,
    "a variational autoencoder, its weight annealed": ODD["vae_kl_annealing"].make,
    "a rate far too low": PAIRS["rate_a_million_times_too_low"].faulty,
}

NOISY = ("windows_with_noise", "windows_of_a_gan", "declared_noise_by_length", "vae_kl_annealing", "simclr")
"""Odd loops in which rows draw."""

ROWS = 3
"""Rows of the smallest composition, at most."""

Verdict = tuple[tuple[Any, ...], ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=50, metavar="SEEDS")
    parser.add_argument("--hypothesis", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    changed = 0
    for name, make, options in of_hypothesis() if given.hypothesis else whole_battery():
        verdicts: dict[Verdict, list[int]] = {}
        for seed in range(given.seeds):
            seeded = {"hypothesis_seed": str(seed)} if given.hypothesis else {"seed": seed}
            results = check_loop(make, raises=False, **options, **seeded).results
            verdicts.setdefault(verdict_of(results), []).append(seed)
            if given.hypothesis and not seed and not any(f.smallest for r in results for f in r.findings):
                break  # nothing was searched for
            if many := largest(results):
                changed += 1
                print(f"{name}: under {seed} a smallest composition of {many} rows")
        usual = max(verdicts, key=lambda v: len(verdicts[v]))
        for verdict, under in verdicts.items():
            if verdict != usual:
                changed += len(under)
                print(f"{name}: under {under} {sorted(set(verdict) - set(usual))}")
        print(f"{name}: {sum(map(len, verdicts.values()))} seeds, {len(verdicts)} verdicts", flush=True)
    return int(changed > 0)


def whole_battery() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    for name, make in LOOPS.items():
        yield name, make, {}


def of_hypothesis() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    batch = [name for name, check in registered().items() if check.family == "batch"]
    for pair in PAIRS.values():
        if pair.check in batch and pair.quick:
            yield f"{pair.check}:{pair.cause}, {pair.name}", pair.faulty, {"only": [pair.check]}
    for name in NOISY:
        yield name, ODD[name].make, {"only": batch}


def verdict_of(results: list[Result]) -> Verdict:
    return tuple((r.check, r.outcome, tuple((f.cause, f.level) for f in r.findings)) for r in results)


def largest(results: list[Result]) -> int:
    """The rows of a smallest composition that has too many; 0 where none has."""
    shown = [f.composition for r in results for f in r.findings if f.composition is not None]
    return max((len(c.rows) for c in shown if len(c.rows) > ROWS), default=0)


if __name__ == "__main__":
    raise SystemExit(main())
