"""Losses over padded sequences whose padding is masked somewhere before the loss function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops import plain
from tests.loops.odd import odd

LENGTH = 10


class Forecaster(nn.Module):
    """A recurrent net that gives one value (or ``out`` scores) for each time step."""

    def __init__(self, out=1, *, ids=0, masked=False):
        super().__init__()
        self.embed = nn.Embedding(ids, 4, padding_idx=0) if ids else nn.Identity()
        self.rnn, self.head = nn.GRU(4, 24, batch_first=True), nn.Linear(24, out)
        self.masked = masked

    def forward(self, x, mask=None):
        scores = self.head(self.rnn(self.embed(x))[0])
        return scores * mask[..., None] if self.masked else scores


def series(seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([10, 7, 5, 9, 4, 8])
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).float()
    x = torch.randn(6, LENGTH, 4, generator=draw) * mask[..., None]
    return {"x": x, "y": x.sum(-1) + 0.5 * mask, "mask": mask, "lengths": lengths}


def words(seed=0):
    draw = torch.Generator().manual_seed(seed)
    mask = series()["mask"]
    ids = torch.randint(1, 16, (6, LENGTH), generator=draw) * mask.long()
    return {"ids": ids, "tags": ids % 5, "mask": mask}


def loop(model, draw, loss_of, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return plain.loop(model, draw(), loss_of, optimizer, batches=lambda n: map(draw, range(n)), **fields)


@odd(notes="prediction and target are multiplied by the mask, and the sum is divided by the real positions")
def both_sides_times_the_mask() -> TrainLoop:
    def loss_of(model, batch):
        mask, made = batch["mask"], model(batch["x"]).squeeze(-1)
        return F.l1_loss(made * mask, batch["y"] * mask, reduction="sum") / mask.sum()

    return loop(Forecaster(), series, loss_of)


@odd(notes="padded predictions are replaced by the target with torch.where")
def prediction_replaced_by_the_target() -> TrainLoop:
    def loss_of(model, batch):
        made = model(batch["x"]).squeeze(-1)
        made = torch.where(batch["mask"] > 0, made, batch["y"])
        return F.huber_loss(made, batch["y"], reduction="sum") / batch["lengths"].sum()

    return loop(Forecaster(), series, loss_of)


@odd(notes="padded logits are multiplied by 0: each adds the constant log 2, and no gradient")
def constant_binary_loss_at_padding() -> TrainLoop:
    def loss_of(model, batch):
        mask, scores = batch["mask"], model(batch["x"]).squeeze(-1)
        labels = (batch["y"] > 0).float() * mask
        return F.binary_cross_entropy_with_logits(scores * mask, labels, reduction="sum") / mask.sum()

    return loop(Forecaster(), series, loss_of)


@odd(notes="a weight of 0 at padded positions")
def weight_of_zero_at_padding() -> TrainLoop:
    def loss_of(model, batch):
        mask, scores = batch["mask"], model(batch["x"]).squeeze(-1)
        labels = (batch["y"] > 0).float()
        return F.binary_cross_entropy_with_logits(scores, labels, weight=mask, reduction="sum") / mask.sum()

    return loop(Forecaster(), series, loss_of)


@odd(notes="a softmax over the real positions is compared with a target that is 0 at padded ones")
def masked_softmax_over_positions() -> TrainLoop:
    def loss_of(model, batch):
        padded = batch["mask"] == 0
        share = model(batch["x"]).squeeze(-1).masked_fill(padded, float("-inf")).softmax(1)
        wanted = batch["y"].masked_fill(padded, float("-inf")).softmax(1)
        return F.mse_loss(share, wanted, reduction="sum") / len(share)

    return loop(Forecaster(), series, loss_of)


@odd(notes="smoothed labels, the loss of each position times the mask")
def smoothed_losses_times_the_mask() -> TrainLoop:
    def loss_of(model, batch):
        each = F.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["tags"].flatten(), reduction="none", label_smoothing=0.1
        )
        return (each * batch["mask"].flatten()).sum() / batch["mask"].sum()

    return loop(Forecaster(5, ids=16), words, loss_of, padding=Padding(pad_id=0))


@odd(notes="the gradient of padded predictions is taken out by a hook, and the loss divided by the real positions")
def gradient_masked_by_a_hook() -> TrainLoop:
    def loss_of(model, batch):
        mask, made = batch["mask"], model(batch["x"]).squeeze(-1)
        made.register_hook(lambda slope: slope * mask)
        return F.mse_loss(made, batch["y"] * mask, reduction="sum") / mask.sum()

    return loop(Forecaster(), series, loss_of)


@odd(notes="a translation written in one pass: each row has more or fewer labels than tokens, at padded positions too")
def translation_in_one_pass() -> TrainLoop:
    def draw(seed=0):
        batch = words(seed)
        lengths = torch.tensor([8, 10, 6, 7, 5, 9])
        labels = torch.randint(5, (6, LENGTH), generator=torch.Generator().manual_seed(seed + 100))
        labels = labels.masked_fill(torch.arange(LENGTH)[None] >= lengths[:, None], -100)
        return {"ids": batch["ids"], "mask": batch["mask"], "labels": labels}

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"])

    return loop(Forecaster(5, ids=16), draw, loss_of)


@odd(notes="a generator's first loss comes after a critic's step, which is sure of what is made by then")
def critic_sure_after_its_first_step() -> TrainLoop:
    critic, made = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), nn.Linear(3, 6)
    nn.init.normal_(critic[0].weight, std=0.01)
    of_critic = torch.optim.SGD(critic.parameters(), lr=8.0)
    of_made = torch.optim.SGD(made.parameters(), lr=1e-2)

    def fit(batches):
        for real in batches:
            fake = made(torch.randn(len(real), 3)) - 8
            of_critic.zero_grad()
            scores = critic(torch.cat([real, fake.detach()])).squeeze(1)
            F.binary_cross_entropy(scores, (torch.arange(len(scores)) < len(real)).float()).backward()
            of_critic.step()
            of_made.zero_grad()
            F.binary_cross_entropy(critic(fake).squeeze(1), torch.ones(len(fake))).backward()
            of_made.step()

    real = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) + 8
    return TrainLoop(model={"critic": critic, "made": made}, optimizer=[of_critic, of_made], batch=real, fit=fit)
