"""Every kind of call gives under everything that looks at a run what it gives alone, bit for bit."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_trainloop.recording import mistakes
from tests.helpers.all_modes import all_at_once
from tests.helpers.calls import files, graphs, layouts, plain, subclasses, training
from tests.helpers.calls.kinds import KINDS
from tests.helpers.same_bits import told

assert all((files, graphs, layouts, plain, subclasses, training))  # they fill KINDS

OFTEN = """
    in_place numbers zero_sizes complex_numbers generators sparse_coo graph_convolution graph_attention nested_strided
    without_values fake_tensors quantized a_wrapper_subclass checkpoints refused_calls
""".split()
"""Those of the default run; all of them take minutes under so many modes over each other."""


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """For the frames of so many modes over each other, and for all of their mistakes."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    monkeypatch.setattr(mistakes, "MOST_MISTAKES", 100_000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture(scope="module", autouse=True)
def group_of_one():
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def once(name):
    """What the call gives, and the state of torch's generator after it."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = KINDS[name]()
        return out, torch.get_rng_state()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.corpus) for name in KINDS]
)
def test_a_call_gives_what_it_gives_alone(name):
    if name == "conditions" and not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        pytest.skip("this torch knows no dispatch mode that passes torch.cond on")
    alone = told(once(name))
    assert told(once(name)) == alone, "the call itself does not repeat"
    with all_at_once() as record:
        made = once(name)
    assert sorted(set(record.mistakes)) == []
    assert told(made) == alone
