"""Steps of two runs compared: what is rounding is no difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.scale.compile_parity.compared import Course


def course_of(gradient, other=None, *, lr=0.1):
    """One step of a weight whose gradient is given."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    course = Course(1e-9, other)
    course.begin(TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(1), fit=lambda batches: None))
    model.weight.grad = torch.tensor([gradient], dtype=torch.float64)
    course.before_step(optimizer, (optimizer,), {})
    optimizer.step()
    course.after_step(optimizer, (optimizer,), {})
    course.end()
    return course


@pytest.mark.parametrize(
    ("second", "lr", "part"),
    [(2.0, 0.1, None), (2.0 + 1e-13, 0.1, None), (2.5, 0.1, "gradients"), (2.0, 0.2, "weights")],
)
def test_what_differs_first(second, lr, part):
    found = course_of([1.0, second], course_of([1.0, 2.0]), lr=lr).difference
    assert (found and (found.step, found.part, found.names)) == (part and (0, part, ("weight",)))


def test_another_update_where_the_gradient_is_rounding_is_no_difference():
    first = course_of([1.0, 1e-17])
    first.moments[0].after["weight"][0, 1] += 0.1  # what an optimizer makes of it that divides by its size
    assert course_of([1.0, -1e-17], first).difference is None
