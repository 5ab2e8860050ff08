"""Gradients that a project reduces itself, without a wrapper."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class ActorCritic(nn.Module):
    def __init__(self, obs: int = 6, act: int = 4) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs, 24), nn.Tanh(), nn.Linear(24, act))
        self.critic = nn.Sequential(nn.Linear(obs, 24), nn.Tanh(), nn.Linear(24, 1))


def rollout(rows: int = 16, obs: int = 6, act: int = 4) -> dict[str, torch.Tensor]:
    return {
        "obs": torch.randn(rows, obs),
        "act": torch.randint(act, (rows,)),
        "adv": torch.randn(rows),
        "ret": torch.randn(rows),
    }


def sum_gradients(params, world_size):
    if world_size > 1:
        for p in params:
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


@fault(
    "reduction",
    "gradients of means are summed over the ranks and never divided",
    thread="alexis-jacq/Pytorch-DPPO#7",
    check="distributed_equivalence",
    place="dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)",
)
def distributed_ppo(ranks=1):
    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)

    def learn(batches):
        for b in batches:
            logp = net.actor(b["obs"]).log_softmax(-1).gather(1, b["act"][:, None])[:, 0]
            loss = -(logp * b["adv"]).mean() + 0.5 * F.mse_loss(net.critic(b["obs"])[:, 0], b["ret"])
            opt.zero_grad()
            loss.backward()
            sum_gradients(net.parameters(), ranks)
            nn.utils.clip_grad_norm_(net.parameters(), 40.0)
            opt.step()

    return TrainLoop(model=net, optimizer=opt, batch=rollout(), fit=learn)


@fault(
    "reduction",
    "the critic's gradients are not among those that are reduced",
    thread="Denys88/rl_games#191",
    check="distributed_equivalence",
    place="for p in net.actor.parameters()",
)
def multi_gpu_agent(ranks=1):
    net = ActorCritic(obs=5, act=3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def truncate_gradients_and_step():
        if ranks > 1:
            grads = [p.grad.view(-1) for p in net.actor.parameters()]
            flat = torch.cat(grads)
            dist.all_reduce(flat)
            offset = 0
            for p in net.actor.parameters():
                p.grad.copy_(flat[offset : offset + p.numel()].view_as(p.grad) / ranks)
                offset += p.numel()
        optimizer.step()

    def train(batches):
        for b in batches:
            optimizer.zero_grad()
            logp = F.log_softmax(net.actor(b["obs"]), -1)[torch.arange(len(b["act"])), b["act"]]
            policy_loss = -(logp * b["adv"]).mean()
            value_loss = (net.critic(b["obs"]).squeeze(-1) - b["ret"]).pow(2).mean()
            (policy_loss + value_loss).backward()
            truncate_gradients_and_step()

    return TrainLoop(model=net, optimizer=optimizer, batch=rollout(8, 5, 3), fit=train)


@fault(
    "reduction",
    "DDP averages already, and the loss is divided by the world size as well",
    thread="NVIDIA/apex#696",
    check="distributed_equivalence",
    place="loss = loss / world_size",
)
def imagenet_like(ranks=1):
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))
    if ranks > 1:
        model = DDP(model)
    world_size = dist.get_world_size() if ranks > 1 else 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()

    def train(train_loader):
        for images, target in train_loader:
            loss = criterion(model(images), target)
            loss = loss / world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(16, 12), torch.randint(10, (16,))), fit=train)


def average_gradients(model: nn.Module) -> None:
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


@fault(
    "reduction",
    "the loss is divided by the world size, then the gradients are averaged by hand as well",
    thread="kubeflow/pytorch-operator#122",
    check="distributed_equivalence",
    place="/ max(ranks, 1)",
)
def mnist_job(ranks=1):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.fc = nn.Linear(4 * 6 * 6, 10)

        def forward(self, x):
            return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def train(loader):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target, reduction="sum") / len(data) / max(ranks, 1)
            loss.backward()
            if ranks > 1:
                average_gradients(model)
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))), fit=train
    )


@fault(
    "reduction",
    "the flattened copy is reduced, and nothing is copied back",
    thread="vwxyzjn/cleanrl#162",
    check="distributed_equivalence",
    place="flat /= ranks",
)
def batched_reduce(ranks=1):
    agent = ActorCritic(obs=4, act=2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    def reduce_all():
        flat = torch.cat([p.grad.reshape(-1) for p in agent.parameters() if p.grad is not None])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        flat /= ranks
        return flat.norm()

    def update(batches):
        norms = []
        for mb in batches:
            new_logprob = agent.actor(mb["obs"]).log_softmax(-1).gather(1, mb["act"].unsqueeze(1)).squeeze(1)
            v = agent.critic(mb["obs"]).squeeze(1)
            loss = -(new_logprob * mb["adv"]).mean() + 0.5 * (v - mb["ret"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if ranks > 1:
                norms.append(reduce_all().item())
            optimizer.step()
        return norms

    return TrainLoop(model=agent, optimizer=optimizer, batch=rollout(8, 4, 2), fit=update)


@dataclass
class Topology:
    world: int
    tensor_parallel: int = 1
    groups: dict[int, object] = field(default_factory=dict)

    def build(self) -> None:
        for start in range(0, self.world, self.tensor_parallel):
            members = list(range(start, start + self.tensor_parallel))
            group = dist.new_group(members)
            for rank in members:
                self.groups[rank] = group

    @property
    def data_parallel_group(self):
        return self.groups[dist.get_rank()]


@fault(
    "reduction",
    "gradients are averaged over the tensor-parallel group, which holds the rank alone",
    thread="ByteDance-Seed/VeOmni#184",
    check="distributed_equivalence",
    place="group=topology.data_parallel_group",
)
def grid_of_ranks(ranks=1):
    topology = Topology(ranks)
    if ranks > 1:
        topology.build()
    model = nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def reduce_gradients():
        if ranks == 1:
            return
        group = topology.data_parallel_group
        for p in model.parameters():
            dist.all_reduce(p.grad, group=topology.data_parallel_group)
            p.grad.div_(dist.get_world_size(group))

    def train_step(batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        reduce_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch={"x": torch.randn(8, 10), "y": torch.randn(8, 10)},
        fit=lambda batches: [train_step(b) for b in batches],
    )


@fault(
    "reduction",
    "gradients are clipped by each rank's own norm and averaged afterwards",
    thread="mindspore-lab/mindcv#603",
    check="distributed_equivalence",
    place="clip_grad_norm_(model.parameters(), 0.05)",
)
def clip_in_train_step(ranks=1):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x).squeeze(-1), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if ranks > 1:
            average_gradients(model)
        optimizer.step()

    def fit(batches):
        for x, y in batches:
            train_step(x, y)

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(12, 8), torch.randn(12)), fit=fit)


@fault(
    "reduction",
    "weights are drawn apart on each rank and never broadcast; the reduced gradients are of different models",
    thread="antoyang/TubeDETR#15",
    check="distributed_equivalence",
    place="torch.manual_seed(seed + rank)",
)
def seeded_apart(ranks=1, seed=42):
    rank = dist.get_rank() if dist.is_initialized() and ranks > 1 else 0
    torch.manual_seed(seed + rank)
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_one_epoch(loader):
        for tokens, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).mean(1), label).backward()
            if ranks > 1:
                average_gradients(model)
            optimizer.step()

    tokens = torch.arange(8 * 5).view(8, 5) % 20
    return TrainLoop(model=model, optimizer=optimizer, batch=(tokens, torch.arange(8) % 4), fit=train_one_epoch)


@fault(
    "reduction",
    "gradients are reduced before the second backward, whose share stays local",
    thread="determined-ai/determined#602",
    check="distributed_equivalence",
    place="aux.backward()",
)
def two_backwards(ranks=1):
    encoder = nn.Sequential(nn.Linear(9, 24), nn.ReLU())
    classify, rebuild = nn.Linear(24, 3), nn.Linear(24, 9)
    model = nn.ModuleDict({"encoder": encoder, "classify": classify, "rebuild": rebuild})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def sync():
        for p in model.parameters():
            if ranks > 1:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= ranks

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(classify(encoder(x)), y).backward()
            sync()
            aux = 0.1 * F.mse_loss(rebuild(encoder(x)), x)
            aux.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 9), torch.randint(3, (8,))), fit=train)


@fault(
    "reduction",
    "only the first of the optimizer's groups is reduced",
    thread="lucidrains/vector-quantize-pytorch#222",
    check="distributed_equivalence",
    place="param_groups[0]",
)
def decayed_and_not(ranks=1):
    model = nn.Sequential(nn.Linear(7, 21), nn.LayerNorm(21), nn.GELU(), nn.Linear(21, 5))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )

    def synchronize():
        handles = [dist.all_reduce(p.grad, async_op=True) for p in optimizer.param_groups[0]["params"]]
        for handle in handles:
            handle.wait()
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(1.0 / ranks)

    def fit(batches):
        for b in batches:
            loss = F.cross_entropy(model(b["inputs"]), b["labels"])
            loss.backward()
            if ranks > 1:
                synchronize()
            optimizer.step()
            optimizer.zero_grad()

    batch = {"inputs": torch.randn(8, 7), "labels": torch.randint(5, (8,))}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)
