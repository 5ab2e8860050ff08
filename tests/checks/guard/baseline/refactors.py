"""Refactors that keep the mathematics: the project before and after, by name, and what is said of names."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.checks.guard.baseline.projects import (
    VOCAB,
    WIDTH,
    Attention,
    Block,
    Decoder,
    Pictures,
    Table,
    adamw,
    decoder,
    pictures,
    table,
    token_loss,
)
from tests.loops import data

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Refactor:
    before: Callable
    after: Callable
    says: str = ""
    """Part of the note on names; empty where no name changes."""


REFACTORS: dict[str, Refactor] = {}


def refactor(name, before, after, says=""):
    REFACTORS[name] = Refactor(before, after, says)


class Moved(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({"embed": nn.Embedding(VOCAB, WIDTH), "blocks": nn.ModuleList([Block()])})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.backbone["embed"](ids)
        for block in self.backbone["blocks"]:
            x = block(x)
        return self.head(self.norm(x))


refactor("submodules_moved", decoder(), decoder(Moved), "embed is now backbone.embed")


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Decoder()

    def forward(self, ids):
        return self.module(ids)


refactor("wrapped", decoder(), decoder(Wrapper), "embed is now module.embed")
refactor("compiled", decoder(), decoder(lambda: torch.compile(Decoder(), backend="eager")), "_orig_mod")


class OtherOrder(Decoder):
    """Built in the same order, registered in another one."""

    def __init__(self):
        super().__init__()
        head, embed = self.head, self.embed
        del self.head, self.embed
        self.head, self.embed = head, embed


refactor("registered_in_another_order", decoder(), decoder(OtherOrder))


class Fused(Attention):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        with torch.no_grad():
            for name in ("weight", "bias"):
                joined = torch.cat([getattr(part, name) for part in (self.q, self.k, self.v)])
                getattr(self.qkv, name).copy_(joined)
        del self.q, self.k, self.v

    def forward(self, x):
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        return self.out(self.mix(q, k, v).transpose(1, 2).reshape(x.shape))


class DrawnLikeFused(Attention):
    """Draws what building the fused layer draws, so that later layers begin alike."""

    def __init__(self):
        super().__init__()
        nn.Linear(WIDTH, 3 * WIDTH)


with_fused = functools.partial(Block, Fused)
with_apart = functools.partial(Block, DrawnLikeFused)
refactor(
    "projections_joined",
    decoder(functools.partial(Decoder, with_apart)),
    decoder(functools.partial(Decoder, with_fused)),
    "are joined in block.attention.qkv.weight",
)
refactor(
    "projection_split",
    decoder(functools.partial(Decoder, with_fused)),
    decoder(functools.partial(Decoder, with_apart)),
    "block.attention.qkv.weight is split into block.attention.q.weight",
)


class ByHand(Attention):
    def mix(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v


class WithMask(ByHand):
    """The mask is a buffer now."""

    def __init__(self):
        super().__init__()
        self.register_buffer("later", torch.ones(32, 32, dtype=torch.bool).triu(1))

    def mix(self, q, k, v):
        length = q.shape[-2]
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(self.later[:length, :length], -1e30).softmax(-1), v)


for _name, _kind in {"attention_by_hand": ByHand, "attention_by_einsum": WithMask}.items():
    refactor(_name, decoder(), decoder(functools.partial(Decoder, functools.partial(Block, _kind))))


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.gain + self.shift


class WithOwnNorm(Decoder):
    def __init__(self):
        super().__init__()
        self.norm = OwnNorm(WIDTH)


refactor("norm_by_hand", decoder(), decoder(WithOwnNorm), "norm.weight is now norm.gain")


class Tied(Decoder):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class TiedByUse(Decoder):
    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, ids):
        return F.linear(self.norm(self.block(self.embed(ids))), self.embed.weight)


refactor("tied_by_use", decoder(Tied), decoder(TiedByUse))


class Convolved(Table):
    """Layers of one position."""

    def __init__(self):
        super().__init__()
        first = nn.Conv1d(6, 10, 1)
        with torch.no_grad():
            first.weight.copy_(self.fc1.weight.unsqueeze(-1))
            first.bias.copy_(self.fc1.bias)
        self.fc1 = first

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x.unsqueeze(-1))).squeeze(-1))


refactor("convolution_of_one_position", table(), table(Convolved), "fc1.weight is now fc1.weight with another layout")


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


class MoreLayers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(6, 10), nn.ReLU(), nn.Identity(), nn.Linear(10, 3))


refactor("positions_in_a_sequence_shifted", table(Layers), table(MoreLayers), "0 is now 1")


class Equal(nn.Sequential):
    """Layers of one shape, whose names shift onto one another."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x):
        for layer in self:
            x = torch.tanh(layer(x)) if isinstance(layer, nn.Linear) and layer.out_features == 6 else layer(x)
        return x


class EqualShifted(Equal):
    def __init__(self):
        super().__init__()
        self.insert(0, nn.Identity())


refactor("names_shifted_onto_one_another", table(Equal), table(EqualShifted), "0 is now 1")


class TimeFirst(nn.Module):
    def __init__(self, first=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=not first)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.first = first

    def forward(self, ids):
        x = self.embed(ids.T if self.first else ids)
        hidden = self.head(self.lstm(x)[0])
        return hidden.transpose(0, 1) if self.first else hidden


refactor("time_first", decoder(TimeFirst), decoder(functools.partial(TimeFirst, first=True)))


class Checkpointed(Decoder):
    def forward(self, ids):
        return self.head(self.norm(checkpoint(self.block, self.embed(ids), use_reentrant=False)))


refactor("checkpointed", decoder(), decoder(Checkpointed))


class SpelledOut(Pictures):
    """Sums in another order before a batch norm, where the bias has no gradient but rounding."""

    def forward(self, x):
        patches = F.unfold(x, 3, padding=1)
        hidden = torch.einsum("of,bfp->bop", self.conv.weight.flatten(1), patches) + self.conv.bias.unsqueeze(-1)
        return self.head(F.relu(self.norm(hidden.view(len(x), 6, *x.shape[2:]))).flatten(2).mean(-1))


refactor("convolution_spelled_out", pictures(), pictures(SpelledOut))


class OneScore(nn.Module):
    """One number before the norm: its bias is moved by the whole rate or against it."""

    def __init__(self, flip=False):
        super().__init__()
        self.score = nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(1)
        self.head = nn.Linear(1, 3)
        self.flip = flip

    def forward(self, x):
        score = (x.flip(-1) @ self.score.weight.flip(-1).T + self.score.bias) if self.flip else self.score(x)
        return self.head(self.norm(score))


refactor("one_score_before_a_norm", table(OneScore), table(functools.partial(OneScore, flip=True)))

MASKED = functools.partial(Decoder, functools.partial(Block, dropout=0.3))


class FunctionalDropout(Block):
    def mlp(self, x):
        return self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.3, self.training))


refactor("dropout_as_a_function", decoder(MASKED), decoder(functools.partial(Decoder, FunctionalDropout)))


def zeroed_after(model, optimizer, batches):
    for batch in batches:
        loss = token_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def two_passes(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scores = model(x)
        (0.5 * token_loss(scores, y)).backward(retain_graph=True)
        (0.5 * token_loss(scores, y)).backward()
        optimizer.step()


def nll(scores, targets):
    return F.nll_loss(scores.log_softmax(-1).flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def run(self, batches):
        for batch in batches:
            self.step(**{"ids": batch["ids"], "labels": batch["labels"]})

    def step(self, ids, labels):
        self.model.train()
        loss = token_loss(self.model(ids), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


refactor("zeroed_after_the_step", decoder(), decoder(fit=zeroed_after))
refactor("two_backward_passes", decoder(), decoder(fit=two_passes))
refactor("log_softmax_written_out", decoder(), decoder(criterion=nll))
refactor(
    "trainer_class_and_dict",
    decoder(),
    decoder(
        fit=lambda model, optimizer, batches: Trainer(model, optimizer).run(batches),
        batch=lambda: dict(zip(("ids", "labels"), data.tokens(), strict=True)),
    ),
)


class Momentum(torch.optim.Optimizer):
    """Torch's SGD with momentum, by hand."""

    def __init__(self, parameters, lr, beta):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                kept.mul_(group["beta"]).add_(p.grad)
                p -= group["lr"] * kept


def by(kind, **options):
    return lambda model: kind(model.parameters(), **options)


def in_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": others}, {"params": matrices}], lr=3e-3)


refactor("foreach", decoder(optimizer=by(adamw, foreach=False)), decoder(optimizer=by(adamw, foreach=True)))
refactor("fused", decoder(), decoder(optimizer=by(adamw, fused=True)))
refactor("two_groups_alike", decoder(), decoder(optimizer=in_groups))
refactor(
    "optimizer_by_hand",
    decoder(optimizer=by(torch.optim.SGD, lr=0.1, momentum=0.9)),
    decoder(optimizer=by(Momentum, lr=0.1, beta=0.9)),
)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def rate_set(model, optimizer, batches, criterion=token_loss):
    model.train()
    for step, (x, y) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + math.cos(math.pi * step / 30)) / 2
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


refactor("rate_set_by_hand", decoder(scheduler=cosine), decoder(fit=rate_set))


def clipped(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()


def clipped_by_hand(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        grads = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        for grad in grads:
            grad.mul_((0.2 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()


refactor("clipped_by_hand", decoder(fit=clipped), decoder(fit=clipped_by_hand))


def two_optimizers(order):
    def make():
        net = Table()
        own = [adamw(net.fc1.parameters()), torch.optim.SGD(net.fc2.parameters(), lr=0.1)]
        own = [own[number] for number in order]
        return TrainLoop(
            model=net, optimizer=own, batch=data.labelled(), fit=lambda batches: stepped_in_turn(net, own, batches)
        )

    return make


def one_optimizer_or_two(two):
    def make():
        net = Table()
        parts = [net.fc1.parameters(), net.fc2.parameters()] if two else [net.parameters()]
        own = [adamw(part) for part in parts]
        return TrainLoop(
            model=net, optimizer=own, batch=data.labelled(), fit=lambda batches: stepped_in_turn(net, own, batches)
        )

    return make


def stepped_in_turn(model, optimizers, batches):
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


refactor("optimizers_take_turns_otherwise", two_optimizers((0, 1)), two_optimizers((1, 0)))
refactor("an_optimizer_for_each_layer", one_optimizer_or_two(two=False), one_optimizer_or_two(two=True))


def stepped(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5)


refactor(
    "one_group_split_in_two",
    table(scheduler=stepped),
    table(
        optimizer=lambda model: adamw(
            [{"params": list(model.parameters())[:1]}, {"params": list(model.parameters())[1:]}]
        ),
        scheduler=stepped,
    ),
)
