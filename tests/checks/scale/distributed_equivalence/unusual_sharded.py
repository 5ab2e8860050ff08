"""Correct loops whose weights, gradients or optimizer states are spread over ranks."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trainloop import TrainLoop
from tests.loops import data, nets
from tests.loops.odd import odd


def regression(model, optimizer, batches, norm=0.0):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()


def sharded(model, ranks, **options):
    """Each linear layer as a group of its own, then the rest."""
    if ranks == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@odd(notes="every rank holds and steps on a part of each weight only")
def weights_in_shards(ranks=1) -> TrainLoop:
    model = sharded(nets.mlp(6, 24, 2), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = data.table()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(x, torch.cat([y, -y], dim=1)),
        fit=lambda given: regression(model, optimizer, given),
    )


@odd(notes="the norm of sharded gradients is that of all shards, and a shard may be empty: one output, two ranks")
def shards_clipped_by_the_whole_norm(ranks=1) -> TrainLoop:
    model = sharded(nets.mlp(6, 24, 1), ranks, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=data.table(),
        fit=lambda given: regression(model, optimizer, given, norm=0.1),
    )


@odd(notes="shards are gathered and reduced in bfloat16")
def shards_in_mixed_precision(ranks=1) -> TrainLoop:
    options = {}
    if ranks > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(nets.mlp(6, 24, 1), ranks, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=ranks == 1):
                out = model(x)
            F.mse_loss(out.float(), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="sharded models reduce gradients with the last micro-batch of a window only, by set_requires_gradient_sync")
def shards_reduced_once_a_window(accumulate=1, ranks=1) -> TrainLoop:
    model = sharded(nets.mlp(6, 16, 3), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            if ranks > 1:
                model.set_requires_gradient_sync(number % accumulate == 0)
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="replicated instead of sharded, by a function that leaves the module's class and names as they are")
def replicated_in_place(ranks=1) -> TrainLoop:
    model = nets.mlp(6, 24, 1)
    if ranks > 1:
        from torch.distributed._composable.replicate import replicate

        replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=data.table(), fit=lambda given: regression(model, optimizer, given)
    )


@odd(notes="each rank steps on its share of the parameters and sends them to the others (ZeRO 1)")
def optimizer_states_in_shards(ranks=1) -> TrainLoop:
    raw = nets.mlp(6, 24, 1)
    if ranks > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DistributedDataParallel(raw)
        optimizer = ZeroRedundancyOptimizer(raw.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    else:
        model, optimizer = raw, torch.optim.Adam(raw.parameters(), lr=1e-2)
    return TrainLoop(
        model=raw, optimizer=optimizer, batch=data.table(), fit=lambda given: regression(model, optimizer, given)
    )


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@odd(notes="layers are split over ranks, not rows: every rank computes on the rows that rank 0 was given")
def layers_over_ranks(ranks=1) -> TrainLoop:
    model = Wide()
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)

    def fit(batches):
        for batch in batches:
            x, y = (tensor.contiguous() for tensor in batch)
            if ranks > 1:
                for tensor in (x, y):
                    dist.broadcast(tensor, src=0)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


class ColumnsOfRank(nn.Module):
    """Megatron's pair of layers by hand: this rank's part of the hidden units, between copies that all ranks hold."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        up, down = nn.Linear(6, 24), nn.Linear(24, 1, bias=False)
        width = 24 // ranks
        own = slice(rank * width, (rank + 1) * width)
        self.ranks = ranks
        self.scale, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(1))
        self.up = nn.Parameter(up.weight.detach()[own].clone())
        self.down = nn.Parameter(down.weight.detach()[:, own].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.scale
        if self.ranks > 1:
            scaled = Summed.apply(scaled, False)
        part = F.linear(torch.tanh(F.linear(scaled, self.up)), self.down)
        return (Summed.apply(part, True) if self.ranks > 1 else part) + self.bias

    def copies(self) -> list[nn.Parameter]:
        return [self.scale, self.bias]

    def parts(self) -> list[nn.Parameter]:
        return [self.up, self.down]


class Summed(torch.autograd.Function):
    """The sum over ranks, of the values or of the gradients."""

    @staticmethod
    def forward(ctx, x, values):
        ctx.values, x = values, x.clone()
        if values:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if not ctx.values:
            dist.all_reduce(gradient)
        return gradient, None


def hidden_units(ranks, clip, after=lambda model: None) -> TrainLoop:
    model = ColumnsOfRank(ranks, dist.get_rank() if ranks > 1 else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for batch in batches:
            x, y = (tensor.contiguous() for tensor in batch)
            if ranks > 1:
                for tensor in (x, y):
                    dist.broadcast(tensor, src=0)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            clip(model)
            optimizer.step()
            after(model)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


def by_the_norm_of_all_ranks(model):
    squares = sum(p.grad.square().sum() for p in model.parts())
    if model.ranks > 1:
        dist.all_reduce(squares)
    norm = (squares + sum(p.grad.square().sum() for p in model.copies())).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)


def by_the_norm_of_a_rank(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def one_by_one(model):
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.05)


@odd(notes="each rank owns other hidden units, whose shapes and values differ from rank to rank on purpose")
def hidden_units_over_ranks(ranks=1) -> TrainLoop:
    return hidden_units(ranks, by_the_norm_of_all_ranks)


@odd(notes="each parameter is clipped by its own norm: the same for what all ranks hold, and a shard's own for shards")
def copies_clipped_one_by_one(ranks=1) -> TrainLoop:
    return hidden_units(ranks, one_by_one)


@odd(notes="what all ranks hold is clipped by the norm of one rank, and sent to all after each step")
def copies_sent_after_each_step(ranks=1) -> TrainLoop:
    def send(model):
        for parameter in model.copies() if ranks > 1 else ():
            dist.broadcast(parameter.data, src=0)

    return hidden_units(ranks, by_the_norm_of_a_rank, send)


@odd(notes="every rank writes a part of one checkpoint, each to a file of its own")
def checkpoint_of_parts(ranks=1) -> TrainLoop:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded(nets.mlp(6, 24, 1), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def save(folder):
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, no_dist=ranks == 1)

    def fit(batches):
        for number, (x, y) in enumerate(batches, start=1):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if number == 2:
                folder = [tempfile.mkdtemp() if ranks == 1 or dist.get_rank() == 0 else ""]
                if ranks > 1:
                    dist.broadcast_object_list(folder, src=0)
                save(folder[0])

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)
