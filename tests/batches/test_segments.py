"""Which entries of a batch belong to one graph or document."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.instruments.batches import segments
from tests.loops.segmented import SIZES, borders, graph_of, graphs, packed_documents, rings

NODES = torch.randn(sum(SIZES), 6)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(graphs(), id="pyg"),
        pytest.param({"x": NODES, "batch": graph_of()}, id="vector"),
        pytest.param({"x": NODES, "ptr": borders()}, id="borders"),
        pytest.param({"coord": NODES, "offset": borders()[1:]}, id="pointcept"),
        pytest.param({"nodes": NODES, "n_node": torch.tensor(SIZES)}, id="jraph"),
        pytest.param({"feat": NODES, "batch_num_nodes": torch.tensor(SIZES)}, id="dgl"),
        pytest.param((NODES, rings(), graph_of(), torch.arange(4)), id="without names, beside edges"),
    ],
)
def test_graphs_by_the_fields_of_several_libraries(batch):
    found = segments.read(batch)
    assert found is not None
    assert found.kind == "graph"
    assert torch.equal(found.ids, graph_of())
    assert found.sizes == list(SIZES)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (packed_documents((2, 3)), [[0, 0, 1, 1, 1]]),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 0, 1, 2]])},
            [[0, 0, 1, 1, 1, -1, -1], [2, 2, 2, 2, 3, 3, 3]],
        ),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1]])}, [[0, 0, 1, 1]]),
        ({"inputs_segmentation": torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])}, [[0, 0, 1, -1], [2, 3, 3, 3]]),
        ({"input_ids": torch.zeros(1, 5), "cu_seqlens": torch.tensor([0, 2, 5])}, [0, 0, 1, 1, 1]),
    ],
)
def test_documents(batch, expected):
    found = segments.read(batch)
    assert found is not None
    assert found.kind == "document"
    assert found.ids.tolist() == expected


def test_nothing_is_taken_where_lengths_do_not_tell_what_is_what():
    batch = graphs((2, 2), edges=torch.tensor([[0, 1], [1, 0]]))
    assert segments.take(batch, segments.read(batch), [0]) is None


def test_some_graphs_of_a_batch():
    batch = graphs()
    few = segments.take(batch, segments.read(batch), [2, 0])
    assert torch.equal(few.x, torch.cat([batch.x[8:12], batch.x[:3]]))
    assert set(map(tuple, few.edge_index.T.tolist())) == set(map(tuple, rings((4, 3)).T.tolist()))
    assert few.batch.tolist() == [0] * 4 + [1] * 3
    assert few.ptr.tolist() == [0, 4, 7]
    assert few.y.tolist() == [2, 0]
    assert len(batch.x) == sum(SIZES)


def test_some_documents_of_a_row():
    batch = packed_documents((2, 3, 4))
    few = segments.take(batch, segments.read(batch), [1, 2])
    assert torch.equal(few["input_ids"], batch["input_ids"][:, 2:])
    assert few["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]


TWO_ROWS = torch.tensor([[7, 7, 7, 8, 8, 9, 9], [4, 4, 5, 5, 5, 5, 6]])
"""The numbers of documents, beside as many tokens."""


def beside_tokens(numbers, name="doc"):
    return {"tokens": torch.randn(*numbers.shape, 3), name: numbers}


def blocks(numbers):
    return numbers[:, :, None] == numbers[:, None]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(beside_tokens(TWO_ROWS), id="numbers"),
        pytest.param({"mask": blocks(TWO_ROWS)}, id="blocks"),
        pytest.param({"mask": ~blocks(TWO_ROWS).tril()[:, None]}, id="causal blocks, true where left out"),
        pytest.param({"mask": torch.zeros(2, 7, 7).masked_fill(~blocks(TWO_ROWS), -1e9)}, id="added to scores"),
    ],
)
def test_documents_by_their_values(batch):
    assert segments.read(batch) is None
    found = segments.read(batch, by_value=True)
    assert found is not None
    assert found.by_value
    assert found.ids.tolist() == [[0, 0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 4, 4, 5]]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param({"doc": TWO_ROWS}, id="no tokens"),
        pytest.param(beside_tokens(TWO_ROWS, "token_type"), id="of another name"),
        pytest.param(beside_tokens(TWO_ROWS[:1].expand(3, -1)), id="windows"),
        pytest.param(beside_tokens(torch.arange(4).repeat_interleave(3)[None]), id="windows of one row"),
        pytest.param(beside_tokens(TWO_ROWS.flip(1)), id="numbers that fall"),
        pytest.param(beside_tokens((TWO_ROWS > 7).long()), id="two sentences"),
        pytest.param(beside_tokens(torch.arange(7).expand(2, -1)), id="positions"),
        pytest.param({"mask": torch.ones(2, 7, 7).tril()}, id="causal"),
        pytest.param({"mask": (torch.arange(7) < torch.tensor([[5], [7]]))[:, None].expand(-1, 7, -1)}, id="padding"),
        pytest.param({"adj": torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.3}, id="adjacency"),
    ],
)
def test_values_that_tell_no_documents(batch):
    assert segments.read(batch, by_value=True) is None


def test_numbers_that_fall_may_be_those_of_documents():
    assert segments.unclear(beside_tokens(TWO_ROWS.flip(1))) == "doc"
    assert not segments.unclear(beside_tokens(torch.arange(14).reshape(2, 7) * 5 % 11))


def test_a_document_of_a_row_with_a_mask_and_positions_through_the_row():
    row = TWO_ROWS[:1]
    batch = {**beside_tokens(row), "mask": blocks(row), "places": torch.arange(7)[None]}
    few = segments.take(batch, segments.read(batch, by_value=True), [1])
    assert few["mask"].shape == (1, 2, 2)
    assert few["places"].tolist() == [[0, 1]]
