"""What a LossContract may say, and what is said of what it may not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import LossContract, UsageError, check_loss
from pytest_trainloop.instruments.strategies.loss_cases import Case, inputs_of, traits

REFUSED = {
    "no function": ({"criterion": 3}, "criterion is of type int; a function"),
    "a class": ({"criterion": nn.MSELoss}, "criterion is the class MSELoss"),
    "unknown output": ({"expects": "logit"}, "expects is 'logit'; one of .* the nearest name is 'logits'"),
    "unknown target": ({"target": "indices"}, "target is 'indices'; .* the nearest name is 'index'"),
    "no such call": ({"expects": "values"}, "expects='values' with target='index' .* target='value' or 'binary'"),
    "no classes": ({"num_classes": None}, "num_classes is not given; expects='logits' with target='index' needs"),
    "one class": ({"num_classes": 1}, "num_classes is 1; a whole number from 2 on"),
    "classes of values": (
        {"expects": "values", "target": "value"},
        "num_classes is given, but values have no classes; num_outputs",
    ),
    "outputs of logits": ({"num_outputs": 2}, "num_outputs is given; it goes with expects='values'"),
    "ignored float": ({"ignore_index": -1.0}, r"ignore_index is -1.0; a whole number"),
    "ignored pair": ({"target": "pair", "ignore_index": 0}, "ignore_index is given, but no entry of target='pair'"),
    "unknown reduction": ({"reduction": "avg"}, "reduction is 'avg'; one of mean, sum, none is needed"),
    "shape": ({"shape": 3}, "shape is 3; the sizes of one row's positions"),
    "class axis": ({"class_dim": 0}, "class_dim is 0; an axis of the output's 2"),
    "labels": ({"labels": (1, -1)}, r"labels is \(1, -1\); a tuple of two numbers, the smaller one first"),
    "views": ({"expects": "embeddings", "target": "pair", "views": 1}, "views is 1, but a pair is two tensors"),
    "rows": ({"min_rows": 0}, "min_rows is 0; a whole number from 1 on"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_sentence(name):
    given, sentence = REFUSED[name]
    with pytest.raises(UsageError, match=sentence):
        LossContract(**{"criterion": F.cross_entropy, "expects": "logits", "num_classes": 3, **given})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LossContract(criterion=F.mse_loss, expect="values"), r"has no field 'expect'; the .* is 'expects'"),
        (
            lambda: LossContract(expects="values"),
            r"LossContract.criterion is not given; a function criterion\(output, ",
        ),
        (
            lambda: LossContract(F.mse_loss, "values"),
            r"takes its fields by keyword only, as in LossContract\(criterion=",
        ),
        (lambda: LossContract(criterion=F.mse_loss, expects=3), "expects is 3; one of"),
        (lambda: 3, "<lambda> returned a int; it must return a LossContract"),
    ],
)
def test_a_slip_in_the_call_is_one_sentence_with_its_line(make, sentence):
    with pytest.raises(UsageError, match=sentence + r".* \(tests/test_losscontract\.py:\d+\)$"):
        check_loss(make)


@pytest.mark.parametrize(
    ("contract", "output", "target"),
    [
        ({"expects": "logits", "num_classes": 3}, (4, 3), (4,)),
        ({"expects": "logits", "num_classes": 3, "shape": (5, 6)}, (4, 3, 5, 6), (4, 5, 6)),
        ({"expects": "logits", "num_classes": 3, "shape": (5,), "class_dim": -1}, (4, 5, 3), (4, 5)),
        ({"expects": "logits", "num_classes": 3, "target": "distribution"}, (4, 3), (4, 3)),
        ({"expects": "logits", "num_classes": 3, "target": "binary"}, (4, 3), (4, 3)),
        ({"expects": "probabilities", "target": "binary", "shape": (5,)}, (4, 5), (4, 5)),
        ({"expects": "values", "target": "value", "num_outputs": 2}, (4, 2), (4,)),
        ({"expects": "embeddings", "num_classes": 3, "embedding_dim": 7}, (4, 7), (4,)),
    ],
)
def test_outputs_and_targets_have_the_shapes_of_the_contract(contract, output, target):
    made = inputs_of(LossContract(criterion=F.cross_entropy, **contract), Case(rows=4))
    assert tuple(made.outputs[0].shape) == output
    assert made.target is not None
    assert tuple(made.target.shape) == target


def test_the_strategies_serve_a_projects_own_tests():
    from hypothesis import HealthCheck, given, settings

    from pytest_trainloop.instruments import strategies

    contract = LossContract(criterion=F.cross_entropy, expects="logits", num_classes=3, ignore_index=-100)
    kinds = set()

    # What else the machine does is not what is tested.
    @settings(max_examples=60, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(strategies.calls(contract), strategies.outputs(contract), strategies.targets(contract, only=["one_class"]))
    def own(call, output, target):
        logits, labels = call
        kinds.add(bool((labels == -100).all()))
        assert logits.shape == (len(labels), 3)
        assert output.dtype is torch.float32
        assert len(target.unique()) == 1

    own()
    assert kinds == {True, False}
    assert "all_ignored" in traits(contract)


def test_a_criterion_must_return_a_tensor():
    with pytest.raises(UsageError, match=r"criterion returned a tuple of 2; a floating tensor is needed"):
        check_loss(LossContract(criterion=lambda o, t: (F.mse_loss(o, t), {}), expects="values", target="value"))
