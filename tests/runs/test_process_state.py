"""The user's process is left as it was: random states bit for bit, modes, flags, threads, hooks and files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, UsageError, check_loop
from pytest_trainloop.frontends.api import observe
from pytest_trainloop.recording.autocast import open_blocks
from pytest_trainloop.recording.torch_internals import default_device
from pytest_trainloop.runs.process_state import preserved, seed_all

FP32 = (
    torch.backends,
    torch.backends.cuda.matmul,
    getattr(torch.backends.cudnn, "conv", None),
    getattr(torch.backends.mkldnn, "matmul", None),
)
"""What a precision of float32 can be set for; torch 2.6 has some of them only."""


def process() -> dict[str, Any]:
    """All that must not change, ready to be compared."""
    kind, keys, *rest = np.random.get_state()
    cudnn = torch.backends.cudnn
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "dtype": torch.get_default_dtype(),
        "device": default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fp32": [getattr(owner, "fp32_precision", None) for owner in FP32],
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "autocast-block": open_blocks(),
        "warnings": list(warnings.filters),
        "files": (Path.cwd(), sorted(Path.cwd().iterdir())),
        "python hooks": (sys.gettrace(), sys.getprofile(), os._exit, signal.getsignal(signal.SIGALRM)),
        "doors": (torch.autograd.backward, torch.autograd.grad, vars(torch.autograd.Function)["apply"]),
        "patches": [(cls.__name__, dict(vars(cls))) for cls in (torch.amp.GradScaler, torch.optim.lr_scheduler.StepLR)],
    }


def changed(before: dict[str, Any]) -> list[str]:
    after = process()
    return [name for name, value in before.items() if after[name] != value]


@pytest.fixture(autouse=True)
def a_folder_and_seeds_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), preserved():
        seed_all(123)
        yield


def draw() -> None:
    random.random()
    np.random.rand()
    torch.rand(1)


def into_a_folder_that_goes() -> None:
    folder = Path("gone")
    folder.mkdir()
    os.chdir(folder)
    Path.cwd().rmdir()


DISTURBANCES = {
    "draws": draw,
    "seeds": lambda: seed_all(5),
    "default-dtype": lambda: torch.set_default_dtype(torch.float64),
    "default-device": lambda: torch.set_default_device("meta"),
    "grad-mode": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(2),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic-warn": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "matmul": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32-of-cudnn": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "fp32-by-operation": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "fp32-of-all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "cudnn-benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn-deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast-block": lambda: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
    "autocast-dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "folder": lambda: os.chdir(".."),
    "folder-that-goes": into_a_folder_that_goes,
    "warnings": lambda: warnings.simplefilter("error"),
}
if not hasattr(torch.backends, "fp32_precision"):  # up to torch 2.8
    del DISTURBANCES["fp32-by-operation"], DISTURBANCES["fp32-of-all"]


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=list(DISTURBANCES))
@pytest.mark.parametrize("leave", [contextlib.nullcontext, lambda: pytest.raises(ZeroDivisionError)], ids=["", "raise"])
def test_each_is_put_back(disturb, leave):
    before = process()
    with leave() as raising, preserved():
        disturb()
        if raising is not None:
            raise ZeroDivisionError
    assert changed(before) == []


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has one precision for all")
def test_precisions_that_were_set_by_operation_are_no_trouble():
    setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")  # noqa: B010  mypy knows no such attribute
    before = process()
    with preserved():
        torch.set_float32_matmul_precision("highest")
    assert changed(before) == []


def test_a_folder_that_is_gone_from_the_start_is_no_trouble():
    into_a_folder_that_goes()
    with preserved():
        pass


def test_seeding_reaches_every_generator():
    seed_all(3)
    first = (random.random(), np.random.rand(), float(torch.rand(1)))
    seed_all(3)
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == first
    seed_all(2**40)


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def make(work=None, *, detach=False, raises=False):
    """A loop with everything that is patched: dropout, a scheduler, a scaler, batch norm."""
    if work is not None:
        work()
    first, head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout()), nn.Linear(8, 1)
    model = nn.ModuleDict({"first": first, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def fit(batches):
        if work is not None:
            work()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for x, y in batches:
            draw()
            hidden = first(x)
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(head(hidden.detach() if detach else hidden), y)).backward()
            if raises:
                raise ValueError("bad row")
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 4), torch.randn(8, 1)), fit=fit)


@pytest.mark.parametrize(
    ("fault", "said"),
    [({}, ""), ({"detach": True}, "detach()"), ({"raises": True}, "ValueError: bad row")],
    ids=["passes", "fails-and-ran-in-float64", "raises"],
)
def test_after_a_loop(fault, said):
    before = process()
    report = check_loop(lambda: make(**fault), raises=False)
    assert report.ok == (not fault)
    assert said in str(report)
    assert changed(before) == []


def test_after_a_loop_that_is_refused():
    before = process()
    with pytest.raises(UsageError, match="no parameters"):
        check_loop(lambda: TrainLoop(model=nn.ReLU(), batch=torch.rand(1), fit=print))
    assert changed(before) == []


def test_after_an_interrupt():
    called = []

    def interrupt():
        draw()
        called.append(1)
        if len(called) == 4:  # twice built to be compared, built for the run, and in fit
            raise KeyboardInterrupt

    before = process()
    with pytest.raises(KeyboardInterrupt):
        check_loop(lambda: make(interrupt))
    assert changed(before) == []


DISRUPTIVE = ("default-device", "grad-mode", "warnings", "deterministic", "folder-that-goes")
HARMLESS = [name for name in DISTURBANCES if name not in DISRUPTIVE]


@pytest.mark.parametrize("name", HARMLESS)
def test_after_a_loop_that_changes_it(name, tmp_path):
    def work():
        os.chdir(tmp_path)
        DISTURBANCES[name]()

    before = process()
    report = check_loop(lambda: make(work), only=["step_order"], raises=False)
    assert changed(before) == []
    assert report.ok, str(report)


def test_after_watching_by_hand():
    before = process()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.get_rng_state()
    with observe() as watched:
        for _ in range(3):
            optimizer.zero_grad()
            mse(model, (torch.ones(2, 4), torch.ones(2, 1))).backward()
            optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    watched.check()
    torch.set_rng_state(torch.frombuffer(bytearray(before["torch"]), dtype=torch.uint8))
    assert changed(before) == []


def test_the_users_own_objects_are_not_touched():
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    kept = [t.clone() for t in batch]
    seen = []

    def mine():
        loop = make()
        loop.batch = batch
        seen.append(loop.model)
        return loop

    check_loop(mine)
    assert all(map(torch.equal, batch, kept))
    for model in seen:
        assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
        assert not any(p._backward_hooks for p in model.parameters())
