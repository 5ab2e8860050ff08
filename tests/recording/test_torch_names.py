"""The names of torch's functions: torch knows them, and each module takes them from one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import pytest_trainloop
from pytest_trainloop.recording import torch_names

GROUPS = {name: group for name, group in vars(torch_names).items() if isinstance(group, frozenset)}

NOT_ATTRIBUTES = {
    *("__get__", "__set__", "names", "alias"),
    *("linalg_norm", "linalg_vector_norm", "vector_norm", "log_sigmoid"),  # torch.linalg's and torch._C._nn's
    *("radd", "rmul", "rdiv", "truediv", "rtruediv", "setitem"),  # as provenance shortens operators
}

PARTS = {"ATEN_DRAWS", "ATEN_OPAQUE"}
"""Groups of parts of names."""


@pytest.mark.parametrize("name", sorted(set(GROUPS) - PARTS))
def test_torch_knows_the_functions(name):
    owners = (torch.ops.aten,) if name.startswith("ATEN") else (torch, torch.Tensor, F)
    unknown = {f for f in GROUPS[name] if not any(hasattr(owner, f) for owner in owners)}
    assert unknown <= NOT_ATTRIBUTES


def test_no_module_lists_a_whole_group_again():
    """A list of four or more functions that is a group, or holds one, is to be written with the group's name."""
    large = {name: group for name, group in GROUPS.items() if len(group) >= 4}
    again = []
    for file in Path(pytest_trainloop.__file__).parent.rglob("*.py"):
        if file.name == "torch_names.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            listed = words(node)
            again += [f"{file.name}:{node.lineno} {name}" for name, group in large.items() if group <= listed]
    assert not again


def words(node: ast.AST) -> frozenset[str]:
    """The strings of a set, tuple or list, or the words of a text."""
    if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
        return frozenset(e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return frozenset(node.value.split())
    return frozenset()
