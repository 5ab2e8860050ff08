"""Whole sessions over one test file that holds a loop, in this process."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.core.registry import of
from pytest_trainloop.views.pictures import make as _pictures  # noqa: F401  a session forgets what it imports itself

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = """
    import os, sys, pytest, torch
    from pathlib import Path
    import torch.nn.functional as F
    from torch import nn
    from pytest_trainloop import TrainLoop

    def mlp():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def rows(n=8):
        return torch.randn(n, 4), torch.randn(n, 1)

    def mse(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def train(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

    def loop(fit=train, **given):
        model = given.pop("model", None) or mlp()
        optimizer = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
        given.setdefault("batch", rows())
        if fit is not None:
            given["fit"] = lambda batches: fit(model, optimizer, batches)
        return TrainLoop(model=model, optimizer=optimizer, **given)
"""

TAIL = """
    def test_the_session_goes_on():
        with Path(__file__).with_name("went_on").open("a") as file:
            print(os.getpid(), file=file)
"""

OTHERS = len(of("loop")) - 1
"""Checks that say where the loop was refused first."""

FIRST = "test_a.py::test_it[[]optimizer_holds_every_param[]]"


def builds(body: str) -> str:
    """A marked function with this body."""
    return f"@pytest.mark.trainloop\ndef test_it():\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


def fit(body: str) -> str:
    """A loop that trains as ``body`` says, with model, optimizer and batches at hand."""
    work = f"def work(model, optimizer, batches):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
    return f"{work}\n{builds('return loop(work)')}"


@pytest.fixture(scope="module", autouse=True)
def all_of_torch_is_loaded() -> None:
    """An in-process run drops what it was the first to import, and torch loads parts of itself late."""

    def make():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch, loss = torch.ones(2, 2), lambda model, batch: model(batch).detach().mean() + model.bias.square().sum()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, loss=loss)

    assert not check_loop(make, raises=False).ok


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was() -> Iterator[None]:
    before = _process()
    yield
    assert _process() == before


def _process() -> list[object]:
    grad = torch.is_grad_enabled()
    return [os._exit, os.getpid(), sys.gettrace(), signal.getsignal(signal.SIGALRM), torch.get_default_dtype(), grad]


@pytest.fixture(name="run")
def one_file(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run a session over one test file: the loop, then a plain test that tells whether the session went on."""
    for name in ("CI", "BUILD_NUMBER", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def session(source: str, *args: str) -> pytest.RunResult:
        parts = (textwrap.dedent(part) for part in (HEAD, source, TAIL))
        pytester.makepyfile(test_a="\n\n".join(parts))
        result = pytester.runpytest("-p", "no:randomly", "--trainloop", *args)
        went_on = (pytester.path / "went_on").read_text(encoding="utf-8").split()
        assert went_on == [str(os.getpid())], "the session goes on after the loop, once and in this process"
        shown = result.stdout.str() + result.stderr.str()
        assert "pytest_trainloop/" not in shown.replace("\\", "/"), "no frame of ours is shown"
        assert "INTERNALERROR" not in shown
        return result

    return session


def failure(result: pytest.RunResult) -> list[str]:
    """What stands under the header of the only failure."""
    starts = [i for i, line in enumerate(result.outlines) if line.startswith("____")]
    assert len(starts) == 1, "reported once"
    end = next(i for i, line in enumerate(result.outlines) if i > starts[0] and line.startswith("===="))
    return [line for line in result.outlines[starts[0] + 1 : end] if line]
