"""Means over the places that a mask keeps, divided by the number of those that it leaves out; and other weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.odd import odd
from tests.loops.pairs import pair
from tests.loops.plain import loop


def infilled(loss_of):
    """Frames of which a span is hidden; ``loss_of(each, hidden)``, of (rows, frames)."""

    def make():
        draw = torch.Generator().manual_seed(4)
        frames = torch.randn(6, 12, 4, generator=draw).cumsum(1)
        sizes = torch.tensor([3, 5, 8, 4, 6, 9])
        hidden = (torch.arange(12) >= 2) & (torch.arange(12) < 2 + sizes[:, None])
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def loss(model, batch):
            shown, wanted, left_out = batch
            return loss_of(F.mse_loss(model(shown), wanted, reduction="none").mean(-1), left_out)

        shown = frames.masked_fill(hidden[..., None], 0)
        return loop(model, (torch.cat([shown, shown.roll(3, 1)], -1), frames, hidden), loss)

    return make


def of_hidden(each, hidden):
    return ((each * hidden).sum(1) / hidden.sum(1)).mean()


# https://github.com/lucidrains/voicebox-pytorch/issues/6, and the same with a product.

pair(
    "hidden_frames_filled_with_zeros_and_counted",
    "loss_contract",
    "divided_by_the_others",
    faulty=infilled(lambda each, hidden: (each.masked_fill(hidden, 0).sum(1) / hidden.sum(1).clamp(min=1)).mean()),
    fixed=infilled(of_hidden),
    quick=True,
)

pair(
    "frames_kept_and_others_counted",
    "loss_contract",
    "divided_by_the_others",
    faulty=infilled(lambda each, hidden: ((each * hidden).sum(1) / (~hidden).sum(1)).sum()),
    fixed=infilled(of_hidden),
)

CORRECT = {
    "of_all_hidden_places": ("all hidden places weigh the same", lambda e, h: (e * h).sum() / h.sum()),
    "of_the_shown_places": ("the shown places count, by their own number", lambda e, h: of_hidden(e, ~h)),
    "hidden_ones_summed_in_rows": ("rows with more hidden places weigh more", lambda e, h: (e * h).mean(1).mean()),
    "rows_by_the_share_that_is_hidden": (
        "a row weighs as much as the share of it that is hidden",
        lambda e, h: ((e * h).sum(1) / h.sum(1) * h.double().mean(1)).mean(),
    ),
}

for name, (notes, weigh) in CORRECT.items():
    odd(notes=notes, name=f"mean_{name}")(infilled(weigh))
