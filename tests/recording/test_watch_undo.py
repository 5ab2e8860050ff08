"""Two densities, and a process that is left as it was found: hooks, patches, modes, filters."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pytest_trainloop.recording.events import Backward, Forward, GradWrite, LossCall, ScalerCall, SchedulerStep, Step
from pytest_trainloop.recording.watch import FULL_ROUNDS, Watch
from tests.helpers.watched_runs import batches, net_and_sgd

REGISTRIES = {
    modules: ["_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"],
    optimizers: ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
}
PATCHED = [
    *((torch.autograd, name) for name in ("backward", "grad")),
    *((cls, "step") for cls in (lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, lr_scheduler.ReduceLROnPlateau)),
    *((torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update")),
]


def of_the_process():
    registries = {(m.__name__, r): dict(getattr(m, r)) for m, found in REGISTRIES.items() for r in found}
    always = dict(modules._global_forward_hooks_always_called)
    patched = [vars(owner).get(name) for owner, name in PATCHED]
    return registries, always, patched, _get_current_function_mode_stack(), list(warnings.filters)


@pytest.fixture
def nothing_left():
    """Holds that a test leaves the process as it found it."""
    before = of_the_process()
    yield
    assert of_the_process() == before


@pytest.fixture
def loop():
    model, optimizer = net_and_sgd()

    def train(count, *, each=lambda n: None):
        for n, (x, y) in enumerate(batches(count)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            each(n)

    return model, optimizer, train


def hooks_of(model):
    return [bool(p._backward_hooks) for p in model.parameters()]


def test_hooks_and_patches_come_out(loop, nothing_left):
    model, optimizer, train = loop
    with Watch({"": model}, [optimizer]):
        assert torch.autograd.backward.__wrapped__
        assert all(hooks_of(model))
        train(2)
    assert not any(hooks_of(model))
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_hooks_come_out_after_an_exception_anywhere(loop, nothing_left, error):
    model, optimizer, train = loop
    watch = Watch({"": model}, [optimizer])

    def fail(n):
        if n == 1:
            raise error

    with pytest.raises(error), watch:
        train(5, each=fail)
    assert not any(hooks_of(model))
    assert watch.record.steps == 2
    assert all(p.name for p in watch.record.parameters)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_hooks_come_out_after_an_exception_inside_torch(loop, nothing_left, where):
    model, optimizer, train = loop

    def fail(*args):
        raise ValueError(where)

    registers = {
        "forward": model[2].register_forward_pre_hook,
        "backward": model[0].bias.register_hook,
        "step": optimizer.register_step_pre_hook,
    }
    with registers[where](fail), pytest.raises(ValueError, match=where), Watch({"": model}, [optimizer]):
        train(1)
    assert not any(hooks_of(model))


def test_a_watch_that_cannot_begin_leaves_nothing(loop, nothing_left):
    model, _, _ = loop
    with pytest.raises(AttributeError), Watch({"": model, "broken": "no module"}):
        pass
    assert not any(hooks_of(model))


def test_one_watch_inside_another(loop, nothing_left):
    model, optimizer, train = loop
    with Watch({"": model}, [optimizer]) as outer:
        train(1)
        with Watch({"": model}, [optimizer]) as inner:
            train(2)
        train(1)
    assert (outer.record.steps, inner.record.steps) == (4, 2)
    assert [len(w.record.of(Backward)) for w in (outer, inner)] == [4, 2]


def test_full_density_for_twelve_steps_and_light_from_then_on(loop, nothing_left):
    model, optimizer, train = loop
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    seen = {}

    def look(n):
        scheduler.step()
        scaler.update()
        seen[n] = (hooks_of(model), len(modules._global_forward_hooks), len(_get_current_function_mode_stack()))

    with Watch({"": model}, [optimizer]) as watch:
        train(FULL_ROUNDS + 4, each=look)
    assert seen[FULL_ROUNDS - 2] == ([True] * 4, 1, 1)
    assert seen[FULL_ROUNDS - 1] == ([False] * 4, 0, 0)
    assert seen[FULL_ROUNDS + 3] == ([False] * 4, 0, 0)
    record = watch.record
    rounds = FULL_ROUNDS + 4
    assert (record.rounds, record.steps, record.optimizers[0].steps) == (rounds, rounds, rounds)
    assert {len(record.of(k)) for k in (Step, Backward, SchedulerStep, ScalerCall)} == {rounds}
    assert {len(record.of(k)) for k in (Forward, LossCall)} == {FULL_ROUNDS}
    assert all(e.at < record.full_until for k in (Forward, LossCall, GradWrite) for e in record.of(k))
    light = [s for s in record.of(Step) if not s.full]
    assert len(light) == 4
    assert [s.lrs[0] for s in record.of(Step)] == pytest.approx([0.1 * 0.5**n for n in range(rounds)])
    assert all(b.roots[0].value > 0 for b in record.of(Backward))
    assert not any(b.arrivals for b in record.of(Backward)[FULL_ROUNDS:])
    assert not any(s.updates for s in light)
    assert record.moves[-1].at <= record.full_until


def test_a_run_of_many_backwards_and_no_steps_leaves_the_full_density_too(loop, monkeypatch):
    monkeypatch.setattr(sys.modules[Watch.__module__], "FULL_BACKWARDS", 3)
    model, _, _ = loop
    with Watch({"": model}) as watch:
        for x, y in batches(6):
            F.mse_loss(model(x), y).backward()
        assert not any(hooks_of(model))
    assert [bool(b.arrivals) for b in watch.record.of(Backward)] == [True] * 3 + [False] * 3


def test_the_light_density_begins_inside_a_backward_too(nothing_left):
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step_now(p):
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(step_now)
    with Watch({}, [optimizer], full_rounds=2) as watch:
        for _ in range(4):
            (w * w).sum().backward()
    assert [s.full for s in watch.record.of(Step)] == [True, True, False, False]
    assert [len(b.roots) for b in watch.record.of(Backward)] == [1] * 4


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_function_modes_of_the_user_work_as_ever(loop, nothing_left):
    model, optimizer, train = loop
    made, nested = [], []
    train(1)
    with Counting() as bare:
        train(1)
    with Watch({"": model}, [optimizer]) as watch:
        for _ in range(FULL_ROUNDS + 2):
            with torch.device("meta"):
                made.append(torch.zeros(1).device.type)
            with Counting() as counting:
                train(1)
            nested.append(counting.calls)
    assert set(made) == {"meta"}
    assert min(nested) == nested[-1] == bare.calls  # before that it sees what the hooks read as well
    assert len(watch.record.of(LossCall)) == FULL_ROUNDS


def test_a_default_device_set_inside_stays_under_the_watch(loop, nothing_left):
    _, _, train = loop
    with Watch() as watch:
        torch.set_default_device("cpu")
        train(2)
        torch.set_default_device(None)
        train(1)
    assert len(watch.record.of(LossCall)) == 3


def test_a_mode_left_open_in_a_generator_is_not_mistaken_for_ours(loop, nothing_left):
    model, optimizer, _ = loop

    def on_device():
        with torch.device("cpu"), Counting():
            while True:
                yield torch.ones(1, 3)

    source = on_device()
    with Watch({"": model}, [optimizer]):
        model(next(source)).sum().backward()
        optimizer.step()
    assert [type(mode).__name__ for mode in _get_current_function_mode_stack()] == ["DeviceContext", "Counting"]
    source.close()
