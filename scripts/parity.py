"""How far the gradients of right and wrong loops lie from float64, over what rounding explains: the margin of
precision_parity.

python scripts/parity.py [SEEDS] [--page]

Prints the largest ratio of each loop over the seeds: of right loops at their start and after 100 batches of float32
training, of wrong ones under the first seed.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns, low_precision_runs
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.run import fit_of
from tests.loops.corpus import ODD, PAIRS

RIGHT = {
    "GPT": "mixed_gpt",
    "convolutions, batch norm": "mixed_convolutions",
    "LSTM": "mixed_lstm",
    "ViT": "mixed_vit",
    "LoRA, base in bf16": "mixed_lora",
    "contrastive": "mixed_contrast",
    "experts, top-2": "mixed_experts",
    "scan in float32": "mixed_scan",
    "vector quantisation": "mixed_codes",
}
PAGE = Path(__file__).parents[1] / "docs" / "how-it-decides.md"
ANNOUNCED = "The largest ratios over 20 seeds (`python scripts/parity.py 20 --page`; u: one rounding):\n\n```text\n"

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

Make = Callable[..., Any]


def trained(make: Make) -> Make:
    """The same loop, beginning with the weights that 100 batches in float32 lead to."""
    loop = make(precision="fp32")
    batch = first_batches(loop, 1)[0] if loop.batch is None else loop.batch
    fit_of(loop)([batch] * 100)
    state = loop.model.state_dict()

    def made(precision: str) -> Any:
        fresh = make(precision=precision)
        fresh.model.load_state_dict(state)
        return fresh

    return made


def ratios(make: Make, seed: int) -> Iterator[tuple[str, float]]:
    """The dtype and the ratio of each low precision of the loop; 0 for an error of two roundings at most."""
    evidence = Evidence(make, knobs={"precision": "precision"} if _has_knob(make) else {}, seed=seed)
    for runs in low_precision_runs(evidence):
        if not isinstance(runs, LowPrecisionRuns) or runs.low is None:
            continue
        try:
            parity = runs.parity()
        except CannotDecide:
            continue
        yield NAMES[runs.low], 0.0 if parity is None else parity.ratio if parity.finite else math.inf


def _has_knob(make: Make) -> bool:
    return "precision" in inspect.signature(make).parameters


def largest(make: Make, seeds: int) -> dict[str, float]:
    """By dtype, over the seeds."""
    found: dict[str, float] = {}
    for seed in range(seeds):
        for dtype, ratio in ratios(make, seed):
            found[dtype] = max(found.get(dtype, 0.0), ratio)
    return found


def knob_at(make: Make, value: str) -> Make:
    def made(precision: str = value) -> Any:
        return make(precision=precision)

    return made


def table(seeds: int) -> Iterator[str]:
    yield f"{'loop':<46} {'bf16':>10} {'fp16':>10}"
    for name, odd in RIGHT.items():
        make = ODD[odd].make
        torch.manual_seed(0)
        for when, one in (("", make), (", trained", trained(make))):
            yield line(f"right: {name}{when}", largest(knob_at(one, "fp32"), seeds))
    for pair in PAIRS.values():
        if pair.check == "precision_parity" and pair.level == "fault":
            yield line(f"wrong: {pair.name.replace('_', ' ')}", largest(pair.faulty, 1))


def line(name: str, found: dict[str, float]) -> str:
    def cell(dtype: str) -> str:
        ratio = found.get(dtype, math.nan)
        return "-" if math.isnan(ratio) else "inf" if math.isinf(ratio) else f"{ratio:.4g}" if ratio else "<= 2 u"

    return f"{name:<46} {cell('bf16'):>10} {cell('fp16'):>10}"


def write(lines: list[str]) -> None:
    """Put the table into the guide, below the line that announces it."""
    head, found, rest = PAGE.read_text(encoding="utf-8").partition(ANNOUNCED)
    if not found:
        raise SystemExit(f"{PAGE.name} has no line {ANNOUNCED.strip()!r}")
    PAGE.write_text(head + found + "\n".join(lines) + "\n" + rest[rest.index("```") :], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=20, metavar="SEEDS")
    parser.add_argument("--page", action="store_true", help="write the table into docs/how-it-decides.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = []
    for text in table(given.seeds):
        print(text, flush=True)
        lines.append(text)
    if given.page:
        write(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
