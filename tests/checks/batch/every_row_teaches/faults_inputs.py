"""Inputs that are read in the place of others, and weights of which some are 0."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def two_views(second):
    def loss_of(model, batch):
        one = F.normalize(model(batch["view1"]), dim=1)
        other = F.normalize(model(batch[second]), dim=1)
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))

    def make():
        view1, view2 = data.views(left=6, right=6)
        return loop(mlp(6, 16, 4), {"view1": view1, "view2": view2}, loss_of, rows_interact=True)

    return make


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)

    def forward(self, ids):
        return self.head(self.embed(ids).cumsum(1))


def log_probability(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)


def preferences(other):
    def make():
        chosen, rejected = data.tokens()[0], data.tokens(seed=5)[0]
        policy = LanguageModel()
        reference = copy.deepcopy(policy).requires_grad_(False)
        nn.init.normal_(policy.head.bias, std=0.1)

        def loss_of(model, batch):
            won = log_probability(model, batch["chosen_ids"])
            lost = log_probability(model, batch[other])
            with torch.no_grad():
                before = log_probability(reference, batch["chosen_ids"]) - log_probability(reference, batch[other])
            return -F.logsigmoid(0.1 * (won - lost - before)).mean()

        return loop(policy, {"chosen_ids": chosen, "rejected_ids": rejected}, loss_of)

    return make


pair(
    "second_view_is_the_first",
    "every_row_teaches",
    "one_input_for_two",
    culprits=("view2", "view1"),
    where="model(batch[second])",
    faulty=two_views("view1"),
    fixed=two_views("view2"),
    quick=True,
)

pair(
    "rejected_answers_scored_by_the_chosen",
    "every_row_teaches",
    "one_input_for_two",
    culprits=("rejected_ids",),
    where="lost = log_probability(model, batch[other])",
    faulty=preferences("chosen_ids"),
    fixed=preferences("rejected_ids"),
)


def balanced(weigh, *, in_the_call):
    def loss_of(model, batch):
        x, y = batch
        counts = torch.bincount(y, minlength=3).clamp(min=1)
        weights = weigh(len(y), counts).to(x.dtype)
        if in_the_call:
            return F.cross_entropy(model(x), y, weight=weights)
        return (F.cross_entropy(model(x), y, reduction="none") * weights[y]).mean()

    def make():
        x, y = data.labelled()
        return loop(mlp(6, 16, 3), (x, torch.where(torch.arange(16) < 9, 0, y)), loss_of)

    return make


pair(
    "weights_of_rows_by_an_integer_division",
    "every_row_teaches",
    "weights_cut_to_zero",
    where="* weights[y]",
    faulty=balanced(lambda _rows, counts: 5 // counts, in_the_call=False),
    fixed=balanced(lambda _rows, counts: 5 / counts, in_the_call=False),
)


def regressed(loss_of):
    return lambda: loop(mlp(6, 16, 1), data.table(), lambda m, b: loss_of(m(b[0]), b[1]))


pair(
    "target_of_the_first_row_for_all",
    "every_row_teaches",
    "one_target_for_all_rows",
    culprits=("batch[1]",),
    where="(output - y[0])",
    faulty=regressed(lambda output, y: (output - y[0]).square().mean()),
    fixed=regressed(lambda output, y: (output - y).square().mean()),
    quick=True,
)

pair(
    "target_of_the_last_row_for_all",
    "every_row_teaches",
    "one_target_for_all_rows",
    where="F.l1_loss(output, y[-1:].expand_as(output))",
    faulty=regressed(lambda output, y: F.l1_loss(output, y[-1:].expand_as(output))),
    fixed=regressed(F.l1_loss),
)
