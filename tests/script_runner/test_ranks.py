"""Scripts under torchrun, and scripts that spawn their ranks: one report, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

HEAD = """
import os, sys, time, torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def fit(model, epochs=8, batches=100, after=lambda step: None):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _, (x, y) in zip(range(batches), DataLoader(data, batch_size=8, sampler=sampler)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            after(step)

def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""

MAIN = """
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""

SPAWN = """
def main(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", init_method="file://" + folder + "/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    {}
    fit(DDP(mlp()))

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(os.getcwd(),), nprocs=2)
    print("after spawn")
"""

OF_TORCH = ("torchelastic_", "torchinductor_", "pytorch-errorfile")
"""What torch itself leaves."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def started(tmp_path):
    """Start the command on a script; all that it leaves goes to ``tmp_path/tmp``."""
    (tmp_path / "tmp").mkdir()

    def start(source, *options, launcher=TORCHRUN):
        (tmp_path / "train.py").write_text(HEAD + source, encoding="utf-8")
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_"))}
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "pytest_trainloop", *options, "train.py"],
            cwd=tmp_path,
            env=plain | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield start
    assert running(tmp_path) == []
    assert [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith(OF_TORCH)] == []


def running(folder):
    """The processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder and "Z" not in (process / "stat").read_text().split()[2]:
                found.append(process.name)
        except OSError:
            continue
    return found


def said(process):
    out, error = process.communicate(timeout=120)
    assert out.count("= trainloop =") + out.count("before any step") == 1, out + error
    return process.returncode, out


def test_a_right_script_passes_and_is_reported_once(started):
    status, out = said(started(MAIN + "fit(DDP(mlp()))"))
    assert status == 0, out
    assert "train.py: 30 optimizer steps watched, then it was stopped" in out
    assert "distributed_equivalence" not in out


def test_the_rank_that_ends_first_and_what_the_others_wait_in_are_named(started):
    status, out = said(started(MAIN + "fit(DDP(mlp()), batches=4 - rank, epochs=3)", "--steps=0"))
    assert status == 1
    assert "rank 0 waits for ever in all_reduce: rank 1 has come to its end without it (last in all_reduce at" in out
    assert "give all ranks the same number of batches" in out


def test_a_wrapper_that_one_rank_builds(started):
    status, out = said(started(MAIN + "fit(mlp() if rank else DDP(mlp()))"))
    assert status == 1
    assert "rank 0 builds DistributedDataParallel and waits for ever in its all_gather" in out


def test_a_rank_that_raises_is_named_with_its_traceback(started):
    status, out = said(started(MAIN + "fit(DDP(mlp()), after=lambda step: 1 / (step < 5 or not rank))"))
    assert status == 1
    assert "train.py: on rank 1 the script raised ZeroDivisionError: division by zero after 5 optimizer steps" in out
    assert "gloo" not in out


def test_a_fault_of_one_rank_is_reported_by_rank_0(started):
    source = "SGD = torch.optim.SGD\nif rank: torch.optim.SGD = lambda held, lr: SGD(list(held)[:2], lr=lr)\nfit(mlp())"
    status, out = said(started(MAIN + source, "--trainloop-only=optimizer_holds_every_param"))
    assert status == 1
    assert "on rank 1: " in out


def test_interrupted_ranks_leave_nothing(started, tmp_path):
    process = started(MAIN + "fit(DDP(mlp()), after=lambda s: s == 5 and (open('ready', 'w'), time.sleep(999)))")
    until = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    status, out = said(process)
    assert status == 1
    assert "interrupted after 5 optimizer steps" in out


def test_a_killed_rank_leaves_nothing(started):
    process = started(MAIN + "fit(DDP(mlp()), after=lambda s: s == 5 and rank and os.kill(os.getpid(), 9))")
    process.communicate(timeout=120)
    assert process.returncode == 1


def test_ranks_that_a_script_spawns_are_watched(started):
    status, out = said(started(SPAWN.format(""), launcher=[]))
    assert status == 0, out
    assert "train.py: 30 optimizer steps watched, then it was stopped" in out
    assert "after spawn" not in out


def test_a_spawned_rank_that_raises(started):
    status, out = said(started(SPAWN.format("if rank: raise ValueError('no data')"), launcher=[]))
    assert status == 1
    assert "train.py: on rank 1 the script raised ValueError: no data before any step" in out
