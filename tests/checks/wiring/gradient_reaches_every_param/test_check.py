"""What ``gradient_reaches_every_param`` says of a record and of the runs that it asks for."""

import pytest

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.check import gradient_reaches_every_param
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cut_search import Cut, CutSearch, Search
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.exposed_results import ExposedResults
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.local_slopes import LocalSlopes
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.teachers import Teachers
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.unread_targets import UnreadTargets
from pytest_trainloop.gradients.dependence import Dependence, Dependences
from pytest_trainloop.recording.events import Move, Raised
from pytest_trainloop.runs.weight_origins import pretrained
from pytest_trainloop.tracing.cut_candidates import Candidate
from tests.helpers.records import HERE, ONE, ZERO, FakeEvidence, parameter, record


class Experiments:
    """What moving parameters, leaving operations out and following results would show."""

    def __init__(self, depends, cut, touched, exposed, saddle, target, teacher):
        self._teacher = teacher
        self._depends, self._cut, self._touched = depends, cut, set(touched)
        self._exposed, self._saddle, self._target = set(exposed), saddle, target
        self.shapes = {name: {(8, 1)} for name in exposed}

    def of(self, names):
        return {n: Dependence(1e-2 if n in self._depends else 0.0, 1e-12) for n in names}

    def find(self, names, kinds):
        return Search(self._cut, self._touched)

    def among(self, names):
        return self._exposed & set(names)

    def wanted_elsewhere(self, names, cut):
        return None

    def other_side(self, *_):
        return None

    def holding(self, names):
        return self._teacher

    def saddles(self, names):
        return self._saddle

    def fitting(self, names, results):
        return self._target if results else ""


class Slopes:
    """The slopes that central differences would show."""

    def __init__(self, slopes):
        self._slopes = slopes

    def of(self, names):
        return {name: slope for name, slope in self._slopes.items() if name in names}


def given(
    record,
    *,
    depends=(),
    cut=None,
    touched=(),
    exposed=(),
    saddle=None,
    target="",
    teacher="",
    batches=False,
    slopes=None,
):
    found = Experiments(depends, cut, touched, exposed, saddle or {}, target, teacher)
    kinds = (Dependences, CutSearch, ExposedResults, UnreadTargets, Teachers)
    evidence = FakeEvidence(record, shared=dict.fromkeys(kinds, found) | {LocalSlopes: Slopes(slopes or {})})
    evidence.offers = evidence.offers | ({"batches"} if batches else set())
    return evidence


def cut(kind, op, gradient=0.1, reached=("body.weight",)):
    return Cut(Candidate(kind, op, HERE, (), "Net"), gradient, 0.2, frozenset(reached))


def made(body=None, **fields):
    parameters = [parameter(0, "body.weight", **fields), parameter(1, "head.weight")]
    return record(parameters, held=[0, 1], gradients={0: body, 1: ONE})


def found(evidence):
    return [(f.cause, f.level, f.culprits) for f in gradient_reaches_every_param(evidence)]


def test_gradients_everywhere_are_fine():
    assert found(given(made(ONE))) == []


@pytest.mark.parametrize(
    ("kind", "op", "gradient", "cause"),
    [
        ("detach", "detach", 0.1, "graph_cut"),
        ("value", "item", None, "graph_cut"),
        ("custom", "Square", None, "graph_cut"),
        ("grad_off", "grad_off", 0.1, "no_grad_forward"),
        ("grad_off", "grad_off", None, "graph_cut"),
    ],
)
def test_no_gradient_where_the_loss_depends_is_a_cut(kind, op, gradient, cause):
    evidence = given(made(), depends=["body.weight"], cut=cut(kind, op, gradient))
    assert found(evidence) == [(cause, "fault", ("body.weight",))]


def test_a_cut_that_no_operation_explains_says_what_was_ruled_out():
    (finding,) = gradient_reaches_every_param(given(made(), depends=["body.weight"]))
    assert finding.cause == "graph_cut"
    assert "tried without" in finding.shown_by


@pytest.mark.parametrize(("kind", "level"), [("grad_off", "advice"), ("detach", "fault")])
def test_a_module_without_gradients_that_gives_targets_only_is_advice(kind, level):
    evidence = given(made(), depends=["body.weight"], cut=cut(kind, kind), teacher="body")
    ((_, found_level, culprits),) = found(evidence)
    assert (found_level, culprits) == (level, ("body.weight",))


def test_no_gradient_and_no_dependence_on_what_never_ran_is_advice():
    assert found(given(made(calls_with_grad=0))) == [("parameter_unused", "advice", ("body.weight",))]


def test_a_result_thrown_away_is_a_fault_and_one_given_out_is_advice():
    assert found(given(made(), touched=["body.weight"])) == [("parameter_unused", "fault", ("body.weight",))]
    assert found(given(made(), touched=["body.weight"], exposed=["body.weight"])) == [
        ("parameter_unused", "advice", ("body.weight",))
    ]


def test_a_result_given_out_is_a_fault_where_the_batch_has_a_target_for_it():
    evidence = given(made(), touched=["body.weight"], exposed=["body.weight"], target="batch.radius")
    (finding,) = gradient_reaches_every_param(evidence)
    assert (finding.cause, finding.level) == ("parameter_unused", "fault")
    assert "nothing reads batch.radius" in finding.summary


@pytest.mark.parametrize(
    ("frozen", "batches", "ran", "level"),
    [
        (("head.",), False, True, "fault"),
        ((), False, True, "fault"),
        (None, True, True, "advice"),
        (("head.",), True, False, "fault"),
        (("head.",), False, False, "advice"),
        ((), False, False, "fault"),
        (None, True, False, "advice"),
    ],
)
def test_what_takes_no_part_is_a_fault_where_frozen_is_declared_and_does_not_name_it(frozen, batches, ran, level):
    declared = made(calls_with_grad=int(ran))
    declared.frozen = frozen
    touched = ["body.weight"] if ran else []
    evidence = given(declared, touched=touched, exposed=touched, batches=batches)
    assert found(evidence) == [("parameter_unused", level, ("body.weight",))]


def test_a_zero_gradient_is_a_fault_only_with_the_operation_that_makes_it():
    assert found(given(made(ZERO), cut=cut("zero_slope", "round"))) == [
        ("gradient_vanished", "fault", ("body.weight",))
    ]
    assert found(given(made(ZERO), cut=cut("constant", "relu"))) == [("dead_activation", "fault", ("body.weight",))]
    flat = given(made(ZERO), depends=["body.weight"])
    sloping = given(made(ZERO), depends=["body.weight"], slopes={"body.weight": 0.3})
    assert found(flat) == [("gradient_vanished", "advice", ("body.weight",))]
    assert found(sloping) == [("gradient_vanished", "fault", ("body.weight",))]
    assert found(given(made(ZERO))) == []


@pytest.mark.parametrize("batches", [False, True])
def test_a_softmax_over_one_key_is_advice_whatever_batches_were_given(batches):
    evidence = given(made(ZERO), cut=cut("constant", "softmax"), batches=batches)
    assert found(evidence) == [("dead_activation", "advice", ("body.weight",))]


@pytest.mark.parametrize(("learned", "level"), [(False, "fault"), (True, "advice")])
def test_a_number_beyond_its_clamp_is_a_fault_unless_it_was_learned(learned, level):
    evidence = given(made(ZERO, shape=()), cut=cut("zero_slope", "clamp"))
    evidence._shared[pretrained] = learned
    assert found(evidence) == [("gradient_vanished", level, ("body.weight",))]


def test_zero_times_zero_is_dead():
    assert found(given(made(ZERO), saddle={"body.weight": 0.3})) == [("dead_activation", "fault", ("body.weight",))]


def test_a_loss_at_its_floor_has_nothing_to_teach():
    at_floor = made(ZERO)
    for backward in at_floor.backwards():
        backward.roots[0].value = 0.0
    assert found(given(at_floor, cut=cut("constant", "relu"))) == []


def test_the_excuses():
    declared = made()
    declared.frozen = ("body.",)
    assert found(given(declared, depends=["body.weight"])) == []
    by_hand = made()
    by_hand.moves = [Move(1, 5, (0,), None)]
    assert found(given(by_hand, depends=["body.weight"])) == []
    assert found(given(made(shape=(0,)), depends=["body.weight"])) == []


def test_what_only_ran_inside_a_checkpoint_lies_behind_it():
    evidence = given(made(calls_with_grad=0, checkpoint=HERE), depends=["body.weight"])
    assert found(evidence) == [("checkpoint_cut", "fault", ("body.weight",))]


def test_a_refused_backward_puts_every_parameter_under_suspicion():
    refused = made(ONE)
    refused.raised = Raised("RuntimeError", "...", "", HERE, "element 0 of tensors does not require grad")
    refused.backwards()[-1].arrivals.clear()
    refused.backwards()[-1].roots[0].history = False
    (finding,) = gradient_reaches_every_param(
        given(
            refused,
            depends=["body.weight", "head.weight"],
            cut=cut("grad_off", "grad_off", 0.1, ("body.weight", "head.weight")),
        )
    )
    assert (finding.cause, finding.culprits) == ("no_grad_forward", ("body.weight", "head.weight"))


def test_nothing_trains():
    frozen = record([parameter(0, "weight", requires_grad=False)], held=[0], gradients={})
    assert found(given(frozen)) == [("nothing_trainable", "fault", ("weight",))]


def test_adapters():
    base = {"name": "proj.weight", "index": 0}
    frozen = [
        parameter(**base, requires_grad=False),
        parameter(1, "proj.lora_A", requires_grad=False),
        parameter(2, "head.weight"),
    ]
    assert found(given(record(frozen, held=[2], gradients={2: ONE})))[0][0] == "adapters_frozen"
    open_base = [parameter(**base), parameter(1, "proj.lora_A"), parameter(2, "head.weight")]
    trained = record(open_base, held=[0, 1, 2], gradients={0: ONE, 1: ONE, 2: ONE})
    assert found(given(trained)) == [("base_left_trainable", "fault", ("proj.weight",))]
    closed = [parameter(**base, requires_grad=False), parameter(1, "proj.lora_A"), parameter(2, "head.weight")]
    assert found(given(record(closed, held=[1, 2], gradients={1: ONE, 2: ONE}))) == []
