"""Losses whose parts live on several ranks: counts of tokens, and pairs of rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import fault

IGNORE = -100


class TinyLM(nn.Module):
    def __init__(self, vocab: int = 14, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.out = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.out(h + self.mix(h))


def completions(rows: int = 8, length: int = 10, vocab: int = 14) -> dict[str, torch.Tensor]:
    """The later the row, the shorter its completion."""
    ids = torch.randint(1, vocab, (rows, length))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row * (length - 2) // (rows - 1)] = IGNORE
    return {"input_ids": ids, "labels": labels}


def summed_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


@fault(
    "losses",
    "the number of target tokens is counted over the micro-batches of this rank only",
    thread="modelscope/FunASR#1157",
    check="distributed_equivalence",
    place="num_items_in_batch =",
)
def sft_trainer(ranks=1, accumulate=1):
    net = TinyLM()
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def get_batch_samples(batches):
        for i in range(0, len(batches), accumulate):
            samples = batches[i : i + accumulate]
            num_items_in_batch = sum(int(b["labels"][:, 1:].ne(IGNORE).sum()) for b in samples)
            yield samples, num_items_in_batch

    def train(batches):
        for samples, count in get_batch_samples(list(batches)):
            for inputs in samples:
                loss = summed_nll(model(inputs["input_ids"]), inputs["labels"]) / count
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(
        model=net, optimizer=optimizer, batch=completions(), fit=train, padding=Padding(pad_id=0, ignore_index=IGNORE)
    )


@fault(
    "losses",
    "the token count is that of all ranks, and DDP divides by the number of ranks once more",
    thread="huggingface/transformers#34373",
    check="distributed_equivalence",
    place="/ denominator",
)
def tokens_across_devices(ranks=1):
    net = TinyLM(vocab=10, width=12)
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def compute_loss(inputs):
        denominator = inputs["labels"][:, 1:].ne(IGNORE).sum()
        if ranks > 1:
            dist.all_reduce(denominator)
        return summed_nll(model(inputs["input_ids"]), inputs["labels"]) / denominator

    def train(batches):
        for inputs in batches:
            optimizer.zero_grad()
            compute_loss(inputs).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batch=completions(8, 9, 10), fit=train)


class Meter:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.history: list[dict[str, float]] = []

    def log(self, **values: torch.Tensor) -> None:
        if self.ranks > 1:
            for value in values.values():
                dist.all_reduce(value)
        self.history.append({k: v.item() for k, v in values.items()})


@fault(
    "losses",
    "the meter reduces the very tensor that the loss is divided by afterwards",
    thread="NVIDIA/apex#664",
    check="distributed_equivalence",
    place="dist.all_reduce(value)",
)
def detector_losses(ranks=1):
    net = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 5))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    meter = Meter(ranks)

    def train(batches):
        for anchors, target in batches:
            weight = torch.ones(len(target), 1)
            normaliser = weight.sum()
            box = (F.smooth_l1_loss(model(anchors), target, reduction="none") * weight).sum()
            meter.log(box=box.detach().clone(), boxes=normaliser)
            (box / normaliser).backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 12), torch.randn(8, 5)), fit=train)


@fault(
    "losses",
    "the loss is summed over ranks by a differentiable all_reduce, so that DDP's average is the sum",
    thread="EleutherAI/bergson#334",
    check="distributed_equivalence",
    place="dist_fn.all_reduce(loss)",
)
def reported_loss(ranks=1):
    net = nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 6))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def step(x):
        loss = F.mse_loss(model(x), x)
        if ranks > 1:
            loss = dist_fn.all_reduce(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return TrainLoop(model=net, optimizer=optimizer, batch=torch.randn(8, 6), fit=lambda bs: [step(b) for b in bs])


def gather(t: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.detach().contiguous())
    return torch.cat(parts)


class Towers(nn.Module):
    def __init__(self, image: int = 10, text: int = 7, dim: int = 8) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(image, 24), nn.ReLU(), nn.Linear(24, dim))
        self.text = nn.Sequential(nn.Linear(text, 24), nn.ReLU(), nn.Linear(24, dim))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.log_scale.exp()


@fault(
    "losses",
    "features of all ranks are gathered without gradient, the rank's own ones too; the share of the negatives is lost",
    thread="KevinMusgrave/pytorch-metric-learning#302",
    check="distributed_equivalence",
    place="gather(image), gather(text)",
)
def clip_like(ranks=1):
    towers = Towers()
    model = DDP(towers) if ranks > 1 else towers
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-3)

    def contrastive(image, text, scale):
        offset = 0
        all_image, all_text = image, text
        if ranks > 1:
            offset = dist.get_rank() * len(image)
            all_image, all_text = gather(image), gather(text)
        labels = torch.arange(len(image)) + offset
        return 0.5 * (
            F.cross_entropy(scale * image @ all_text.t(), labels)
            + F.cross_entropy(scale * text @ all_image.t(), labels)
        )

    def train(batches):
        for b in batches:
            optimizer.zero_grad()
            contrastive(*model(b["image"], b["text"])).backward()
            optimizer.step()

    batch = {"image": torch.randn(8, 10), "text": torch.randn(8, 7)}
    return TrainLoop(model=towers, optimizer=optimizer, batch=batch, fit=train, rows_interact=True)


@fault(
    "losses",
    "gathered with gradients, and the loss is multiplied by the world size all the same",
    thread="texttron/tevatron#143",
    check="distributed_equivalence",
    place="* world_size",
)
def dense_retrieval(ranks=1):
    world_size = ranks
    towers = Towers(9, 9)
    model = DDP(towers) if ranks > 1 else towers
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)

    def loss_of(q, p):
        q_reps, p_reps, scale = model(q, p)
        target = torch.arange(len(q_reps))
        if ranks > 1:
            p_reps = torch.cat(dist_fn.all_gather(p_reps))
            target = target + dist.get_rank() * len(q_reps)
        loss = F.cross_entropy(scale * q_reps @ p_reps.t(), target)
        if ranks > 1:
            loss = loss * world_size
        return loss

    def train(batches):
        for q, p in batches:
            optimizer.zero_grad()
            loss_of(q, p).backward()
            optimizer.step()

    return TrainLoop(
        model=towers, optimizer=optimizer, batch=(torch.randn(8, 9), torch.randn(8, 9)), fit=train, rows_interact=True
    )


@fault(
    "losses",
    "labels count from 0 on every rank although the gathered rows of this rank begin at rank * rows",
    thread="facebookresearch/vissl#474",
    check="distributed_equivalence",
    place="labels = torch.arange(len(a))",
)
def info_nce(ranks=1, temperature=0.2):
    encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
    model = DDP(encoder) if ranks > 1 else encoder
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(views):
        a, b = (F.normalize(model(v), dim=1) for v in views.unbind(1))
        if ranks > 1:
            b = torch.cat(dist_fn.all_gather(b))
        labels = torch.arange(len(a))
        return F.cross_entropy(a @ b.t() / temperature, labels)

    def train(loader):
        for views in loader:
            loss = loss_fn(views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    anchor = torch.randn(8, 1, 12)
    views = torch.cat([anchor + 0.1 * torch.randn(8, 1, 12), anchor + 0.1 * torch.randn(8, 1, 12)], 1)
    return TrainLoop(model=encoder, optimizer=optimizer, batch=views, fit=train, rows_interact=True)


@fault(
    "losses",
    "the cross-correlation is summed over ranks in place, past autograd, and divided by all rows: "
    "gradients are 1/world of what they are",
    thread="lightly-ai/lightly#1977",
    check="distributed_equivalence",
    place="/ (len(z1) * ranks)",
)
def redundancy_reduction(ranks=1, lambd=0.05):
    projector = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 6))
    model = DDP(projector) if ranks > 1 else projector
    optimizer = torch.optim.SGD(projector.parameters(), lr=0.05)

    def forward(pair):
        z1, z2 = model(pair[:, 0]), model(pair[:, 1])
        c = (z1.T @ z2) / (len(z1) * ranks)
        if ranks > 1:
            with torch.no_grad():
                total = c.clone()
                dist.all_reduce(total)
            c = c + (total - c).detach()
        on = (torch.diagonal(c) - 1).square().sum()
        off = c.square().sum() - torch.diagonal(c).square().sum()
        return on + lambd * off

    def train(loader):
        for pair in loader:
            optimizer.zero_grad()
            forward(pair).backward()
            optimizer.step()

    return TrainLoop(model=projector, optimizer=optimizer, batch=torch.randn(16, 2, 10), fit=train, rows_interact=True)


class DetectionTrainer:
    def __init__(self, ranks: int) -> None:
        self.world_size = ranks
        self.net = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 6))
        self.model = DDP(self.net) if ranks > 1 else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, nesterov=True)

    def criterion(self, preds: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        box = F.smooth_l1_loss(preds[:, :4], batch["bboxes"])
        cls = F.binary_cross_entropy_with_logits(preds[:, 4:], batch["cls"])
        return torch.stack([7.5 * box, 0.5 * cls])

    def train(self, batches) -> None:
        for batch in batches:
            loss = self.criterion(self.model(batch["img"]), batch).sum()
            if self.world_size > 1:
                loss *= self.world_size
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@fault(
    "losses",
    "the loss, a mean over rows, is multiplied by the world size before DDP takes the mean",
    thread="ultralytics/ultralytics#18616",
    check="distributed_equivalence",
    place="loss *= self.world_size",
)
def detection_trainer(ranks=1):
    trainer = DetectionTrainer(ranks)
    batch = {"img": torch.randn(8, 8), "bboxes": torch.rand(8, 4), "cls": torch.rand(8, 2).round()}
    return TrainLoop(model=trainer.net, optimizer=trainer.optimizer, batch=batch, fit=trainer.train)
