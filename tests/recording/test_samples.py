"""What is read of one tensor: its peak and the bytes of a sample of its entries."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from pytest_trainloop.recording.events import TensorSample
from pytest_trainloop.recording.samples import ENTRIES, Reader, as_bytes, readable
from tests.helpers.watched_runs import values


def sample_of(tensor: torch.Tensor) -> TensorSample:
    reader = Reader()
    sample = reader.sample(tensor)
    reader.resolve()
    return sample


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_dtypes_are_read_bit_for_bit(dtype):
    tensor = torch.tensor([[1.5, -3.25], [0.0, 2.0]], dtype=dtype)
    sample = sample_of(tensor)
    assert (sample.peak, sample.zero, sample.finite) == (3.25, False, True)
    assert torch.equal(values(sample, dtype), tensor.flatten())


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
    sample = sample_of(tensor)
    assert (sample.peak, sample.zero) == (peak, peak == 0)
    assert len(sample.raw) == tensor.numel() * tensor.element_size()


def test_what_is_not_finite():
    nan, inf = sample_of(torch.tensor([1.0, math.nan])), sample_of(torch.tensor([-math.inf, 1.0]))
    assert math.isnan(nan.peak)
    assert inf.peak == math.inf
    assert [f.finite or f.zero for f in (nan, inf)] == [False, False]
    assert (nan.nonfinite, inf.nonfinite) == ("nan", "inf")
    assert nan.same(sample_of(torch.tensor([1.0, math.nan])))


def test_a_nan_outside_the_sample_is_in_the_peak():
    tensor = torch.zeros(1000)
    tensor[1] = math.nan
    assert not sample_of(tensor).finite
    tensor[1] = 5.0
    assert sample_of(tensor).peak == 5.0
    assert not sample_of(tensor).zero


def test_no_entries_are_zero():
    sample = sample_of(torch.empty(0, 3))
    assert (sample.peak, sample.raw, sample.zero) == (0.0, b"", True)


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
    sample = sample_of(tensor)
    assert sample.peak == pytest.approx(tensor.abs().max().item())
    read = values(sample, tensor.dtype)
    assert sorted(map(str, read.tolist())) == sorted(map(str, tensor.flatten().tolist()))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("count", [65, 127, 128, 129, 4096, 30_030, 100_000])
def test_a_large_tensor_is_sampled_from_end_to_end(count):
    read = values(sample_of(torch.arange(float(count))))
    assert len(read) == count if count <= 2 * ENTRIES else 32 <= len(read) <= ENTRIES
    assert read[0] == 0
    assert read[-1] > 0.9 * count


@pytest.mark.parametrize("shape", [(64, 64), (64, 100), (100, 64), (128, 48), (10, 3, 5, 5), (256, 784), (30, 77)])
def test_a_sample_runs_down_no_single_row_or_column(shape):
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    places = [torch.unravel_index(torch.tensor(int(v)), shape) for v in values(sample_of(tensor), torch.float64)]
    assert all(len({int(place[dim]) for place in places}) > 1 for dim in range(len(shape)))
    assert len({int(place[-1]) for place in places}) > min(shape[-1], 60) // 3


def test_samples_are_linear():
    a, b = torch.randn(500), torch.randn(500)
    assert torch.equal(values(sample_of(a + b)), values(sample_of(a)) + values(sample_of(b)))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout):
    dense = torch.tensor([[0.0, 2.0], [0.0, -3.0]])
    sample = sample_of(dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())
    assert sample.peak == 3.0


def test_samples_are_as_of_the_moment_they_were_taken():
    tensor = torch.ones(3)
    reader = Reader()
    before = reader.sample(tensor)
    alone = reader.sample_entries(tensor)
    reader.scalar(tensor.sum(), lambda value: seen.append(value))
    tensor.mul_(5)
    after = reader.sample(tensor)
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
    assert not sample_of(a).same(sample_of(b))


def test_the_tensor_is_not_kept_alive():
    w = torch.ones(2, requires_grad=True)
    reader, doubled = Reader(), w * 2
    reader.sample(doubled)
    reader.scalar(doubled.sum(), lambda value: None)
    kept = weakref.ref(doubled)
    del doubled
    assert kept() is None


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad])
def test_samples_may_begin_in_one_grad_mode_and_go_on_in_another(inside):
    reader = Reader()
    with inside():
        first = reader.sample(torch.ones(2))
    second = reader.sample(torch.ones(2, requires_grad=True) * 2)
    with inside():
        third = reader.sample(torch.ones(2) * 3)
    reader.resolve()
    assert [f.peak for f in (first, second, third)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2], ids=str
)
def test_a_sample_says_what_of_it_is_not_finite(dtype):
    reader = Reader()
    entries = [[1.0, 2.0], [1.0, math.inf], [math.nan, -math.inf], [3.0, 0.0]]
    samples = [reader.sample_entries(torch.tensor(e).to(dtype)) for e in entries]
    reader.resolve()
    assert [f.nonfinite for f in samples] == ["", "inf", "nan", ""]


def test_more_samples_than_one_block_holds():
    reader = Reader()
    samples = [reader.sample(torch.full((100,), float(n))) for n in range(1000)]
    reader.resolve()
    assert [f.peak for f in samples] == list(map(float, range(1000)))
    assert all(values(f).tolist() == [float(n)] * 100 for n, f in enumerate(samples))


def test_mixed_dtypes_are_read_together():
    reader = Reader()
    tensors = [torch.tensor([1.0]), torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([3]), torch.tensor([4j])]
    samples = [reader.sample(t) for t in tensors]
    reader.resolve()
    assert [f.peak for f in samples] == [1.0, 2.0, 3.0, 4.0]
    assert [values(f, t.dtype).item() for f, t in zip(samples, tensors, strict=True)] == [1.0, 2.0, 3, 4j]


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, device="meta"), nn.parameter.UninitializedParameter()], ids=["meta", "lazy"]
)
def test_what_has_no_entries_yet_is_unreadable(tensor):
    assert not readable(tensor)
    sample = sample_of(tensor)
    assert not sample.zero
    assert not sample.finite


def test_a_single_entry_with_the_stride_of_its_column_is_read_as_bytes():
    entry = torch.arange(40).reshape(2, 20)[:, 3][:1]
    assert as_bytes(entry).tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    column = torch.arange(4, dtype=torch.uint8).reshape(2, 2)[:, 1]
    assert as_bytes(column).tolist() == [1, 3]
