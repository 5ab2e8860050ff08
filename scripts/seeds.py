"""The battery under many seeds on five loops: no verdict may change.

python scripts/seeds.py [SEEDS]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.api import check_loop
from tests.loops.corpus import ODD, PAIRS

LOOPS = {
    "a language model": PAIRS["epoch_schedule_stepped_per_batch"].fixed,
    "a convolutional net with batch norm": PAIRS["cnn_head_forgotten"].fixed,
    "contrastive": ODD["simclr"].make,
    "a variational autoencoder, its weight annealed": ODD["vae_kl_annealing"].make,
    "a rate far too low": PAIRS["rate_a_million_times_too_low"].faulty,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=50, metavar="SEEDS")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    changed = 0
    for name, make in LOOPS.items():
        verdicts: dict[tuple[tuple[str, str, tuple[str, ...]], ...], list[int]] = {}
        for seed in range(seeds):
            results = check_loop(make, seed=seed, raises=False).results
            verdict = tuple((r.check, r.outcome, tuple(f.cause for f in r.faults)) for r in results)
            verdicts.setdefault(verdict, []).append(seed)
        usual = max(verdicts, key=lambda v: len(verdicts[v]))
        for verdict, under in verdicts.items():
            if verdict != usual:
                changed += len(under)
                print(f"{name}: under {under} {sorted(set(verdict) - set(usual))}")
        print(f"{name}: {seeds} seeds, {len(verdicts)} verdicts")
    return int(changed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
