"""Two runs of one loop compared: how far the gradients that their steps read agree, and what else differs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.gradients.vectors import consumed, ends, steps_of, vectors
from pytest_trainloop.recording.events import Backward, Forward, Step
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from pytest_trainloop.instruments.gradients.vectors import Gradient
    from pytest_trainloop.recording.events import Event
    from pytest_trainloop.recording.record import Record


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two gradients agree."""

    ratio: float
    """The length of the second over that of the first."""
    cosine: float
    difference: float
    """The length of their difference over the larger of both lengths."""


def agreement(expected: torch.Tensor, got: torch.Tensor) -> Agreement:
    """How far two gradients agree, as vectors over the same entries."""
    a, b = (float(torch.linalg.vector_norm(v)) for v in (expected, got))
    if not (a < float("inf") and b < float("inf")):
        return Agreement(float("nan"), float("nan"), 0.0 if a != a and b != b else float("inf"))
    largest = max(a, b)
    if largest == 0.0:
        return Agreement(1.0, 1.0, 0.0)
    cosine = float(expected @ got) / (a * b) if a and b else 0.0
    return Agreement(b / a if a else float("inf"), cosine, float(torch.linalg.vector_norm(got - expected)) / largest)


def by_tensor(expected: Gradient, got: Gradient) -> dict[str, Agreement]:
    """How far two gradients agree at each parameter; one that is missing counts as zero."""
    return {
        name: agreement(*vectors([{name: side[name]} if name in side else {} for side in (expected, got)]))
        for name in dict.fromkeys((*expected, *got))
    }


def first_step_difference(expected: Record, got: Record, optimizer: int) -> float:
    """The relative difference between the gradients that an optimizer's first step reads in two runs."""
    a, b = (consumed(record, optimizer, 0) or {} for record in (expected, got))
    return agreement(*vectors([a, b])).difference


def optimizers(record: Record) -> list[int]:
    """The optimizers that were seen to step."""
    return [o.index for o in record.optimizers if steps_of(record, o.index)]


def step_count(record: Record, optimizer: int) -> int:
    """The number of steps of one optimizer; 0 where the run has no such optimizer."""
    return len(steps_of(record, optimizer)) if optimizer < len(record.optimizers) else 0


def moving_steps(record: Record) -> int:
    """The number of steps that changed a parameter: an optimizer may gather gradients of several calls first."""
    return sum(any(u > 0.0 for u in s.updates.values()) for s in record.of(Step) if not s.nested)


def cuts_by_itself(one: Record, whole: Record, k: int) -> bool:
    """Whether the loop splits whole batches itself: with the knob at k as many steps, and k passes for each."""
    stepping = optimizers(one)
    same = all(step_count(one, o) == step_count(whole, o) for o in stepping)
    return same and bool(stepping) and micro_batches(one, whole, stepping[0]) >= k


def micro_batches(one: Record, many: Record, optimizer: int) -> int:
    """Micro-batches of the first window: by its backward passes, or by its forward passes where one backward serves
    several."""
    (one_forward, one_backward), (forward, backward) = passes(one, optimizer), passes(many, optimizer)
    if backward == one_backward > 1 and forward >= one_forward:
        return max(backward, forward)  # one for each example, however they are cut
    return max(backward // max(1, one_backward), forward - one_forward + 1 if one_forward else 0)


def passes(record: Record, optimizer: int) -> tuple[int, int]:
    """Forward and backward passes before the optimizer's first step."""
    first = min((s.reads[0].at for s in steps_of(record, optimizer)), default=0)
    mine = set(record.optimizers[optimizer].parameters) if optimizer < len(record.optimizers) else set()
    forward = sum(f.grad_enabled and f.at < first for f in record.root_forwards())
    return forward, sum(b.at < first and bool(mine & set(b.arrivals)) for b in record.of(Backward))


def window_sizes(record: Record) -> list[int]:
    """The number of backward passes before each step of the first optimizer that was seen to step."""
    stepping = optimizers(record)
    if not stepping:
        return []
    ends_at = [s.reads[0].at for s in steps_of(record, stepping[0])]
    mine = set(record.optimizers[stepping[0]].parameters)
    passes_at = [b.at for b in record.of(Backward) if mine & set(b.arrivals)]
    return [sum(a < at < b for at in passes_at) for a, b in itertools.pairwise([0, *ends_at])]


def learning_rates(record: Record, optimizer: int, count: int) -> list[tuple[float, ...]]:
    """The learning rates at the optimizer's first steps, by parameter group."""
    known = [s.lrs for s in steps_of(record, optimizer)[:count]]
    return [tuple(lr if lr == lr else -1.0 for lr in lrs) for lrs in known]  # an optimizer may have none


def update_difference(one: Record, many: Record) -> float:
    """The distance between the final weights of two runs, over that from the initial weights."""
    (start, end), (_, other) = ends(one), ends(many)
    before, after, got = vectors([start, end, other])
    distance, moved = (float(torch.linalg.vector_norm(v)) for v in (got - after, after - before))
    return distance / moved if moved else distance


def first_backward(record: Record, optimizer: int) -> Backward | None:
    """The first backward pass that brings this optimizer gradients."""
    mine = set(record.optimizers[optimizer].parameters)
    return next((b for b in record.of(Backward) if mine & set(b.arrivals)), None)


def library_around(event: Event | None) -> str:
    """The framework whose code made the call: "transformers", "lightning", "accelerate", or none."""
    files = " ".join(Path(file).as_posix() for file, _ in event.site) if event else ""
    return next((name for name in ("transformers", "lightning", "accelerate") if f"/{name}/" in files), "")


def line_of_forward(record: Record, backward: Backward) -> str:
    """The line that calls the model whose output a backward pass goes through; empty where none was seen."""
    answered = (f for f in record.of(Forward) if backward.at in f.answered)
    return next((str(f.place) for f in answered if not made_by_library(f)), "")


def made_by_library(event: Event) -> bool:
    """Whether no line of the project's own led to the event: a trainer's."""
    return bool(event.site) and layer(event.site[0][0]) == 1 and place_of(*event.site[0]) == event.place


def step_place(record: Record, optimizer: int) -> str:
    """The line of the optimizer's first step."""
    return next((str(s.place) for s in steps_of(record, optimizer)), "")
