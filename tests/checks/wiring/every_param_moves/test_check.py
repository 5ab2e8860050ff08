"""What ``every_param_moves`` says of a record and of the same run in float64."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.checks.wiring.every_param_moves.check import every_param_moves
from pytest_trainloop.instruments.gradients.dependence import Dependence, Dependences
from pytest_trainloop.recording.events import TensorSample
from pytest_trainloop.runs.further_runs import float64_run
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence

UNMOVED = [1.0, 1.0, 1.0]


class Influence:
    """Whether the loss depends on the parameter."""

    def __init__(self, depends):
        self._change = 1e-2 if depends else 0.0

    def influence(self, names):
        return {name: Dependence(self._change, 1e-12) for name in names}


def packed(values, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    return TensorSample(float(tensor.abs().max()), bytes(tensor.view(torch.uint8).tolist()))


def run(start=UNMOVED, end=UNMOVED, dtype=torch.bfloat16, *, steps=4, gradient=0.5, lr=1e-3, update=0.0, peak=None):
    """One parameter under an optimizer of torch's own; its values before and after, and how far each step went."""
    build = RecordBuilder([0])
    build.parameters[0].dtype = str(dtype).removeprefix("torch.")
    build.parameters[0].start = packed(start, dtype)
    build.parameters[0].shape = (len(start),)
    build.optimizers[0].from_torch = True
    build.optimizers[0].groups = (0,)
    build.optimizers[0].peak_lrs = (lr if peak is None else peak,)
    for _ in range(steps):
        build.zero()
        event = build.backward()
        for arrived in event.arrivals.values():
            arrived[0].incoming.peak = gradient
        step = build.step()
        step.lrs = (lr,)
        step.reads[0].grads = {0: packed([gradient] * len(start), dtype)}
        if update:
            step.updates = {0: update}
    record = build.record()
    record.end = {0: packed(end, dtype)}
    return record


def in_float64(start=UNMOVED, change=4e-4, update=1e-4):
    return run(start, [value - change for value in start], torch.float64, update=update)


def findings(native, double, *, depends=True):
    shared = {Dependences: Influence(depends), float64_run: double}
    return list(every_param_moves(FakeEvidence(native, shared=shared)))


def found(native, double, **more):
    return [(f.cause, f.level, f.culprits) for f in findings(native, double, **more)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_updates_below_half_a_ulp_are_lost(dtype):
    assert found(run(dtype=dtype), in_float64()) == [("lost_to_rounding", "fault", ("p0",))]


def test_a_learning_rate_too_low_for_float32_is_advice():
    native = run(dtype=torch.float32, lr=1e-9)
    assert found(native, in_float64(change=4e-9, update=1e-9)) == [("lost_to_rounding", "advice", ("p0",))]


@pytest.mark.parametrize(
    "native",
    [
        run(end=[1.0078125] * 3),
        run(gradient=0.0),
        run(lr=0.0),
        run(steps=2),
        run(lr=1e-5, peak=1e-3),  # float64 moves it by 1e-2 once the warm-up is over
    ],
    ids=["moved", "no-gradient", "lr-0", "two-steps", "warm-up"],
)
def test_what_moves_or_has_no_reason_to(native):
    assert found(native, in_float64()) == []


def test_what_the_loss_does_not_depend_on_may_stay():
    assert found(run(), in_float64(), depends=False) == []


def test_updates_that_float64_shows_to_be_large_are_another_matter():
    assert found(run(), in_float64(change=0.4, update=0.1)) == []
    there_and_back = run(dtype=torch.float64, update=0.01)
    assert found(run(), there_and_back) == []


@pytest.mark.parametrize(
    ("start", "dtype", "ulp"),
    [
        ([1.0], torch.bfloat16, "7.8e-03"),
        ([0.75], torch.bfloat16, "3.9e-03"),
        ([1.0], torch.float16, "9.8e-04"),
        ([0.1], torch.float32, "7.5e-09"),
    ],
)
def test_the_distance_to_the_next_value_is_given(start, dtype, ulp):
    (finding,) = findings(run(start, start, dtype), in_float64(start, change=4e-9, update=1e-9))
    assert finding.measured.endswith(f"ULP {ulp}")
