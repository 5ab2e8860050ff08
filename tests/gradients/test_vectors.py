"""Gradients as weighted sums of others."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.instruments.gradients.vectors import combination, consumed
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


def test_a_clip_inside_a_closure_is_taken_back():
    build = RecordBuilder([0])
    step = build.step(closure=[lambda: (build.backward(0), build.clip(0))])
    record = build.record()
    step.reads[0].grads = {0: packed(0.1)}
    clip = record.of(GradWrite)[0]
    clip.before, clip.after = {0: packed(1.0)}, {0: packed(0.1)}
    assert consumed(record, 0, 0)["p0"].tolist() == pytest.approx([1.0])
