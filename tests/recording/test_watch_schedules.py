"""Scheduler steps and gradient scalers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from pytest_trainloop.recording.events import Backward, ScalerCall, SchedulerStep, Step
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, code, net, net_and_sgd

KINDS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "step": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_counts_once_and_constructors_not_at_all(kind):
    model, optimizer = net_and_sgd()
    rates = []
    with Watch({"": model}, [optimizer]) as watch:
        scheduler = KINDS[kind](optimizer)
        for x, y in batches(4):
            F.mse_loss(model(x), y).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    steps = watch.record.of(SchedulerStep)
    assert code(steps) == ["scheduler.step()"] * 4
    assert {(s.scheduler, s.optimizer, s.metric) for s in steps} == {(type(scheduler).__name__, 0, False)}
    assert [s.lrs for s in watch.record.of(Step)] == [(rate,) for rate in rates]
    assert len(set(rates)) > 1


def test_a_scheduler_of_the_project_itself_may_override_step():
    class Warmup(lr_scheduler.LRScheduler):
        def get_lr(self):
            return [base * min(1.0, (self.last_epoch + 1) / 4) for base in self.base_lrs]

        def step(self, epoch=None):
            super().step(epoch)

    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]) as watch:
        scheduler = Warmup(optimizer)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
    assert code(watch.record.of(SchedulerStep)) == ["scheduler.step()"] * 3
    assert [s.lrs[0] for s in watch.record.of(Step)] == pytest.approx([0.025, 0.05, 0.075])


def test_plateau_is_stepped_with_a_metric():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]) as watch:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        optimizer.step()
        scheduler.step(1.0)
        scheduler.step(torch.tensor(2.0))
    assert [(s.scheduler, s.metric) for s in watch.record.of(SchedulerStep)] == [("ReduceLROnPlateau", True)] * 2


def test_a_scheduler_that_raises_does_not_hide_the_next_step():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]) as watch:
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1)
        optimizer.step()
        scheduler.step()
        for _ in range(2):
            with pytest.raises(ValueError, match="Tried to step"):
                scheduler.step()
    assert len(watch.record.of(SchedulerStep)) == 3


def test_schedulers_can_be_copied_and_pickled_while_watched():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]):
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        scheduler.step()
        again = pickle.loads(pickle.dumps(scheduler))
        copied = copy.deepcopy(scheduler)
    assert again.last_epoch == copied.last_epoch == 1
    assert "step" not in vars(scheduler)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_each_call_has_the_rates_before_and_after_it(rate):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with Watch({"": model}, [optimizer]) as watch:
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
    (call,) = watch.record.of(SchedulerStep)
    assert (call.before, call.after) == ((0.5,), (0.25,))
    assert call.at < call.until


@pytest.mark.parametrize("kind", [*KINDS, "plateau"])
def test_schedulers_are_numbered_with_their_line_also_when_nobody_calls_them(kind):
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]) as watch:
        kept = lr_scheduler.ReduceLROnPlateau(optimizer) if kind == "plateau" else KINDS[kind](optimizer)
    outer = watch.record.schedulers[-1]
    assert (outer.kind, outer.optimizer, outer.calls, outer.inner) == (type(kept).__name__, 0, 0, False)
    assert outer.place is not None
    assert "test_watch_schedules" in outer.place.file
    assert all(s.inner for s in watch.record.schedulers[:-1])
    assert outer.plateau == (kind == "plateau")


def test_equal_settings_are_equal_texts():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]) as watch:
        kept = [lr_scheduler.LambdaLR(optimizer, lambda step, k=k: 1 / (step + k)) for k in (1, 1, 2)]
        kept += [lr_scheduler.StepLR(optimizer, 10, gamma) for gamma in (0.5, 0.5, 0.1)]
    one, same, other, *steps = (s.settings for s in watch.record.schedulers)
    assert one == same != other
    assert steps[0] == steps[1] != steps[2]


def test_a_scheduler_that_nothing_holds_is_gone():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Watch({}, [optimizer]) as watch:
        lr_scheduler.StepLR(optimizer, 10)
        kept = lr_scheduler.StepLR(optimizer, 10)
        optimizer.step()
    dropped, held = watch.record.schedulers
    assert dropped.gone is not None
    assert dropped.gone < watch.record.of(Step)[0].at
    assert held.gone is None
    assert kept.optimizer is optimizer


def test_the_constructors_are_torchs_own_again():
    before = {cls: vars(cls).get("__init__") for cls in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)}
    with Watch({}, []):
        assert lr_scheduler.LRScheduler.__init__ is not before[lr_scheduler.LRScheduler]
    assert {cls: vars(cls).get("__init__") for cls in before} == before


def test_lambdas_that_share_the_variable_of_a_loop():
    optimizer = torch.optim.SGD([{"params": [p]} for p in net().parameters()], lr=0.1)
    groups, decay = range(len(optimizer.param_groups)), 0.9
    with Watch({}, [optimizer]) as watch:
        kept = [
            lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + k + 1) for k in groups]),  # noqa: B023
            lr_scheduler.LambdaLR(optimizer, [lambda step, k=k: 1 / (step + k + 1) for k in groups]),
            lr_scheduler.LambdaLR(optimizer, [lambda step: decay**step for _ in groups]),
            lr_scheduler.LambdaLR(optimizer, lambda step: decay**step),
        ]
    assert [s.shares for s in watch.record.schedulers] == [("k",), (), (), ()]
    assert len(kept) == 4


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda o: o.param_groups[0].update(learning_rate=0.5), 'group["learning_rate"]'),
        (lambda o: o.defaults.update(lr=0.5), 'optimizer.defaults["lr"]'),
        (lambda o: setattr(o, "lr", 0.5), "optimizer.lr"),
    ],
)
def test_numbers_that_are_called_a_rate_are_noted_at_each_step(write, name):
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    write(optimizer)
    with Watch({}, [optimizer]) as watch:
        optimizer.step()
    assert watch.record.of(Step)[0].named_lrs[name] == (0.5,)


def scaled_loop(model, optimizer, scaler, losses, *, clip=False):
    for x, y in losses:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def watched_scaler(data, **how):
    model, optimizer = net_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how.pop("enabled", True))
    with Watch({"": model}, [optimizer]) as watch:
        scaled_loop(model, optimizer, scaler, data, **how)
    return watch.record


def test_the_calls_of_a_scaler_in_their_order():
    record = watched_scaler(batches(1), clip=True)
    calls = record.scaler_calls()
    assert [c.what for c in calls] == ["scale", "unscale", "step", "update"]
    assert code(calls) == [
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ]
    assert [c.optimizer for c in calls] == [None, 0, 0, None]
    assert all(c.enabled and c.scaler == 0 for c in calls)
    assert calls[0].factor == 1024.0
    assert calls[2].stepped is True


def test_a_step_that_the_scaler_skips():
    good = batches(2)
    bad = [(good[0][0], good[0][1] * float("inf"))]
    record = watched_scaler([good[0], *bad, good[1]])
    steps = [c for c in record.scaler_calls() if c.what == "step"]
    assert [c.stepped for c in steps] == [True, False, True]
    assert [c.factor for c in record.scaler_calls() if c.what == "scale"] == [1024.0, 1024.0, 512.0]
    assert record.steps == 2
    assert not record.of(Backward)[1].arrivals[0][0].incoming.finite


def test_gradients_arrive_scaled_and_are_consumed_unscaled():
    record = watched_scaler(batches(1))
    (backward,), (step,) = record.of(Backward), record.of(Step)
    assert backward.arrivals[0][0].incoming.peak == pytest.approx(1024 * step.reads[0].grads[0].peak)
    # step() unscales by itself where unscale_() was not called
    assert [c.what for c in record.scaler_calls()] == ["scale", "step", "unscale", "update"]


def test_a_scaler_that_is_switched_off():
    record = watched_scaler(batches(1), enabled=False)
    assert {c.enabled for c in record.scaler_calls()} == {False}
    assert [c.what for c in record.scaler_calls()] == ["scale", "step", "update"]
    assert record.steps == 1


def test_two_scalers_and_a_subclass_are_told_apart():
    class Quiet(torch.amp.GradScaler):
        pass

    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    loss = torch.tensor(2.0, requires_grad=True)
    with Watch({}, [optimizer]) as watch:
        for scaler in (torch.amp.GradScaler("cpu"), Quiet("cpu", init_scale=8.0)):
            scaler.scale([loss, 3 * loss])
            scaler.scale(loss)
    calls = watch.record.of(ScalerCall)
    assert {c.what for c in calls} == {"scale"}
    assert [c.scaler for c in calls] == [0, 0, 1, 1]
    assert [c.factor for c in calls] == [65536.0, 65536.0, 8.0, 8.0]


class PassingOn(torch.amp.GradScaler):
    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        super().update(new_scale)


def test_a_call_that_a_subclass_passes_on_is_one_call():
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        scaled_loop(model, optimizer, PassingOn("cpu", init_scale=8.0), batches(1))
    scale, step, unscale, update = watch.record.scaler_calls()
    assert [c.what for c in (scale, step, unscale, update)] == ["scale", "step", "unscale", "update"]
    assert step.at < unscale.at < unscale.until < step.until < update.at
