"""What ``input_dependence`` says of tensors that nothing depends on."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, UsageError, check_loop
from tests.loops import data
from tests.loops.plain import loop


def judged(make, **options):
    return check_loop(make, only=["input_dependence"], options={"input_dependence": options}, raises=False).results[0]


def classifier():
    """Reads one of three tensors in the model, another in the loss, and the kind of each row nowhere."""
    batch = {"x": torch.randn(8, 6), "kind": torch.arange(8) % 5, "y": torch.arange(8) % 3}
    return loop(nn.Linear(6, 3), batch, lambda model, b: F.cross_entropy(model(b["x"]), b["y"]))


@pytest.mark.parametrize("uses", [["batch['knid']"], "batch['kind']"])
def test_a_declared_use_of_nothing_that_is_there_is_refused(uses):
    with pytest.raises(UsageError, match="input_dependence got uses="):
        judged(classifier, uses=uses)


@pytest.mark.parametrize(("uses", "levels"), [(["batch['kind']"], ["fault"]), (["batch['y']"], []), ([], [])])
def test_a_declared_input_that_no_model_is_called_with(uses, levels):
    findings = judged(classifier, uses=uses).findings
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

    judged(make)
    steps_of_each_run, runs = 2, ("as it is", "with the first row", "with the last row")
    assert sum(alive) >= steps_of_each_run * len(runs)
