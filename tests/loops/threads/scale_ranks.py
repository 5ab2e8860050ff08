"""Micro-batches, rows, losses and wrapped models that are divided over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pytest_trainloop import Padding, TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.threads.shared import cross_entropy_of, fit_with, training_arguments


@right("accumulation", "every micro-batch is reduced: slower, and the same", thread="huggingface/accelerate#106")
def always_synced(ranks=1, accumulate=1):
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    model = DDP(net, static_graph=False, bucket_cap_mb=1) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def train(loader):
        for step, (x,) in enumerate(loader, 1):
            loss = F.mse_loss(model(x), x) / accumulate
            loss.backward()
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6),), fit=train)


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


def table(rows: int = 32, width: int = 6, classes: int = 3) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(rows, width, generator=g), torch.randint(classes, (rows,), generator=g))


def classifier(ranks: int, width: int = 6, classes: int = 3):
    net = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, classes))
    model = DDP(net) if ranks > 1 else net
    return net, model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def one_epoch(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Stream(IterableDataset):
    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(start, len(self.rows), step):
            yield self.rows[i]


@fault(
    "rows",
    "the stream is split over workers and not over ranks",
    thread="huggingface/datasets#3423",
    check="distributed_equivalence",
    place="start, step =",
)
def streamed(ranks=1):
    net, model, optimizer = classifier(ranks)
    loader = DataLoader(Stream(table(24)), batch_size=4)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=lambda bs: one_epoch(model, optimizer, bs))


class Tagger(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 20), nn.ReLU())
        self.head = nn.Linear(20, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


@fault(
    "wrapping",
    "parameters are frozen after DDP was built; its reducer waits for their gradients and raises in the next step",
    thread="facebookresearch/ClassyVision#398",
    check="distributed_equivalence",
    place="requires_grad_(False)",
)
def freeze_trunk_for_transfer(ranks=1):
    model = Tagger(classes=3)
    net = model
    if ranks > 1:
        model = DDP(model)
    net.trunk.requires_grad_(False)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)

    def train_epoch(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    batch = (torch.randn(8, 10), torch.randint(3, (8,)))
    return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=train_epoch, frozen=("trunk.",))


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

    batch, fit = (torch.randn(16, 6), torch.randint(3, (16,))), fit_with(optimizer, cross_entropy_of(model))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: int = 32) -> None:
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(rows, 6, generator=g)
        self.y = torch.randint(3, (rows,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.x[index], "labels": self.y[index]}


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@right("frameworks", "compute_loss calls the model that it is handed", thread="huggingface/transformers#37110")
def trainer_given_model(ranks=1):
    from transformers import Trainer

    from pytest_trainloop.adapters import from_trainer

    class SmoothTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs["logits"], inputs["labels"], label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    rows = Rows()
    arguments = training_arguments(per_device_train_batch_size=8 // ranks, seed=5)
    trainer = SmoothTrainer(model=Scored(), args=arguments, train_dataset=rows)
    return from_trainer(trainer, batch={"inputs": rows.x[:8], "labels": rows.y[:8]})
