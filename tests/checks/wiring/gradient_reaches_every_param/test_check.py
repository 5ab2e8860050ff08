"""What ``gradient_reaches_every_param`` says of a record, where no loop can be run again."""

import pytest

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.check import gradient_reaches_every_param
from pytest_trainloop.instruments.gradients.dependence import Dependence, Dependences
from pytest_trainloop.recording.events import Move, Raised
from tests.helpers.records import HERE, ONE, ZERO, FakeEvidence, parameter, record


class Depends:
    """What moving parameters would show."""

    def __init__(self, names):
        self._names = names

    def of(self, names):
        return {n: Dependence(1e-2 if n in self._names else 0.0, 1e-12) for n in names}


def found(record, *, depends=(), batches=False):
    evidence = FakeEvidence(record, shared={Dependences: Depends(depends)})
    evidence.repeatable = False
    evidence.offers = evidence.offers | ({"batches"} if batches else set())
    return [(f.cause, f.level, f.culprits) for f in gradient_reaches_every_param(evidence)]


def made(body=None, **fields):
    parameters = [parameter(0, "body.weight", **fields), parameter(1, "head.weight")]
    return record(parameters, held=[0, 1], gradients={0: body, 1: ONE})


def test_gradients_everywhere_are_fine():
    assert found(made(ONE)) == []


def test_no_gradient_where_the_loss_depends_is_a_cut():
    assert found(made(), depends=["body.weight"]) == [("graph_cut", "fault", ("body.weight",))]


@pytest.mark.parametrize(
    ("frozen", "batches", "level"),
    [
        (("head.",), True, "fault"),
        (("head.",), False, "advice"),
        ((), False, "fault"),
        (None, True, "advice"),
    ],
)
def test_what_takes_no_part_is_a_fault_where_frozen_is_declared_and_does_not_name_it(frozen, batches, level):
    declared = made(calls_with_grad=0)
    declared.frozen = frozen
    assert found(declared, batches=batches) == [("parameter_unused", level, ("body.weight",))]


def test_a_loss_at_its_floor_has_nothing_to_teach():
    at_floor = made(ZERO)
    for backward in at_floor.backwards():
        backward.roots[0].value = 0.0
    assert found(at_floor, depends=["body.weight"]) == []


def test_the_excuses():
    declared = made()
    declared.frozen = ("body.",)
    by_hand = made()
    by_hand.moves = [Move(1, 5, (0,), None)]
    for excused in (declared, by_hand, made(shape=(0,))):
        assert found(excused, depends=["body.weight"]) == []


def test_what_only_ran_inside_a_checkpoint_lies_behind_it():
    behind = made(calls_with_grad=0, checkpoint=HERE)
    assert found(behind, depends=["body.weight"]) == [("checkpoint_cut", "fault", ("body.weight",))]


def test_a_refused_backward_puts_every_parameter_under_suspicion():
    refused = made(ONE)
    refused.raised = Raised("RuntimeError", "...", "", HERE, "element 0 of tensors does not require grad")
    refused.backwards()[-1].arrivals.clear()
    refused.backwards()[-1].roots[0].history = False
    both = ("body.weight", "head.weight")
    assert found(refused, depends=both) == [("graph_cut", "fault", both)]


def test_nothing_trains():
    frozen = record([parameter(0, "weight", requires_grad=False)], held=[0], gradients={})
    assert found(frozen) == [("nothing_trainable", "fault", ("weight",))]


def test_adapters():
    head = parameter(2, "head.weight")
    base, frozen_base = (parameter(0, "proj.weight", requires_grad=asks) for asks in (True, False))
    adapter, frozen_adapter = (parameter(1, "proj.lora_A", requires_grad=asks) for asks in (True, False))
    frozen = record([frozen_base, frozen_adapter, head], held=[2], gradients={2: ONE})
    assert found(frozen)[0] == ("adapters_frozen", "fault", ("proj.lora_A",))
    trained = record([base, adapter, head], held=[0, 1, 2], gradients={0: ONE, 1: ONE, 2: ONE})
    assert found(trained) == [("base_left_trainable", "fault", ("proj.weight",))]
    assert found(record([frozen_base, adapter, head], held=[1, 2], gradients={1: ONE, 2: ONE})) == []
