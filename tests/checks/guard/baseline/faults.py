"""Changes that are no refactor: the loop that the baseline was recorded of is the fixed one."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn

from tests.checks.guard.baseline.projects import (
    Block,
    Decoder,
    Pictures,
    Table,
    adamw,
    decoder,
    pictures,
    table,
    token_loss,
    train,
)
from tests.checks.guard.baseline.refactors import Tied, by, clipped, cosine
from tests.loops import data
from tests.loops.pairs import pair


def changed(name, cause, faulty, fixed, *culprits, **fields):
    pair(name, "baseline", cause, faulty=faulty, fixed=fixed, culprits=culprits, **fields)


def of_blocks(block, **options):
    return functools.partial(Decoder, functools.partial(block, **options))


changed(
    "tanh_in_place_of_relu",
    "steps_differ",
    table(functools.partial(Table, activation=torch.tanh)),
    table(),
    "fc2",
    quick=True,
)


def left_in_evaluation(model, optimizer, batches, criterion):
    for x, y in batches:
        model.eval()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


changed(
    "batch_norm_in_evaluation_mode",
    "steps_differ",
    pictures(fit=left_in_evaluation),
    pictures(),
    "norm",
)


def from_scratch(std):
    class Drawn(Table):
        def __init__(self):
            super().__init__(width=40)
            nn.init.normal_(self.fc1.weight, std=std)

    return Drawn


class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc2 = nn.Linear(40, 3)
        self.fc1 = nn.Linear(6, 40)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


wide = functools.partial(Table, width=40)
changed(
    "smaller_initial_weights",
    "initial_weights_differ",
    table(from_scratch(0.02)),
    table(from_scratch(0.2)),
    "fc1.weight",
    mentions=("deviation 0.02",),
    quick=True,
)
changed(
    "built_in_another_order",
    "initial_weights_differ",
    table(HeadFirst),
    table(wide),
    "fc1.weight",
)


changed(
    "fewer_rows",
    "setup_differs",
    table(batch=lambda: data.labelled(rows=8)),
    table(),
    "batch",
)


def summed(scores, targets):
    return F.cross_entropy(scores, targets, reduction="sum")


changed(
    "sum_in_place_of_mean",
    "steps_differ",
    table(criterion=summed),
    table(),
    "loss",
)


class DetachedEmbedding(Decoder):
    def forward(self, ids):
        return self.head(self.norm(self.block(self.embed(ids).detach())))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


changed(
    "embedding_detached",
    "steps_differ",
    decoder(DetachedEmbedding),
    decoder(),
    "embed.weight",
)
changed(
    "relu_whose_gradient_passes_straight_through",
    "steps_differ",
    table(functools.partial(Table, activation=Straight.apply)),
    table(),
    "fc1.weight",
    "fc1.bias",
)


def warm_up(first):
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + first) / 8))


def schedule_first(model, optimizer, batches, scheduler):
    for x, y in batches:
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        scheduler.step()
        optimizer.step()


changed(
    "another_rate",
    "steps_differ",
    table(optimizer=by(adamw, lr=1e-3)),
    table(optimizer=by(adamw, lr=3e-3)),
    "fc2.bias",
    mentions=("0.001",),
)
changed(
    "scheduler_before_the_optimizer",
    "setup_differs",
    decoder(fit=schedule_first, scheduler=warm_up(1)),
    decoder(scheduler=warm_up(1)),
)


def decayed(biases):
    def groups(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": biases}], lr=3e-3)

    return groups


changed(
    "decay_on_the_biases",
    "setup_differs",
    table(optimizer=decayed(0.01)),
    table(optimizer=decayed(0.0)),
    "fc1.bias",
    mentions=("0.01",),
    quick=True,
)
changed(
    "without_betas",
    "setup_differs",
    table(optimizer=by(adamw, betas=(0.9, 0.95))),
    table(),
)
changed(
    "head_not_in_the_optimizer",
    "setup_differs",
    table(optimizer=lambda model: adamw(model.fc1.parameters())),
    table(),
    "fc2.weight",
)


class Frozen(Table):
    def __init__(self):
        super().__init__()
        self.fc1.requires_grad_(False)


changed("first_layer_frozen", "setup_differs", table(Frozen), table(), "fc1.weight")


def zeroed_late(model, optimizer, batches, criterion):
    for x, y in batches:
        criterion(model(x), y).backward()
        optimizer.step()


def unclipped(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        optimizer.step()


changed("gradients_not_zeroed", "setup_differs", table(fit=zeroed_late), table(), "zero_grad()")
changed("clip_gone", "setup_differs", decoder(fit=unclipped), decoder(fit=clipped), "clip_grad_norm_()")


def after_many_steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 100)


changed("scheduler_gone", "setup_differs", table(), table(scheduler=after_many_steps))
changed(
    "shorter_cosine",
    "setup_differs",
    decoder(scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
    decoder(scheduler=cosine),
)
changed(
    "other_momentum_of_running_statistics",
    "steps_differ",
    pictures(functools.partial(Pictures, momentum=0.01)),
    pictures(),
    "norm.running_mean",
)
changed("wider", "setup_differs", table(wide), table(), "fc1.weight")
changed(
    "head_untied",
    "setup_differs",
    decoder(Decoder),
    decoder(Tied),
    "head.weight",
)


def in_bfloat16(model, optimizer, batches, criterion):
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


changed("autocast_added", "precision_differs", table(fit=in_bfloat16), table(), "fc1", quick=True)


class Renamed(Table):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = self.fc1, self.fc2
        del self.fc1, self.fc2

    def forward(self, x):
        return self.head(self.activation(self.hidden(x)))


changed("layers_renamed", "renamed", table(Renamed), table(), "hidden.weight", level="note", quick=True)


def through_bfloat16(model, optimizer, batches, criterion):
    for x, y in batches:
        optimizer.zero_grad()
        criterion(model(x).to(torch.bfloat16).to(x.dtype), y).backward()
        optimizer.step()


changed(
    "logits_through_bfloat16",
    "precision_differs",
    table(fit=through_bfloat16),
    table(),
)


def skipping(model, optimizer, batches, criterion):
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        if number not in (3, 6):
            optimizer.step()


changed(
    "two_updates_skipped",
    "setup_differs",
    table(fit=skipping),
    table(),
    "step()",
)


def clipping(limit, of=None):
    def fit(model, optimizer, batches, criterion=token_loss):
        handed = model if of is None else of(model)
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(handed.parameters(), limit)
            optimizer.step()

    return fit


changed(
    "clip_of_a_copy",
    "steps_differ",
    table(fit=clipping(0.01, of=copy.deepcopy)),
    table(fit=clipping(0.01)),
)


def idle_schedule(model, optimizer, batches, criterion, scheduler):
    train(model, optimizer, batches, criterion)


changed(
    "scheduler_built_and_not_stepped",
    "setup_differs",
    table(fit=idle_schedule, scheduler=lambda own: torch.optim.lr_scheduler.StepLR(own, 5)),
    table(scheduler=lambda own: torch.optim.lr_scheduler.StepLR(own, 5)),
    "StepLR.step()",
)


def twice(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        ((token_loss(model(x), y) + token_loss(model(x), y)) / 2).backward()
        optimizer.step()


changed(
    "two_forwards_with_dropout",
    "steps_differ",
    decoder(of_blocks(Block, dropout=0.2), fit=twice),
    decoder(of_blocks(Block, dropout=0.2)),
    "block.dropout",
)


def shifted(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        token_loss(model(x.roll(1, 1)), y).backward()
        optimizer.step()


changed(
    "inputs_shifted_in_the_loop",
    "steps_differ",
    decoder(fit=shifted),
    decoder(),
    "embed",
)
