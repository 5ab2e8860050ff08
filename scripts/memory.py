"""Measure the peak memory of each check against that of the bare run, on a loop of N parameters.

python scripts/memory.py                               # all checks at 100 million parameters, both declarations: hours
python scripts/memory.py 20e6 --only resume_equivalence evaluation_is_pure
python scripts/memory.py 20e6 --declares little        # a loop without evaluate, save and load

The figures are those of one loop: ten linear layers under Adam in float32, batches of eight rows. The watched run is
made once; each check then runs in a forked process of its own, so that what one check keeps does not count for another.
A figure is the high-water mark of the resident memory less what the imports take. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

LAYERS, ROWS, STEPS = 10, 8, 12
ASIDE = ("compile_parity", "distributed_equivalence")
"""Checks whose memory is that of a compiler and of other processes."""


def project(parameters: float, declares: str) -> Callable[..., Any]:
    """The function that a test would be, with evaluation, saving and knobs or without."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint as checkpointed

    from pytest_trainloop import TrainLoop

    width = round((parameters / LAYERS) ** 0.5)
    x, y = torch.randn(ROWS, width), torch.randint(10, (ROWS,))

    def make(accumulate: int = 1, precision: str = "fp32", checkpoint: bool = False) -> TrainLoop:
        layers = [nn.Sequential(nn.Linear(width, width), nn.LeakyReLU()) for _ in range(LAYERS)]
        model, head = nn.Sequential(*layers), nn.Linear(width, 10)
        both = nn.ModuleList([model, head])
        optimizer = torch.optim.Adam(both.parameters(), lr=1e-4)

        def loss_of(batch: Any) -> Any:
            inputs, labels = batch
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                features = checkpointed(model, inputs, use_reentrant=False) if checkpoint else model(inputs)
                return functional.cross_entropy(head(features).float(), labels)

        def fit(batches: Any) -> None:
            both.train()
            for number, batch in enumerate(batches, start=1):
                (loss_of(batch) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        @torch.no_grad()
        def evaluate() -> float:
            both.eval()
            loss = float(loss_of((x, y)))
            both.train()
            return loss

        def save() -> dict[str, Any]:
            return {"model": both.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}

        def load(state: dict[str, Any]) -> None:
            both.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])

        more = {"evaluate": evaluate, "save": save, "load": load} if declares == "all" else {}
        return TrainLoop(model=both, optimizer=optimizer, batch=(x, y), fit=fit, **more)

    return make


def forked(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a process of its own, with the peak there and the seconds that it took."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        began, found = time.monotonic(), {}
        try:
            found = function()
        finally:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                json.dump({**found, "peak": peak, "seconds": time.monotonic() - began}, pipe)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"outcome": "killed", "peak": float("nan"), "seconds": float("nan")}


def measure(parameters: float, declares: str, only: list[str]) -> dict[str, Any]:
    """Print a row for the bare run, one for the watched run, and one for each check."""
    import torch

    from pytest_trainloop.core.registry import of
    from pytest_trainloop.judging.battery import Settings, Subject

    torch.set_num_threads(1)
    make = project(parameters, declares)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def bare() -> dict[str, Any]:
        loop = make()
        loop.fit([loop.batch] * STEPS)
        return {"count": sum(p.numel() for p in loop.model.parameters())}

    subject = Subject("loop", make, settings=Settings(timeout=36_000, budget=360_000))
    if declares == "all":
        subject._knobs = {knob: knob for knob in ("accumulate", "precision", "checkpoint")}
    of_bare = forked(bare)
    count, least = of_bare["count"], of_bare["peak"] - base

    def row(name: str, found: dict[str, Any]) -> None:
        above = found["peak"] - base
        cells = (f"{above / count:.1f}", f"{above / least:.2f}", f"{found['seconds']:.0f}", found.get("outcome", ""))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)

    print(f"\n{count:,} parameters, {declares} declared; imports take {base / 2**20:.0f} MiB\n")
    print("| check | bytes per parameter | times the bare run | seconds | outcome |\n|---|---|---|---|---|")
    row("the bare run", of_bare)
    row("the watched run", forked(lambda: {"outcome": str(subject.evidence.run().steps) + " steps"}))
    subject.evidence.run()
    subject.evidence.release()
    for name in only or [name for name in of("loop") if name not in ASIDE]:
        row(f"`{name}`", forked(lambda name=name: {"outcome": subject.run_check(name).outcome}))  # type: ignore[misc]
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", nargs="?", type=float, default=100e6)
    parser.add_argument("--declares", choices=("all", "little"), nargs="*", default=["little", "all"])
    parser.add_argument("--only", nargs="*", default=[], metavar="CHECK")
    given = parser.parse_args()
    for declares in given.declares:  # each from a process without torch on
        forked(lambda declares=declares: measure(given.parameters, declares, given.only))  # type: ignore[misc]


if __name__ == "__main__":
    main()
