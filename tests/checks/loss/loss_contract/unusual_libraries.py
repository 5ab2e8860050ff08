"""Right uses of library losses, boxes, distributions and similarities that look like wrong ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

from pytest_trainloop import TrainLoop
from tests.helpers.stand_ins import (
    monai,
    pytorch_metric_learning,
    segmentation_models_pytorch,
    torchvision,
)
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(model, batch, loss_of, rate=1e-2) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return loop(model, batch, loss_of, optimizer)


def segmenter():
    return nn.Sequential(nn.Conv2d(1, 16, 1), nn.Tanh(), nn.Conv2d(16, 1, 1))


def masks():
    images = drawn(6, 1, 6, 6)
    return images, (images > 0.2).float()


class SquashingDice(monai.DiceLoss):
    def forward(self, input, target):
        return super().forward(torch.sigmoid(input), target)


@odd(notes="raw scores given to a subclass of a Dice loss without sigmoid=: it squashes them itself")
def dice_that_squashes_itself() -> TrainLoop:
    return trained(segmenter(), masks(), lambda net, b: SquashingDice()(net(b[0]), b[1]))


def segmented(*shape):
    images = drawn(4, 1, *shape)
    return images, (images[:, 0] > 0.2).long() + (images[:, 0] > 0.8).long()


def three_classes():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))


@odd(notes="raw scores given to a focal loss of segmentation_models_pytorch: it has no from_logits, and takes logits")
def focal_loss_without_from_logits() -> TrainLoop:
    criterion = segmentation_models_pytorch.FocalLoss("multiclass")
    return trained(three_classes(), segmented(8, 8), lambda net, b: criterion(net(b[0]), b[1]))


@odd(notes="a Dice loss of raw scores with other_act=: the activation is a function")
def dice_with_another_activation() -> TrainLoop:
    criterion = monai.DiceLoss(other_act=lambda scores: 0.5 * (1 + torch.tanh(scores)))
    return trained(segmenter(), masks(), lambda net, b: criterion(net(b[0]), b[1]))


@odd(notes="soft masks between 0 and 1, and smoothed ones, given to Dice losses")
def dice_of_soft_masks() -> TrainLoop:
    dice = segmentation_models_pytorch.DiceLoss("binary")
    return trained(segmenter(), masks(), lambda net, b: dice(net(b[0]), 0.05 + 0.9 * b[1]))


@odd(notes="probabilities of a net with a sigmoid, mixed and scaled, given to a Dice loss of probabilities")
def dice_of_mixed_probabilities() -> TrainLoop:
    nets = nn.ModuleList([segmenter(), segmenter()])
    dice = segmentation_models_pytorch.DiceLoss("binary", from_logits=False)

    def loss_of(net, batch):
        return dice(0.3 * net[0](batch[0]).sigmoid() + 0.7 * net[1](batch[0]).sigmoid(), batch[1])

    return trained(nets, masks(), loss_of)


# Boxes.


def boxes(fmt="xyxy"):
    x = drawn(8, 6)
    at, size = 0.3 + 0.4 * x[:, :2].sigmoid(), 0.1 + 0.2 * x[:, 2:4].sigmoid()
    return x, torch.cat([at - size / 2, at + size / 2] if fmt == "xyxy" else [at, size], 1)


def corners(given):
    return torch.cat([given[:, :2] - given[:, 2:] / 2, given[:, :2] + given[:, 2:] / 2], 1)


@odd(notes="boxes of size 0 as padding, whose loss is masked: x1 == x2 is no wrong order")
def padded_boxes() -> TrainLoop:
    x, target = boxes()
    target = torch.where(torch.arange(8)[:, None] < 6, target, torch.zeros(1))

    def loss_of(net, batch):
        each = torchvision.generalized_box_iou_loss(corners(net(batch[0]).sigmoid()), batch[1])
        return each[batch[1].sum(1) > 0].mean()

    return trained(mlp(6, 32, 4), (x, target), loss_of)


@odd(notes="the distance compares centres, the overlap corners of the same predictions, both converted alike")
def two_formats_of_one_prediction() -> TrainLoop:
    def loss_of(net, batch):
        predicted = net(batch[0]).sigmoid()
        overlap = torchvision.generalized_box_iou_loss(corners(predicted), corners(batch[1])).mean()
        return 5 * F.l1_loss(predicted, batch[1]) + 2 * overlap

    return trained(mlp(6, 32, 4), boxes("cxcywh"), loss_of)


@odd(notes="all overlaps of all pairs are computed for a matcher, without gradients, and then only matched ones")
def matched_by_overlap() -> TrainLoop:
    def loss_of(net, batch):
        predicted = net(batch[0]).sigmoid()
        with torch.no_grad():
            best = torchvision.generalized_box_iou(corners(predicted), batch[1]).argmax(0)
        table = torchvision.generalized_box_iou(corners(predicted), batch[1])
        chosen = 1 - table[best, torch.arange(len(best))]
        return chosen.mean() + F.l1_loss(corners(predicted), batch[1])

    return trained(mlp(6, 32, 4), boxes(), loss_of)


# Distributions.


@odd(notes="each row asked of every component of a mixture: (N, 1) against (K,)")
def mixture_density() -> TrainLoop:
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.at, self.spread, self.share = (nn.Parameter(v) for v in (drawn(4), torch.zeros(4), torch.zeros(4)))

        def forward(self, x):
            each = Normal(self.at, self.spread.exp()).log_prob(x[:, None])
            return torch.logsumexp(each + self.share.log_softmax(0), 1)

    return trained(Mixture(), (drawn(16),), lambda net, b: -net(b[0]).mean())


@odd(notes="the entropy of predictions is minimised, beside a cross entropy: semi-supervised learning")
def entropy_minimisation() -> TrainLoop:
    def loss_of(net, batch):
        predicted = Categorical(logits=net(batch["x"]))
        return F.cross_entropy(net(batch["x"][:6]), batch["y"]) + 0.1 * predicted.entropy().mean()

    return trained(mlp(6, 32, 3), {"x": drawn(12, 6), "y": torch.arange(6) % 3}, loss_of)


@odd(notes="a deviation for each action beside means for each row: (A,) against (N, A), as in PPO")
def shared_deviation() -> TrainLoop:
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.spread = mlp(6, 32, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return Normal(self.mean(x), self.spread.exp())

    def loss_of(net, batch):
        policy = net(batch["x"])
        ratio = (policy.log_prob(batch["action"]).sum(-1) - batch["before"]).exp()
        gain = torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
        return -gain.mean() - 0.01 * policy.entropy().sum(-1).mean()

    torch.manual_seed(0)
    net = Policy()
    x, action = drawn(12, 6), drawn(12, 2, seed=1)
    with torch.no_grad():
        before = net(x).log_prob(action).sum(-1)
    batch = {"x": x, "action": action, "before": before, "advantage": drawn(12, seed=2)}
    return trained(net, batch, loss_of, rate=1e-3)


@odd(notes="an auto-encoder's divergence from its prior, and the likelihood of its inputs, both summed")
def variational() -> TrainLoop:
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = mlp(6, 32, 4), mlp(2, 32, 6)

        def forward(self, x):
            mean, spread = self.encode(x).chunk(2, -1)
            return Normal(mean, (0.5 * spread).exp())

    def loss_of(net, x):
        code = net(x)
        rebuilt = Normal(net.decode(code.rsample()), 1.0).log_prob(x).sum(-1)
        prior = Normal(torch.zeros(2), torch.ones(2))
        return (kl_divergence(code, prior).sum(-1) - rebuilt).mean()

    return trained(Coder(), drawn(12, 6), loss_of)


# Embeddings and images.


@odd(notes="two views of each row have one label of their own: the pairs are the views")
def labels_of_views() -> TrainLoop:
    criterion = pytorch_metric_learning.TripletMarginLoss()

    def loss_of(net, batch):
        views = torch.cat([batch, batch + 0.1 * torch.randn_like(batch)])
        return criterion(net(views), torch.arange(len(batch)).repeat(2))

    return trained(mlp(6, 32, 4), drawn(8, 6), loss_of)


@odd(notes="products of all pairs of rows under a square, and of both sides with an axis inserted: pairs are meant")
def products_of_pairs() -> TrainLoop:
    def loss_of(net, batch):
        score = net(batch["x"])
        agreement = torch.tanh(score * score.squeeze(-1)) - batch["alike"]
        spread = (score.squeeze(-1)[:, None] * score.squeeze(-1)[None]).mean()
        return agreement.square().mean() + 1e-3 * spread

    x = drawn(8, 6)
    return trained(mlp(6, 32, 1), {"x": x, "alike": torch.outer(x[:, 0].sign(), x[:, 0].sign())}, loss_of)


@odd(notes="the weights of a loss with weights are frozen on purpose: fixed random prototypes")
def fixed_prototypes() -> TrainLoop:
    criterion = pytorch_metric_learning.ArcFaceLoss(3, 4).requires_grad_(False)
    batch = (drawn(9, 6), torch.arange(9) % 3)
    return trained(mlp(6, 32, 4), batch, lambda net, b: criterion(net(b[0]), b[1]))
