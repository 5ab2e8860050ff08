"""What ``optimizer_holds_every_param`` says of a record."""

import pytest

from pytest_trainloop.checks.wiring.optimizer_holds_every_param.check import optimizer_holds_every_param
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.recording.record import Record
from tests.helpers.records import ONE, ZERO, FakeEvidence, parameter, record


def found(made):
    return [(f.cause, f.level, f.culprits) for f in optimizer_holds_every_param(FakeEvidence(made))]


def test_what_is_declared_frozen_is_not_missing():
    made = record([parameter(0, "body.weight"), parameter(1, "head.weight")], held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == [("not_in_optimizer", "fault", ("head.weight",))]
    made.frozen = ("head.",)
    assert found(made) == []


def test_a_parameter_next_to_missing_ones_is_missing_while_its_gradients_are_zero():
    parameters = [parameter(0, "body.weight"), parameter(1, "lora.a"), parameter(2, "lora.b"), parameter(3, "c.b")]
    made = record(parameters, held=[0], gradients={0: ONE, 1: ZERO, 2: ONE, 3: ZERO})
    assert found(made) == [("not_in_optimizer", "fault", ("lora.b", "lora.a"))]


def test_a_fixed_model_around_an_optimised_image_is_advice():
    parameters = [parameter(0, "image", role="foreign"), parameter(1, "net.weight")]
    made = record(parameters, held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == [("not_in_optimizer", "advice", ("net.weight",))]
    made.frozen = ("other.",)
    assert found(made) == [("not_in_optimizer", "fault", ("net.weight",))]
    made.frozen = ("net.",)
    assert found(made) == []


def test_what_three_passes_do_not_reach_is_no_part_of_an_undeclared_model():
    parameters = [parameter(0, "body.weight"), parameter(1, "clone.weight", declared=False)]
    made = record(parameters, held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == [("not_in_optimizer", "advice", ("clone.weight",))]
    made = record(parameters, held=[0], gradients={0: ONE, 1: ONE}, batches=2)
    assert found(made) == []


def test_without_an_optimizer_or_a_backward_pass_it_cannot_decide():
    with pytest.raises(CannotDecide, match="no torch optimizer was given or seen"):
        found(Record())
    made = record([parameter(0, "weight")], held=[0], gradients={})
    made.events = []
    with pytest.raises(CannotDecide, match="no backward pass was seen"):
        found(made)
