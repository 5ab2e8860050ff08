"""Detectors and segmentation in small: faulty ones, and right ones that look odd."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.threads.shared import stepped


def render(boxes):
    """One image per box (cx, cy, w, h in 0..1): soft insides."""
    ys = xs = (torch.arange(12) + 0.5) / 12
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


def box_cxcywh_to_xyxy(b):
    cx, cy, w, h = b.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)


def box_area(b):
    return (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])


def iou_union(a, b):
    wh = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    union = box_area(a) + box_area(b) - inter
    return inter / (union + 1e-7), union


def paired_giou(a, b):
    iou, union = iou_union(a, b)
    lt = torch.min(a[:, :2], b[:, :2])
    rb = torch.max(a[:, 2:], b[:, 2:])
    area = (rb - lt).prod(-1)
    return iou - (area - union) / (area + 1e-7)


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(8 * 36, 24), nn.ReLU()),
        )
        self.cls_head = nn.Linear(24, 2)
        self.box_head = nn.Linear(24, 4)

    def forward(self, x):
        h = self.backbone(x)
        return {"pred_logits": self.cls_head(h), "pred_boxes": self.box_head(h).sigmoid()}


class GridNet(nn.Module):
    """A dense head over a 6 x 6 grid."""

    def __init__(self, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Conv2d(12, outputs, 1)

    def forward(self, x):
        return self.head(self.body(x))


@fault(
    "detection",
    "generalized_box_iou takes corners, and gets src_boxes and target_boxes as (cx, cy, w, h)",
    thread="stevebottos/owl-vit-object-detection#14",
    check="loss_formula",
)
def owl_vit_box_loss():
    model = BoxNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images, boxes, labels = single_objects()
    loader = DataLoader(TensorDataset(images, boxes, labels), batch_size=8, shuffle=True)

    def criterion(outputs, boxes, labels):
        loss_ce = F.cross_entropy(outputs["pred_logits"], labels)
        loss_bbox = F.l1_loss(outputs["pred_boxes"], boxes, reduction="none").sum(-1).mean()
        loss_giou = 1 - paired_giou(outputs["pred_boxes"], boxes)
        return loss_ce, loss_bbox, loss_giou.mean()

    def fit(batches):
        model.train()
        for images, boxes, labels in batches:
            optimizer.zero_grad()
            loss_ce, loss_bbox, loss_giou = criterion(model(images), boxes, labels)
            (loss_ce + 5 * loss_bbox + 2 * loss_giou).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "detection",
    "the sides of the intersection are not clamped at 0: two negative sides of disjoint boxes give a positive overlap",
    thread="yhenon/keras-frcnn#45",
    check="loss_formula",
)
def iou_regression():
    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    nn.init.constant_(model.box_head.bias[2:], -2.2)
    _, boxes, labels = single_objects(seed=2)
    boxes[:, :2] = torch.where(boxes[:, :2] > 0.5, boxes[:, :2] + 0.15, boxes[:, :2] - 0.15)
    boxes[:, 2:] *= 0.6
    loader = DataLoader(TensorDataset(render(boxes), boxes, labels), batch_size=8, shuffle=True)

    def bbox_iou(box1, box2):
        b1, b2 = box_cxcywh_to_xyxy(box1), box_cxcywh_to_xyxy(box2)
        inter_x1 = torch.max(b1[:, 0], b2[:, 0])
        inter_y1 = torch.max(b1[:, 1], b2[:, 1])
        inter_x2 = torch.min(b1[:, 2], b2[:, 2])
        inter_y2 = torch.min(b1[:, 3], b2[:, 3])
        inter = (inter_x2 - inter_x1) * (inter_y2 - inter_y1)
        return inter / (box_area(b1) + box_area(b2) - inter + 1e-6)

    def compute_loss(outputs, boxes, labels):
        lbox = (1.0 - bbox_iou(outputs["pred_boxes"], boxes)).mean()
        lcls = F.cross_entropy(outputs["pred_logits"], labels)
        return lbox + 0.5 * lcls

    return stepped(
        model, optimizer, lambda images, boxes, labels: compute_loss(model(images), boxes, labels), batches=loader
    )


@fault(
    "detection",
    "the bias for a prior of 0.1 lacks its minus: every place of the heat map begins at 0.9",
    thread="princeton-vl/CornerNet#13",
    check="loss_at_init",
)
def keypoint_heatmap():
    model = GridNet(1)
    prior = 0.1
    nn.init.constant_(model.head.bias, math.log((1 - prior) / prior))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=14)
    places = (boxes[:, :2] * 6).long()
    heat = torch.zeros(len(images), 1, 6, 6)
    heat[torch.arange(len(images)), 0, places[:, 1], places[:, 0]] = 1.0
    loader = DataLoader(TensorDataset(images, heat), batch_size=8)

    def fit(batches):
        for x, y in batches:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "detection",
    "anchors are assigned by sorted IoU, and the band between the thresholds is ignored with a weight of 0",
    thread="fizyr/keras-retinanet, utils/anchors.py; pytorch/vision BETWEEN_THRESHOLDS",
)
def ignored_anchors():
    model = GridNet(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=12)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)
    grid = (torch.arange(6) + 0.5) / 6
    cx, cy = torch.meshgrid(grid, grid, indexing="xy")
    anchors = torch.stack([cx, cy, torch.full_like(cx, 0.4), torch.full_like(cx, 0.4)], -1).flatten(0, 1)

    def loss_of(x, y):
        overlap, _ = iou_union(box_cxcywh_to_xyxy(anchors)[None], box_cxcywh_to_xyxy(y)[:, None])
        labels = torch.full_like(overlap, -1)
        labels[overlap < 0.3] = 0
        labels[overlap >= 0.5] = 1
        labels[torch.arange(len(y)), overlap.argmax(1)] = 1
        logits = model(x).flatten(1)
        weight = (labels >= 0).float()
        losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0), reduction="none")
        return (losses * weight).sum() / weight.sum()

    return stepped(model, optimizer, loss_of, batches=loader)


def scans(n=24, classes=3, size=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(size, dtype=torch.float32)
    images, masks = 0.1 * torch.randn(n, 1, size, size, generator=g), torch.zeros(n, size, size, dtype=torch.long)
    for k in range(1, classes):
        at = 2 + (size - 4) * torch.rand(n, 2, generator=g)
        r = 1.5 + 1.5 * torch.rand(n, generator=g)
        d = (grid[None, :, None] - at[:, 0, None, None]) ** 2 + (grid[None, None, :] - at[:, 1, None, None]) ** 2
        inside = d < r[:, None, None] ** 2
        masks[inside] = k
        images[:, 0][inside] += 1.0 if k == 1 else -1.0
    return images, masks


class MiniUNet(nn.Module):
    def __init__(self, classes=3, width=8):
        super().__init__()
        self.enc1 = nn.Conv2d(1, width, 3, padding=1)
        self.enc2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec = nn.Conv2d(2 * width, width, 3, padding=1)
        self.outc = nn.Conv2d(width, classes, 1)

    def features(self, x):
        a = F.relu(self.enc1(x))
        b = F.relu(self.enc2(a))
        return b, F.relu(self.dec(torch.cat([a, self.up(b)], 1)))

    def forward(self, x):
        return self.outc(self.features(x)[1])


@right(
    "segmentation",
    "the lowest of three outputs has the weight 0 by design, and its head stays as it is; the others share 1",
    thread="MIC-DKFZ/nnUNet#329",
)
def lowest_output_unused():
    class DeepUNet(MiniUNet):
        def __init__(self):
            super().__init__()
            self.mid_head, self.low_head = nn.Conv2d(16, 3, 1), nn.Conv2d(16, 3, 1)

        def forward(self, x):
            low, high = self.features(x)
            return [self.outc(high), self.mid_head(low), self.low_head(F.avg_pool2d(low, 2))]

    weights = torch.tensor([1 / 2**i for i in range(3)])
    weights[-1] = 0
    weights = (weights / weights.sum()).tolist()

    def criterion(outputs, y):
        targets = [y, y[:, ::2, ::2], y[:, ::4, ::4]]
        return sum(w * F.cross_entropy(o, t) for w, o, t in zip(weights, outputs, targets, strict=True) if w != 0)

    model = DeepUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return stepped(
        model,
        optimizer,
        lambda x, y: criterion(model(x), y),
        train=True,
        batches=DataLoader(TensorDataset(*scans(seed=15)), batch_size=6, shuffle=True),
    )
