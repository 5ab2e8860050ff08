"""Overlaps of two boxes whose values are known."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_trainloop.instruments.formulas.boxes import _overlap, _Way

A = torch.tensor([[0.0, 0.0, 2.0, 2.0]], dtype=torch.float64)
B = torch.tensor([[1.0, 1.0, 3.0, 3.0]], dtype=torch.float64)
TALL = torch.tensor([[1.0, 1.0, 2.0, 4.0]], dtype=torch.float64)
APART = torch.tensor([[5.0, 5.0, 6.0, 6.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("iou", 1 / 7), ("giou", 1 / 7 - 2 / 9), ("diou", 1 / 7 - 2 / 18), ("ciou", 1 / 7 - 2 / 18)],
)
def test_two_squares_that_share_a_corner(kind, value):
    assert float(_overlap(A, B, way=_Way(kind))) == pytest.approx(value)


def test_boxes_of_other_shapes_cost_their_aspect_in_ciou():
    v = 4 / math.pi**2 * (math.atan(1 / 3) - math.atan(1.0)) ** 2
    iou = 1 / (4 + 3 - 1)
    expected = iou - ((1 - 1.5) ** 2 + (1 - 2.5) ** 2) / (2**2 + 4**2) - v * v / (1 - iou + v)
    assert float(_overlap(A, TALL, way=_Way("ciou"))) == pytest.approx(expected)


def test_boxes_that_are_apart_share_nothing_with_a_clamp():
    assert float(_overlap(A, APART, way=_Way())) == 0
    assert float(_overlap(A, APART, way=_Way(clamp=False))) != 0


def test_the_formats_agree():
    def centred(b):
        return torch.cat([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], 1)

    def sided(b):
        return torch.cat([b[:, :2], b[:, 2:] - b[:, :2]], 1)

    for kind in ("iou", "giou", "diou", "ciou"):
        values = [
            float(_overlap(a, b, way=_Way(kind, form)))
            for form, a, b in (
                ("corners", A, TALL),
                ("centre", centred(A), centred(TALL)),
                ("sides", sided(A), sided(TALL)),
            )
        ]
        assert values == pytest.approx([values[0]] * 3)


def test_whole_pixels_are_one_wider():
    assert float(_overlap(A, B, way=_Way(more=1.0))) == pytest.approx(4 / (9 + 9 - 4))
