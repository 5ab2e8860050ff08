"""Initial values that are replaced on purpose, or read before."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.learning.initial_values_are_kept.faults import Residual, initialise, supervised
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop


@odd(notes="all blocks are loaded, and the last one is initialised again: fine-tuning with re-initialised top layers")
def last_block_initialised_again():
    def model_of():
        model, trained = mlp(6, 16, 3), mlp(6, 16, 3)
        model.load_state_dict(trained.state_dict())
        initialise(model[2])
        return model

    return supervised(model_of)()


@odd(notes="a base class sets a bias, and its subclass sets another one")
def subclass_sets_another_value():
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
            nn.init.constant_(self.head.bias, -2.0)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    class Own(Base):
        def __init__(self):
            super().__init__()
            self.apply(initialise)
            nn.init.constant_(self.head.bias, 0.1)

    return supervised(Own)()


@odd(notes="the student gives its loaded values to a teacher, and then begins at random: self-distillation")
def values_are_read_by_a_teacher():
    student = mlp(6, 16, 3)
    student.load_state_dict(mlp(6, 16, 3).state_dict())
    teacher = copy.deepcopy(student).requires_grad_(False)
    student.apply(initialise)

    def loss_of(model, batch):
        x, y = batch
        scores = model(x)
        return F.cross_entropy(scores, y) + F.mse_loss(scores, teacher(x))

    return loop(student, data.labelled(), loss_of)


@odd(notes="a row of an embedding is zeroed by torch, drawn over with all others, and zeroed again")
def padding_row_is_zeroed_again():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)
            nn.init.normal_(self.table.weight, std=0.1)
            self.table.weight.data[0].fill_(0.0)

        def forward(self, ids):
            return self.head(self.table(ids).sum(1))

    return loop(Bag(), (torch.randint(1, 20, (12, 6)), torch.arange(12) % 3), cross_entropy)


@odd(notes="zeros of the branch are set last, after they were set and drawn over")
def zeros_are_set_again():
    def model_of():
        model = Residual(zeros_last=False)
        nn.init.zeros_(model.out.weight)
        return model

    return supervised(model_of)()


@odd(notes="forget gates begin at one, in a part of the bias, after the general initialisation")
def forget_gates_begin_at_one():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 3)
            for name, parameter in self.rnn.named_parameters():
                if "bias" in name:
                    nn.init.zeros_(parameter)
                    parameter.data[8:16].fill_(1.0)
                else:
                    nn.init.orthogonal_(parameter)

        def forward(self, x):
            return self.head(self.rnn(x.view(len(x), 2, 3))[0][:, -1])

    return supervised(Recurrent)()


@odd(
    notes="one checkpoint is loaded into each part as far as it has its keys, and again without the prefix of a wrapper"
)
def checkpoint_is_tried_on_every_part():
    def model_of():
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        state = {f"module.{name}": value for name, value in model.state_dict().items()}
        body = {f"linear.{name}": value for name, value in model[0].state_dict().items()}
        if model.load_state_dict(state, strict=False).missing_keys:
            model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
        for part in (model[2], nn.ModuleDict({"linear": model[0]})):
            part.load_state_dict(body, strict=False)
        return model

    return supervised(model_of)()
