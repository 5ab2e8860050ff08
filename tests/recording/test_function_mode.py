"""The base of function modes: what a mode gets, and where its caller stands."""

from __future__ import annotations

import sys

import torch

from pytest_trainloop.recording.function_mode import FunctionMode


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
