"""Draws that are the same for a row in every batch that holds it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.runs.row_draws import DrawAxes, RowDraws
from tests.runs.test_shared_draws import DRAWS as OF_ROWS


def run(draw, *items, axes=None):
    """What a loop draws for each item, which is given by the keys of its rows."""
    mode = RowDraws(items, axes)
    found = []
    with mode:
        for number, keys in enumerate(items):
            batch = torch.zeros(len(keys), 5)
            mode.next_item(number, batch)
            found.append(draw(batch))
    return found, mode.log


def learned(draw):
    """What the axes stand for, from a batch of four rows and one of two."""
    return DrawAxes.between(run(draw, range(4))[1], run(draw, range(2))[1], 4, 2)


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_draws_the_same_in_every_batch(name):
    def draw(batch):
        return OF_ROWS[name](len(batch))

    axes = learned(draw)
    assert not axes.unknown
    (one, two, three), _ = run(draw, [0, 1, 2, 3], [3, 1], [1, 1, 0], axes=axes)
    assert torch.equal(two, one[[3, 1]])
    assert torch.equal(three, one[[1, 1, 0]])
    assert (one.dtype, one.shape) == (draw(torch.zeros(4, 5)).dtype, (4, *two.shape[1:]))


def test_rows_draw_differently():
    (found,), _ = run(lambda b: torch.randn_like(b), range(64), axes=learned(torch.randn_like))
    assert found.unique().numel() == found.numel()
    assert found.std() == pytest.approx(1.0, abs=0.1)


WAYS = {
    "time first": (lambda b: torch.randn(7, len(b), 3), 1),
    "samples in front": (lambda b: torch.rand(3, len(b)), 1),
    "pairs": (lambda b: torch.randn(len(b), len(b)), (0, 1)),
}


@pytest.mark.parametrize("name", WAYS)
def test_rows_along_any_axis(name):
    draw, at = WAYS[name]
    (one, two), _ = run(draw, [0, 1, 2], [2, 0], axes=learned(draw))
    for axis in (at,) if isinstance(at, int) else at:
        one = one.index_select(axis, torch.tensor([2, 0]))
    assert torch.equal(one, two)


def test_as_many_numbers_as_rows_by_chance_are_no_rows():
    def heads(batch):
        return torch.randn(4, 3)

    axes = learned(heads)
    (one, two, three), _ = run(heads, [0, 1, 2, 3], [3, 2, 1, 0], [1], axes=axes)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_several_for_each_row_are_alike():
    def samples(batch):
        return torch.randn(len(batch) * 3, 2)

    (one, two), _ = run(samples, [0, 1, 2], [2], axes=learned(samples))
    assert torch.equal(one, two[:1].expand(9, 2))


def test_two_draws_of_a_batch_differ():
    def views(batch):
        return torch.stack([torch.randn_like(batch), torch.randn_like(batch)], 1)

    (one, two), _ = run(views, [0, 1, 2], [2, 0], axes=learned(views))
    assert torch.equal(two, one[[2, 0]])
    assert not torch.equal(one[:, 0], one[:, 1])


def test_a_loop_over_rows_draws_the_same_for_each():
    def each(batch):
        return torch.stack([torch.rand(2) for _ in batch])

    (one, two), _ = run(each, [0, 1, 2], [2], axes=learned(each))
    assert torch.equal(one[:1], two)
    assert not learned(each).unknown


def test_a_longer_draw_begins_as_the_shorter_one():
    def noise(batch, width):
        return torch.randn(len(batch), 3, width)

    axes = learned(lambda b: noise(b, 5))
    (short,), _ = run(lambda b: noise(b, 5), [0, 1], axes=axes)
    (longer,), _ = run(lambda b: noise(b, 8), [0, 1], axes=axes)
    assert torch.equal(longer[..., :5], short)


def test_a_draw_that_fits_no_axis_is_named_with_its_line():
    def odd(batch):
        return torch.randn(len(batch) + 1)

    axes = learned(odd)
    assert len(axes.unknown) == 1
    assert axes.unknown[0].startswith("randn of shape (5,), ")
    assert axes.unknown[0].endswith("return torch.randn(len(batch) + 1)")
    (one, two), _ = run(odd, [0, 1, 2], [2], axes=axes)
    assert torch.equal(one[:2], two)  # alike for all


def test_the_batch_at_hand_is_the_one_that_is_computed_with():
    """Trainers take all micro-batches of a window before they use the first."""
    axes = learned(torch.randn_like)
    mode = RowDraws([[0, 1], [2, 3]], axes)
    first, second = torch.zeros(2, 5), torch.zeros(2, 5)
    with mode:
        mode.next_item(0, {"x": first})
        mode.next_item(1, {"x": second})
        a = torch.randn_like(first)
        F.relu(second)
        b = torch.randn(2, 5)
    (whole,), _ = run(torch.randn_like, range(4), axes=axes)
    assert torch.equal(a, whole[:2])
    assert b.shape == (2, 5)


def test_micro_batches_draw_as_the_whole_does():
    axes = learned(torch.randn_like)
    (whole,), _ = run(torch.randn_like, [4, 2, 0, 1], axes=axes)
    parts, _ = run(torch.randn_like, [4, 2], [0, 1], axes=axes)
    assert torch.equal(torch.cat(parts), whole)
