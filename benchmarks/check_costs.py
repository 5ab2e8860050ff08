"""What each check of the battery costs on one size of a project that declares everything, as JSON.

``scripts/costs.py`` runs it, once for each size. Times are processor seconds. Bare steps of the same project are timed
between the checks, so that other work on the machine slows both alike: ratios are to their median.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import torch
from declared import project

from pytest_trainloop.core.registry import of
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.runs import evidence

KNOBS = ("accumulate", "precision", "checkpoint")
ASIDE = ("compile_parity", "distributed_equivalence")
"""Checks whose time is that of a compiler and of other processes: those of knobs that the project does not have."""


@dataclasses.dataclass
class Batches:
    """Counts the batches that the loop's own runs take: one bare step for each, whatever it accumulates."""

    taken: int = 0

    def counting(self) -> None:
        made = evidence.run

        def run(make: Any, plan: Any) -> Any:
            record = made(make, plan)
            self.taken += record.items
            return record

        evidence.run = run


def bare(make: Any, most: int) -> list[float]:
    """Processor seconds of steps that nobody watches, the first left out."""
    loop = make()
    loop.fit([loop.batch])
    taken = []
    for _ in range(most):
        used = time.process_time()
        loop.fit([loop.batch])
        taken.append(time.process_time() - used)
    return taken


def measure(size: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    make = project(size)
    unwatched = bare(make, 4)
    every = max(0.5, 5 * statistics.median(unwatched))
    batches = Batches()
    batches.counting()
    subject = Subject(size, make, settings=Settings(timeout=3600.0), knobs={knob: knob for knob in KNOBS})
    checks: dict[str, dict[str, Any]] = {}
    since = 0.0
    for name in of("loop"):
        if name in ASIDE:
            continue
        before, used = batches.taken, time.process_time()
        result = subject.run_check(name)
        used = time.process_time() - used
        if result.outcome not in ("passed", "skipped"):
            raise RuntimeError(f"{name} on {size}: {result}")
        checks[name] = {"seconds": used, "batches": batches.taken - before, "steps": result.steps}
        since += used
        if since > every:
            unwatched += bare(make, 3)
            since = 0.0
    parameters = sum(p.numel() for p in make().model.parameters())
    return {"bare": statistics.median(unwatched), "parameters": parameters, "checks": checks}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1])))
