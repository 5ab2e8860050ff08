"""The names that torch does not promise to keep: they fail here first when a new version renames one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.mode_stack import asked_without_ours, modes_kept, take_off
from pytest_trainloop.recording.torch_internals import (
    DROPOUT_MODULES,
    FILES_OF_MODES,
    MODULE_CALLS,
    NORM_MODULES,
    aliased_arguments,
    function_class,
    has_gradient_hooks,
    has_step_hooks,
    has_values,
    hooks_of,
    is_functorch,
    is_higher_order,
    is_initialised,
    is_patched_by_scheduler,
)


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


def test_a_hook_on_a_gradient():
    hooked, plain = (torch.ones(2, requires_grad=True) for _ in range(2))
    hooked.register_hook(lambda g: 0 * g)
    assert (has_gradient_hooks(hooked), has_gradient_hooks(plain)) == (True, False)


def test_a_gradient_of_a_batched_backward():
    w = torch.ones(2, requires_grad=True)
    seen = []
    w.register_hook(lambda g: seen.append(is_functorch(g)))
    torch.autograd.grad(w * 2, w, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad((w * 2).sum(), w)
    assert seen == [True, False]


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


def test_an_exit_that_was_interrupted_leaves_subclasses_seen():
    with modes_kept():
        torch._C.DisableTorchFunctionSubclass().__enter__()
    assert torch._C._get_torch_function_state() == torch._C._TorchFunctionState.ENABLED


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        return x * 2

    @staticmethod
    def backward(_context, gradient):
        return gradient * 2


def test_the_function_behind_a_node():
    x = torch.ones(1, requires_grad=True)
    assert function_class(Doubled.apply(x).grad_fn) is Doubled
    assert function_class((x * 2).grad_fn) is None
    assert function_class(None) is None


@pytest.mark.parametrize(
    ("func", "viewed", "written"),
    [
        (torch.ops.aten.add.Tensor, set(), set()),
        (torch.ops.aten.add_.Tensor, set(), {0}),
        (torch.ops.aten.view.default, {0}, set()),
    ],
    ids=str,
)
def test_what_an_overload_views_and_writes(func, viewed, written):
    assert aliased_arguments(func) == (viewed, written)


def test_hooks_of_a_tensor():
    weight = nn.Parameter(torch.ones(1))
    assert hooks_of(weight) == []
    weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    weight.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [len(hooks) for hooks in hooks_of(weight)] == [1, 1]
    hooks_of(weight)[0].clear()
    weight.sum().backward()
    assert weight.grad.item() == 1.0


def test_what_is_no_optimizer_of_torch():
    assert not is_initialised(torch.optim.SGD.__new__(torch.optim.SGD))
    assert has_step_hooks(object())


def test_a_step_that_a_scheduler_has_patched():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not is_patched_by_scheduler(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_patched_by_scheduler(vars(optimizer)["step"])


def test_the_bases_of_modules():
    assert all(issubclass(kind, DROPOUT_MODULES) for kind in (nn.Dropout, nn.Dropout3d, nn.FeatureAlphaDropout))
    assert all(issubclass(kind, NORM_MODULES) for kind in (nn.BatchNorm1d, nn.SyncBatchNorm, nn.LazyInstanceNorm2d))
    assert not issubclass(nn.LayerNorm, NORM_MODULES)


@pytest.mark.parametrize("file", FILES_OF_MODES)
def test_the_files_of_modes(file):
    assert (Path(torch.__file__).parents[1] / file).is_file()


def test_the_code_that_calls_a_module():
    class Raises(nn.Module):
        def forward(self):
            raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its frames are looked at
        Raises()()
    frames = [entry.frame.code.raw for entry in caught.traceback]
    assert set(frames) >= MODULE_CALLS


def test_zeros_without_memory_have_no_values():
    assert has_values(torch.zeros(2))
    assert not has_values(torch._efficientzerotensor(2))


def test_operators_that_take_functions():
    assert is_higher_order(torch.ops.higher_order.cond)
    assert not is_higher_order(torch.ops.aten.add.Tensor)


def test_whether_a_call_is_seen_is_answered_as_without_modes_of_ours():
    asked = asked_without_ours(torch.overrides.has_torch_function)
    with Mode():
        assert torch.overrides.has_torch_function((torch.ones(1),))
        assert asked((torch.ones(1),))
    with FunctionMode():
        assert not asked((torch.ones(1),))
        assert torch.overrides.has_torch_function((torch.ones(1),))
