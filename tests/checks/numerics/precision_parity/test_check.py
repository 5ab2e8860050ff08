"""Which ratios are a fault, which are advice, and when nothing is decided."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.numerics.precision_parity import operations, runs
from pytest_trainloop.checks.numerics.precision_parity.check import precision_parity
from pytest_trainloop.checks.numerics.precision_parity.modes import Choices
from pytest_trainloop.checks.numerics.precision_parity.operations import Aligned, Operation, OpLog, Sample
from pytest_trainloop.checks.numerics.precision_parity.runs import Parity, TensorErrors
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.recording.events import Place, TensorSample
from pytest_trainloop.recording.watch import Watch
from tests.helpers.records import FakeEvidence, parameter, record

RECORD = record([parameter(0, "w")], held=[0], gradients={0: TensorSample(1.0, bytes(4))})
COUNT = itertools.count()


class Given:
    """Runs in low precision whose parity is given, or the reason why there is none; no operation is seen in them."""

    name, how, record, reference, low, choices = "as it is", "", RECORD, RECORD, torch.bfloat16, Choices()

    def __init__(self, ratio, *, imposed=False):
        self._ratio, self.imposed = ratio, imposed

    def again(self, *_contexts):
        return self.record

    def reference_inside(self, _contexts):
        return self.record

    def rounded(self, _noise, **_how):
        return self.record

    def parity(self):
        if isinstance(self._ratio, CannotDecide):
            raise self._ratio
        return Parity(dtype=torch.bfloat16, measured=self._ratio * 1e-3, explained=1e-3)


@pytest.fixture
def verdicts(monkeypatch):
    def judge(*given):
        monkeypatch.setattr(runs, "low_precision_runs", lambda _evidence: iter(given))
        noted = TensorErrors(FakeEvidence(RECORD))
        return list(precision_parity(FakeEvidence(RECORD, shared={TensorErrors: noted})))

    return judge


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ([Given(1.9)], []),
        ([Given(3.0)], ["advice"]),
        ([Given(4.0)], ["fault"]),
        ([Given(math.inf)], ["fault"]),
        ([Given(40.0, imposed=True)], ["advice"]),
        ([Given(1.0), Given(9.0), Given(90.0)], ["fault"]),  # the first wrong precision alone is reported
        ([CannotDecide("no low precision"), Given(CannotDecide("no gradient")), Given(1.0)], []),
    ],
)
def test_the_ratio_decides(verdicts, given, levels):
    assert [f.level for f in verdicts(*given)] == levels


@pytest.mark.parametrize(
    ("imposed", "left", "level"),
    [(False, 1.4e-3, "fault"), (False, 1.6e-3, "advice"), (True, 1.4e-3, "advice")],
)
def test_between_the_limits_an_operation_that_makes_half_of_the_error_decides(
    verdicts, monkeypatch, imposed, left, level
):
    right, wrong = (
        Operation(0, "matmul", Place("model.py", 9, "q @ k.T"), 1, "attention", False, [], (), sample)
        for sample in (Sample(torch.ones(1), 9.0, 0.0, lost, torch.float16) for lost in (0.0, 0.5))
    )
    monkeypatch.setattr(operations, "aligned_operations", lambda _runs: [Aligned(wrong, right, [right])])
    monkeypatch.setattr(operations, "_left_in_float32", lambda *_: {"": left})
    (found,) = verdicts(Given(40.0 if imposed else 3.0, imposed=imposed))
    assert (found.cause, found.level) == ("overflow", level)
    assert ("a knob precision=" in found.repair) == imposed
    assert ("settles it" in found.repair) == (level == "advice" and not imposed)


def test_what_cannot_be_judged_is_no_pass(verdicts):
    with pytest.raises(DoesNotApply, match="the loop computes nothing in low precision"):
        verdicts(Given(3.0, imposed=True))
    absent, undecided = CannotDecide("no low precision"), Given(CannotDecide("no gradient arrives"))
    with pytest.raises(CannotDecide, match="no low precision"):
        verdicts(absent)
    with pytest.raises(CannotDecide, match="no gradient arrives"):
        verdicts(absent, undecided)


def test_memory_that_is_not_written_yet_is_no_value():
    model, log = nn.Linear(4, 2), OpLog()
    watch = Watch({"": model}, [])
    with watch, contextlib.ExitStack() as around:
        for context in log.contexts(watch):
            around.enter_context(context)
        Normal(model(torch.randn(3, 4)), torch.ones(3, 2)).rsample().sum()
    names = {operation.name for operation in log.operations.values()}
    assert "normal_" in names
    assert "empty" not in names


def loop(loss_of):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 4), torch.randint(2, (8,)))

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


def only(make):
    (result,) = check_loop(make, only=["precision_parity"], raises=False).results
    return result


def under(dtype, *, enabled=True):
    def loss_of(model, x, y):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return F.cross_entropy(model(x), y)

    return loss_of


FLOAT32 = {"fp32": torch.float32}


@pytest.mark.parametrize(
    ("dtypes", "outcome", "reason"),
    [
        ({"bf16": torch.bfloat16}, "passed", ""),
        ({}, "skipped", "with precision='bf16' building the loop raised KeyError: 'bf16'"),
        (dict.fromkeys(("bf16", "fp16"), torch.float32), "skipped", "with precision='bf16' nothing is computed in low"),
    ],
    ids=["one-value", "other-names", "not-passed-on"],
)
def test_a_knob_is_judged_at_the_values_that_it_offers(dtypes, outcome, reason):
    def make(precision="fp32"):
        dtype = {**FLOAT32, **dtypes}[precision]
        return loop(under(torch.bfloat16, enabled=dtype is torch.bfloat16))

    result = only(make)
    assert (result.outcome, result.reason[: len(reason)]) == (outcome, reason)


def test_a_knob_whose_loop_raises_says_so():
    def make(precision="fp32"):
        return loop(lambda model, x, y: F.cross_entropy(model(x if precision == "fp32" else x.bfloat16()), y))

    result = only(make)
    assert result.outcome == "skipped"
    assert "with precision='bf16' the loop raises RuntimeError" in result.reason


def test_a_loop_that_refuses_autocast_gives_the_reason():
    result = only(lambda: loop(under(torch.bfloat16, enabled=False)))
    assert result.outcome == "skipped"
    assert result.reason.startswith("nothing of this loop is computed in low precision")


def test_a_model_that_ignores_autocast_is_told_with_its_line():
    def in_float32(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16), calls_switched_off(model):
            return F.cross_entropy(model(x), y)

    @contextlib.contextmanager
    def calls_switched_off(model):
        forward = model.forward
        model.forward = torch.autocast("cpu", enabled=False)(forward)
        yield
        del model.forward

    result = only(lambda: loop(in_float32))
    assert result.outcome == "skipped"
    assert "although the model is called under autocast" in result.reason
    assert "F.cross_entropy(model(x), y)" in result.reason


def test_draws_without_a_seed_are_no_fault():
    def make(precision="bf16"):
        def loss_of(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
                logits = model(x)
            weight = torch.tensor([1.0, 2.0 + next(COUNT) % 7])
            return F.cross_entropy(logits.float(), y, weight=weight)

        return loop(loss_of)

    assert only(make).outcome in ("passed", "unreliable")


def test_a_low_precision_batch_is_data_and_a_buffer_made_in_low_precision_is_not():
    def batch():
        given = loop(lambda model, x, y: F.cross_entropy(model(x.float()), y))
        given.batch = (given.batch[0].bfloat16(), given.batch[1])
        return given

    def buffer():
        given = loop(lambda model, x, y: F.mse_loss(model(x) * model.keep.float(), F.one_hot(y, 2).float()))
        given.model.register_buffer("keep", torch.cumprod(torch.full((1000,), 0.999).bfloat16(), 0)[-2:])
        return given

    assert only(batch).outcome == "passed"
    assert [f.cause for f in only(buffer).faults] == ["precision_lost"]


def test_a_small_loss_in_float16_is_to_be_scaled():
    def loss_of(model, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(1e-3 * model(x), 1e-3 * F.one_hot(y, 2).float())

    (found,) = only(lambda: loop(loss_of)).findings
    assert found.cause == "underflow"
    assert found.repair.startswith("scale the loss (torch.amp.GradScaler)")
