"""What ``input_dependence`` says of tensors that nothing depends on."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.checks.batch.input_dependence.check import input_dependence
from pytest_trainloop.checks.batch.input_dependence.passes import BatchTensor, InputRuns, UnusedInputs
from pytest_trainloop.errors import UsageError
from tests.helpers.records import ONE, FakeEvidence, parameter, record
from tests.loops import data

X = BatchTensor("batch['x']", 0, passed=True, shape=(4, 6))
MASK = BatchTensor("batch['mask']", 1, passed=True, shape=(4, 6), integer=True, largest=1.0, masks=5)
KIND = BatchTensor("batch['kind']", 2, passed=True, shape=(4,), integer=True, largest=4.0)


class Runs:
    names = (X.name, MASK.name, KIND.name)
    own_data = False

    def __init__(self, found):
        self.found = found

    def unused(self, uses=()):
        return self.found


def findings(found, *idle, **options):
    parameters = [parameter(0, "body.weight"), *idle]
    made = record(parameters, held=range(len(parameters)), gradients={0: ONE})
    return list(input_dependence(FakeEvidence(made, shared={InputRuns: Runs(found)}), **options))


def unused(*tensors, **fields):
    return UnusedInputs(tensors, no_input_used=False, place="train.py:3", **fields)


def layer(index, name, shape):
    return parameter(index, name, shape=shape, owner=name.rpartition(".")[0], layer=True, calls_with_grad=0)


def test_inputs_that_are_used_pass():
    assert findings(None) == []


def test_no_input_used_is_a_fault():
    (found,) = findings(UnusedInputs((X, MASK), no_input_used=True, place="train.py:3"))
    assert (found.cause, found.level) == ("inputs_ignored", "fault")
    assert found.culprits == ("batch['x']", "batch['mask']")


def test_one_unused_input_is_advice_that_says_what_to_declare():
    (found,) = findings(unused(MASK))
    assert (found.cause, found.level) == ("input_ignored", "advice")
    assert found.summary == "the model receives batch['mask'], and nothing depends on it"
    assert """input_dependence={'uses': ["batch['mask']"]}""" in found.repair


def test_a_declared_use_makes_it_a_fault():
    assert [f.level for f in findings(unused(X, KIND), uses=[KIND.name])] == ["advice", "fault"]


@pytest.mark.parametrize("uses", [["batch['maks']"], "batch['mask']"])
def test_a_declared_use_of_nothing_that_is_there_is_refused(uses):
    with pytest.raises(UsageError, match="input_dependence got uses="):
        findings(None, uses=uses)


def test_a_mask_behind_which_the_loss_is_read_is_a_fault():
    (found,) = findings(unused(MASK, mask=MASK, hidden=X))
    assert found.level == "fault"
    assert "with other values in batch['x'] where it is 0, the loss changes" in found.summary
    (found,) = findings(unused(replace(MASK, masks=0), mask=MASK, hidden=X))
    assert found.level == "advice"


@pytest.mark.parametrize(
    ("tensor", "shape", "level"),
    [
        (KIND, (5, 8), "fault"),
        (KIND, (4, 8), "advice"),  # a table of four rows has none for the id 4
        (X, (8, 6), "fault"),
        (X, (6, 8), "advice"),
        (MASK, (5, 8), "advice"),
    ],
)
def test_a_layer_that_takes_it_and_never_runs_makes_it_a_fault(tensor, shape, level):
    (found,) = findings(unused(tensor), layer(1, "extra.weight", shape))
    assert found.level == level
    assert ("extra" in found.culprits) == (level == "fault")


def test_of_two_layers_that_would_take_it_neither_is_named():
    (found,) = findings(unused(X), layer(1, "one.weight", (8, 6)), layer(2, "two.weight", (8, 6)))
    assert found.level == "advice"


def test_ids_are_not_for_a_layer_with_a_bias():
    (found,) = findings(unused(KIND), layer(1, "one.weight", (8, 6)), layer(2, "one.bias", (8,)))
    assert found.level == "advice"


@pytest.mark.parametrize(("uses", "levels"), [(["batch['kind']"], ["fault"]), (["batch['y']"], []), ([], [])])
def test_a_declared_input_that_no_model_is_called_with(uses, levels):
    """The targets are read by the loss alone, and the kind by nothing."""

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = {"x": torch.randn(8, 6), "kind": torch.arange(8) % 5, "y": torch.arange(8) % 3}

        def fit(batches):
            for b in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(b["x"]), b["y"]).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    given = {"input_dependence": {"uses": uses}}
    findings = check_loop(make, only=["input_dependence"], options=given, raises=False).results[0].findings
    assert [f.level for f in findings] == levels
    assert all(
        f.summary
        == "nothing depends on batch['kind'], and no model is called with it: uses= declares that it is needed"
        for f in findings
    )


def test_the_first_batch_keeps_its_place_in_memory_while_addresses_are_compared():
    alive = []

    def make():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            given = iter(batches)
            first = weakref.ref(next(given)[0])
            for _ in given:
                alive.append(first() is not None)
                optimizer.zero_grad()
                model(torch.randn(12, 6)).square().mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(rows=12), fit=fit)

    check_loop(make, only=["input_dependence"], raises=False)
    steps_of_each_run, runs = 2, ("as it is", "with the first row", "with the last row")
    assert sum(alive) >= steps_of_each_run * len(runs)
