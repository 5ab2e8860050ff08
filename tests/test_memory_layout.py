"""Copies, casts and writes that keep strides, offsets and shared storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop.declare import memory_layout, nested

WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float64}


def layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


LAID_OUT = {
    "plain": lambda: torch.randn(4, 6),
    "turned": lambda: torch.randn(6, 4).t(),
    "cut": lambda: torch.randn(4, 9)[:, 2:8],
    "strided": lambda: torch.randn(8, 6)[1::2],
    "spread": lambda: torch.randn(1, 6).expand(4, 6),
    "picture": lambda: torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(4, 0),
    "far": lambda: torch.randn(3 * memory_layout.LARGE)[-24:].view(4, 6),
    "parameter": lambda: nn.Parameter(torch.randn(6, 4).t()),
}
by_layout = pytest.mark.parametrize("make", LAID_OUT.values(), ids=LAID_OUT)


@by_layout
def test_a_cast_keeps_the_layout(make):
    tensor = make()
    before, values = layout(tensor), tensor.detach().clone()
    far = tensor.storage_offset() > memory_layout.LARGE
    memory_layout.cast([tensor], WIDER)
    assert tensor.dtype == torch.float64
    assert torch.equal(tensor, values.double())
    assert layout(tensor) == ((*before[:2], 0) if far else before)


def test_a_cast_keeps_what_is_shared():
    flat = torch.randn(20)
    one, other, number = nn.Parameter(flat[2:8].view(2, 3)), nn.Parameter(flat[4:12]), torch.arange(3)
    memory_layout.cast([one, other, number, one], WIDER)
    with torch.no_grad():
        one.fill_(7.0)
    assert other[:4].tolist() == [7.0] * 4
    assert number.dtype == torch.int64


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.randn(2, device="meta")], ids=["sparse", "meta"])
def test_a_cast_of_what_has_no_strides(tensor):
    memory_layout.cast([tensor], WIDER)
    assert tensor.dtype == torch.float64


@by_layout
def test_a_write_reaches_every_layout(make):
    tensor = make().detach()
    memory_layout.write(tensor, torch.ones(tensor.shape))
    assert torch.equal(tensor, torch.ones(tensor.shape))


@by_layout
def test_a_copy_keeps_the_layout(make):
    tensor = make().detach()
    made = memory_layout.copied(tensor, torch.ones(tensor.shape), {})
    assert made.stride() == tensor.stride()
    assert torch.equal(made, torch.ones(tensor.shape))
    assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_copies_share_what_the_tensors_share():
    flat, memo = torch.zeros(12), {}
    one, other = (memory_layout.copied(t, t + 1.0, memo) for t in (flat[:8], flat[4:]))
    one.fill_(3.0)
    assert other.tolist() == [3.0] * 4 + [1.0] * 4


@by_layout
def test_rows_keep_the_order_of_the_axes(make):
    tensor = make().detach()
    if not tensor.dim() or not tensor.numel():
        return
    taken = nested.take({"x": tensor}, [2, 0, 1], 0)["x"]
    assert torch.equal(taken, tensor[[2, 0, 1]])
    wanted = [axis for axis in range(tensor.dim()) if tensor.stride(axis) != 0]
    assert sorted(wanted, key=tensor.stride) == sorted(wanted, key=taken.stride)
    assert [s == 0 for s in taken.stride()] == [s == 0 for s in tensor.stride()]


@by_layout
def test_the_other_layout_is_another(make):
    tensor = make().detach()
    if tensor.dim() > 1 and tensor.numel():
        turned = memory_layout.turned(tensor)
        assert torch.equal(turned, tensor)
        assert turned.is_contiguous() != tensor.is_contiguous()
