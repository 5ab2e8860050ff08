"""Correct loops with statements that resemble a typing slip."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# ruff: noqa: B018
from tests.checks.wiring.no_typos.faults import Encoder, divergence, net
from tests.loops import data
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop


@odd(notes="a call is made for its side effect, and its result has the shape of what it was given")
def hook_filled_by_a_lost_pass():
    class Matched(nn.Module):
        """Compares hidden states with those of a pass over moved inputs, which a hook keeps."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
            self.kept = []

        def forward(self, x):
            handle = self.body.register_forward_hook(lambda module, given, out: self.kept.append(out.detach()))
            self.body(x + 0.1)
            handle.remove()
            hidden = self.body(x)
            return self.head(torch.tanh(hidden)), F.mse_loss(hidden, self.kept.pop())

    def loss_of(model, batch):
        scores, distance = model(batch[0])
        return F.cross_entropy(scores, batch[1]) + 0.1 * distance

    return loop(Matched(), data.labelled(), loss_of)


@odd(notes="statements name attributes and functions, give a signed keyword, and compute lost values of no consequence")
def attributes_that_are_looked_at():
    def loss_of(model, batch):
        model.training
        torch.manual_seed
        torch.initial_seed
        total = torch.add(batch[0], 0, alpha=+1)
        total.sum(dim=+1)
        batch[0].clamp(-100, 100)
        batch[0].detach()
        return cross_entropy(model, batch)

    return loop(net(), data.labelled(), loss_of)


@odd(notes="a divergence is taken in both directions: the arguments of one call are in the other order")
def divergence_in_both_directions():
    def gap(student, teacher):
        return F.kl_div(student.log_softmax(-1), teacher.detach().softmax(-1), reduction="batchmean")

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = net(), net()

        def forward(self, x):
            return self.student(x), self.teacher(x)

    def loss_of(model, batch):
        student, teacher = model(batch[0])
        mutual = gap(student, teacher) + gap(teacher, student)
        return F.cross_entropy(student, batch[1]) + F.cross_entropy(teacher, batch[1]) + 0.1 * mutual

    return loop(Pair(), data.labelled(), loss_of)


@odd(notes="a function that swaps two halves gives them, and takes them, in the other order")
def halves_that_are_swapped():
    def swapped(left, right):
        return right, left

    def loss_of(model, batch):
        left, right = batch[0].chunk(2, -1)
        right, left = swapped(right, left)
        left, right = swapped(left, right)
        return F.cross_entropy(model(torch.cat([right, left], 1)), batch[1])

    return loop(net(), data.labelled(), loss_of)


@odd(notes="one value is returned twice on purpose: the prior is the posterior's own mean, and a spread is not used")
def spread_that_is_not_used():
    class Fixed(Encoder):
        def encode(self, x):
            mean, _ = self.body(x).chunk(2, -1)
            return mean, torch.zeros_like(mean)

    def loss_of(model, batch):
        mean, logvar = model.encode(batch[0])
        first, second = mean, mean
        return divergence(model, batch[0], 0.5 * (first + second), logvar)

    model = Fixed()
    model.body = nn.Linear(6, 8)
    return loop(model, data.labelled(), loss_of)


@odd(notes="a wrapper takes an argument for the sake of others, and gives what it makes of another; one is left out")
def arguments_that_are_taken_and_not_read():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attend = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x, attn_mask=None, need_weights=False):
            hidden = self.embed(x)[:, None]
            causal = torch.zeros(1, 1, dtype=torch.bool)
            return self.head(self.attend(hidden, hidden, hidden, attn_mask=causal)[0][:, 0])

    def loss_of(model, batch, reduction="mean", weight=None, dim=1):
        return F.cross_entropy(model(batch[0], need_weights=True), batch[1])

    return loop(Wrapped(), data.labelled(), loss_of)


@odd(notes="frames are stacked in pairs, twice as many of them as they have features; a table of weights gets two axes")
def frames_stacked_in_pairs():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 3)

        def forward(self, x):
            rows, steps, width = x.shape
            pairs = x.reshape(rows, steps // 2, width * 2)
            return self.head(pairs.mean(1) * self.table.view(8, 3).sum(1))

    return loop(Stacked(), (torch.randn(12, 8, 4), torch.arange(12) % 3), cross_entropy)


@odd(notes="each word of a list is read alone, from one state that summarises the text: the new state is not read")
def words_read_from_one_state():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.start, self.head = nn.GRUCell(1, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            start, states = torch.tanh(self.start(x)), []
            for word in x.unbind(1):
                state = self.cell(word[:, None], start)
                states.append(state)
            return self.head(torch.stack(states).mean(0))

    return loop(Alone(), data.labelled(), cross_entropy)


@odd(notes="a module keeps a flag of its own beside requires_grad, as transformers' audio encoders do")
def module_with_a_flag():
    class Encoder(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
            self[0].requires_grad_(False)
            self._requires_grad = True

        def forward(self, x):
            return super().forward(x.detach().requires_grad_() if self._requires_grad else x)

    return loop(Encoder(), data.labelled(), cross_entropy)
