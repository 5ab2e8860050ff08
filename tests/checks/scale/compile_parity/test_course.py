"""Names that wrappers change, and steps of two runs compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop.checks.scale.compile_parity.course import Course
from pytest_trainloop.loop import TrainLoop
from pytest_trainloop.recording import plain_names


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("weight", "weight"),
        ("_orig_mod.encoder.weight", "encoder.weight"),
        ("blocks.0._orig_mod.norm.weight", "blocks.0.norm.weight"),
        ("module._orig_mod.head.bias", "head.bias"),
        ("_orig_mod.module.head.bias", "head.bias"),
        ("submodule.weight", "submodule.weight"),
    ],
)
def test_names_without_wrappers(name, plain):
    assert plain_names.plain(name) == plain


def course_of(gradient, other=None, *, lr=0.1, bound=1e-9):
    """One step of a weight whose gradient is given."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loop = TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(1), fit=lambda batches: None)
    course = Course(bound, other)
    course.begin(loop)
    model.weight.grad = torch.tensor([gradient], dtype=torch.float64)
    course.before_step(optimizer, (optimizer,), {})
    optimizer.step()
    course.after_step(optimizer, (optimizer,), {})
    course.end()
    return course


def test_equal_steps():
    first = course_of([1.0, 2.0])
    assert course_of([1.0, 2.0], first).difference is None


def test_rounding_is_no_difference():
    first = course_of([1.0, 2.0])
    assert course_of([1.0, 2.0 + 1e-13], first).difference is None


def test_another_gradient():
    found = course_of([1.0, 2.5], course_of([1.0, 2.0])).difference
    assert (found.step, found.what, found.names) == (0, "gradients", ("weight",))


def test_another_update_of_the_same_gradient():
    found = course_of([1.0, 2.0], course_of([1.0, 2.0]), lr=0.2).difference
    assert (found.step, found.what, found.names) == (0, "weights", ("weight",))


def test_another_update_where_the_gradient_is_rounding_is_no_difference():
    first = course_of([1.0, 1e-17])
    first.moments[0].after["weight"][0, 1] += 0.1  # what an optimizer makes of it that divides by its size
    assert course_of([1.0, -1e-17], first).difference is None
