"""Sequences that begin with equal ids, and with no start token twice."""

from __future__ import annotations

import torch

from tests.checks.loss.loss_contract.unusual_label_shifts import loop, scored
from tests.loops.nets import CharLSTM
from tests.loops.odd import odd


def next_id(model, ids):
    return scored(model(ids[:, :-1]), ids[:, 1:])


@odd(notes="half days of weeks that all begin on the same day: every id is there twice")
def half_days_of_aligned_weeks():
    def draw():
        first = torch.randint(1, 5, (6, 1))
        days = torch.cat([torch.zeros(6, 1, dtype=torch.long), (first + torch.arange(6)) % 12 + 1], 1)
        return days.repeat_interleave(2, 1)

    return loop(CharLSTM(), draw, next_id)


@odd(notes="rows are padded on the left to the length of the longest")
def padded_on_the_left():
    def draw():
        ids = torch.randint(3, 16, (6, 10))
        for row, begin in enumerate((0, 2, 2, 1, 3, 2)):
            ids[row, :begin] = 0
        return ids

    return loop(CharLSTM(), draw, next_id)


@odd(notes="every line begins with two spaces, and there are more of them")
def lines_that_are_indented():
    def draw():
        ids = torch.randint(3, 16, (6, 10))
        ids[:, :2] = 1
        ids[:, 5] = 1
        return ids

    return loop(CharLSTM(), draw, next_id)


@odd(notes="a start token, and a language token that is the same in every row")
def start_and_language_token():
    def draw():
        return torch.cat([torch.tensor([[1, 2]]).expand(6, 2), torch.randint(3, 16, (6, 8))], 1)

    return loop(CharLSTM(), draw, next_id)
