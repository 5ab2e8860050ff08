"""The names that torch does not promise to keep: they fail here first when a new version renames one."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pytest_trainloop.recording.torch_internals import is_functorch, modes_kept, take_off


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def seen_inside(transform):
    seen = []

    def f(x):
        seen.append(is_functorch(x))
        return (x * x).sum()

    transform(f)
    return seen


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
        lambda f: torch.func.grad(f)(torch.ones(3)),
        lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3)),
        lambda f: torch.func.functionalize(f)(torch.ones(3)),
    ],
    ids=["vmap", "grad", "jvp", "vmap of grad", "functionalize"],
)
def test_a_tensor_inside_a_transform(transform):
    assert seen_inside(transform) == [True]


def test_a_gradient_of_a_batched_backward():
    w = torch.ones(2, requires_grad=True)
    seen = []
    w.register_hook(lambda g: seen.append(is_functorch(g)))
    torch.autograd.grad(w * 2, w, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad((w * 2).sum(), w)
    assert seen == [True, False]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()],
)
def test_a_plain_tensor_is_none(tensor):
    assert is_functorch(tensor) is False


def test_a_mode_is_taken_off_from_under_others():
    ours, theirs, last = Mode(), Mode(), Mode()
    before = _get_current_function_mode_stack()
    ours.__enter__()
    with theirs, last:
        assert take_off(ours)
        assert _get_current_function_mode_stack() == [*before, theirs, last]
        assert not take_off(ours)
    assert _get_current_function_mode_stack() == before


def test_a_mode_under_a_device_context():
    ours = Mode()
    ours.__enter__()
    with torch.device("meta"):
        assert take_off(ours)
        assert torch.zeros(1).device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"


def test_a_mode_inside_its_own_call_is_not_on_the_stack():
    class Within(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(take_off(self))
            return func(*args, **(kwargs or {}))

    found = []
    with Within():
        torch.ones(1) + 1
    assert not any(found)
    assert len(found) >= 1


class LeftOn(TorchFunctionMode):
    """As one of the package's own that a stop has kept from being left."""

    __module__ = "pytest_trainloop.evidence.somewhere"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_ours_that_are_left_on_are_taken_off():
    outer, own, theirs = LeftOn(), LeftOn(), Mode()
    with outer:
        with modes_kept():
            own.__enter__()
            theirs.__enter__()
        assert _get_current_function_mode_stack() == [outer, theirs]
        assert take_off(theirs)
    assert _get_current_function_mode_stack() == []
