"""What is read of one tensor: its peak and the bytes of a sample of its entries."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from pytest_trainloop.recording.events import Fact
from pytest_trainloop.recording.samples import ENTRIES, Reader, readable
from tests.helpers.watched_runs import values


def fact_of(tensor: torch.Tensor) -> Fact:
    reader = Reader()
    fact = reader.fact(tensor)
    reader.resolve()
    return fact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_dtypes_are_read_bit_for_bit(dtype):
    tensor = torch.tensor([[1.5, -3.25], [0.0, 2.0]], dtype=dtype)
    fact = fact_of(tensor)
    assert (fact.peak, fact.zero, fact.finite) == (3.25, False, True)
    assert torch.equal(values(fact, dtype), tensor.flatten())


@pytest.mark.parametrize(
    ("tensor", "peak"),
    [
        (torch.tensor([-7, 3]), 7.0),
        (torch.tensor([200, 3], dtype=torch.uint8), 200.0),
        (torch.tensor([True, False]), 1.0),
        (torch.zeros(3, dtype=torch.int16), 0.0),
        (torch.tensor([2.0, -4.0]).to(torch.float8_e4m3fn), 4.0),
        (torch.tensor([3 + 4j, 0]), 5.0),
        (torch.tensor([3 + 4j, 0], dtype=torch.complex32), 5.0),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else "",
)
def test_every_other_dtype_has_a_peak_too(tensor, peak):
    fact = fact_of(tensor)
    assert (fact.peak, fact.zero) == (peak, peak == 0)
    assert len(fact.sample) == tensor.numel() * tensor.element_size()


def test_what_is_not_finite():
    nan, inf = fact_of(torch.tensor([1.0, math.nan])), fact_of(torch.tensor([-math.inf, 1.0]))
    assert math.isnan(nan.peak)
    assert inf.peak == math.inf
    assert [f.finite or f.zero for f in (nan, inf)] == [False, False]
    assert (nan.nonfinite, inf.nonfinite) == ("nan", "inf")
    assert nan.same(fact_of(torch.tensor([1.0, math.nan])))


def test_a_nan_outside_the_sample_is_in_the_peak():
    tensor = torch.zeros(1000)
    tensor[1] = math.nan
    assert not fact_of(tensor).finite
    tensor[1] = 5.0
    assert fact_of(tensor).peak == 5.0
    assert not fact_of(tensor).zero


def test_no_entries_are_zero():
    fact = fact_of(torch.empty(0, 3))
    assert (fact.peak, fact.sample, fact.zero) == (0.0, b"", True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(20.0).reshape(4, 5).t(),
        torch.arange(20.0)[::3],
        torch.arange(4.0)[:, None].expand(4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.arange(6.0).reshape(2, 3).t().conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "scalar", "view", "conjugate", "negated"],
)
def test_layouts_are_read_whole_and_left_alone(tensor):
    before = tensor.clone()
    fact = fact_of(tensor)
    assert fact.peak == pytest.approx(tensor.abs().max().item())
    read = values(fact, tensor.dtype)
    assert sorted(map(str, read.tolist())) == sorted(map(str, tensor.flatten().tolist()))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("count", [65, 127, 128, 129, 4096, 30_030, 100_000])
def test_a_large_tensor_is_sampled_from_end_to_end(count):
    read = values(fact_of(torch.arange(float(count))))
    assert len(read) == count if count <= 2 * ENTRIES else 32 <= len(read) <= ENTRIES
    assert read[0] == 0
    assert read[-1] > 0.9 * count


@pytest.mark.parametrize("shape", [(64, 64), (64, 100), (100, 64), (128, 48), (10, 3, 5, 5), (256, 784), (30, 77)])
def test_a_sample_runs_down_no_single_row_or_column(shape):
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    places = [torch.unravel_index(torch.tensor(int(v)), shape) for v in values(fact_of(tensor), torch.float64)]
    assert all(len({int(place[dim]) for place in places}) > 1 for dim in range(len(shape)))
    assert len({int(place[-1]) for place in places}) > min(shape[-1], 60) // 3


def test_samples_are_linear():
    a, b = torch.randn(500), torch.randn(500)
    assert torch.equal(values(fact_of(a + b)), values(fact_of(a)) + values(fact_of(b)))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout):
    dense = torch.tensor([[0.0, 2.0], [0.0, -3.0]])
    fact = fact_of(dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())
    assert fact.peak == 3.0


def test_facts_are_as_of_the_moment_they_were_taken():
    tensor = torch.ones(3)
    reader = Reader()
    before = reader.fact(tensor)
    alone = reader.sample_only(tensor)
    reader.scalar(tensor.sum(), lambda value: seen.append(value))
    tensor.mul_(5)
    after = reader.fact(tensor)
    seen: list[float] = []
    reader.resolve()
    assert (before.peak, after.peak, seen) == (1.0, 5.0, [3.0])
    assert values(alone).tolist() == [1.0] * 3
    assert alone.same(before)
    assert not before.same(after)
    assert not before.same(None)


def test_one_bit_makes_a_difference():
    a = torch.tensor([1.0, 2.0])
    b = torch.tensor([1.0, 2.0]).nextafter(torch.tensor(3.0))
    assert not fact_of(a).same(fact_of(b))


def test_the_tensor_is_not_kept_alive():
    w = torch.ones(2, requires_grad=True)
    reader, doubled = Reader(), w * 2
    reader.fact(doubled)
    reader.scalar(doubled.sum(), lambda value: None)
    kept = weakref.ref(doubled)
    del doubled
    assert kept() is None


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad])
def test_facts_may_begin_in_one_grad_mode_and_go_on_in_another(inside):
    reader = Reader()
    with inside():
        first = reader.fact(torch.ones(2))
    second = reader.fact(torch.ones(2, requires_grad=True) * 2)
    with inside():
        third = reader.fact(torch.ones(2) * 3)
    reader.resolve()
    assert [f.peak for f in (first, second, third)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2], ids=str
)
def test_a_sample_says_what_of_it_is_not_finite(dtype):
    reader = Reader()
    entries = [[1.0, 2.0], [1.0, math.inf], [math.nan, -math.inf], [3.0, 0.0]]
    facts = [reader.sample_only(torch.tensor(e).to(dtype)) for e in entries]
    reader.resolve()
    assert [f.nonfinite for f in facts] == ["", "inf", "nan", ""]


def test_more_facts_than_one_block_holds():
    reader = Reader()
    facts = [reader.fact(torch.full((100,), float(n))) for n in range(1000)]
    reader.resolve()
    assert [f.peak for f in facts] == list(map(float, range(1000)))
    assert all(values(f).tolist() == [float(n)] * 100 for n, f in enumerate(facts))


def test_mixed_dtypes_are_read_together():
    reader = Reader()
    tensors = [torch.tensor([1.0]), torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([3]), torch.tensor([4j])]
    facts = [reader.fact(t) for t in tensors]
    reader.resolve()
    assert [f.peak for f in facts] == [1.0, 2.0, 3.0, 4.0]
    assert [values(f, t.dtype).item() for f, t in zip(facts, tensors, strict=True)] == [1.0, 2.0, 3, 4j]


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, device="meta"), nn.parameter.UninitializedParameter()], ids=["meta", "lazy"]
)
def test_what_has_no_entries_yet_is_unreadable(tensor):
    assert not readable(tensor)
    fact = fact_of(tensor)
    assert not fact.zero
    assert not fact.finite
