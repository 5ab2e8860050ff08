"""Parameters that stay as they were, on hand-written records."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.checks.wiring.every_param_moves.bit_equal import (
    bit_equal,
    lost_shares,
    low_precision_by_torch,
    measure,
)
from pytest_trainloop.recording.events import TensorSample
from tests.helpers.record_builder import RecordBuilder


def packed(values, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    return TensorSample(float(tensor.abs().max()), bytes(tensor.view(torch.uint8).tolist()))


def run(start, end, dtype=torch.bfloat16, *, steps=4, gradient=0.5, lr=1e-3, update=0.0, peak=None):
    """One parameter under an optimizer of torch's own; its values before and after, and how far each step went."""
    build = RecordBuilder([0])
    build.parameters[0].dtype = str(dtype).removeprefix("torch.")
    build.parameters[0].start = packed(start, dtype)
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


UNMOVED = [1.0, 1.0, 1.0]


def test_a_parameter_that_never_changed_is_found():
    assert [p.name for p in bit_equal(run(UNMOVED, UNMOVED))] == ["p0"]


@pytest.mark.parametrize(
    "record",
    [
        run(UNMOVED, [1.0, 1.0, 1.0078125]),
        run(UNMOVED, UNMOVED, gradient=0.0),
        run(UNMOVED, UNMOVED, lr=0.0),
        run(UNMOVED, UNMOVED, steps=2),
    ],
    ids=["moved", "no-gradient", "lr-0", "two-steps"],
)
def test_what_moved_or_had_no_reason_to(record):
    assert bit_equal(record) == []


@pytest.mark.parametrize(
    ("start", "dtype", "ulp"),
    [
        ([1.0], torch.bfloat16, 2.0**-7),
        ([0.75], torch.bfloat16, 2.0**-8),
        ([1.0], torch.float16, 2.0**-10),
        ([0.1], torch.float32, 2.0**-27),
    ],
)
def test_the_ulp_of_values(start, dtype, ulp):
    double = run(start, start, torch.float64)
    (found,) = measure(run(start, start, dtype).parameters, run(start, start, dtype), double)
    assert found.ulp == ulp


def test_float64_shows_the_update():
    double = run([1.0], [1.0 - 4e-4], torch.float64, update=1e-4)
    (found,) = measure(run([1.0], [1.0]).parameters, run([1.0], [1.0]), double)
    assert found.update == pytest.approx(1e-4)
    assert found.lost


def test_a_warm_up_is_seen_to_its_end():
    native = run([1.0], [1.0], lr=1e-5, peak=1e-3)
    double = run([1.0], [1.0 - 4e-4], torch.float64, update=1e-4)
    (found,) = measure(native.parameters, native, double)
    assert found.update == pytest.approx(1e-2)
    assert not found.lost


def test_entries_are_lost_where_no_step_can_reach_half_a_ulp():
    start, end = [1.0, 1.0, 0.001, 0.001], [1.0, 1.0, 0.0011, 0.0009]
    native = run(start, end)
    double = run(start, [1.0 - 4e-4] * 2 + [0.0006] * 2, torch.float64, update=1e-4)
    assert lost_shares(low_precision_by_torch(native, ("bfloat16",)), native, double) == {"p0": 0.5}


def test_entries_that_went_there_and_back_are_not_lost():
    native = run([1.0, 1.0], [1.0, 1.0])
    double = run([1.0, 1.0], [1.0, 1.0], torch.float64, update=0.01)
    assert lost_shares(low_precision_by_torch(native, ("bfloat16",)), native, double) == {"p0": 0.0}


def test_only_low_precision_under_optimizers_of_torch_is_counted():
    assert low_precision_by_torch(run(UNMOVED, UNMOVED, torch.float32), ("bfloat16",)) == []
    own = run(UNMOVED, UNMOVED)
    own.optimizers[0].from_torch = False
    assert low_precision_by_torch(own, ("bfloat16",)) == []
