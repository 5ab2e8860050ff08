"""The base of function modes: what a mode gets, and where its caller stands."""

from __future__ import annotations

import dataclasses
import sys

import torch

from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in


class Noting(FunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, name, func, args, kwargs):
        self.calls.append((name, len(args), sorted(kwargs), sys._getframe(2).f_code.co_name))
        return super().call(name, func, args, kwargs)


def test_a_mode_gets_name_arguments_and_its_caller_two_frames_up():
    x = torch.ones(2)
    with Noting() as mode:
        total = x.sum(dim=0)
        torch.add(x, x)
    assert total == 2
    here = "test_a_mode_gets_name_arguments_and_its_caller_two_frames_up"
    assert mode.calls == [("sum", 1, ["dim"], here), ("add", 2, [], here)]


def test_a_mode_that_changes_nothing():
    with FunctionMode():
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: list[torch.Tensor]


def test_tensors_are_found_in_order_in_every_kind_of_argument():
    a, b, c, d = (torch.full((1,), float(n)) for n in range(4))
    assert list(tensors_in((a, [b, (c, None)], 3), {"out": d})) == [a, b, c, d]
    assert list(tensors_in(Pair(a, [b]), {c}, {"given": {"deep": d}})) == [a, b, c, d]
    assert list(tensors_in(torch.topk(torch.tensor([1.0, 2.0]), 1))) == [torch.tensor([2.0]), torch.tensor([1])]


def test_the_memo_of_a_copy_and_foreign_objects_are_no_arguments():
    a, b = torch.ones(1), torch.zeros(1)
    assert list(tensors_in(a, {id(b): b})) == [a]
    assert list(tensors_in(Noting, torch.nn.Linear(1, 1), "text", a)) == [a]
