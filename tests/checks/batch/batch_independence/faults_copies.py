"""Copies of the rows of a batch that are laid out in two orders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Captioner(nn.Module):
    """Tokens of an answer, from an image and the tokens before."""

    def __init__(self):
        super().__init__()
        self.vision, self.embed = nn.Linear(8, 16), nn.Embedding(20, 16)
        self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, ids, image):
        states, _ = self.rnn(self.embed(ids), torch.tanh(self.vision(image))[None])
        return self.head(states)


def answers_to_images(copies_of):
    """Several answers to each image, taught by their rewards."""

    def make():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        batch = {
            "image": drawn(5, 8),
            "prompt": torch.randint(20, (5, 4), generator=generator),
            "answers": torch.randint(20, (5, 3, 6), generator=generator),
            "rewards": drawn(5, 3, seed=2),
        }

        def loss_of(model, batch):
            prompt = batch["prompt"].repeat_interleave(3, dim=0)
            ids = torch.cat([prompt, batch["answers"].flatten(0, 1)], dim=1)
            images = copies_of(batch["image"])
            told = model(ids[:, :-1], images).log_softmax(-1).gather(-1, ids[:, 1:, None])[:, 3:, 0]
            advantages = batch["rewards"] - batch["rewards"].mean(1, keepdim=True)
            return -(told.sum(1) * advantages.flatten()).mean()

        return loop(Captioner(), batch, loss_of)

    return make


def batch_by_batch(images):
    return images.repeat(3, 1)


def row_by_row(images):
    return images.repeat_interleave(3, dim=0)


class Attention(nn.Module):
    """Self-attention of several heads, and a mean over what is no padding."""

    def __init__(self, row_by_row):
        super().__init__()
        self.row_by_row = row_by_row
        self.enter, self.qkv, self.out = nn.Linear(5, 12), nn.Linear(12, 36), nn.Linear(12, 3)

    def forward(self, x, mask):
        rows, steps, _ = x.shape
        parts = self.qkv(self.enter(x)).view(rows, steps, 3, 3, 4).permute(2, 0, 3, 1, 4)
        q, k, v = parts.reshape(3, rows * 3, steps, 4)
        masks = mask[:, None].repeat_interleave(3, dim=0) if self.row_by_row else mask[:, None].repeat(3, 1, 1)
        scores = (q @ k.mT / 2).masked_fill(~masks, -1e9)
        heads = (scores.softmax(-1) @ v).view(rows, 3, steps, 4).transpose(1, 2).reshape(rows, steps, 12)
        return self.out((heads * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def masked_attention(row_by_row):
    def make():
        torch.manual_seed(0)
        mask = torch.arange(8) < torch.tensor([8, 3, 5, 2, 7])[:, None]
        batch = {"x": drawn(5, 8, 5) * mask[..., None], "mask": mask, "y": torch.tensor([0, 2, 1, 1, 0])}

        def loss_of(model, batch):
            return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])

        return loop(Attention(row_by_row), batch, loss_of)

    return make


def preferred(cut):
    """A reward model of pairs, both sides scored in one call."""

    def make():
        def loss_of(model, batch):
            scores = model(torch.cat([batch["chosen"], batch["rejected"]])).squeeze(-1)
            chosen, rejected = cut(scores)
            return -F.logsigmoid(chosen - rejected).mean()

        return loop(mlp(6, 16, 1), {"chosen": drawn(10, 6) + 0.5, "rejected": drawn(10, 6, seed=1)}, loss_of)

    return make


def neighbours(scores):
    return scores[::2], scores[1::2]


def halves(scores):
    return scores.chunk(2)


pair(
    "images_of_other_answers",
    "batch_independence",
    "copies_in_two_orders",
    where="return images.repeat(3, 1)",
    faulty=answers_to_images(batch_by_batch),
    fixed=answers_to_images(row_by_row),
)
pair(
    "masks_of_other_rows_by_heads",
    "batch_independence",
    "copies_in_two_orders",
    where="mask[:, None].repeat(3, 1, 1)",
    faulty=masked_attention(row_by_row=False),
    fixed=masked_attention(row_by_row=True),
)
pair(
    "neighbours_of_joined_halves",
    "batch_independence",
    "copies_in_two_orders",
    where="return scores[::2], scores[1::2]",
    faulty=preferred(neighbours),
    fixed=preferred(halves),
    quick=True,
)
