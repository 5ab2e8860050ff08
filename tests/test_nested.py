"""Rows of a batch, whatever the batch is made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pytest_trainloop.declare.nested import mapped, rows, take
from pytest_trainloop.instruments.batches.totals import shared_by_rows

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    image: torch.Tensor
    weights: torch.Tensor
    names: list[str]


class Encoding(dict):
    """A mapping with attributes, as tokenizers return."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.source = "here"


def test_rows_are_what_most_tensors_share():
    assert rows({"x": torch.zeros(6, 2), "y": torch.zeros(6), "class_weights": torch.zeros(3)}) == 6
    assert rows([torch.zeros(5, 7), torch.zeros(5, 7)], axis=1) == 7
    assert rows(torch.zeros(5, 7), axis=-1) == 7
    assert rows(torch.tensor(1.0)) == 0


def test_what_has_no_row_for_each_is_kept_whole():
    batch = {"x": torch.zeros(6, 2), "y": torch.zeros(6), "class_weights": torch.ones(3), "step": 7, "mask": None}
    taken = take(batch, [1, 2])
    assert taken["x"].shape == (2, 2)
    assert taken["class_weights"].shape == (3,)
    assert (taken["step"], taken["mask"]) == (7, None)


@pytest.mark.parametrize("axis", [1, -2])
def test_rows_along_another_axis(axis):
    sequence_first = torch.arange(24).view(3, 4, 2)
    assert torch.equal(take([sequence_first], [3, 1], axis=axis)[0], sequence_first[:, [3, 1]])


def test_types_stay():
    sample = Sample(torch.zeros(3, 2), torch.ones(5), ["a", "b", "c"])
    taken = take(sample, [2, 1])
    assert isinstance(taken, Sample)
    assert taken.names == ["c", "b"]
    assert taken.weights.shape == (5,)
    assert isinstance(take(Pair(torch.zeros(3), torch.zeros(3)), [0]), Pair)
    encoding = take(Encoding(ids=torch.zeros(3, 4), mask=torch.ones(3, 4, dtype=torch.bool)), [0, 1])
    assert (type(encoding), encoding.source, encoding["mask"].dtype) == (Encoding, "here", torch.bool)


def test_a_list_of_columns_is_no_list_of_rows():
    columns = [torch.arange(2), torch.arange(2) + 10]
    taken = take({"x": torch.zeros(2, 2), "columns": columns}, [1])
    assert [c.tolist() for c in taken["columns"]] == [[1], [11]]


def test_the_batch_itself_is_left_alone():
    batch = {"x": torch.arange(4.0).requires_grad_(True)}
    taken = take(batch, [0, 1])
    taken["x"].data.fill_(9.0)
    assert batch["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert taken["x"].requires_grad
    assert taken["x"].is_leaf


def test_one_tensor_in_two_places_stays_one():
    x = torch.arange(4)
    taken = take({"x": x, "again": x}, [1, 2])
    assert taken["x"] is taken["again"]


class Wrapped:
    """Keeps its entries in ``data`` and is no mapping, as some tokenizers' encodings."""

    def __init__(self, data):
        self.data = data


def test_leaves_are_changed_and_what_holds_none_is_shared():
    kept, sample = [3.0], Sample(torch.ones(1), torch.ones(1), ["a"])
    batch = {"n": 2, "kept": kept, "pair": Pair(1, sample), "wrapped": Wrapped({"n": 5}), "set": {7}}
    batch["self"] = batch
    paths = []

    def change(path, value):
        paths.append(path)
        return value + 1

    made = mapped(batch, change, lambda value: isinstance(value, int))
    assert (made["n"], made["pair"].left, made["wrapped"].data) == (3, 2, {"n": 6})
    assert made["kept"] is kept
    assert made["pair"].right is sample
    assert made["set"] == {7}
    assert (batch["n"], batch["pair"].left, batch["wrapped"].data) == (2, 1, {"n": 5})
    assert paths == [("n",), ("pair", "left"), ("wrapped", "n")]
    assert mapped(batch, lambda path, value: value, lambda value: isinstance(value, int)) is batch


@dataclass
class Detection:
    images: tuple[torch.Tensor, ...]
    targets: tuple[dict[str, torch.Tensor], ...]


class Table:
    """Tensors under one ``batch_size``, taken from by index, as in a TensorDict."""

    def __init__(self, held):
        self.held = held
        self.batch_size = held["x"].shape[:1]

    def __getitem__(self, index):
        return Table({key: tensor[index] for key, tensor in self.held.items()})


def image(n):
    return torch.full((3, 8, 8), float(n))


def boxes(n, count):
    return {"boxes": torch.full((count, 4), float(n)), "labels": torch.full((count,), n)}


def jagged(*sizes, layout=torch.jagged):
    parts = [torch.full((size, 2), float(n)) for n, size in enumerate(sizes)]
    return torch.nested.nested_tensor(parts, layout=layout)


def packed(*sizes, enforce_sorted=False):
    parts = [torch.full((size, 2), float(n)) for n, size in enumerate(sizes)]
    return torch.nn.utils.rnn.pack_sequence(parts, enforce_sorted=enforce_sorted)


N = 4
OF_FOUR = {
    "a tuple of images and one of boxes": (
        (tuple(image(n) for n in range(N)), tuple(boxes(n, 2) for n in range(N))),
        lambda b: [int(t["labels"][0]) for t in b[1]],
    ),
    "lists of images and labels": (
        {"images": [image(n) for n in range(N)], "labels": list(range(N))},
        lambda b: b["labels"] if [int(i[0, 0, 0]) for i in b["images"]] == b["labels"] else None,
    ),
    "a dataclass of tuples": (
        Detection(tuple(image(n) for n in range(N)), tuple(boxes(n, n) for n in range(N))),
        lambda b: [len(t["boxes"]) for t in b.targets],
    ),
    "samples as dicts": (
        [{"pixel_values": image(n), "labels": torch.tensor(n)} for n in range(N)],
        lambda b: [int(row["labels"]) for row in b],
    ),
    "samples as tuples with a number": ([(image(n), n) for n in range(N)], lambda b: [row[1] for row in b]),
    "samples of ids of one length": (
        [{"input_ids": torch.full((5,), n), "labels": torch.full((5,), n)} for n in range(N)],
        lambda b: [int(row["labels"][0]) for row in b],
    ),
    "samples beside nothing": (
        ([{"x": torch.zeros(n + 1, 2), "label": n} for n in range(N)],),
        lambda b: [row["label"] for row in b[0]],
    ),
    "samples of text": ([(f"text {n}", n) for n in range(N)], lambda b: [row[1] for row in b]),
    "columns of text": (
        {"text": ["a", "b", "c", "d"], "label": [0, 1, 2, 3]},
        lambda b: b["label"] if [ord(t) - 97 for t in b["text"]] == b["label"] else None,
    ),
    "texts in a tuple beside ids": (
        {"ids": torch.arange(N).view(N, 1), "text": ("0", "1", "2", "3")},
        lambda b: [int(t) for t in b["text"]],
    ),
    "arrays": ({"x": np.zeros((N, 2)), "y": np.arange(N)}, lambda b: b["y"].tolist()),
    "a jagged tensor": (jagged(2, 1, 3, 2), lambda b: [int(row[0, 0]) for row in b.unbind()]),
    "a strided nested tensor": (
        {"x": jagged(2, 1, 3, 2, layout=torch.strided)},
        lambda b: [int(row[0, 0]) for row in b["x"].unbind()],
    ),
    "a packed sequence and labels": (
        (packed(2, 1, 3, 2), torch.arange(N)),
        lambda b: b[1].tolist() if [int(row[0, 0]) for row in unpacked(b[0])] == b[1].tolist() else None,
    ),
    "a table": ({"t": Table({"x": torch.zeros(N, 2), "y": torch.arange(N)})}, lambda b: b["t"].held["y"].tolist()),
    "states of a recurrent layer": (
        {
            "x": torch.zeros(N, 5, 2),
            "y": torch.zeros(N),
            "state": (torch.arange(N).expand(2, N)[..., None], torch.zeros(2, N, 1)),
        },
        lambda b: b["state"][0][0, :, 0].tolist() if b["state"][1].shape[1] == len(b["x"]) else None,
    ),
    "ids that are time-first beside labels": (
        {"labels": torch.arange(N), "lengths": torch.ones(N), "ids": torch.arange(N).expand(7, N)},
        lambda b: b["ids"][3].tolist() if b["ids"].shape[0] == 7 else None,
    ),
}


def unpacked(sequence):
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(sequence, batch_first=True)
    return [row[:length] for row, length in zip(padded, lengths, strict=True)]


@pytest.mark.parametrize("name", OF_FOUR)
def test_rows_of_batches_of_every_shape(name):
    batch, numbers = OF_FOUR[name]
    assert rows(batch) == N
    for chosen in ([2, 0], [1], [3, 3, 0], [0, 1, 2, 3]):
        taken = take(batch, chosen)
        assert numbers(taken) == chosen
        assert type(taken) is type(batch)
        assert rows(taken) == len(chosen)
    assert numbers(batch) == [0, 1, 2, 3]


OF_COLUMNS = {
    "inputs and labels": ([torch.zeros(4, 3), torch.arange(4)], 4),
    "two inputs of one shape": ([torch.zeros(4, 3), torch.zeros(4, 3)], 4),
    "views": ({"views": [torch.zeros(4, 3, 8, 8), torch.zeros(4, 3, 8, 8), torch.zeros(4, 3, 4, 4)]}, 4),
    "keys and values of layers": ([(torch.zeros(4, 2, 5, 3), torch.zeros(4, 2, 5, 3))] * 6, 4),
    "labelled and unlabelled": ([torch.zeros(8, 5), torch.zeros(24, 5), torch.zeros(24, 5)], 24),
    "micro-batches": ([(torch.zeros(4, 3), torch.zeros(4))] * 2, 4),
    "class names beside rows": ({"x": torch.zeros(6, 2), "classes": ["a", "b"]}, 6),
    "an image and its size": ({"x": torch.zeros(2, 3, 4, 4), "y": torch.zeros(2), "size": (4, 4)}, 2),
}


@pytest.mark.parametrize("name", OF_COLUMNS)
def test_lists_of_columns_are_no_rows(name):
    batch, count = OF_COLUMNS[name]
    assert rows(batch) == count
    assert rows(take(batch, [1, 0])) == 2


def test_what_is_no_row_stays_whole():
    batch, _ = OF_COLUMNS["class names beside rows"]
    assert take(batch, [1])["classes"] == ["a", "b"]
    batch, _ = OF_COLUMNS["an image and its size"]
    assert take(batch, [1])["size"] == (4, 4)
    features = {"x": torch.zeros(4, 6), "y": torch.zeros(4), "prototypes": torch.zeros(10, 4)}
    assert take(features, [1])["prototypes"].shape == (10, 4)
    by_chance = {"x": torch.zeros(4, 4), "kernel": torch.zeros(10, 4, 3)}
    assert take(by_chance, [1])["kernel"].shape == (10, 4, 3)


def test_three_images_of_three_channels_are_rows():
    batch = {"images": [image(n) for n in range(3)], "targets": [boxes(n, n + 1) for n in range(3)]}
    assert rows(batch) == 3
    assert [int(i[0, 0, 0]) for i in take(batch, [2])["images"]] == [2]


def test_jagged_tensors_go_on_sharing_their_offsets():
    x = jagged(2, 1, 3).requires_grad_(True)
    y = torch.nested.nested_tensor_from_jagged(torch.arange(12.0).view(6, 2), x.offsets())
    a, b = take((x, y), [2, 0])
    assert [row.tolist() for row in (a.detach() + b).unbind()] == [
        [[8.0, 9.0], [10.0, 11.0], [12.0, 13.0]],
        [[0.0, 1.0], [2.0, 3.0]],
    ]
    assert a.requires_grad
    assert a.is_leaf


@pytest.mark.parametrize(("sizes", "chosen", "in_order"), [((3, 2, 1), [0, 2], True), ((3, 2, 1), [2, 0], False)])
def test_packed_sequences_stay_sorted_where_they_can(sizes, chosen, in_order):
    taken = take(packed(*sizes, enforce_sorted=True), chosen)
    assert (taken.sorted_indices is None) is in_order
    assert [len(row) for row in unpacked(taken)] == [sizes[i] for i in chosen]


def test_labels_next_to_time_first_inputs_are_taken_in_front():
    x, y, lengths = take((torch.arange(24).view(4, 3, 2), torch.arange(3), torch.ones(3, 1)), [2, 0], axis=1)
    assert (x.shape, y.tolist(), lengths.shape) == ((4, 2, 2), [2, 0], (2, 1))


def test_outputs_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    batch = outputs.Seq2SeqLMOutput(logits=torch.arange(3.0).view(3, 1), encoder_last_hidden_state=torch.zeros(3, 2))
    taken = take(batch, [2])
    assert type(taken) is type(batch)
    assert taken.logits.tolist() == taken["logits"].tolist() == [[2.0]]
    assert list(taken.keys()) == list(batch.keys())


def test_a_packed_sequence_is_no_number_that_rows_share():
    assert shared_by_rows((packed(2, 1, 3), torch.arange(3), 7, torch.ones(5)), 3).keys() == {(2,), (3,)}
