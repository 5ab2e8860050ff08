"""Whose mistake an exception is (``whose.py``)."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.paths import PACKAGE
from pytest_trainloop.whose import is_ours, reraise_ours

OURS = """
def raises(): raise ValueError("x")
def reads_what_is_not_there(tensor): return tensor.nope
def asserts(tensor): assert tensor is None
def adds_other_sizes(tensor): return tensor + tensor.new_zeros(7)
def calls(function): return function()
def __torch_function__(function): return function("no tensor")
"""
"""Functions that stand in a file of the package, by their code's filename."""


def _user() -> None:
    raise KeyError(1)


def _raised(name: str, *given: object) -> Exception:
    functions: dict = {}
    exec(compile(OURS, f"{PACKAGE}x.py", "exec"), functions)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        functions[name](*given)
    return caught.value


@pytest.mark.parametrize(
    ("name", "given", "ours"),
    [
        ("raises", (), True),
        ("reads_what_is_not_there", (torch.zeros(3),), True),
        ("asserts", (torch.zeros(3),), True),
        ("adds_other_sizes", (torch.zeros(3),), False),
        ("calls", (_user,), False),
        ("__torch_function__", (torch.relu,), False),
    ],
)
def test_a_mistake_of_the_package_is_known_by_its_innermost_frame(name, given, ours):
    error = _raised(name, *given)
    assert is_ours(error) is ours
    if ours:
        with pytest.raises(type(error)):
            reraise_ours(error)
    else:
        reraise_ours(error)


def test_a_signal_between_parts_of_the_package_goes_through():
    with pytest.raises(CannotDecide):
        reraise_ours(CannotDecide("no rows"))
