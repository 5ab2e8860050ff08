"""What a file keeps of large models."""

from __future__ import annotations

import json

import pytest

from pytest_trainloop.instruments.baselines.as_json import text_of, trajectory_of
from pytest_trainloop.instruments.baselines.trajectory import (
    IN_FULL,
    LATER,
    Call,
    Course,
    Digest,
    Environment,
    Made,
    Step,
    Tensor,
    Trajectory,
    thinned,
)

NUMBER = 0.1234567890123456


def trajectory(tensors, calls):
    """One with so many tensors, and so many calls of modules in a step."""
    digest = Digest(NUMBER, NUMBER, NUMBER, NUMBER)
    names = [f"blocks.{number}.weight" for number in range(tensors)]
    call = Call(path="blocks.0", kind="Linear", training=True, grad=True, dtype="float64", given=digest, gave=digest)
    start = Tensor(shape=(2, 2), dtype="float32", start=Digest(0.0, 0.0, 0.0, 0.0), trains=True)
    steps = tuple(
        Step(
            number=number,
            optimizer=0,
            batches=number,
            losses=(NUMBER,),
            lrs=(0.1,),
            gradients=dict.fromkeys(names, digest) if recorded else {},
            updates=dict.fromkeys(names, NUMBER) if recorded else {},
            weights=dict.fromkeys(names, digest) if recorded else {},
            calls=(call,) * calls if number <= IN_FULL else None,
        )
        for number in range(1, 25)
        for recorded in [number <= IN_FULL or number in LATER]
    )
    course = Course(
        precision="own",
        tensors=dict.fromkeys(names, start),
        optimizers=(),
        schedulers=(),
        batches=(),
        steps=steps,
    )
    place = Environment(torch="2", python="3", platform="Linux", device="cpu", threads=1, cpu="AVX2")
    made = Made(seed=0, count=26, read_ahead=10)
    return Trajectory(environment=place, made=made, double=course, why="", own=course)


@pytest.mark.parametrize(
    ("tensors", "steps", "bytes_each"),
    [(10, 15, 2700), (80, 9, 1800), (140, 5, 1200), (250, 3, 800), (2000, 2, 600)],
)
def test_the_more_tensors_the_fewer_steps(tensors, steps, bytes_each):
    kept = thinned(trajectory(tensors, calls=10))
    assert sum(bool(step.weights) for step in kept.double.steps) == steps
    assert all(step.losses for step in kept.double.steps)
    text = text_of(kept)
    assert len(text) < 16_000 + tensors * bytes_each
    assert text_of(trajectory_of(text, "", "")) == text


@pytest.mark.parametrize(("calls", "kept_at"), [(10, [1, 2, 3, 12]), (30, [1, 2, 3]), (70, [1]), (400, [1])])
def test_calls_are_kept_at_the_first_steps(calls, kept_at):
    kept = thinned(trajectory(4, calls))
    assert [step.number for step in kept.double.steps if step.calls] == kept_at
    assert [step.number for step in kept.own.steps if step.calls] == [1]


def test_what_can_be_read_in_a_diff_comes_first():
    assert list(json.loads(text_of(thinned(trajectory(1, calls=0))))) == [
        "about",
        "format",
        "made",
        "optimizers",
        "schedulers",
        "layers",
        "events",
        "tensors",
        "environment",
        "float64",
        "own",
    ]
