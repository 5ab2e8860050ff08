"""Forward passes, loss calls and roots as the record shows them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.recording.events import Backward, Forward, LossCall, ModeCall
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, code, names, net


@pytest.mark.parametrize("declared", [True, False])
def test_each_call_of_the_root_is_one_forward(declared):
    model = net()
    with Watch({"": model} if declared else {}) as watch:
        for x, _ in batches(3):
            model(x)
    forwards = watch.record.of(Forward)
    assert [f.module for f in forwards] == ["Sequential"] * 3
    assert code(forwards) == ["model(x)"] * 3
    assert all(f.grad_enabled and f.training and not f.inference and not f.in_eval for f in forwards)
    assert names(watch.record) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [p.owner for p in watch.record.parameters] == ["0", "0", "2", "2"]
    assert [p.shape for p in watch.record.parameters] == [(4, 3), (4,), (2, 4), (2,)]
    assert [p.calls_with_grad for p in watch.record.parameters] == [3] * 4


def test_grad_mode_is_seen_at_each_call():
    model, x = net(), torch.ones(1, 3)
    with Watch({"": model}) as watch:
        model(x)
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
    assert [(f.grad_enabled, f.inference) for f in watch.record.of(Forward)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert [(p.calls_with_grad, p.calls_without_grad) for p in watch.record.parameters] == [(1, 2)] * 4


def test_modules_that_act_by_mode_are_named():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.BatchNorm1d(3), nn.Dropout(0.0)), torch.ones(2, 3)
    with Watch({"": model}) as watch:
        model[1].eval()
        model(x)
        model.eval()
        model(x)
    first, second = watch.record.of(Forward)
    assert (first.training, first.in_eval, first.in_training) == (True, ("1",), ("2",))
    assert (second.training, second.in_eval, second.in_training) == (False, ("1", "2"), ())
    assert [(c.below, c.on) for c in watch.record.of(ModeCall)] == [("1", False), ("", False)]
    assert [p.calls_in_eval for p in watch.record.parameters] == [1, 1, 1, 1]


def test_autocast_and_its_dtype_are_seen():
    model, x = net(), torch.ones(1, 3)
    with Watch({"": model}) as watch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        model(x)
    assert [f.autocast for f in watch.record.of(Forward)] == ["cpu:bfloat16", ""]


def test_an_empty_batch_counts_apart():
    model = net()
    with Watch({"": model}) as watch:
        model(torch.ones(0, 3))
    assert [(p.calls_with_grad, p.calls_empty) for p in watch.record.parameters] == [(0, 1)] * 4


def test_a_forward_that_raises_and_is_caught_leaves_no_trace_on_the_next():
    model = net()
    with Watch({"": model}) as watch:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 7))
        model(torch.ones(1, 3))
    assert [f.module for f in watch.record.of(Forward)] == ["Sequential"] * 2


def test_parts_called_one_by_one_keep_their_declared_names():
    encoder, head = nn.Linear(3, 4), nn.Linear(4, 2)
    with Watch({"encoder": encoder, "head": head}) as watch:
        head(encoder(torch.ones(1, 3)))
    assert [f.module for f in watch.record.of(Forward)] == ["encoder", "head"]
    assert names(watch.record) == ["encoder.weight", "encoder.bias", "head.weight", "head.bias"]


def test_a_loss_is_seen_whoever_calls_it():
    logits, labels = torch.zeros(5, 4), torch.zeros(5, dtype=torch.long)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    with Watch() as watch:
        F.cross_entropy(logits, labels)
        criterion(logits, labels)
        F.mse_loss(input=logits.to(torch.bfloat16), target=torch.ones(5, 4, dtype=torch.bfloat16))
    first, second, third = watch.record.of(LossCall)
    assert (first.name, first.input_shape, first.target_shape, first.reduction) == (
        *("cross_entropy", (5, 4), (5,), "mean"),
    )
    assert (first.input_dtype, first.target_dtype) == ("float32", "int64")
    assert first.value == pytest.approx(torch.tensor(4.0).log().item())
    assert (second.reduction, second.value) == ("sum", pytest.approx(5 * first.value))
    assert (third.name, third.input_dtype, third.value) == ("mse_loss", "bfloat16", 1.0)
    assert code([first, second])[0] == "F.cross_entropy(logits, labels)"
    assert code([first, second])[1] == "criterion(logits, labels)"


def test_a_loss_per_row_has_no_single_value():
    with Watch() as watch:
        F.l1_loss(torch.ones(3), torch.zeros(3), reduction="none")
    (call,) = watch.record.of(LossCall)
    assert call.reduction == "none"
    assert call.value is None


def test_roots_carry_their_values():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with Watch() as watch:
        (3 * w).sum().backward()
        (2 * w).backward(torch.ones(2))
        torch.autograd.backward([w.sum(), (w * w).sum()])
        torch.autograd.backward(tensors=(w.max(),))
    first, second, two, last = (b.roots for b in watch.record.of(Backward))
    assert [(r.value, r.shape, r.requires_grad, r.history) for r in first] == [(9.0, (), True, True)]
    assert [(r.value, r.shape) for r in second] == [(6.0, (2,))]
    assert [r.value for r in two] == [3.0, 5.0]
    assert [r.value for r in last] == [2.0]


def test_a_root_without_history_is_recorded_before_torch_refuses_it():
    with Watch() as watch:
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.tensor(1.0).backward()
        torch.tensor(2.0, requires_grad=True).backward()
    refused, leaf = watch.record.of(Backward)
    assert [(r.requires_grad, r.history) for r in (*refused.roots, *leaf.roots)] == [(False, False), (True, False)]


def test_roots_given_by_an_iterator_still_reach_autograd():
    w = torch.ones(2, requires_grad=True)
    with Watch() as watch:
        torch.autograd.backward(root for root in [w.sum(), 2 * w.sum()])
        (grad,) = torch.autograd.grad(w.sum(), iter([w]))
    assert w.grad.tolist() == [3.0, 3.0]
    assert grad.tolist() == [1.0, 1.0]
    assert [r.value for r in watch.record.of(Backward)[0].roots] == [2.0, 4.0]
