"""Loops written with Accelerate run unchanged, and the state that it shares does not leak from one to the next."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_trainloop import TrainLoop, UsageError
from pytest_trainloop.adapters import fresh_accelerator
from pytest_trainloop.runs.accelerate_state import gradient_state_kept

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("a_process_without_accelerators")]


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def labelled(rows=8):
    x = torch.randn(rows, 4)
    return x, (x.sum(dim=1) > 0).long()


def train(accelerator, model, optimizer, scheduler, batches):
    """The loop of Accelerate's own guide to gradient accumulation."""
    model.train()
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def prepared(accelerator, model, optimizer):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=labelled(),
        fit=lambda batches: train(accelerator, model, optimizer, scheduler, batches),
    )


def guide(accumulate=1):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = net()
    return prepared(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def batches_prepared_as_well(accumulate=1):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(batches):
        ready, stepper, loader = accelerator.prepare(model, optimizer, batches)
        for x, y in loader:
            with accelerator.accumulate(ready):
                accelerator.backward(F.cross_entropy(ready(x), y))
                stepper.step()
                stepper.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=labelled(), fit=fit)


def without_accumulation():
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=labelled(), fit=fit)


def precision_as_knob(accumulate=1, precision="fp32"):
    accelerator = fresh_accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, mixed_precision="no" if precision == "fp32" else precision
    )
    model = net()
    return prepared(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def trained_with(backward, accumulate, *, both=True):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if both:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare(model)

    def fit(batches):
        for x, y in batches:
            with accelerator.accumulate(model):
                backward(accelerator, F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=labelled(), fit=fit)


def past_the_accelerator(accumulate=1):
    """Faulty: ``loss.backward()`` where only ``accelerator.backward`` divides."""
    return trained_with(lambda accelerator, loss: loss.backward(), accumulate)


def divided_beside_the_accelerator(accumulate=1):
    """Faulty: the loop divides the loss, and ``accelerator.backward`` divides it once more."""
    return trained_with(
        lambda accelerator, loss: accelerator.backward(loss / accelerator.gradient_accumulation_steps), accumulate
    )


def optimizer_not_prepared(accumulate=1):
    """Faulty: only the model was prepared, so that the optimizer steps in every micro-batch."""
    return trained_with(lambda accelerator, loss: accelerator.backward(loss), accumulate, both=False)


def clips_used_up_weights(kept=iter):
    """Faulty: the optimizer uses up the iterator that each clip is given."""
    accelerator, model = accelerate.Accelerator(cpu=True), net()
    weights = kept(filter(lambda p: p.requires_grad, model.parameters()))
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def fit(batches):
        for x, y in batches:
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(weights, 0.1)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=labelled(), fit=fit)


def clips_listed_weights():
    return clips_used_up_weights(list)


CORRECT = [clips_listed_weights, guide, batches_prepared_as_well, without_accumulation, precision_as_knob]


@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_a_correct_loop_is_silent(make, assert_silent):
    assert_silent(make)


def test_an_optimizer_that_was_not_prepared_is_repaired_by_preparing_it(root_fault):
    fault = root_fault(optimizer_not_prepared, "accumulation_equivalence:stepped_inside_window")
    assert "accelerator.prepare(model, optimizer)" in fault.repair
    assert "model = accelerator.prepare(model)" in fault.change
    assert "optimizer.step()" in fault.where


def test_a_clip_that_accelerate_gives_an_empty_list(root_fault):
    """https://github.com/PixArt-alpha/PixArt-alpha/pull/160"""
    fault = root_fault(clips_used_up_weights, "step_order:clips_nothing")
    assert "weights = kept(filter(" in fault.change


@pytest.mark.parametrize(
    ("make", "cause", "factor"),
    [(past_the_accelerator, "loss_not_divided", "2.000"), (divided_beside_the_accelerator, "divided_twice", "0.500")],
)
def test_a_loss_divided_too_seldom_or_too_often(make, cause, factor, root_fault):
    assert factor in root_fault(make, f"accumulation_equivalence:{cause}").measured


@pytest.mark.parametrize("make", [guide, batches_prepared_as_well, precision_as_knob], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 12), (4, 3), (5, 2)])
def test_the_loop_runs_unchanged(make, accumulate, steps, run):
    with gradient_state_kept():
        assert run(make(accumulate=accumulate)) == steps


def test_precision_can_be_varied_in_one_process(run):
    guide()
    with pytest.raises(ValueError, match="AcceleratorState has already been initialized"):
        accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    seen = set()
    for precision in ("bf16", "fp32"):
        loop = precision_as_knob(precision=precision)
        loop.model[0].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        assert run(loop) == 12
        assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
        seen.clear()


@pytest.mark.parametrize("kept", [False, True])
def test_a_window_left_open_stops_the_next_loop_unless_the_state_is_kept(kept, run):
    if kept:
        with gradient_state_kept():
            run(guide(accumulate=5))
    else:
        run(guide(accumulate=5))
    assert run(without_accumulation()) == (12 if kept else 0)


def test_the_state_is_given_back_after_an_exception():
    state = accelerate.state.GradientState()

    def interrupted():
        with gradient_state_kept():
            state._set_sync_gradients(False)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert state.sync_gradients


def test_keeping_the_state_does_not_import_accelerate(monkeypatch):
    monkeypatch.delitem(sys.modules, "accelerate.state")
    with gradient_state_kept():
        pass
    assert "accelerate.state" not in sys.modules


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match="fresh_accelerator needs the package accelerate"):
        fresh_accelerator()
