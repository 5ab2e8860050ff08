"""While one of torch's optimizers steps, torch calls no function mode that would not look."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.events import GradWrite, Step
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, net, net_and_sgd


class Counting(WatchingMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def active(self):
        return True

    def call(self, name, func, args, kwargs):
        self.names.append(name)
        return func(*args, **kwargs)


class CountingSteps(Counting):
    in_steps = True


class Projects(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Clipping(torch.optim.SGD):
    """Of torch's in name only: its step calls torch by itself."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.clamp_(-1, 1)
        return super().step(closure)


def names_seen_in_a_step(mode, optimizer=None):
    model = net()
    optimizer = torch.optim.Adam(model.parameters()) if optimizer is None else optimizer(model.parameters())
    ((x, y),) = batches(1)
    with Watch({"": model}, [optimizer]) as watch, contextlib.ExitStack() as stack:
        for context in mode.contexts(watch) if isinstance(mode, FunctionMode) else (mode,):
            stack.enter_context(context)
        F.mse_loss(model(x), y).backward()
        mode.names.clear()
        optimizer.step()
        seen = [name for name in mode.names if name.strip("_").startswith(("lerp", "addcdiv", "clamp"))]
        model(x)
        assert "linear" in mode.names
    assert all(step.consumes for step in watch.record.of(Step))
    return seen


def test_a_mode_that_does_not_look_costs_nothing_in_a_step():
    assert names_seen_in_a_step(Counting()) == []


@pytest.mark.parametrize(("mode", "optimizer"), [(CountingSteps, None), (Projects, None), (Counting, Clipping)])
def test_who_looks_into_steps_sees_them(mode, optimizer):
    assert names_seen_in_a_step(mode(), optimizer)


def test_after_a_step_of_torchs_that_raised_everything_is_seen_again():
    model, _ = net_and_sgd()
    optimizer = torch.optim.SparseAdam(model.parameters())
    ((x, y),) = batches(1)
    with Watch({"": model}, [optimizer]) as watch:
        for _ in range(2):
            F.mse_loss(model(x), y).backward()
            with contextlib.suppress(RuntimeError):  # dense gradients
                optimizer.step()
            model.zero_grad()
        model[0](x)
        model.zero_grad()
    steps, writes = watch.record.of(Step), watch.record.of(GradWrite)
    assert len(steps) == 2
    assert [sorted(write.parameters) for write in writes if write.how == "none"] == 3 * [[0, 1, 2, 3]]
    assert torch._C._get_torch_function_state() == torch._C._TorchFunctionState.ENABLED


def test_a_run_that_ends_in_a_step_leaves_torch_as_it_was():
    model, _ = net_and_sgd()
    optimizer = torch.optim.SparseAdam(model.parameters())
    ((x, y),) = batches(1)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match="dense"), Watch({"": model}, [optimizer]):
        optimizer.step()
    assert torch._C._get_torch_function_state() == torch._C._TorchFunctionState.ENABLED
