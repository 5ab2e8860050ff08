"""Which ratios of a given parity are a fault, which are advice, and when nothing is decided."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from pytest_trainloop.checks.numerics.precision_parity import locate, runs
from pytest_trainloop.checks.numerics.precision_parity.check import precision_parity
from pytest_trainloop.checks.numerics.precision_parity.locate import Located
from pytest_trainloop.checks.numerics.precision_parity.op_log import Operation, OpLog, Sample
from pytest_trainloop.checks.numerics.precision_parity.runs import Parity
from pytest_trainloop.checks.numerics.precision_parity.tensor_errors import TensorErrors
from pytest_trainloop.errors import CannotDecide, DoesNotApply
from pytest_trainloop.recording.events import Place
from pytest_trainloop.recording.watch import Watch
from tests.helpers.records import ONE, FakeEvidence, parameter, record

RECORD = record([parameter(0, "w")], held=[0], gradients={0: ONE})
HERE = Place("model.py", 9, "scores = q @ k.T")


class Given:
    """Runs in low precision whose parity is given, or the reason why there is none."""

    name, record, low, angles = "as it is", RECORD, None, False

    def __init__(self, ratio, *, imposed=False, finite=True):
        self._ratio, self._finite, self.imposed = ratio, finite, imposed

    def again(self, contexts):
        return self.record

    def parity(self):
        if isinstance(self._ratio, CannotDecide):
            raise self._ratio
        return Parity(dtype=torch.float16, measured=self._ratio * 1e-3, explained=1e-3, finite=self._finite)


def sample(peak, *, lost=0.0):
    return Sample(torch.ones(1), peak, 0.0, lost, torch.float16)


def operation(low):
    return Operation(0, "matmul", HERE, "attention", False, [], (), low)


@pytest.fixture
def verdicts(monkeypatch):
    def judge(*given, located=None):
        monkeypatch.setattr(runs, "low_precision_runs", lambda _evidence: iter(given))
        monkeypatch.setattr(locate, "locate", lambda *_: located or Located("precision_lost", names=("w",)))
        noted = TensorErrors(FakeEvidence(RECORD))
        return list(precision_parity(FakeEvidence(RECORD, shared={TensorErrors: noted})))

    return judge


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        (Given(1.9), []),
        (Given(3.0), ["advice"]),
        (Given(4.0), ["fault"]),
        (Given(math.inf), ["fault"]),
        (Given(40.0, imposed=True), ["advice"]),
    ],
)
def test_the_ratio_decides(verdicts, given, levels):
    assert [f.level for f in verdicts(given)] == levels


def test_an_autocast_of_the_check_that_agrees_is_no_pass_of_low_precision(verdicts):
    with pytest.raises(DoesNotApply, match="the loop computes nothing in low precision"):
        verdicts(Given(3.0, imposed=True))


@pytest.mark.parametrize(
    ("imposed", "left", "level"),
    [(False, 1.4e-3, "fault"), (False, 1.6e-3, "advice"), (True, 1.4e-3, "advice")],
)
def test_between_the_limits_an_operation_that_makes_half_of_the_error_decides(verdicts, imposed, left, level):
    located = Located("accumulation", "forward", operation(sample(9.0)), sample(9.0), sample(9.0), left=left)
    given = Given(40.0 if imposed else 3.0, imposed=imposed)
    (found,) = verdicts(given, located=located)
    assert found.level == level
    assert ("a knob precision=" in found.repair) == imposed
    assert ("settles it" in found.repair) == (level == "advice" and not imposed)


def test_only_the_first_wrong_precision_is_reported(verdicts):
    assert len(verdicts(Given(1.0), Given(9.0), Given(90.0))) == 1


def test_an_operation_is_named_with_its_values(verdicts):
    low = sample(6e4, lost=0.25)
    located = Located("overflow", "forward", operation(low), low, sample(1e6))
    (found,) = verdicts(Given(math.inf, finite=False), located=located)
    assert (found.cause, found.culprits, found.where) == ("overflow", ("attention", "matmul"), str(HERE))
    assert found.summary == "matmul in attention overflows in float16"
    assert "25% of it not finite" in found.measured
    assert "float16 holds 6e-08 to 65504" in found.measured


def test_without_an_operation_the_loss_is_to_be_scaled(verdicts):
    (found,) = verdicts(Given(9.0), located=Located("underflow", "backward", share=0.3, names=("w",)))
    assert (found.culprits, found.where) == (("w",), "train.py:7   loss.backward()")
    assert "30% of its entries are zero" in found.summary
    assert "GradScaler" in found.repair


def test_no_precision_that_can_be_judged_is_a_skip(verdicts):
    absent, undecided = CannotDecide("no low precision"), Given(CannotDecide("no gradient arrives"))
    with pytest.raises(CannotDecide, match="no low precision"):
        verdicts(absent)
    with pytest.raises(CannotDecide, match="no gradient arrives"):
        verdicts(absent, undecided)
    assert verdicts(absent, undecided, Given(1.0)) == []


def test_memory_that_is_not_written_yet_is_no_value():
    model = nn.Linear(4, 2)
    log = OpLog()
    watch = Watch({"": model}, [])
    with watch, contextlib.ExitStack() as around:
        for context in log.contexts(watch):
            around.enter_context(context)
        mean = model(torch.randn(3, 4))
        Normal(mean, torch.ones(3, 2)).rsample().sum()
    assert "normal_" in {operation.name for operation in log.operations}
    assert "empty" not in {operation.name for operation in log.operations}
