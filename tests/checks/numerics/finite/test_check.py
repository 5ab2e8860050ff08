"""What finite says of given records, and of given origins of values that are not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from pytest_trainloop.checks.numerics.finite.check import finite
from pytest_trainloop.instruments.tracing.nonfinite import BadStep, MaskedLoss, NonFiniteOrigin, NonFiniteOrigins
from pytest_trainloop.recording.events import Place, TensorSample
from tests.helpers.records import ONE, FakeEvidence, parameter, record

HERE = Place("model.py", 9, "x = a / b")


def origin(direction="forward", **fields):
    at = {"op": "div", "place": HERE, "module": "body", "value": "NaN", "low": 0.0, "high": 2.0, "step": 3, "trail": ()}
    return NonFiniteOrigin(**{**at, **fields}, direction=direction)


def found(*, loss=math.nan, initial=ONE, **origins):
    seen = record([parameter(0, "w", start=initial)], held=[0], gradients={0: ONE})
    for backward in seen.backwards():
        backward.roots[0].value = loss
    known = {"root": None, "gradient": None, "loss": None, "from_input": None, "bad_step": None, "masked": []}
    known |= origins
    known["first"] = known["root"] or known["gradient"] or known["loss"]
    known["others_like"] = lambda origin: []
    return list(finite(FakeEvidence(seen, shared={NonFiniteOrigins.of: SimpleNamespace(**known)})))


def test_no_further_run_where_all_is_finite():
    assert found(loss=1.0) == []


def test_a_parameter_that_is_not_finite_before_training_needs_no_further_run():
    (finding,) = found(initial=TensorSample(math.nan, b"one", nonfinite="nan"))
    assert (finding.cause, finding.culprits) == ("nonfinite_parameter", ("w",))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_operation_is_named_by_the_pass_in_which_it_fails(direction):
    (finding,) = found(root=origin(direction))
    assert (finding.cause, finding.culprits, finding.where) == (f"made_in_{direction}", ("div", "body"), str(HERE))
    assert "div() in body makes" in finding.summary
    assert "after 3 optimizer steps" in finding.summary
    assert finding.repair.startswith("x / (y + eps)")


def test_a_bad_step_comes_before_operations():
    step = BadStep("Adam", ("w",), 2, 0.5, "exp_avg_sq in float16, 100% zero")
    (finding,) = found(bad_step=step, root=origin())
    assert (finding.cause, finding.culprits) == ("weights_lost", ("w",))
    assert "100% zero" in finding.measured


def test_a_masked_loss_counts_only_where_no_root_is_bad():
    masked = [MaskedLoss("nan_to_num", HERE, origin(), 0)]
    assert [f.cause for f in found(masked=masked)] == ["nonfinite_masked"]
    assert [f.cause for f in found(masked=masked, root=origin())] == ["made_in_forward"]


def test_an_input_is_named_where_no_operation_made_the_value():
    (finding,) = found(from_input=origin())
    assert finding.cause == "nonfinite_input"
    assert "3 losses that were backpropagated are not finite" in finding.measured


def test_a_bad_step_from_state_in_float16_says_so():
    step = BadStep("Adam", ("w",), 2, 0.5, "exp_avg_sq in float16, 100% zero", "exp_avg_sq", "float32")
    (finding,) = found(bad_step=step, root=origin())
    assert finding.measured.endswith("the weights are float32")
    assert finding.repair.startswith("keep exp_avg_sq of the optimizer in float32")
