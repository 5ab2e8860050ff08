"""Losses whose parts live on several ranks: counts of tokens, and pairs of rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import Padding, TrainLoop
from tests.loops.from_threads import fault

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
