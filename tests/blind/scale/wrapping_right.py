"""DistributedDataParallel around models, as it works."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


class Policy(nn.Module):
    """Every entry goes through forward, so that the wrapper sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 24), nn.Tanh())
        self.pi = nn.Linear(24, 3)
        self.v = nn.Linear(24, 1)

    def forward(self, obs: torch.Tensor, action: torch.Tensor | None = None, *, mode: str = "train"):
        hidden = self.body(obs)
        if mode == "act":
            return self.pi(hidden).argmax(-1)
        logp = self.pi(hidden).log_softmax(-1).gather(1, action[:, None])[:, 0]
        return logp, self.v(hidden)[:, 0]


@right(
    "wrapping",
    "model.module is called for acting under no_grad only; training goes through the wrapper",
    thread="vwxyzjn/cleanrl#162",
)
def act_with_module(ranks=1):
    policy = Policy()
    wrapped = DDP(policy) if ranks > 1 else policy
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)

    def update(rollouts):
        for rollout in rollouts:
            with torch.no_grad():
                (wrapped.module if ranks > 1 else wrapped)(rollout["obs"], mode="act")
            logp, value = wrapped(rollout["obs"], rollout["action"])
            loss = -(logp * rollout["advantage"]).mean() + 0.5 * F.mse_loss(value, rollout["return"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    rollout = {
        "obs": torch.randn(16, 5),
        "action": torch.randint(3, (16,)),
        "advantage": torch.randn(16),
        "return": torch.randn(16),
    }
    return TrainLoop(model=policy, optimizer=optimizer, batch=rollout, fit=update)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@right("wrapping", "adapters are put in first, then the model is wrapped", thread="bghira/SimpleTuner#974")
def adapters_then_wrap(ranks=1):
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 8)).requires_grad_(False)
    for index in (0, 2):
        model[index] = Adapter(model[index])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    forward = DDP(model) if ranks > 1 else model

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(forward(x), y).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(torch.randn(8, 8), torch.randn(8, 8)),
        fit=train,
        frozen=("0.base.", "2.base."),
    )


class TwoStage:
    def __init__(self, net: nn.Module, distributed: bool) -> None:
        self.net, self.distributed = net, distributed
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.wrap()

    def wrap(self) -> None:
        self.model = DDP(self.net) if self.distributed else self.net

    def fit(self, batches) -> None:
        for step, (x, y) in enumerate(batches):
            if step == 1:
                self.net[0].requires_grad_(True)
                self.wrap()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


@right("wrapping", "DDP is built again after the trunk is unfrozen", thread="facebookresearch/ClassyVision#398")
def rewrap_after_unfreezing(ranks=1):
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    net[0].requires_grad_(False)
    stage = TwoStage(net, ranks > 1)
    return TrainLoop(
        model=net, optimizer=stage.optimizer, batch=(torch.randn(8, 6), torch.randint(4, (8,))), fit=stage.fit
    )


@right(
    "wrapping",
    "find_unused_parameters: the head that takes no part gets no gradient, on every rank alike",
    thread="roboflow/rf-detr#1093",
)
def heads_by_turn(ranks=1):
    trunk = nn.Linear(7, 16)
    heads = nn.ModuleDict({"seg": nn.Linear(16, 4), "det": nn.Linear(16, 2)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = trunk, heads

        def forward(self, x, name):
            return self.heads[name](F.relu(self.trunk(x)))

    model = Net()
    if ranks > 1:
        model = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for i, batch in enumerate(batches):
            name = "seg" if i % 2 == 0 else "det"
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(batch["x"], name), batch[name]).backward()
            optimizer.step()

    batch = {"x": torch.randn(8, 7), "seg": torch.randn(8, 4), "det": torch.randn(8, 2)}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)


@right(
    "wrapping",
    "each rank is seeded apart before the model is built; DDP broadcasts rank 0's",
    thread="facebookresearch/detr#297",
)
def seed_plus_rank(ranks=1, seed=7):
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    torch.manual_seed(seed + rank)
    model = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 5))
    if ranks > 1:
        model = DDP(model)
    model_without_ddp = model.module if ranks > 1 else model
    optimizer = torch.optim.AdamW(model_without_ddp.parameters(), lr=1e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(12, 9, generator=generator), torch.randint(5, (12,), generator=generator))

    def train_one_epoch(data_loader):
        model.train()
        for samples, targets in data_loader:
            losses = F.cross_entropy(model(samples), targets)
            optimizer.zero_grad()
            losses.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return TrainLoop(model=model_without_ddp, optimizer=optimizer, batch=batch, fit=train_one_epoch)


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


@right(
    "wrapping",
    "generator and critic are wrapped each; the critic is frozen for the generator's turn",
    thread="rosinality/swapping-autoencoder-pytorch#22",
)
def two_wrapped_networks(ranks=1):
    g, d = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), Critic()
    if ranks > 1:
        g, d = DDP(g, broadcast_buffers=False), DDP(d, broadcast_buffers=False)
    og = torch.optim.SGD(g.parameters(), lr=0.05)
    od = torch.optim.SGD(d.parameters(), lr=0.05)

    def turn(real, z):
        fake = g(z).detach()
        od.zero_grad()
        scores = d(torch.cat([real, fake]))
        (F.softplus(-scores[: len(real)]).mean() + F.softplus(scores[len(real) :]).mean()).backward()
        od.step()
        og.zero_grad()
        F.softplus(-d(g(z))).mean().backward()
        og.step()

    return TrainLoop(
        model={"g": g, "d": d},
        optimizer=[og, od],
        batch=(torch.randn(8, 8), torch.randn(8, 4)),
        fit=lambda batches: [turn(*b) for b in batches],
    )


@right(
    "wrapping",
    "the criterion's parameters belong to the wrapped module, which returns the loss",
    thread="open-mmlab/mmcv#216",
)
def loss_inside_model(ranks=1):
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(10, 16)
            self.centers = nn.Parameter(torch.randn(4, 16) * 0.1)
            self.log_scale = nn.Parameter(torch.zeros(()))

        def forward(self, img, gt):
            logits = F.normalize(self.backbone(img)) @ F.normalize(self.centers).t() * self.log_scale.exp() * 8
            return {"loss_cls": F.cross_entropy(logits, gt), "loss_reg": 0.01 * self.centers.pow(2).sum()}

    model = Detector()
    if ranks > 1:
        model = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)

    def run_iter(data):
        losses = model(data["img"], data["gt"])
        total = sum(losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return {k: v.item() for k, v in losses.items()}

    data = {"img": torch.randn(8, 10), "gt": torch.randint(4, (8,))}
    return TrainLoop(model=model, optimizer=optimizer, batch=data, fit=lambda loader: [run_iter(d) for d in loader])


@right(
    "wrapping",
    "batch norm keeps statistics of each rank's rows, as DDP does everywhere; buffers are broadcast",
    thread="facebookresearch/moco#41",
)
def plain_batch_norm(ranks=1):
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    if ranks > 1:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def train(loader):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(16, 6), torch.randint(3, (16,))), fit=train)
