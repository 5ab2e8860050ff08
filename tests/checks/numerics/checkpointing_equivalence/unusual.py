"""Activation checkpointing as it is done: of either kind, nested, selective, with dropout, for a part of a run."""

from __future__ import annotations

import functools
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points, tokens


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x, scale=1.0):
        return x + scale * self.body(self.norm(x))


class Stack(nn.Module):
    """Blocks between a first and a last layer; ``call`` runs one block."""

    def __init__(self, call=lambda block, x: block(x), depth=3, dropout=0.0, outputs=4):
        super().__init__()
        self.call = call
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(depth))
        self.last = nn.Linear(16, outputs)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def classify(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def classifier(model, fit=classify, batches=points):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batches(),
        batches=fresh(batches),
        fit=lambda given: fit(model, optimizer, given),
    )


@odd(notes="dropout under a checkpoint is drawn twice, from the same preserved state of torch's generator")
def checkpointed_dropout() -> TrainLoop:
    return classifier(Stack(functools.partial(checkpoint, use_reentrant=False), dropout=0.2))


@odd(notes="the same with the older, re-entrant checkpoint: its forward pass runs without gradients")
def reentrant_checkpointed_dropout() -> TrainLoop:
    return classifier(Stack(functools.partial(checkpoint, use_reentrant=True), dropout=0.2))


@odd(notes="the state of the generator is not preserved, and nothing under the checkpoint draws")
def checkpoint_preserves_nothing_where_nothing_is_drawn() -> TrainLoop:
    call = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return classifier(Stack(lambda block, x: F.dropout(call(block, x), 0.1)))


@odd(notes="a checkpoint within a checkpoint: inner blocks run three times")
def nested_checkpoints() -> TrainLoop:
    def twice(block, x):
        def inner(y):
            return checkpoint(block, y, use_reentrant=False)

        return checkpoint(inner, F.dropout(x, 0.1), use_reentrant=False)

    return classifier(Stack(twice, dropout=0.1))


@odd(notes="a sequence is cut into checkpointed segments, and the last runs outside of them")
def sequence_in_segments() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def fit(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(checkpoint_sequential(model, 2, x, use_reentrant=False), y).backward()
            optimizer.step()

    return classifier(model, fit)


@odd(notes="autocast is on in the forward pass only: the checkpoint restores it in the backward pass")
def checkpoint_under_autocast() -> TrainLoop:
    def fit(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()

    return classifier(Stack(functools.partial(checkpoint, use_reentrant=False), dropout=0.1), fit)


def keep_products(context, op, *args, **kwargs):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@odd(notes="products of matrices are saved and all else is computed again")
def selective_checkpoints() -> TrainLoop:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    call = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    return classifier(Stack(call, dropout=0.1))


@odd(notes="the checkpointed function takes keyword arguments, and a number beside its tensors")
def checkpoint_with_keywords() -> TrainLoop:
    return classifier(Stack(lambda block, x: checkpoint(block, x, scale=0.5, use_reentrant=False)))


class Recomputed(torch.autograd.Function):
    """A checkpoint of the project's own, as reversible and chunked models have it."""

    @staticmethod
    def forward(ctx, x, block, *weights):
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, incoming):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.set_rng_state(now)
        of_input, *others = torch.autograd.grad(out, (x, *ctx.block.parameters()), incoming)
        return of_input, None, *others


@odd(notes="a recomputation of the project's own, chosen by the knob: it puts torch's state back by itself")
def own_recomputation(checkpoint=False) -> TrainLoop:
    def call(block, x):
        return Recomputed.apply(x, block, *block.parameters()) if checkpoint else block(x)

    return classifier(Stack(call, dropout=0.1))


@odd(notes="activations go to the CPU's memory between the passes, within checkpoints and without")
def saved_tensors_offloaded() -> TrainLoop:
    def fit(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return classifier(Stack(functools.partial(checkpoint, use_reentrant=False)), fit)


@odd(notes="a frozen base under re-entrant checkpoints: a hook makes the first layer's output require grad")
def frozen_base_with_a_hook_for_grad() -> TrainLoop:
    model = Stack(functools.partial(checkpoint, use_reentrant=True))
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.first.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    return classifier(model)


@odd(notes="layers are dropped at random, by torch's generator within the checkpoint: the same ones are dropped again")
def stochastic_depth_under_checkpoints() -> TrainLoop:
    def dropped(block, x):
        return x if block.training and torch.rand(()) < 0.3 else block(x)

    return classifier(Stack(lambda block, x: checkpoint(dropped, block, x, use_reentrant=False)))


@odd(notes="layers are dropped at random by python's generator, before the checkpoint: nothing is drawn again")
def stochastic_depth_before_checkpoints() -> TrainLoop:
    def maybe(block, x):
        return x if block.training and random.random() < 0.3 else checkpoint(block, x, use_reentrant=False)

    return classifier(Stack(maybe))


@odd(notes="a batch norm under a checkpoint trains: its statistics move twice a step, which gradients do not see")
def batch_norm_under_a_checkpoint() -> TrainLoop:
    body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 8), body, nn.Linear(16, 4))

    def fit(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            h = checkpoint(model[1], model[0](x), use_reentrant=False)
            F.cross_entropy(model[2](h), y).backward()
            optimizer.step()

    return classifier(model, fit)


class OnlyInTraining(Stack):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.last(x)


@odd(notes="checkpoints are made in training mode only, and the loop evaluates between epochs")
def checkpoints_in_training_only() -> TrainLoop:
    def fit(model, optimizer, batches):
        for x, y in batches:
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(x)

    return classifier(OnlyInTraining(dropout=0.1), fit)


@odd(notes="one block is used three times over, under re-entrant checkpoints: its gradient comes in three parts")
def shared_block_under_checkpoints(checkpoint=True) -> TrainLoop:
    from torch.utils.checkpoint import checkpoint as checkpointed

    model = Stack(lambda b, x: checkpointed(b, x, use_reentrant=True) if checkpoint else b(x))
    model.blocks[1] = model.blocks[2] = model.blocks[0]
    return classifier(model)


@odd(notes="the knob wraps modules, which gives their parameters other names")
def wrapped_modules(checkpoint=False) -> TrainLoop:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Stack(dropout=0.1)
    if checkpoint:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    return classifier(model)


@odd(notes="dropout masks come in another order with checkpointing: blocks are drawn for before they run")
def masks_drawn_beforehand(checkpoint=False) -> TrainLoop:
    from torch.utils.checkpoint import checkpoint as checkpointed

    class Masked(Stack):
        def forward(self, x):
            x = self.first(x)
            masks = [F.dropout(torch.ones_like(x), 0.2) for _ in self.blocks] if checkpoint else []
            for i, block in enumerate(self.blocks):
                if checkpoint:
                    x = checkpointed(lambda y, m, b=block: b(y * m), x, masks[i], use_reentrant=False)
                else:
                    x = block(F.dropout(x, 0.2))
            return self.last(F.dropout(x, 0.1))

    return classifier(Masked())


@odd(notes="a closure makes several checkpointed passes within one step")
def closures_with_checkpoints() -> TrainLoop:
    model = Stack(functools.partial(checkpoint, use_reentrant=False), depth=1, outputs=1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def fit(batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batch=curves(), fit=fit)


@odd(notes="a gradient is penalised: checkpoints that are not re-entrant are passed through twice")
def gradient_penalty_with_checkpoints() -> TrainLoop:
    def fit(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            x = x.requires_grad_()
            loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + 0.1 * slope.square().sum()).backward()
            optimizer.step()

    return classifier(Stack(functools.partial(checkpoint, use_reentrant=False), depth=1), fit)


@odd(notes="the loop trains by hand, without any optimizer, under re-entrant checkpoints")
def by_hand_with_checkpoints() -> TrainLoop:
    model = Stack(functools.partial(checkpoint, use_reentrant=True), depth=1)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None

    return TrainLoop(model=model, batch=points(), batches=fresh(points), fit=fit)


@odd(notes="a checkpoint in evaluation only, where no gradients are made: nothing is ever run again")
def checkpoint_without_gradients() -> TrainLoop:
    def fit(model, optimizer, batches):
        for x, y in batches:
            with torch.no_grad():
                guess = checkpoint(model, x, use_reentrant=True).argmax(1)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * (1.0 + (guess != y).to(x.dtype).mean())).backward()
            optimizer.step()

    return classifier(relu_mlp(8, 16, 4), fit)


@odd(notes="the loss over the vocabulary is made in checkpointed chunks of rows, and summed")
def chunked_loss_under_checkpoints(checkpoint=True) -> TrainLoop:
    from torch.utils.checkpoint import checkpoint as checkpointed

    embed, head = nn.Embedding(16, 12), nn.Linear(12, 16)
    model = nn.ModuleDict({"embed": embed, "head": head})

    def part(h, y):
        return F.cross_entropy(head(h), y, reduction="sum")

    def loss(ids):
        h, y = embed(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        if not checkpoint:
            return part(h, y) / len(y)
        chunks = zip(h.split(7), y.split(7), strict=True)
        return sum(checkpointed(part, a, b, use_reentrant=False) for a, b in chunks) / len(y)

    def fit(model, optimizer, batches):
        for ids in batches:
            optimizer.zero_grad()
            loss(ids).backward()
            optimizer.step()

    return classifier(model, fit, tokens)


@odd(notes="layers learn their widths from the first batch, under a checkpoint")
def lazy_layers_under_a_checkpoint() -> TrainLoop:
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))

    def fit(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=False)), y).backward()
            optimizer.step()

    return classifier(model, fit)


@odd(notes="weights are stepped within the backward pass, each as its gradient comes, under a checkpoint")
def stepped_in_backward_under_a_checkpoint() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def stepped(optimizer, _weight):
        optimizer.step()
        optimizer.zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(functools.partial(stepped, torch.optim.SGD([p], lr=0.05)))

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=False)), y).backward()

    return TrainLoop(model=model, batch=points(), batches=fresh(points), fit=fit)
