"""An actor and a learner that train two models at once, in a process of its own: reading what the other thread's
backward pass replaces would end it. Called with the name of what looks on."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.learning.update_sizes import Ratios
from pytest_trainloop.frontends import api
from pytest_trainloop.instruments.baselines.trajectory_recorder import Looking
from pytest_trainloop.instruments.tracing.root_terms import RootTerms
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.hooks import around_steps, on_arrival
from pytest_trainloop.views.loop_facts import measured
from pytest_trainloop.views.pictures.report_inputs import ReportInputs
from tests.helpers.all_modes import instruments

if TYPE_CHECKING:
    from collections.abc import Iterable

ROUNDS = 20 if sys.argv[1:] == ["modes"] else 200  # a step takes a second under so many modes over each other


def train(model: nn.Module, errors: list[BaseException], start: threading.Barrier) -> None:
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        start.wait(60)
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    except BaseException as error:  # handed to the main thread
        errors.append(error)


def _arrivals(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    yield around_steps(watch, lambda optimizer: 1, lambda optimizer, taken: None)
    with contextlib.ExitStack() as stack:
        for handle in on_arrival(watch, lambda _watch, tensor, gradient: tensor.grad):
            stack.callback(handle.remove)
        yield stack.pop_all()


LOOKING = {
    "record": lambda watch: (),
    "arrivals": _arrivals,
    "baseline": lambda watch: (Looking().on(watch),),
    "pictures": lambda watch: (ReportInputs()._looking(watch),),
    "card": lambda watch: (measured._Looking(measured.Measured(), watch, ROUNDS).on(),),
    "updates": lambda watch: Ratios().contexts(watch),
    "roots": lambda watch: RootTerms().contexts(watch),
    "modes": instruments,
}


def main(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    models, errors, start = (make(), make()), list[BaseException](), threading.Barrier(2)
    watch = Watch({"actor": models[0], "learner": models[1]}, full_rounds=10**9)
    with contextlib.ExitStack() as around:
        around.enter_context(api.observed(watch) if name == "observe" else watch)
        for context in LOOKING[name](watch) if name in LOOKING else ():
            around.enter_context(context)
        other = threading.Thread(target=train, args=(models[1], errors, start))
        sys.setswitchinterval(1e-5)
        other.start()
        train(models[0], errors, start)
        other.join()
        sys.setswitchinterval(5e-3)
    record = watch.record
    assert errors == [], errors
    assert record.mistakes == [], sorted(set(record.mistakes))
    assert [o.steps for o in record.optimizers] == [ROUNDS, ROUNDS]
    assert record.raised is None


if __name__ == "__main__":
    main(sys.argv[1])
