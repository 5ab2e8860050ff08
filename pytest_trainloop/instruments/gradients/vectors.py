"""Gradients as vectors, and a gradient written as a weighted sum of others.

See docs/how-it-decides.md#accumulation-as-weights.

A vector holds the sampled entries of every parameter, always at the same places: a linear map of the whole gradient, so
that a weighted sum of gradients is the same weighted sum of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.events import GradWrite, Step
from pytest_trainloop.recording.samples import as_real

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.recording.events import TensorSample
    from pytest_trainloop.recording.record import Record

Gradient = dict[str, torch.Tensor]
"""The sampled entries by parameter, in float64."""

RELATIVE_TOLERANCE = 1e-7
"""Smallest relative singular value at which the weights are determined: from gradients with errors of 1e-15 to 1e-8."""


def steps_of(record: Record, optimizer: int) -> list[Step]:
    """The innermost steps of one optimizer that were watched in full, in order."""
    return [s for s in record.of(Step) if s.optimizer == optimizer and not s.nested and s.full and s.reads]


def consumed(record: Record, optimizer: int, nth: int) -> Gradient | None:
    """The gradient that the optimizer's nth step read, as it was before any clipping; None without such a step."""
    steps = steps_of(record, optimizer)
    if nth >= len(steps):
        return None
    step = steps[nth]
    samples = {i: sample for i, sample in step.reads[0].grads.items() if sample is not None}
    since = steps[nth - 1].reads[0].at if nth else 0
    for write in record.of(GradWrite):
        if write.how == "clipped" and since < write.at < step.reads[0].at:
            last = {
                i: sample for i, sample in write.before.items() if i in samples and not _written(record, i, write, step)
            }
            samples.update(last)
    return {
        record.name(i): values(sample, record.parameters[i].dtype)
        for i, sample in samples.items()
        if not sample.sparse and sample.raw
    }


def _written(record: Record, index: int, clip: GradWrite, step: Step) -> bool:
    """Whether the gradient was written to, unscaled or added to between a clip and the step's look at it."""
    until = step.reads[0].at
    unscaled = [c.at for c in record.scaler_calls() if c.what == "unscale" and c.optimizer == step.optimizer]
    others = any(clip.at < w.at < until and index in w.parameters for w in record.of(GradWrite))
    return others or any(clip.at < at < until for at in (*unscaled, *(a.at for a in record.arrivals(index))))


def values(sample: TensorSample, dtype: str) -> torch.Tensor:
    """The sampled entries of a tensor of this dtype, in float64; complex ones as pairs."""
    raw = torch.frombuffer(bytearray(sample.raw), dtype=getattr(torch, dtype))
    return as_real(raw).reshape(-1).to(torch.float64)


def ends(record: Record) -> tuple[Gradient, Gradient]:
    """Sampled entries of every parameter, as they were at the start and at the end of a run."""
    start = {p.name: values(p.start, p.dtype) for p in record.parameters if p.start.raw and p.index in record.end}
    end = {
        p.name: values(record.end[p.index], p.dtype)
        for p in record.parameters
        if p.name in start and record.end[p.index].raw
    }
    return start, end


def vectors(gradients: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The gradients as vectors over the same parameters; a parameter without a gradient counts as zero."""
    sizes = {name: len(found) for g in gradients for name, found in g.items()}
    names = sorted(n for n in sizes if all(len(g[n]) == sizes[n] for g in gradients if n in g))
    if not names:
        return [torch.zeros(1, dtype=torch.float64) for _ in gradients]
    zeros = {n: torch.zeros(sizes[n], dtype=torch.float64) for n in names}
    return [torch.cat([g.get(n, zeros[n]) for n in names]) for g in gradients]


def combination(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Combination | None:
    """The whole as a weighted sum of the parts, by least squares.

    None where the parts are nearly dependent, or as many as the entries, of which anything is a sum. Every part is
    scaled to length 1 first, so that a small one is not taken for a dependent one.
    """
    lengths = [float(torch.linalg.vector_norm(p)) for p in parts]
    if len(whole) <= len(parts) or not all(0.0 < n < float("inf") for n in lengths):
        return None
    basis = torch.stack([p / n for p, n in zip(parts, lengths, strict=True)], dim=1)
    left, singular, right = torch.linalg.svd(basis, full_matrices=False)
    if float(singular[-1]) < RELATIVE_TOLERANCE * float(singular[0]):
        return None
    scaled = right.T @ ((left.T @ whole) / singular)
    outside = float(torch.linalg.vector_norm(whole - basis @ scaled))
    size = float(torch.linalg.vector_norm(whole))
    return Combination(tuple(float(w) / n for w, n in zip(scaled, lengths, strict=True)), outside / size if size else 0)


@dataclass(frozen=True, slots=True)
class Combination:
    """``weights`` of the parts in the whole, and the share of the whole that lies outside of their span."""

    weights: tuple[float, ...]
    residual: float
