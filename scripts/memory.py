"""Measure the peak memory of each check against that of the bare run, on a loop of N parameters.

python scripts/memory.py                               # at 100 million parameters: an hour
python scripts/memory.py 20e6 --only resume_equivalence evaluation_is_pure
python scripts/memory.py 20e6 --declares faulty        # evaluate scales the weights, load forgets the optimizer

The figures are those of one loop: ten linear layers under Adam in float32, batches of eight rows. The watched run is
made once; each check then runs in a forked process of its own. The last row is that of all of them in one process. A
figure is the high-water mark of the resident memory less what the imports take. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

LAYERS, ROWS, STEPS = 10, 8, 12
ASIDE = ("compile_parity", "distributed_equivalence")  # the memory of a compiler and of other processes


def project(parameters: float, declares: str) -> Any:
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
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def loss_of(batch: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                out = checkpointed(model, batch[0], use_reentrant=False) if checkpoint else model(batch[0])
                return functional.cross_entropy(out.float(), batch[1])

        def fit(batches: Any) -> None:
            for number, batch in enumerate(batches, start=1):
                (loss_of(batch) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        @torch.no_grad()
        def evaluate() -> float:
            for parameter in model.parameters() if declares == "faulty" else ():
                parameter.mul_(0.9)
            return float(loss_of((x, y)))

        def save() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"] if declares != "faulty" else optimizer.state_dict())
            torch.set_rng_state(state["rng"])

        more = {"evaluate": evaluate, "save": save, "load": load} if declares != "little" else {}
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, y), fit=fit, **more)

    return make


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forked(function: Any) -> dict[str, Any]:
    """What a function returns in a process of its own, as ``outcome``, with the peak there and the seconds it took."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        found: dict[str, Any] = {"outcome": "raised", "seconds": -time.monotonic()}
        try:
            found["outcome"] = function()
        finally:
            found["seconds"] += time.monotonic()
            found["peak"] = peak()
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    return json.loads(os.read(reading, 2**16) or '{"outcome": "killed", "peak": 0, "seconds": 0}')


def measure(parameters: float, declares: str, only: list[str]) -> str:
    """Print a row for the bare run, one for the watched run, and one for each check."""
    import torch

    from pytest_trainloop.core.registry import of
    from pytest_trainloop.judging.battery import Settings, Subject

    torch.set_num_threads(1)
    make = project(parameters, declares)
    base = peak()

    def bare() -> str:
        loop = make()
        loop.fit([loop.batch] * STEPS)
        return str(sum(p.numel() for p in loop.model.parameters()))

    def row(name: str, found: dict[str, Any]) -> None:
        above = found["peak"] - base
        figures = f"{above / count:.1f} | {above / (of_bare['peak'] - base):.2f} | {found['seconds']:.0f}"
        print(f"| {name} | {figures} | {found['outcome']} |", flush=True)

    knobs = {knob: knob for knob in ("accumulate", "precision", "checkpoint") if declares != "little"}
    subject = Subject("loop", make, settings=Settings(timeout=36_000, budget=360_000), knobs=knobs)
    of_bare = forked(bare)
    count = int(of_bare["outcome"])
    print(f"\n{count:,} parameters, {declares} declared; imports take {base / 2**20:.0f} MiB\n")
    print("| check | bytes per parameter | times the bare run | seconds | outcome |\n|---|---|---|---|---|")
    row("the bare run", {**of_bare, "outcome": ""})
    row("the watched run", forked(lambda: f"{subject.evidence.run().steps} steps"))
    subject.evidence.run()
    subject.evidence.release()
    chosen = only or [name for name in of("loop") if name not in ASIDE]
    for names in (*((name,) for name in chosen), chosen):
        of_these = forked(lambda names=names: " ".join({subject.run_check(n).outcome: 0 for n in names}))  # type: ignore[misc]
        row(f"`{names[0]}`" if len(names) == 1 else "all in one process", of_these)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", nargs="?", type=float, default=100e6)
    parser.add_argument("--declares", choices=("all", "little", "faulty"), nargs="*", default=["all", "little"])
    parser.add_argument("--only", nargs="*", default=[], metavar="CHECK")
    given = parser.parse_args()
    for declares in given.declares:  # each from a process without torch on
        forked(functools.partial(measure, given.parameters, declares, given.only))


if __name__ == "__main__":
    main()
