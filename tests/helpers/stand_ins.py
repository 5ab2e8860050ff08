"""Functions of libraries by their public names and signatures, as small as they can be: the libraries are not installed
where these tests run."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import ModuleType

_ROOT = Path(sysconfig.get_path("purelib"))


def stand_in(name: str, source: str) -> ModuleType:
    """A module of this name whose file lies where installed code does; it is not put into ``sys.modules``."""
    module = ModuleType(name)
    exec(compile(source, str(_ROOT / f"{name.replace('.', '/')}.py"), "exec"), module.__dict__)
    return module


torchvision = stand_in(
    "torchvision.ops",
    """
import torch
import torch.nn.functional as F


def sigmoid_focal_loss(inputs, targets, alpha=0.25, gamma=2, reduction="none"):
    p = torch.sigmoid(inputs)
    each = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    each = (alpha * targets + (1 - alpha) * (1 - targets)) * each * (1 - p_t) ** gamma
    return each.mean() if reduction == "mean" else each


def _areas(boxes):
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _giou(left, right):
    inter = (torch.min(left[..., 2:], right[..., 2:]) - torch.max(left[..., :2], right[..., :2])).clamp(min=0).prod(-1)
    union = _areas(left) + _areas(right) - inter
    hull = (torch.max(left[..., 2:], right[..., 2:]) - torch.min(left[..., :2], right[..., :2])).prod(-1)
    return inter / (union + 1e-7) - (hull - union) / (hull + 1e-7)


def generalized_box_iou_loss(boxes1, boxes2, reduction="none", eps=1e-7):
    each = 1 - _giou(boxes1, boxes2)
    return each.mean() if reduction == "mean" else each


def generalized_box_iou(boxes1, boxes2):
    return _giou(boxes1[:, None], boxes2[None])
""",
)

monai = stand_in(
    "monai.losses.dice",
    """
import torch
from torch import nn


class DiceLoss(nn.Module):
    def __init__(self, include_background=True, to_onehot_y=False, sigmoid=False, softmax=False, other_act=None):
        super().__init__()
        self.to_onehot_y, self.sigmoid, self.softmax, self.other_act = to_onehot_y, sigmoid, softmax, other_act
        self.ignore_index = None

    def forward(self, input, target):
        if self.sigmoid:
            input = torch.sigmoid(input)
        if self.softmax and input.shape[1] > 1:
            input = torch.softmax(input, 1)
        if self.other_act is not None:
            input = self.other_act(input)
        if self.to_onehot_y and input.shape[1] > 1:
            target = torch.nn.functional.one_hot(target[:, 0], input.shape[1]).movedim(-1, 1)
        axes = tuple(range(2, input.dim()))
        both = (input * target).sum(axes)
        return (1 - (2 * both + 1e-5) / (input.sum(axes) + target.sum(axes) + 1e-5)).mean()
""",
)

segmentation_models_pytorch = stand_in(
    "segmentation_models_pytorch.losses",
    """
import torch
import torch.nn.functional as F
from torch import nn


class DiceLoss(nn.Module):
    def __init__(self, mode, from_logits=True, smooth=1.0, ignore_index=None):
        super().__init__()
        self.mode, self.from_logits, self.smooth, self.ignore_index = mode, from_logits, smooth, ignore_index

    def forward(self, y_pred, y_true):
        if self.from_logits:
            y_pred = F.logsigmoid(y_pred).exp() if self.mode != "multiclass" else y_pred.log_softmax(dim=1).exp()
        if self.mode == "multiclass":
            y_true = torch.stack([y_true == c for c in range(y_pred.shape[1])], 1)
        y_pred, y_true = y_pred.flatten(1), y_true.flatten(1).type_as(y_pred)
        both = (y_pred * y_true).sum()
        return 1 - (2 * both + self.smooth) / (y_pred.sum() + y_true.sum() + self.smooth)


class FocalLoss(nn.Module):
    def __init__(self, mode, gamma=2.0, ignore_index=None):
        super().__init__()
        self.mode, self.gamma, self.ignore_index = mode, gamma, ignore_index

    def forward(self, y_pred, y_true):
        losses = []
        for c in range(y_pred.size(1)):
            scores, target = y_pred[:, c], (y_true == c).type_as(y_pred)
            if self.ignore_index is not None:
                kept = y_true != self.ignore_index
                scores, target = scores[kept], target[kept]
            each = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
            losses.append(((1 - torch.exp(-each)) ** self.gamma * each).mean())
        return torch.stack(losses).mean()


class JaccardLoss(nn.Module):
    # as of a release in which from_logits did not exist

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, y_pred, y_true):
        y_pred = y_pred.softmax(dim=1)
        y_true = torch.stack([y_true == c for c in range(y_pred.shape[1])], 1).type_as(y_pred)
        both = (y_pred * y_true).sum()
        return 1 - both / (y_pred.sum() + y_true.sum() - both)
""",
)

kornia = stand_in(
    "kornia.losses.dice",
    """
import torch


def dice_loss(pred, target, average="micro", eps=1e-8, weight=None, ignore_index=-100):
    soft = torch.softmax(pred, dim=1)
    wanted = torch.nn.functional.one_hot(target, pred.shape[1]).movedim(-1, 1)
    return 1 - 2 * (soft * wanted).sum() / (soft.sum() + wanted.sum() + eps)
""",
)

pytorch_metric_learning = stand_in(
    "pytorch_metric_learning.losses",
    """
import torch
from torch import nn


class BaseMetricLossFunction(nn.Module):
    def forward(self, embeddings, labels=None, indices_tuple=None, ref_emb=None, ref_labels=None):
        if embeddings.shape[0] != labels.shape[0]:
            raise ValueError("labels")
        ref_labels = labels if ref_labels is None else ref_labels
        return self.compute_loss(torch.nn.functional.normalize(embeddings), labels, ref_labels)


class TripletMarginLoss(BaseMetricLossFunction):
    def compute_loss(self, embeddings, labels, ref_labels):
        away = torch.cdist(embeddings, embeddings)
        same = labels[:, None] == ref_labels[None]
        apart = ~same
        same.fill_diagonal_(False)
        triplets = same[:, :, None] & apart[:, None, :]
        each = (away[:, :, None] - away[:, None, :] + 0.5).relu()[triplets]
        return each.mean() if len(each) else embeddings.sum() * 0


class ArcFaceLoss(BaseMetricLossFunction):
    def __init__(self, num_classes, embedding_size, margin=0.1, scale=16):
        super().__init__()
        self.W = nn.Parameter(torch.randn(embedding_size, num_classes))
        self.margin, self.scale = margin, scale

    def compute_loss(self, embeddings, labels, ref_labels):
        cosines = embeddings @ torch.nn.functional.normalize(self.W, dim=0)
        hit = torch.nn.functional.one_hot(labels, cosines.shape[1])
        return torch.nn.functional.cross_entropy(self.scale * (cosines - self.margin * hit), labels)
""",
)

pytorch_msssim = stand_in(
    "pytorch_msssim.ssim",
    """
import torch


def ssim(X, Y, data_range=255, size_average=True, K=(0.01, 0.03)):
    axes = (1, 2, 3)
    c1, c2 = (K[0] * data_range) ** 2, (K[1] * data_range) ** 2
    mx, my = X.mean(axes), Y.mean(axes)
    vx, vy = X.var(axes), Y.var(axes)
    both = ((X - mx.view(-1, 1, 1, 1)) * (Y - my.view(-1, 1, 1, 1))).mean(axes)
    each = (2 * mx * my + c1) * (2 * both + c2) / ((mx ** 2 + my ** 2 + c1) * (vx + vy + c2))
    return each.mean() if size_average else each
""",
)
