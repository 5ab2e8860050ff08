"""Losses of libraries: their flags say what they take; boxes, pairs of embeddings, distributions, similarities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.helpers.stand_ins import (
    monai,
    pytorch_metric_learning,
    pytorch_msssim,
    segmentation_models_pytorch,
    torchvision,
)
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop(model, batch, loss_of):
    def make():
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

        def fit(batches):
            for item in batches:
                optimizer.zero_grad()
                loss_of(net, item).backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=batch(), fit=fit)

    return make


# Masks of images.


def segmenter(classes=1):
    return lambda: nn.Sequential(nn.Conv2d(1, 16, 1), nn.Tanh(), nn.Conv2d(16, classes, 1))


def masks():
    images = drawn(6, 1, 6, 6)
    return {"image": images, "mask": (images > 0.2).float()}


def classes_of_pixels():
    images = drawn(6, 1, 6, 6)
    return {"image": images, "mask": ((images > -0.4).long() + (images > 0.4).long())[:, 0]}


def masked(criterion, prepare=lambda s: s, labels=lambda m: m):
    return loop(segmenter(), masks, lambda net, b: criterion(prepare(net(b["image"])), labels(b["mask"])))


def classified(criterion, prepare=lambda s: s, labels=lambda m: m):
    return loop(segmenter(3), classes_of_pixels, lambda net, b: criterion(prepare(net(b["image"])), labels(b["mask"])))


MonaiDice = monai.DiceLoss
Dice, Focal = segmentation_models_pytorch.DiceLoss, segmentation_models_pytorch.FocalLoss

pair(
    "monai_dice_softmax_of_one_channel",
    "loss_contract",
    "single_class",
    faulty=masked(MonaiDice(softmax=True)),
    fixed=masked(MonaiDice(sigmoid=True)),
)
pair(
    "smp_dice_from_probabilities_of_raw_scores",
    "loss_contract",
    "logits_as_probabilities",
    faulty=masked(Dice("binary", from_logits=False)),
    fixed=masked(Dice("binary", from_logits=True)),
)
pair(
    "smp_dice_of_a_head_with_a_sigmoid",
    "loss_contract",
    "probabilities_as_logits",
    culprits=("sigmoid",),
    faulty=masked(Dice("binary"), torch.sigmoid),
    fixed=masked(Dice("binary", from_logits=False), torch.sigmoid),
)
pair(
    "masks_of_bytes",
    "loss_contract",
    "target_outside_unit",
    culprits=("target",),
    faulty=masked(Dice("binary"), labels=lambda mask: 255 * mask),
    fixed=masked(Dice("binary")),
)
pair(
    "smp_focal_with_a_void_label",
    "loss_contract",
    "target_out_of_range",
    faulty=classified(Focal("multiclass"), labels=lambda mask: torch.where(mask == 2, 255, mask)),
    fixed=classified(Focal("multiclass", ignore_index=255), labels=lambda mask: torch.where(mask == 2, 255, mask)),
)


# Boxes.


def centred():
    features = drawn(8, 6)
    return {
        "x": features,
        "boxes": torch.cat([0.3 + 0.4 * features[:, :2].sigmoid(), 0.1 + 0.2 * features[:, 2:4].sigmoid()], 1),
    }


def corners(boxes):
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


def boxed(overlap, convert_predictions=corners, convert_targets=corners, distance=True):
    def loss_of(net, batch):
        predicted = net(batch["x"]).sigmoid()
        loss = overlap(convert_predictions(predicted), convert_targets(batch["boxes"]))
        return loss + F.l1_loss(predicted, batch["boxes"]) if distance else loss

    return loop(lambda: mlp(6, 32, 4), centred, loss_of)


def giou(left, right):
    return torchvision.generalized_box_iou_loss(left, right, reduction="mean")


pair(
    "targets_with_centres_read_as_corners",
    "loss_contract",
    "box_format",
    quick=True,
    culprits=("boxes2",),
    faulty=boxed(giou, convert_targets=lambda b: b),
    fixed=boxed(giou),
)
pair(
    "predictions_with_centres_compared_with_corners",
    "loss_contract",
    "box_format",
    culprits=("boxes1",),
    faulty=boxed(giou, convert_predictions=lambda b: b),
    fixed=boxed(giou),
)
pair(
    "every_box_compared_with_every_other",
    "loss_contract",
    "broadcast",
    culprits=("generalized_box_iou",),
    faulty=boxed(lambda p, t: (1 - torchvision.generalized_box_iou(p, t)).mean()),
    fixed=boxed(lambda p, t: (1 - torch.diag(torchvision.generalized_box_iou(p, t))).mean()),
)
pair(
    "overlap_made_smaller",
    "loss_contract",
    "sign_flipped",
    culprits=("generalized_box_iou",),
    faulty=boxed(lambda p, t: torch.diag(torchvision.generalized_box_iou(p, t)).mean()),
    fixed=boxed(lambda p, t: 1 - torch.diag(torchvision.generalized_box_iou(p, t)).mean()),
)


# Pairs of embeddings.


def triplets(label_of):
    def loss_of(net, batch):
        return pytorch_metric_learning.TripletMarginLoss()(net(batch[0]), label_of(batch[1]))

    return loop(lambda: mlp(6, 32, 4), lambda: data.labelled(rows=12), loss_of)


pair(
    "each_row_a_label_of_its_own",
    "loss_contract",
    "no_pairs",
    quick=True,
    culprits=("labels",),
    faulty=triplets(lambda y: torch.arange(len(y))),
    fixed=triplets(lambda y: y),
)


def arc_face(parameters):
    def make():
        net, criterion = mlp(6, 32, 4), pytorch_metric_learning.ArcFaceLoss(3, 4)
        optimizer = torch.optim.Adam(parameters(net, criterion), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                criterion.zero_grad()
                criterion(net(x), y).backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=data.labelled(rows=12), fit=fit)

    return make


pair(
    "weights_of_arc_face_in_no_optimizer",
    "loss_contract",
    "criterion_not_trained",
    quick=True,
    culprits=("W",),
    faulty=arc_face(lambda net, _: net.parameters()),
    fixed=arc_face(lambda net, criterion: [*net.parameters(), *criterion.parameters()]),
)


# Similarities of images.


def restored(loss_of):
    def pictures():
        clean = drawn(6, 1, 6, 6).sigmoid()
        return {"noisy": clean + 0.1 * drawn(6, 1, 6, 6, seed=1), "clean": clean}

    return loop(segmenter(), pictures, lambda net, b: loss_of(net(b["noisy"]).sigmoid(), b["clean"]))


pair(
    "range_of_bytes_for_images_up_to_one",
    "loss_contract",
    "value_range",
    quick=True,
    culprits=("Y",),
    faulty=restored(lambda p, t: 1 - pytorch_msssim.ssim(p, t)),
    fixed=restored(lambda p, t: 1 - pytorch_msssim.ssim(p, t, data_range=1)),
)
