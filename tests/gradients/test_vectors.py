"""Gradients as weighted sums of others."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.gradients.vectors import combination, consumed, vectors
from pytest_trainloop.recording.events import GradWrite, TensorSample
from tests.helpers.record_builder import RecordBuilder


def drawn(seed, size=50):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def packed(*values):
    sample = torch.tensor(values, dtype=torch.float32)
    return TensorSample(float(sample.abs().max()), sample.numpy().tobytes())


@pytest.mark.parametrize("weights", [(0.5, 0.5), (1.0, 1.0), (0.0, 0.5), (0.25, 0.25, 0.25, 0.25), (-1.0, 3.0)])
def test_the_weights_are_found(weights):
    parts = [drawn(i) for i in range(len(weights))]
    found = combination(sum(w * p for w, p in zip(weights, parts, strict=True)), parts)
    assert found is not None
    assert found.weights == pytest.approx(weights, abs=1e-12)
    assert found.residual < 1e-14


def test_a_small_part_is_told_from_a_dependent_one():
    small = 1e-9 * drawn(1)
    found = combination(drawn(0) + 2.0 * small, [drawn(0), small])
    assert found is not None
    assert found.weights == pytest.approx((1.0, 2.0), rel=1e-6)


def test_what_lies_outside_is_told():
    found = combination(drawn(0) + 0.1 * drawn(2), [drawn(0), drawn(1)])
    assert found is not None
    assert found.residual == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    "parts",
    [
        [drawn(0), drawn(0)],
        [drawn(0), 3.0 * drawn(0)],
        [drawn(0), torch.zeros(50, dtype=torch.float64)],
        [drawn(0), torch.full((50,), float("nan"), dtype=torch.float64)],
    ],
    ids=["same", "parallel", "zero", "nan"],
)
def test_parts_that_cannot_be_told_apart(parts):
    assert combination(drawn(1), parts) is None


def test_nothing_is_a_sum_of_anything():
    found = combination(torch.zeros(50, dtype=torch.float64), [drawn(0), drawn(1)])
    assert found is not None
    assert (found.weights, found.residual) == ((0.0, 0.0), 0.0)


def test_a_parameter_without_a_gradient_counts_as_zero():
    a, b = vectors([{"w": drawn(0, 3), "v": drawn(1, 2)}, {"w": drawn(2, 3)}])
    assert (len(a), len(b)) == (5, 5)
    assert b[:2].tolist() == [0.0, 0.0]


def test_a_clip_is_taken_back():
    build = RecordBuilder([0])
    build.backward(0)
    build.clip(0)
    step = build.step()
    record = build.record()
    step.reads[0].grads = {0: packed(0.1, 0.2)}
    clip = record.of(GradWrite)[0]
    clip.before, clip.after = {0: packed(1.0, 2.0)}, {0: packed(0.1, 0.2)}
    assert consumed(record, 0, 0)["p0"].tolist() == pytest.approx([1.0, 2.0])
    assert consumed(record, 0, 1) is None


def test_a_clip_inside_a_closure_is_taken_back():
    build = RecordBuilder([0])
    step = build.step(closure=[lambda: (build.backward(0), build.clip(0))])
    record = build.record()
    step.reads[0].grads = {0: packed(0.1)}
    clip = record.of(GradWrite)[0]
    clip.before, clip.after = {0: packed(1.0)}, {0: packed(0.1)}
    assert consumed(record, 0, 0)["p0"].tolist() == pytest.approx([1.0])


def test_the_gradient_that_stands_there_is_taken_without_a_clip():
    build = RecordBuilder([0])
    build.backward(0)
    build.step().reads[0].grads = {0: packed(0.1, 0.2)}
    assert consumed(build.record(), 0, 0)["p0"].tolist() == pytest.approx([0.1, 0.2])
