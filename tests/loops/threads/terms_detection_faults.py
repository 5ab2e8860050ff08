"""Detectors in small, from public threads."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def render(boxes, height=12, width=12):
    """One image per box (cx, cy, w, h in 0..1): soft insides."""
    ys = (torch.arange(height) + 0.5) / height
    xs = (torch.arange(width) + 0.5) / width
    cx, cy, w, h = boxes.unbind(-1)
    inside_x = torch.sigmoid(40 * (w[:, None] / 2 - (xs - cx[:, None]).abs()))
    inside_y = torch.sigmoid(40 * (h[:, None] / 2 - (ys - cy[:, None]).abs()))
    return (inside_y[:, :, None] * inside_x[:, None, :])[:, None]


def single_objects(n=32, seed=0, height=12, width=12):
    g = torch.Generator().manual_seed(seed)
    centre = 0.3 + 0.4 * torch.rand(n, 2, generator=g)
    size = 0.2 + 0.35 * torch.rand(n, 2, generator=g)
    boxes = torch.cat([centre, size], -1)
    images = render(boxes, height, width) + 0.05 * torch.randn(n, 1, height, width, generator=g)
    labels = (size[:, 0] > size[:, 1]).long()
    return images, boxes, labels


def box_cxcywh_to_xyxy(b):
    cx, cy, w, h = b.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)


def box_area(b):
    return (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])


def paired_iou(a, b):
    lt = torch.max(a[:, :2], b[:, :2])
    rb = torch.min(a[:, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    union = box_area(a) + box_area(b) - inter
    return inter / (union + 1e-7), union


def paired_giou(a, b):
    iou, union = paired_iou(a, b)
    lt = torch.min(a[:, :2], b[:, :2])
    rb = torch.max(a[:, 2:], b[:, 2:])
    area = (rb - lt).prod(-1)
    return iou - (area - union) / (area + 1e-7)


class Backbone(nn.Module):
    def __init__(self, dim=24, size=12 * 12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * size // 4, dim)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.fc(x.flatten(1)))


class BoxNet(nn.Module):
    def __init__(self, classes=2, size=12 * 12):
        super().__init__()
        self.backbone = Backbone(size=size)
        self.cls_head = nn.Linear(24, classes)
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

    def generalized_box_iou(a, b):
        return paired_giou(a, b)

    class PushPullLoss(nn.Module):
        def forward(self, outputs, boxes, labels):
            loss_ce = F.cross_entropy(outputs["pred_logits"], labels)
            loss_bbox = F.l1_loss(outputs["pred_boxes"], boxes, reduction="none").sum(-1).mean()
            loss_giou = 1 - generalized_box_iou(outputs["pred_boxes"], boxes)
            return loss_ce, loss_bbox, loss_giou.mean()

    criterion = PushPullLoss()

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

    def train(batches):
        for imgs, boxes, labels in batches:
            loss = compute_loss(model(imgs), boxes, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


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
