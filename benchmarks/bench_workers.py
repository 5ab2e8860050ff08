"""What the worker processes of a DataLoader add to the whole battery: the same loop with no worker and with two.

Each battery is run in a new process. Processor time is that of the process and of its workers together.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
MOST_SECONDS = 2.0
WAYS = ("given", "inside fit", "persistent")


def make_of(way: str, workers: int) -> Callable[[], Any]:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from pytest_trainloop import TrainLoop

    def make() -> TrainLoop:
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        rows = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
        persistent = way == "persistent" and workers > 0
        loader = DataLoader(rows, 8, shuffle=True, num_workers=workers, persistent_workers=persistent)

        def fit(batches: Any) -> None:
            for _, (x, y) in zip(batches, loader if way == "inside fit" else batches, strict=False):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)

    return make


def measure(way: str, workers: int) -> dict[str, float]:
    """One battery in this process."""
    import torch
    from torch.utils.data import dataloader

    from pytest_trainloop import check_loop

    torch.set_num_threads(1)
    starts = 0
    iterator: Any = dataloader._MultiProcessingDataLoaderIter
    start = iterator.__init__

    def counted(self: Any, *args: Any) -> None:
        nonlocal starts
        starts += 1
        start(self, *args)

    iterator.__init__ = counted
    began = time.perf_counter()
    report = check_loop(make_of(way, workers), raises=False)
    wall = time.perf_counter() - began
    if any(result.outcome in ("failed", "error") for result in report.results):
        raise RuntimeError(f"{way}: {report}")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"wall": wall, "cpu": sum(u.ru_utime + u.ru_stime for u in used), "starts": starts}


def in_a_process(way: str, workers: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, way, str(workers)],
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_workers(benchmark: Any, figures: Callable[..., None], way: str) -> None:
    taken: list[tuple[dict[str, float], dict[str, float]]] = []
    benchmark.pedantic(lambda: taken.append((in_a_process(way, 0), in_a_process(way, 2))), rounds=ROUNDS)
    wall, cpu = (statistics.median(two[k] - none[k] for none, two in taken) for k in ("wall", "cpu"))
    starts = statistics.median(two["starts"] for _, two in taken)
    figures(
        f"battery, DataLoader with 2 workers, {way}: {wall:.2f} s wall, {cpu:.2f} s processor more than without; "
        f"started {starts:.0f} times (bound {MOST_SECONDS:g} s)",
        wall=wall,
        cpu=cpu,
        starts=starts,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
