"""What a batch is composed of, as text and in parts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_trainloop.instruments.compositions.composition import Composition


@dataclass(frozen=True)
class OneMore:
    def __str__(self):
        return "1 more padded position on the left"

    def apply(self, batch):
        return batch


@pytest.mark.parametrize(
    ("composition", "text"),
    [
        (Composition((2,)), "row [2]"),
        (Composition((0, 1)), "rows [0, 1]"),
        (Composition((3, 1, 1), (1, 2)), "2 micro-batches: row 3, and rows [1, 1]"),
        (Composition((2,), change=OneMore()), "row [2] with 1 more padded position on the left"),
        (Composition(tuple(range(24)), (12, 12)), "24 rows as [12, 12]"),
    ],
)
def test_as_text(composition, text):
    assert str(composition) == text
