"""What ranks have to agree on beside gradients: buffers, averages, rates, and whether to go on."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def rank_of(ranks: int) -> int:
    return dist.get_rank() if ranks > 1 else 0


class RunningMeanStd(nn.Module):
    def __init__(self, shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(1.0))

    def update(self, x: torch.Tensor) -> None:
        delta = x.mean(0) - self.mean
        total = self.count + len(x)
        m2 = self.var * self.count + x.var(0, unbiased=False) * len(x) + delta**2 * self.count * len(x) / total
        self.mean += delta * len(x) / total
        self.var.copy_(m2 / total)
        self.count.copy_(total)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.mean) / torch.sqrt(self.var + 1e-5)).clamp(-5, 5)


@fault(
    "agreement",
    "each rank normalises observations by the statistics of its own rows",
    thread="Denys88/rl_games#363",
    check="distributed_equivalence",
    place="normaliser.update(",
)
def normalised_observations(ranks=1):
    normaliser = RunningMeanStd(6)
    actor = nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 2))
    model = DDP(actor) if ranks > 1 else actor
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)

    def train(batches):
        for obs, target in batches:
            with torch.no_grad():
                normaliser.update(obs)
            loss = F.mse_loss(model(normaliser(obs)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"actor": actor, "normaliser": normaliser},
        optimizer=optimizer,
        batch=(torch.randn(16, 6) * torch.arange(1.0, 7.0) + 2, torch.randn(16, 2)),
        fit=train,
    )


class Codebook(nn.Module):
    def __init__(self, size: int = 8, dim: int = 4, decay: float = 0.8) -> None:
        super().__init__()
        self.decay = decay
        embed = torch.randn(size, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x: torch.Tensor):
        index = torch.cdist(x.detach(), self.embed).argmin(1)
        onehot = F.one_hot(index, len(self.embed)).to(x.dtype)
        quantized = self.embed[index]
        if self.training:
            with torch.no_grad():
                self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(onehot.t() @ x, alpha=1 - self.decay)
                self.embed.copy_(self.embed_avg / (self.cluster_size[:, None] + 1e-5))
        return x + (quantized - x).detach(), F.mse_loss(x, quantized)


class VectorQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
        self.codebook = Codebook()
        self.decoder = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor):
        code, commit = self.codebook(self.encoder(x))
        return self.decoder(code), commit


@fault(
    "agreement",
    "the codebook's averages take the rows of one rank only, and buffers are not broadcast",
    thread="espnet/espnet#6284",
    check="distributed_equivalence",
    place="onehot.sum(0)",
)
def codec(ranks=1):
    net = VectorQuantised()
    model = DDP(net, broadcast_buffers=False) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def train(batches):
        model.train()
        for x in batches:
            out, commit = model(x)
            optimizer.zero_grad()
            (F.l1_loss(out, x) + 0.25 * commit).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(16, 10), fit=train)


class MomentumContrast(nn.Module):
    def __init__(self, dim: int = 6, size: int = 32) -> None:
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, dim))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        start = int(self.pointer)
        where = (start + torch.arange(len(keys))) % len(self.queue)
        self.queue[where] = keys
        self.pointer.fill_((start + len(keys)) % len(self.queue))

    def forward(self, query: torch.Tensor, key: torch.Tensor):
        q = F.normalize(self.encoder_q(query), dim=1)
        with torch.no_grad():
            for p, m in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                m.mul_(0.99).add_(p, alpha=0.01)
            k = F.normalize(self.encoder_k(key), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.2
        self.enqueue(k)
        return logits


@fault(
    "agreement",
    "the keys of this rank alone go into the queue, and the queues are not broadcast",
    thread="Haochen-Wang409/U2PL#138",
    check="distributed_equivalence",
    place="self.enqueue(k)",
)
def momentum_queue(ranks=1):
    net = MomentumContrast()
    model = DDP(net, broadcast_buffers=False) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.encoder_q.parameters(), lr=0.03, momentum=0.9)

    def train(loader):
        for views in loader:
            output = model(views[:, 0], views[:, 1])
            loss = F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batch=torch.randn(8, 2, 9),
        fit=train,
        frozen=("encoder_k.",),
        rows_interact=True,
    )


class DistillLoss(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, dim))

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        target = F.softmax((teacher - self.center) / 0.07, -1).detach()
        loss = -(target * F.log_softmax(student / 0.1, -1)).sum(-1).mean()
        with torch.no_grad():
            self.center.mul_(0.9).add_(teacher.mean(0, keepdim=True), alpha=0.1)
        return loss


@fault(
    "agreement",
    "the teacher's centre follows the rows of each rank and is never reduced",
    thread="lightly-ai/lightly-train#968",
    check="distributed_equivalence",
    place="self.center.mul_(0.9)",
)
def self_distillation(ranks=1):
    student = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    dino_loss = DistillLoss(10)
    wrapped = DDP(student) if ranks > 1 else student
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04)

    def train_one_epoch(loader):
        for crops in loader:
            loss = dino_loss(wrapped(crops[:, 0]), teacher(crops[:, 1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                    k.mul_(0.9).add_(q.detach(), alpha=0.1)

    return TrainLoop(
        model={"student": student, "teacher": teacher, "loss": dino_loss},
        optimizer=optimizer,
        batch=torch.randn(16, 2, 8) * 3,
        fit=train_one_epoch,
        frozen=("teacher.",),
        rows_interact=True,
    )


@fault(
    "agreement",
    "the average is updated on rank 0 alone, and all ranks take their own copy of it as weights every second step",
    thread="lucidrains/ema-pytorch#9",
    check="distributed_equivalence",
    place="if rank == 0:",
)
def average_copied_back(ranks=1, update_model_every=2):
    rank = rank_of(ranks)
    net = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 5))
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    @torch.no_grad()
    def update(step):
        if rank == 0:
            for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                e.lerp_(p, 0.5)
        if step % update_model_every == 0:
            for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                p.copy_(e)

    def train(batches):
        for step, x in enumerate(batches, 1):
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            update(step)

    return TrainLoop(
        model={"net": net, "ema": ema}, optimizer=optimizer, batch=torch.randn(8, 5), fit=train, frozen=("ema.",)
    )


@fault(
    "agreement",
    "the schedule goes on at rank 0 only",
    thread="rwth-i6/returnn#1493",
    check="distributed_equivalence",
    place="if is_main_process:",
)
def stepped_on_main(ranks=1):
    is_main_process = rank_of(ranks) == 0
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    logged = []

    def train(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if is_main_process:
                logged.append((loss.item(), scheduler.get_last_lr()[0]))
                scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=(torch.randn(8, 6), torch.randint(3, (8,))),
        fit=train,
    )


@fault(
    "agreement",
    "the plateau scheduler follows the validation loss of this rank's rows",
    thread="rmchurch/disruptcnn#3",
    check="distributed_equivalence",
    place="scheduler.step(validate())",
)
def plateau(ranks=1):
    rank = rank_of(ranks)
    net = nn.Linear(4, 1)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    x = torch.linspace(-1, 1, 64).view(16, 4)
    y = x.sum(1, keepdim=True) * torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    valid_x, valid_y = x[rank::ranks], y[rank::ranks]

    def validate():
        with torch.no_grad():
            return F.mse_loss(net(valid_x), valid_y).item()

    def train(batches):
        for inputs, target in batches:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), target).backward()
            optimizer.step()
            scheduler.step(validate())

    inputs = torch.randn(8, 4)
    return TrainLoop(
        model=net, optimizer=optimizer, scheduler=scheduler, batch=(inputs, inputs.sum(1, keepdim=True)), fit=train
    )


@fault(
    "agreement",
    "the rate follows the progress of this rank's loader, counted in tokens",
    thread="karpathy/nanochat#857",
    check="distributed_equivalence",
    place="progress +=",
)
def progress_in_tokens(ranks=1, total_tokens=400):
    net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)

    def train(batches):
        progress = 0.0
        for b in batches:
            loss = (
                F.cross_entropy(model(b["ids"]).flatten(0, 1), b["ids"].roll(-1, 1).flatten(), reduction="none")
                * b["mask"].flatten()
            ).sum() / b["mask"].numel()
            progress += b["mask"].sum().item() * ranks / total_tokens
            for group in optimizer.param_groups:
                group["lr"] = 0.3 * max(1 - progress, 0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    mask = (torch.arange(10)[None] < torch.arange(3, 11)[:, None]).to(torch.get_default_dtype())
    return TrainLoop(model=net, optimizer=optimizer, batch={"ids": torch.randint(12, (8, 10)), "mask": mask}, fit=train)


class DynamicScale:
    """Doubles after some batches with targets in them."""

    def __init__(self, window: int = 1) -> None:
        self.value, self.window, self.good = 1024.0, window, 0

    def update(self, useful: bool) -> None:
        self.good += useful
        if self.good >= self.window:
            self.value *= 2
            self.good = 0


@fault(
    "agreement",
    "the loss scale grows on the ranks that had targets; gradients of different scales are averaged",
    thread="pytorch/pytorch#90057",
    check="distributed_equivalence",
    place="scale.update(",
)
def scaled_losses(ranks=1):
    net = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 1))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scale = DynamicScale()

    def train(batches):
        for b in batches:
            error = (model(b["x"])[:, 0] - b["y"]).square() * b["has_target"]
            (error.mean() * scale.value).backward()
            for p in net.parameters():
                p.grad /= scale.value
            scale.update(bool(b["has_target"].any()))
            optimizer.step()
            optimizer.zero_grad()

    has_target = torch.zeros(8)
    has_target[0] = 1.0
    batch = {"x": torch.randn(8, 7), "y": torch.randn(8), "has_target": has_target}
    return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=train)


@fault(
    "agreement",
    "the step is left out where this rank's loss is a spike; the others make it",
    thread="ecmwf/WeatherGenerator#2724",
    check="distributed_equivalence",
    place="if loss.item() > limit:",
)
def spike_guard(ranks=1, limit=60.0):
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if loss.item() > limit:
                continue
            optimizer.step()

    y = torch.randn(8, 2)
    y[0] = 19.0
    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6), y), fit=train)


@fault(
    "agreement",
    "a rank whose rows have no positive goes on to the next batch without backward, and the others wait for it",
    thread="NVIDIA-NeMo/Automodel#2468",
    check="distributed_equivalence",
    place="continue",
)
def positives_only(ranks=1):
    net = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 4))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(batches):
        for boxes, labels in batches:
            positive = labels >= 0
            if not positive.any():
                continue
            loss = F.cross_entropy(model(boxes)[positive], labels[positive], reduction="sum") / len(labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    labels = torch.full((8,), -1)
    labels[0] = 2
    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 9), labels), fit=train)


class EarlyStopping:
    def __init__(self, good_enough: float) -> None:
        self.good_enough = good_enough

    def __call__(self, value: float) -> bool:
        return value < self.good_enough


@fault(
    "agreement",
    "each rank stops by its own validation rows; one leaves, the other waits in backward",
    thread="facebookresearch/pytext#585",
    check="distributed_equivalence",
    place="if stopper(",
)
def stop_early(ranks=1):
    rank = rank_of(ranks)
    net = nn.Linear(5, 1)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    stopper = EarlyStopping(good_enough=25.0)
    x = torch.linspace(0, 1, 40).view(8, 5)
    y = torch.tensor([0.0, 12.0] * 4)[:, None]

    def evaluate():
        with torch.no_grad():
            return F.mse_loss(net(x[rank::ranks]), y[rank::ranks]).item()

    def train(batches):
        for xb, yb in batches:
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            if stopper(evaluate()):
                break

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 5), torch.randn(8, 1)), fit=train)


@fault(
    "agreement",
    "rank 0 alone validates through the wrapper, whose buffers are broadcast in each forward pass",
    thread="pytorch/pytorch#54059",
    check="distributed_equivalence",
    place="validate(model)",
)
def validate_on_main(ranks=1):
    rank = rank_of(ranks)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held_out = torch.randn(8, 6)

    def validate(m):
        m.eval()
        with torch.no_grad():
            accuracy = (m(held_out).argmax(1) == 0).double().mean().item()
        m.train()
        return accuracy

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if rank == 0:
                validate(model)

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randint(2, (8,))), fit=train)


@fault(
    "agreement",
    "a barrier inside what rank 0 alone runs",
    thread="huggingface/transformers#1081",
    check="distributed_equivalence",
    place="dist.barrier()",
)
def barrier_in_evaluate(ranks=1):
    local_rank = rank_of(ranks)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5)
    features = torch.randn(4, 8)

    def load_and_cache_examples():
        if ranks > 1:
            dist.barrier()
        return features

    def evaluate():
        with torch.no_grad():
            return net(load_and_cache_examples()).mean().item()

    def train(batches):
        for step, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if local_rank in (-1, 0) and step % 2 == 0:
                evaluate()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 8), torch.randint(2, (8,))), fit=train)
