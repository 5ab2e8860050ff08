"""A mistake of this package inside a call of the project: the call goes on as alone, and the record says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.recording import hooks, mistakes
from pytest_trainloop.recording.function_mode import FunctionMode, OperationMode
from pytest_trainloop.recording.mistakes import MOST_MISTAKES, noted_on, passed_over
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.seams import HERE, passed_on


def mistake():
    """What an instrument does wrong: this file counts as one of the package's in these tests."""
    raise KeyError("of ours")


@pytest.fixture
def noted(monkeypatch):
    known = mistakes.layer
    monkeypatch.setattr(mistakes, "layer", lambda filename: 0 if filename == __file__ else known(filename))
    found = []
    with noted_on(found):
        yield found
    assert HERE.seams == []


class Before(FunctionMode):
    def call(self, name, func, args, kwargs):
        mistake()


class After(FunctionMode):
    def call(self, name, func, args, kwargs):
        super().call(name, func, args, kwargs)
        mistake()


class Instead(FunctionMode):
    """One that stumbles over what the call itself raised."""

    def call(self, name, func, args, kwargs):
        try:
            return passed_on(func, args, kwargs)
        except Exception:
            mistake()


class BeforeOperation(OperationMode):
    def operate(self, func, args, kwargs):
        mistake()


class AfterOperation(OperationMode):
    def operate(self, func, args, kwargs):
        passed_on(func, args, kwargs)
        mistake()


@pytest.mark.parametrize("kind", [Before, After, BeforeOperation, AfterOperation])
def test_a_mode_that_fails_changes_nothing(noted, kind):
    x = torch.zeros(3)
    with kind():
        out = x.add_(1)  # once, and no more often
    assert out is x
    assert x.tolist() == [1, 1, 1]
    assert [str(line) for line in noted] == ["KeyError: 'of ours'"]


@pytest.mark.parametrize("kind", [Before, After, Instead, BeforeOperation, AfterOperation])
def test_what_the_call_itself_raises_passes_as_it_is(noted, kind):
    with pytest.raises(RuntimeError, match="shape") as alone:
        torch.ones(2, 3).reshape(4)
    with kind(), pytest.raises(RuntimeError, match="shape") as caught:
        torch.ones(2, 3).reshape(4)
    assert str(caught.value) == str(alone.value)
    assert caught.value.__cause__ is None
    assert len(noted) >= (kind is not After and kind is not AfterOperation)


def test_the_exception_of_the_project_is_the_same_object(noted):
    given = ValueError("the project's")

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise given

    for kind in (Before, After, Instead):
        with kind(), pytest.raises(ValueError, match="project") as caught:
            torch.ones(2).as_subclass(Own).sum()
        assert caught.value is given


def test_a_message_between_parts_of_the_package_passes(noted):
    class Undecided(FunctionMode):
        def call(self, name, func, args, kwargs):
            raise CannotDecide("for a reason")

    with Undecided(), pytest.raises(CannotDecide):
        torch.ones(1)
    assert noted == []


def test_an_operation_that_computes_something_else_on_purpose_ends_the_run(noted):
    class Other(OperationMode):
        changes = True

        def operate(self, func, args, kwargs):
            mistake()

    with Other(), pytest.raises(KeyError):
        torch.ones(1)


def test_without_a_record_nothing_is_hidden():
    with Before(), pytest.raises(KeyError):
        torch.ones(1)


def test_hooks_that_fail(noted):
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).sum().backward()
    expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]
    optimizer.zero_grad()

    def failing(*_call, **_more):
        mistake()

    handles = [
        hooks.before_modules(failing),
        hooks.after_modules(failing),
        hooks.before_steps(failing),
        hooks.after_steps(failing),
        hooks.on_gradient(model.weight, failing),
        hooks.on_gradient(model.weight, failing, after=True),
    ]
    try:
        model(x).sum().backward()
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert all(map(torch.equal, model.parameters(), expected))
    assert len(noted) == 6


@pytest.mark.parametrize("made", [False, True])
def test_a_patch_that_fails(noted, made):
    def around(original):
        def called(*args, **kwargs):
            if made:
                original(*args, **kwargs)
            mistake()

        return called

    calls = []
    with patched(nn.Linear, "forward", around):
        layer = nn.Linear(2, 1)
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        out = layer(torch.ones(3, 2))
    assert torch.equal(out, F.linear(torch.ones(3, 2), layer.weight, layer.bias))
    assert calls == [1]
    assert len(noted) == 1


def test_a_patch_of_a_class_method_that_fails(noted):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def around(original):
        def apply(cls, *args):
            mistake()

        return classmethod(apply)

    with patched(torch.autograd.Function, "apply", around):
        assert Twice.apply(torch.ones(1)).item() == 2
    assert len(noted) == 1


def test_a_module_of_the_project_that_an_experiment_calls_may_raise(noted):
    class Strict(nn.Module):
        def forward(self, x):
            raise ValueError("not this batch")

    def failing(*_call):
        Strict()(torch.ones(1))

    handle = hooks.after_modules(failing)
    try:
        with pytest.raises(ValueError, match="not this batch"):
            nn.Identity()(torch.ones(1))
    finally:
        handle.remove()
    assert noted == []


def test_so_many_are_noted(noted):
    for _ in range(MOST_MISTAKES + 5):
        assert passed_over(KeyError("x"))
    assert len(noted) == MOST_MISTAKES
