"""Which tensors of a batch are padded together."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop import Padding, TrainLoop
from pytest_trainloop.core.errors import CannotDecide, UsageError
from pytest_trainloop.instruments.batches.groups import padded_groups
from tests.loops.several_texts import padded_text

SOURCE, SOURCE_MASK = padded_text((8, 4, 5, 6), seed=1)
TARGET, TARGET_MASK = padded_text((5, 8, 4, 4), seed=2)
SHORT, SHORT_MASK = padded_text((5, 3, 4, 4), seed=3)
LENGTHS = torch.tensor([8, 4, 5, 6])
FEATURES = torch.randn(4, 8, 3) * SOURCE_MASK.unsqueeze(-1)


def labels(ids, mask):
    return ids.masked_fill(mask == 0, -100)


def groups(batch, **given):
    """The names of the tensors of each group, by their last keys."""
    return [sorted(str(path[-1]) for path in one.of) for one in padded_groups(batch, **given)]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"a": SOURCE, "am": SOURCE_MASK}, [["a", "am"]]),
        (
            {"a": SOURCE, "am": SOURCE_MASK, "b": TARGET, "bm": TARGET_MASK},
            [["a", "am"], ["b", "bm"]],
        ),
        ({"a": SOURCE, "am": SOURCE_MASK, "b": SHORT, "bm": SHORT_MASK}, [["a", "am"], ["b", "bm"]]),
        (
            {"a": SOURCE, "am": SOURCE_MASK, "b": TARGET, "bm": TARGET_MASK, "y": labels(TARGET, TARGET_MASK)},
            [["a", "am"], ["b", "bm", "y"]],
        ),
        ({"a": SOURCE.flip(1), "am": SOURCE_MASK.flip(1), "b": TARGET, "bm": TARGET_MASK}, [["a", "am"], ["b", "bm"]]),
        ({"x": FEATURES, "n": LENGTHS}, [["x"]]),
        ({"x": FEATURES, "n": [8, 4, 5, 6]}, [["x"]]),
        ({"a": SOURCE, "types": torch.zeros_like(SOURCE), "am": SOURCE_MASK}, [["a", "am", "types"]]),
        ({"a": SOURCE, "m": SOURCE_MASK, "answers": SOURCE_MASK * (torch.arange(8) > 2)}, [["a", "answers", "m"]]),
        ({"x": torch.randn(4, 8, 3), "gender": torch.tensor([[1, 1], [1, 0], [0, 0], [1, 0]])}, []),
        ({"a": torch.randint(1, 9, (4, 8)), "am": torch.ones(4, 8)}, []),
    ],
)
def test_a_tensor_belongs_to_what_tells_its_padding(batch, expected):
    assert groups(batch) == expected


def test_two_sentences_by_the_id_of_padding():
    assert groups({"a": SOURCE, "b": TARGET}, declared=Padding(pad_id=0)) == [["a"], ["b"]]
    assert groups((SOURCE, TARGET), pad_ids=[0]) == [["0"], ["1"]]


def test_a_tensor_that_fits_two_regions_is_asked_about():
    both = torch.where((SOURCE_MASK * TARGET_MASK) == 0, 0, SOURCE)
    batch = {"a": SOURCE, "am": SOURCE_MASK, "b": TARGET, "bm": TARGET_MASK, "c": both}
    with pytest.raises(CannotDecide, match="c holds one value over two padded regions"):
        padded_groups(batch)
    declared = Padding.first_of([Padding(of=("a", "am", "c")), Padding(of=("b", "bm"))])
    assert groups(batch, declared=declared) == [["a", "am", "c"], ["b", "bm"]]


def test_several_paddings_are_declared_in_a_list():
    given = [Padding(of=("a", "am")), Padding(of="b")]
    model = torch.nn.Linear(1, 1)
    loop = TrainLoop(model=model, padding=given, fit=print)
    assert loop.padding is not None
    assert [p.of for p in loop.padding.all] == [("a", "am"), ("b",)]
    with pytest.raises(UsageError, match=r"Padding\.of is"):
        Padding(of=3)
