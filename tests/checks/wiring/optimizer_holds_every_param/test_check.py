"""What ``optimizer_holds_every_param`` says of a record."""

import pytest

from pytest_trainloop.checks.wiring.optimizer_holds_every_param.check import optimizer_holds_every_param
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.events import Move
from pytest_trainloop.recording.record import Record
from tests.helpers.records import ONE, FakeEvidence, parameter, record


def found(made):
    return [(f.cause, f.level, f.culprits) for f in optimizer_holds_every_param(FakeEvidence(made))]


def body_and_head(**head):
    return [parameter(0, "body.weight"), parameter(1, "head.weight", **head)]


def test_a_parameter_that_gets_gradients_and_is_held_is_fine():
    assert found(record(body_and_head(), held=[0, 1], gradients={0: ONE, 1: ONE})) == []


def test_a_parameter_that_gets_gradients_and_is_not_held_is_missing():
    made = record(body_and_head(), held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == [("not_in_optimizer", "fault", ("head.weight",))]


def test_without_a_gradient_nothing_is_missing():
    assert found(record(body_and_head(), held=[0], gradients={0: ONE})) == []


def test_what_is_declared_frozen_is_not_missing():
    made = record(body_and_head(), held=[0], gradients={0: ONE, 1: ONE})
    made.frozen = ("head.",)
    assert found(made) == []


def test_what_moves_by_other_hands_is_not_missing():
    made = record(body_and_head(), held=[0], gradients={0: ONE, 1: ONE})
    made.moves = [Move(1, 5, (1,), None)]
    assert found(made) == []


def test_a_part_kept_in_eval_mode_is_not_missing():
    made = record(body_and_head(calls_in_eval=2), held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == []


def test_a_fixed_model_around_an_optimised_image_is_advice():
    parameters = [parameter(0, "image", role="foreign"), parameter(1, "net.weight")]
    made = record(parameters, held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == [("not_in_optimizer", "advice", ("net.weight",))]
    made.frozen = ("other.",)
    assert found(made) == [("not_in_optimizer", "fault", ("net.weight",))]
    made.frozen = ("net.",)
    assert found(made) == []


def test_new_parameters_beside_left_over_tensors_were_swapped():
    parameters = [*body_and_head(), parameter(2, "old", role="foreign", calls_with_grad=0)]
    made = record(parameters, held=[0, 2], gradients={0: ONE, 1: ONE})
    assert found(made) == [("swapped_after_optimizer", "fault", ("head.weight",))]


def test_only_left_over_tensors_are_a_stale_copy():
    parameters = [parameter(0, "weight"), parameter(1, "old", role="foreign", calls_with_grad=0)]
    assert found(record(parameters, held=[1], gradients={0: ONE}))[0][:2] == ("stale_copy", "fault")


def test_a_parameter_in_a_plain_list_was_never_registered():
    made = record(body_and_head(role="unregistered"), held=[0], gradients={0: ONE, 1: ONE})
    assert found(made) == [("not_registered", "fault", ("head.weight",))]


def test_a_parameter_listed_twice():
    assert found(record(body_and_head(), held=[0, 1, 1], gradients={0: ONE, 1: ONE}))[0][0] == "held_twice"


def test_without_an_optimizer_it_cannot_decide():
    with pytest.raises(CannotDecide, match="no torch optimizer was given or seen"):
        list(optimizer_holds_every_param(FakeEvidence(Record())))


def test_without_any_backward_pass_nothing_can_be_said():
    made = record(body_and_head(), held=[0], gradients={})
    made.events = []
    with pytest.raises(CannotDecide, match="no backward pass was seen"):
        found(made)
