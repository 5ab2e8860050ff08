"""Which entries of a batch belong to one graph or document."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.batches import segments
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
