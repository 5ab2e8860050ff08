"""Detectors in small that are right, and look odd."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def render(boxes, height=12, width=12):
    ys = (torch.arange(height) + 0.5) / height
    xs = (torch.arange(width) + 0.5) / width
    cx, cy, w, h = boxes.unbind(-1)
    inside_x = torch.sigmoid(40 * (w[:, None] / 2 - (xs - cx[:, None]).abs()))
    inside_y = torch.sigmoid(40 * (h[:, None] / 2 - (ys - cy[:, None]).abs()))
    return (inside_y[:, :, None] * inside_x[:, None, :])[:, None]


def single_objects(n=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    centre = 0.3 + 0.4 * torch.rand(n, 2, generator=g)
    size = 0.2 + 0.35 * torch.rand(n, 2, generator=g)
    boxes = torch.cat([centre, size], -1)
    images = render(boxes) + 0.05 * torch.randn(n, 1, 12, 12, generator=g)
    return images, boxes, (size[:, 0] > size[:, 1]).long()


def xyxy(b):
    cx, cy, w, h = b.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)


def area(b):
    return (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])


def iou_union(a, b):
    wh = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    union = area(a) + area(b) - inter
    return inter / (union + 1e-7), union


class Dense(nn.Module):
    def __init__(self, outputs, bias=None):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Conv2d(12, outputs, 1)
        if bias is not None:
            nn.init.constant_(self.head.bias, bias)

    def forward(self, x):
        return self.head(self.body(x))


@right(
    "detection",
    "anchors are assigned by sorted IoU, and the band between the thresholds is ignored with a weight of 0",
    thread="fizyr/keras-retinanet, utils/anchors.py; pytorch/vision BETWEEN_THRESHOLDS",
)
def ignored_anchors():
    model = Dense(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=12)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)
    grid = (torch.arange(6) + 0.5) / 6
    cx, cy = torch.meshgrid(grid, grid, indexing="xy")
    anchors = torch.stack([cx, cy, torch.full_like(cx, 0.4), torch.full_like(cx, 0.4)], -1).flatten(0, 1)

    def fit(batches):
        for x, y in batches:
            overlap, _ = iou_union(xyxy(anchors)[None], xyxy(y)[:, None])
            labels = torch.full_like(overlap, -1)
            labels[overlap < 0.3] = 0
            labels[overlap >= 0.5] = 1
            labels[torch.arange(len(y)), overlap.argmax(1)] = 1
            logits = model(x).flatten(1)
            weight = (labels >= 0).float()
            losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0), reduction="none")
            loss = (losses * weight).sum() / weight.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
