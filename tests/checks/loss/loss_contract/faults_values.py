"""Regression, likelihoods and CTC: shapes that are broadcast, variances, rates, alignments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


def loop(model, batch, loss_of):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=batch, fit=lambda b: train(optimizer, b, lambda x: loss_of(model, x))
    )


# A column of outputs against a row of targets.


def regression(loss, squeeze=False):
    def make():
        features, targets = data.table()

        def loss_of(model, batch):
            output = model(batch["x"])
            return loss(output.squeeze(-1) if squeeze else output, batch["y"])

        return loop(mlp(6, 32, 1), {"x": features, "y": targets.squeeze(-1)}, loss_of)

    return make


def squared(output, target):
    return ((output - target) ** 2).mean()


for title, criterion in (
    ("mse_loss", F.mse_loss),
    ("huber_loss", nn.HuberLoss(delta=0.5)),
    ("squares", squared),
):
    pair(
        f"column_against_row_in_{title}",
        "loss_contract",
        "broadcast",
        mentions=("(16, 1)", "(16,)", "256"),
        faulty=regression(criterion),
        fixed=regression(criterion, squeeze=True),
    )


def squeezed_critic(clip, keep=False):
    """A critic whose values have lost their last axis, against returns and old values that have it."""

    def make():
        features, returns = data.table()

        def loss_of(model, batch):
            values, old, returns = model(batch["observations"]), batch["values"], batch["returns"]
            values = values if keep else values[:, 0]
            errors = (returns - values) ** 2
            if clip:
                errors = torch.max(errors, (returns - old - (values - old).clamp(-0.2, 0.2)) ** 2)
            return errors.mean()

        rollout = {"observations": features, "values": 0.3 * torch.sin(7 * features[:, :1]), "returns": returns}
        return loop(mlp(6, 32, 1), rollout, loss_of)

    return make


pair(
    "row_of_clipped_values_against_a_column_of_returns",
    "loss_contract",
    "broadcast",
    level="advice",
    faulty=squeezed_critic(clip=True),
    fixed=squeezed_critic(clip=True, keep=True),
)


# Means and variances.


def gaussian(variance_of):
    def make():
        def loss_of(model, batch):
            mean, spread = model(batch[0]).chunk(2, dim=-1)
            return F.gaussian_nll_loss(mean, batch[1], variance_of(spread))

        model = mlp(6, 32, 2)
        nn.init.constant_(model[-1].bias, 1.5)
        return loop(model, data.table(), loss_of)

    return make


pair(
    "log_variance_for_variance",
    "loss_contract",
    "log_variance",
    where="return F.gaussian_nll_loss(mean, batch[1], variance_of(spread))",
    faulty=gaussian(lambda spread: spread),
    fixed=gaussian(lambda spread: spread.exp()),
)


# Counts and rates.


def counts(prepare, **kwargs):
    def make():
        features, values = data.table()
        targets = (values.exp() + 0.5).floor()

        def loss_of(model, batch):
            return F.poisson_nll_loss(prepare(model(batch[0])), batch[1], **kwargs)

        return loop(mlp(6, 32, 1), (features, targets), loss_of)

    return make


pair(
    "rates_where_their_logarithm_is_taken",
    "loss_contract",
    "rate_scale",
    faulty=counts(torch.exp),
    fixed=counts(lambda s: s),
)


# Recognition by CTC.


class Recogniser(nn.Module):
    def __init__(self, labels: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 32, batch_first=True)
        self.head = nn.Linear(32, labels)

    def forward(self, frames):
        return self.head(self.rnn(frames)[0])


def spoken(rows=6, frames=20, length=5):
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(1, 6, (rows, length), generator=generator)
    lengths = torch.tensor([length - n % 3 for n in range(rows)])
    for row, count in enumerate(lengths):
        labels[row, count:] = 0
    waves = torch.randn(6, 4, generator=generator)[labels].repeat_interleave(frames // length, 1)
    return {
        "frames": waves,
        "labels": labels,
        "frame_lengths": torch.full((rows,), frames),
        "label_lengths": lengths,
    }


def recognition(prepare=lambda s: F.log_softmax(s, -1).transpose(0, 1), change=lambda batch: batch):
    def make():
        def loss_of(model, batch):
            batch = change(dict(batch))
            logp = prepare(model(batch["frames"]))
            return F.ctc_loss(logp, batch["labels"], batch["frame_lengths"], batch["label_lengths"], zero_infinity=True)

        return loop(Recogniser(), spoken(), loss_of)

    return make


def ctc_pair(name, cause, *, mentions=(), change_at=None, **faulty):
    pair(
        name,
        "loss_contract",
        cause,
        mentions=mentions,
        where="return F.ctc_loss(" if cause != "wrong_axis" else None,
        change=change_at,
        faulty=recognition(**faulty),
        fixed=recognition(),
    )


ctc_pair("scores_into_ctc", "logits_as_log_probabilities", prepare=lambda s: s.transpose(0, 1))
ctc_pair(
    "probabilities_into_ctc", "probabilities_as_log_probabilities", prepare=lambda s: s.softmax(-1).transpose(0, 1)
)
ctc_pair(
    "ctc_normalised_over_time",
    "wrong_axis",
    prepare=lambda s: F.log_softmax(s.transpose(0, 1), 0),
)
ctc_pair(
    "blank_among_the_labels",
    "blank_in_targets",
    change=lambda b: b | {"label_lengths": torch.full_like(b["label_lengths"], 5)},
)
ctc_pair(
    "frames_counted_after_too_much_pooling",
    "alignment_impossible",
    change=lambda b: b | {"frame_lengths": (b["frame_lengths"] // 8).int()},
    change_at='b["frame_lengths"] // 8',
)
ctc_pair(
    "too_few_frames_left_by_the_model",
    "alignment_impossible",
    prepare=lambda s: F.log_softmax(s[:, ::10], -1).transpose(0, 1),
    change=lambda b: b | {"frame_lengths": torch.full_like(b["frame_lengths"], 2)},
    change_at="return F.ctc_loss(",
)

pair(
    "frames_divided_once_more",
    "loss_contract",
    "frames_left_out",
    level="advice",
    change='change=lambda b: b | {"frame_lengths": b["frame_lengths"] // 2}',
    faulty=recognition(change=lambda b: b | {"frame_lengths": b["frame_lengths"] // 2}),
    fixed=recognition(),
)


def utterances(lengths_of, stride=1):
    """Rows of 12 to 20 frames, of which a strided convolution leaves every second."""

    def make():
        batch = spoken()
        batch["frame_lengths"] = torch.tensor([20, 16, 12, 20, 16, 12])
        behind = torch.arange(20)[None] >= batch["frame_lengths"][:, None]
        batch["frames"] = batch["frames"].masked_fill(behind[..., None], 0.0)
        batch["labels"] = batch["labels"][:, :3]
        batch["label_lengths"] = torch.full((6,), 3)

        def loss_of(model, batch):
            logp = F.log_softmax(model(batch["frames"][:, ::stride]), -1).transpose(0, 1)
            lengths = lengths_of(batch, len(logp), stride)
            return F.ctc_loss(logp, batch["labels"], lengths, batch["label_lengths"])

        return loop(Recogniser(), batch, loss_of)

    return make


def longest(batch, frames, stride):
    return torch.full((len(batch["frames"]),), frames)


def as_given(batch, frames, stride):
    return -(-batch["frame_lengths"] // stride)


for name, stride in {"ctc_over_padded_frames": 1, "ctc_over_padded_frames_of_a_strided_model": 2}.items():
    pair(
        name,
        "loss_contract",
        "frames_of_padding",
        where="return F.ctc_loss(logp",
        change="return torch.full(",
        faulty=utterances(longest, stride),
        fixed=utterances(as_given, stride),
        quick=stride == 1,
    )


# Labels that are all of one class.


def pixel_labels(scaled):
    """Masks that went through the scaling of images, and were made whole numbers."""

    def make():
        x = torch.randn(8, 3, 6, 6)
        mask = (x[:, 0] > 0).to(torch.uint8) + 2 * (x[:, 1] > 1).to(torch.uint8)
        labels = (mask / 255).long() if scaled else mask.long()
        return loop(
            nn.Conv2d(3, 4, 1), {"image": x, "mask": labels}, lambda m, b: F.cross_entropy(m(b["image"]), b["mask"])
        )

    return make


pair(
    "masks_scaled_as_images_are",
    "loss_contract",
    "head_too_wide",
    level="advice",
    faulty=pixel_labels(True),
    fixed=pixel_labels(False),
)
