"""Rows chosen from a batch, and rows cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings

from pytest_trainloop import UsageError
from pytest_trainloop.instruments.strategies import paddings, row_selections, splits
from tests.helpers.hypothesis_draws import REPEATABLE, drawn, smallest
from tests.helpers.padded_batches import Encoding, Pair, Sample, text

BATCH = {"x": torch.arange(12.0).view(6, 2), "y": torch.arange(6), "class_weights": torch.ones(3)}


@pytest.mark.parametrize(
    ("n", "condition", "expected"),
    [
        (7, lambda s: True, (7,)),
        (7, lambda s: len(s) > 1, (4, 3)),
        (8, lambda s: len(s) > 2, (3, 3, 2)),
        (6, lambda s: 1 in s, (2, 2, 1, 1)),
        (6, lambda s: s[0] == 5, (5, 1)),
        (7, lambda s: max(s) - min(s) > 1, (5, 2)),
        (4, lambda s: len(s) == 4, (1, 1, 1, 1)),
    ],
)
def test_splits_shrink_to_few_and_even_parts(n, condition, expected):
    assert smallest(splits(n), condition) == expected


@pytest.mark.parametrize(("n", "parts"), [(1, None), (2, 2), (5, 3), (12, None), (100, 7)])
def test_splits_are_of_all_rows(n, parts):
    for sizes in drawn(splits(n, parts)):
        assert sum(sizes) == n
        assert min(sizes) > 0
        assert parts in (None, len(sizes))


@pytest.mark.parametrize(("n", "parts", "reason"), [(0, None, "at least 1"), (3, 4, "from 1 to 3"), (3, 0, "from 1")])
def test_splits_that_are_none(n, parts, reason):
    with pytest.raises(UsageError, match=reason):
        splits(n, parts)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"x": torch.ones(3, 2)},
            "splits got a dict with tensors of shapes (3, 2); the number of rows is needed, as in splits(3)",
        ),
        (2.0, "splits got 2.0; the number of rows is needed, as in splits(1)"),
    ],
)
def test_splits_of_what_is_no_number(given, sentence):
    with pytest.raises(UsageError) as refused:
        splits(given)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda r: True, (0,)),
        (lambda r: len(set(r.indices)) > 2, (0, 1, 2)),
        (lambda r: {1, 3} <= set(r.indices), (1, 3)),
        (lambda r: len(set(r.indices)) < len(r.indices), (0, 0)),
        (lambda r: list(r.indices) != sorted(r.indices), (1, 0)),
        (lambda r: len(r.indices) % 2 == 1 and 5 in r.indices, (5,)),
        (lambda r: len(set(r.indices)) == 6, (0, 1, 2, 3, 4, 5)),
        (lambda r: len(r.indices) > 6, (0, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_selections_shrink_to_few_rows_in_order(condition, expected):
    rows = smallest(row_selections(BATCH), condition)
    assert rows.indices == expected
    assert rows.batch["y"].tolist() == list(expected)
    assert repr(rows) == f"rows {list(expected)}"


def test_a_failure_names_the_rows_and_not_their_values():
    @settings(REPEATABLE)
    @given(row_selections(BATCH), paddings(text(), only=["more"]))
    def fails(rows, padded):
        assert 3 not in rows.indices

    with pytest.raises(AssertionError) as raised:
        fails()
    told = "\n".join(raised.value.__notes__)
    assert "rows=rows [3]," in told
    assert "padded=padding: 1 more on the right; lengths [3, 5, 2]," in told


def test_each_kind_of_selection_is_drawn():
    for count in (2, 6, 32):
        chosen = [rows.indices for rows in drawn(row_selections(torch.arange(count)))]
        assert any(len(rows) == 1 for rows in chosen)
        assert any(len(set(rows)) < len(rows) for rows in chosen)
        assert any(sorted(rows) == list(range(count)) and rows[0] > rows[-1] for rows in chosen)
        assert any(len(rows) % 2 for rows in chosen)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 3), (6, 6), (6, 9), (8, 9)])
def test_the_number_of_rows_has_bounds(least, most):
    sizes = {len(rows.batch["x"]) for rows in drawn(row_selections(BATCH, least=least, most=most))}
    assert sizes <= set(range(least, most + 1))
    assert least in sizes


@dataclass
class Images:
    images: list[torch.Tensor]
    boxes: list[dict[str, torch.Tensor]]


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (torch.arange(3), lambda b: b),
        ([torch.arange(3), torch.ones(3, 2)], lambda b: b[0]),
        (Pair(torch.arange(3).half(), torch.ones(3, 2)), lambda b: b.ids),
        (Sample(torch.arange(3.0).double(), torch.ones(3)), lambda b: b.frames),
        (Encoding({"ids": torch.arange(3).to(torch.int32)}), lambda b: b["ids"]),
        ({"a": {"b": (torch.arange(3) > 0,)}, "n": 7}, lambda b: b["a"]["b"][0]),
    ],
)
def test_types_and_dtypes_stay(batch, first):
    for rows in drawn(row_selections(batch), 20):
        assert type(rows.batch) is type(batch)
        assert first(rows.batch).dtype is first(batch).dtype
        assert torch.equal(first(rows.batch), first(batch)[list(rows.indices)])


def test_rows_that_are_tensors_of_their_own():
    tokens = [torch.arange(2), torch.arange(5), torch.arange(3)]
    for rows in drawn(row_selections(tokens), 20):
        assert [len(row) for row in rows.batch] == [len(tokens[i]) for i in rows.indices]
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (1, 0, 2)]
    for rows in drawn(row_selections(Images([torch.zeros(3, 8, 8)] * 3, boxes)), 20):
        assert [len(b["boxes"]) for b in rows.batch.boxes] == [len(boxes[i]["boxes"]) for i in rows.indices]
        assert len(rows.batch.images) == len(rows.indices)


def test_rows_along_another_axis_and_of_what_lies_beside_them():
    x, y = torch.arange(24).view(4, 3, 2), torch.arange(3)
    for rows in drawn(row_selections((x, y, torch.arange(3.0).view(3, 1)), batch_dim=1), 20):
        chosen = list(rows.indices)
        assert torch.equal(rows.batch[0], x[:, chosen])
        assert rows.batch[1].tolist() == chosen
        assert rows.batch[2].flatten().tolist() == chosen


def test_the_batch_itself_is_left_alone():
    x = torch.arange(3.0).requires_grad_(True)
    for rows in drawn(row_selections({"x": x}), 5):
        rows.batch["x"].data.fill_(7.0)
        assert rows.batch["x"].requires_grad
    assert x.tolist() == [0.0, 1.0, 2.0]


def test_the_same_rows_each_time():
    again = [[rows.indices for rows in drawn(row_selections(BATCH), 30)] for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    ("batch", "options", "reason"),
    [
        (torch.tensor(1.0), {}, "no tensor of it has an axis 0; pass batch_dim="),
        (BATCH, {"least": 0}, "least= from 1"),
        (BATCH, {"least": 3, "most": 2}, "no selection has 3 to 2 rows"),
        ({"n": 7, "scale": torch.tensor(1.0)}, {}, "no tensor of it"),
        ([], {}, "^rows cannot be chosen from an empty list; at least one row is needed$"),
        (torch.ones(0, 4), {}, r"^rows cannot be .* shape \(0, 4\): it has none; at least one row is needed$"),
    ],
)
def test_what_has_no_rows_to_choose(batch, options, reason):
    with pytest.raises(UsageError, match=reason):
        row_selections(batch, **options)
