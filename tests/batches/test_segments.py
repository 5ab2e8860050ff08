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
