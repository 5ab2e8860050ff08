"""Detectors in small, from public threads."""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


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
    "the modulating factor is (1 - p) * gamma where it should be (1 - p) ** gamma",
    thread="fudannlp16/focal-loss#8",
    check="loss_formula",
)
def binary_focal_loss():
    model = nn.Sequential(Backbone(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, _, labels = single_objects(seed=1)
    loader = DataLoader(TensorDataset(images, labels.float()), batch_size=8)

    def focal_loss(logits, labels, alpha=0.25, gamma=2.0):
        y_pred = torch.sigmoid(logits).clamp(1e-6, 1 - 1e-6)
        loss = -labels * alpha * ((1 - y_pred) * gamma) * torch.log(y_pred) - (1 - labels) * (1 - alpha) * (
            y_pred**gamma
        ) * torch.log(1 - y_pred)
        return loss.mean()

    def train(batches):
        for x, y in batches:
            loss = focal_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


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
    "the Gaussian is drawn around centres between pixels, so that no entry equals 1 and pos_loss is always 0",
    thread="xingyizhou/CenterNet#18",
    check="every_term_trains",
)
def heatmap_head():
    model = GridNet(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=3)

    def draw(boxes, size=6, sigma=0.8):
        ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        cx, cy = boxes[:, 0] * size, boxes[:, 1] * size
        d = (xs - cx[:, None, None]) ** 2 + (ys - cy[:, None, None]) ** 2
        return torch.exp(-d / (2 * sigma**2))[:, None]

    def neg_loss(pred, gt):
        pos_inds = gt.eq(1).float()
        neg_inds = gt.lt(1).float()
        neg_weights = torch.pow(1 - gt, 4)
        pos_loss = (torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds).sum()
        neg_loss = (torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds).sum()
        num_pos = pos_inds.sum()
        if num_pos == 0:
            return -neg_loss
        return -(pos_loss + neg_loss) / num_pos

    loader = DataLoader(TensorDataset(images, draw(boxes)), batch_size=8)

    def fit(batches):
        for batch in batches:
            image, hm = batch
            output = model(image).sigmoid().clamp(min=1e-4, max=1 - 1e-4)
            loss = neg_loss(output, hm)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


def yolo_targets(boxes, size=6):
    gx, gy = boxes[:, 0] * size, boxes[:, 1] * size
    gi, gj = gx.long(), gy.long()
    return gi, gj, torch.stack([gx, gy, boxes[:, 2] * size, boxes[:, 3] * size], -1)


class YoloLoss:
    """The loss of a grid of single boxes; what differs between the cases is passed in."""

    def __init__(self, score, box=0.05, obj=1.0, size=6):
        self.score, self.box, self.obj, self.size = score, box, obj, size
        self.bce = nn.BCEWithLogitsLoss()

    def __call__(self, p, boxes):
        b = torch.arange(len(p))
        gi, gj, tbox = yolo_targets(boxes, self.size)
        ps = p[b, :, gj, gi]
        pxy = ps[:, :2].sigmoid() * 2 - 0.5 + torch.stack([gi, gj], -1)
        pwh = (ps[:, 2:4].sigmoid() * 2) ** 2
        giou = paired_giou(
            box_cxcywh_to_xyxy(torch.cat([pxy, pwh], -1)),
            box_cxcywh_to_xyxy(tbox),
        )
        lbox = (1 - giou).mean()
        tobj = torch.zeros(len(p), self.size, self.size)
        tobj[b, gj, gi] = self.score(giou)
        lobj = self.bce(p[:, 4], tobj)
        return self.box * lbox + self.obj * lobj


@fault(
    "detection",
    "the objectness target tobj is the IoU with its history: the gradient of the BCE flows into the boxes",
    thread="ultralytics/yolov5#6952",
    check="loss_contract",
)
def yolo_objectness():
    model = GridNet(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images, boxes, _ = single_objects(seed=4)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)
    compute_loss = YoloLoss(score=lambda iou: iou.clamp(0))

    def train(batches):
        for imgs, targets in batches:
            loss = compute_loss(model(imgs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "detection",
    "the objectness target is a GIoU, which may be negative: the BCE target leaves 0..1",
    thread="ultralytics/yolov3#901",
    check="loss_contract",
)
def yolo_grid():
    model = GridNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    _, boxes, _ = single_objects(seed=5)
    boxes[:, 2:] *= 0.35
    loader = DataLoader(TensorDataset(render(boxes), boxes), batch_size=8)
    compute_loss = YoloLoss(score=lambda giou: giou.detach(), box=1.0)

    def fit(batches):
        for imgs, targets in batches:
            optimizer.zero_grad()
            compute_loss(model(imgs), targets).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "detection",
    "sigmoid_focal_loss takes logits, and the class head has a sigmoid already",
    thread="jcwang0602/MLLMSeg#9",
    check="loss_contract",
)
def retina_classification():
    class Head(nn.Module):
        def __init__(self, classes=2):
            super().__init__()
            self.features = Backbone()
            self.cls_score = nn.Linear(24, classes)
            self.act = nn.Sigmoid()

        def forward(self, x):
            return self.act(self.cls_score(self.features(x)))

    def sigmoid_focal_loss(inputs, targets, alpha=0.25, gamma=2.0, reduction="none"):
        p = torch.sigmoid(inputs)
        ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
        p_t = p * targets + (1 - p) * (1 - targets)
        loss = ce_loss * ((1 - p_t) ** gamma)
        if alpha >= 0:
            loss = (alpha * targets + (1 - alpha) * (1 - targets)) * loss
        return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction]

    model = Head()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    images, _, labels = single_objects(seed=6)
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)

    def train_one_epoch(batches):
        model.train()
        for images, labels in batches:
            scores = model(images)
            gt = F.one_hot(labels, scores.shape[-1]).float()
            loss = sigmoid_focal_loss(scores, gt, reduction="sum") / max(1, len(images))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_one_epoch)


def object_pairs(n=24, seed=0):
    """Images with two objects: one left, one right, listed in a drawn order."""
    g = torch.Generator().manual_seed(seed)
    left = torch.cat([torch.tensor([0.1, 0.3]) + torch.tensor([0.3, 0.4]) * torch.rand(n, 2, generator=g)], -1)
    right = torch.tensor([0.6, 0.3]) + torch.tensor([0.3, 0.4]) * torch.rand(n, 2, generator=g)
    size = 0.15 + 0.2 * torch.rand(n, 2, 2, generator=g)
    boxes = torch.cat([torch.stack([left, right], 1), size], -1)
    images = render(boxes[:, 0]) + render(boxes[:, 1])
    flip = torch.rand(n, generator=g) < 0.5
    boxes[flip] = boxes[flip].flip(1)
    return images, boxes


class SmallDETR(nn.Module):
    def __init__(self, queries=3):
        super().__init__()
        self.backbone = Backbone()
        self.query_embed = nn.Embedding(queries, 24)
        self.mix = nn.Linear(48, 32)
        self.class_embed = nn.Linear(32, 2)
        self.bbox_embed = nn.Linear(32, 4)

    def forward(self, x):
        h = self.backbone(x)[:, None].expand(-1, self.query_embed.num_embeddings, -1)
        q = self.query_embed.weight[None].expand(len(x), -1, -1)
        h = F.relu(self.mix(torch.cat([h, q], -1)))
        return {"pred_logits": self.class_embed(h), "pred_boxes": self.bbox_embed(h).sigmoid()}


@torch.no_grad()
def match(pred, target):
    """Indices (of queries, of targets) of the cheapest assignment."""
    cost = torch.cdist(pred, target, p=1)
    best = min(
        itertools.permutations(range(len(pred)), len(target)),
        key=lambda p: sum(cost[q, t].item() for t, q in enumerate(p)),
    )
    pairs = sorted((q, t) for t, q in enumerate(best))
    return torch.tensor([q for q, _ in pairs]), torch.tensor([t for _, t in pairs])


@fault(
    "detection",
    "the target boxes are taken in the order of the annotation, not in that of the matcher's second index",
    thread="facebookresearch/detr#75",
    check="loss_formula",
)
def detr_set_loss():
    model = SmallDETR()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images, boxes = object_pairs()
    loader = DataLoader(TensorDataset(images, boxes), batch_size=6, shuffle=True)

    class SetCriterion(nn.Module):
        def forward(self, outputs, targets):
            indices = [match(p, t) for p, t in zip(outputs["pred_boxes"], targets, strict=True)]
            batch_idx = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
            src_idx = torch.cat([src for src, _ in indices])
            src_boxes = outputs["pred_boxes"][batch_idx, src_idx]
            target_boxes = torch.cat([t for t, (_, i) in zip(targets, indices, strict=True)], dim=0)
            num_boxes = len(target_boxes)
            classes = torch.ones(outputs["pred_logits"].shape[:2], dtype=torch.long)
            classes[batch_idx, src_idx] = 0
            return {
                "loss_ce": F.cross_entropy(outputs["pred_logits"].transpose(1, 2), classes),
                "loss_bbox": F.l1_loss(src_boxes, target_boxes, reduction="none").sum() / num_boxes,
                "loss_giou": (1 - paired_giou(box_cxcywh_to_xyxy(src_boxes), box_cxcywh_to_xyxy(target_boxes))).sum()
                / num_boxes,
            }

    criterion = SetCriterion()
    weight_dict = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}

    def train_one_epoch(batches):
        model.train()
        for samples, targets in batches:
            loss_dict = criterion(model(samples), targets)
            losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
            optimizer.zero_grad()
            losses.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_one_epoch)


@fault(
    "detection",
    "weight_dict names the term loss_box, the criterion loss_bbox: the L1 term is dropped from the sum",
    thread="facebookresearch/detr, engine.py: losses = sum(... if k in weight_dict)",
    check="every_term_trains",
)
def weighted_criterion():
    model = BoxNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images, boxes, labels = single_objects(seed=8)
    data = [{"image": i, "boxes": b, "label": c} for i, b, c in zip(images, boxes, labels, strict=True)]
    loader = DataLoader(data, batch_size=8)

    @dataclass
    class Config:
        cls_loss_coef: float = 1.0
        bbox_loss_coef: float = 5.0

    cfg = Config()
    weight_dict = {"loss_ce": cfg.cls_loss_coef, "loss_box": cfg.bbox_loss_coef}

    def criterion(outputs, targets):
        return {
            "loss_ce": F.cross_entropy(outputs["pred_logits"], targets["label"]),
            "loss_bbox": (outputs["pred_boxes"] - targets["boxes"]).abs().sum(-1).mean(),
        }

    def train(batches):
        for batch in batches:
            outputs = model(batch["image"])
            loss_dict = criterion(outputs, batch)
            losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "detection",
    "boxes in pixels are divided by (h, w, h, w): cx and w of the wide images exceed 1, which a sigmoid cannot reach",
    thread="joheras/CLoDSA#3",
    check="learnable_targets",
)
def normalised_boxes():
    height, width = 8, 24
    model = BoxNet(size=height * width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images, boxes, labels = single_objects(seed=9, height=height, width=width)
    pixels = boxes * torch.tensor([width, height, width, height])

    class Normalize:
        def __call__(self, image, target):
            w, h = image.shape[-2:]
            return image, target / torch.tensor([w, h, w, h], dtype=torch.float32)

    transform = Normalize()
    data = [(*transform(i, b), c) for i, b, c in zip(images, pixels, labels, strict=True)]
    loader = DataLoader(data, batch_size=8, shuffle=True)

    def fit(batches):
        for images, boxes, labels in batches:
            out = model(images)
            loss_bbox = F.l1_loss(out["pred_boxes"], boxes, reduction="sum") / len(boxes)
            loss = F.cross_entropy(out["pred_logits"], labels) + 5 * loss_bbox
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "detection",
    "tx and ty are coordinates on the grid (up to 6); sigmoid(x), sigmoid(y) predict the offset within a cell",
    thread="ultralytics/yolov3#302",
    check="learnable_targets",
)
def yolo_v3_mse():
    model = GridNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=10)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)
    anchors = torch.tensor([2.0, 2.0])
    mse, bce = nn.MSELoss(), nn.BCEWithLogitsLoss()

    def build_targets(boxes, size=6):
        b = torch.arange(len(boxes))
        gxy, gwh = boxes[:, :2] * size, boxes[:, 2:] * size
        gi, gj = gxy.long().unbind(-1)
        txy = torch.zeros(len(boxes), size, size, 2)
        twh = torch.zeros(len(boxes), size, size, 2)
        obj_mask = torch.zeros(len(boxes), size, size, dtype=torch.bool)
        obj_mask[b, gj, gi] = True
        txy[b, gj, gi] = gxy
        twh[b, gj, gi] = torch.log(gwh / anchors)
        return obj_mask, txy, twh

    def train(batches):
        model.train()
        for imgs, targets in batches:
            p = model(imgs).permute(0, 2, 3, 1)
            obj_mask, txy, twh = build_targets(targets)
            loss_xy = mse(p[..., :2].sigmoid()[obj_mask], txy[obj_mask])
            loss_wh = mse(p[..., 2:4][obj_mask], twh[obj_mask])
            loss_conf = bce(p[..., 4], obj_mask.float())
            total_loss = loss_xy + loss_wh + loss_conf
            total_loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "detection",
    "w2 and h2 of CIoU are taken from the predicted box b1 again, so that the aspect-ratio term v is always 0",
    thread="ooples/AiDotNet.Tensors#87",
    check="every_term_trains",
)
def ciou_head():
    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*single_objects(seed=11)), batch_size=8)

    def bbox_ciou(pred, target, eps=1e-7):
        b1, b2 = box_cxcywh_to_xyxy(pred), box_cxcywh_to_xyxy(target)
        iou, _ = paired_iou(b1, b2)
        rho2 = (pred[:, :2] - target[:, :2]).square().sum(-1)
        c2 = (torch.max(b1[:, 2:], b2[:, 2:]) - torch.min(b1[:, :2], b2[:, :2])).square().sum(-1) + eps
        w1, h1 = b1[:, 2] - b1[:, 0], b1[:, 3] - b1[:, 1] + eps
        w2, h2 = b1[:, 2] - b1[:, 0], b1[:, 3] - b1[:, 1] + eps
        v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / h2) - torch.atan(w1 / h1), 2)
        with torch.no_grad():
            alpha = v / (1 - iou + v + eps)
        return iou - rho2 / c2 - alpha * v

    def fit(batches):
        for x, y, c in batches:
            out = model(x)
            loss = (1 - bbox_ciou(out["pred_boxes"], y)).mean() + 0.5 * F.cross_entropy(out["pred_logits"], c)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model.train(), optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "detection",
    "theta (N, 1) is compared with angles (N): smooth_l1_loss broadcasts to (N, N)",
    thread="discuss.pytorch.org: Using a target size that is different to the input size (smooth_l1_loss)",
    check="loss_contract",
)
def rotated_boxes():
    class RotatedHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Backbone()
            self.box = nn.Linear(24, 4)
            self.theta = nn.Linear(24, 1)

        def forward(self, x):
            h = self.backbone(x)
            return self.box(h), self.theta(h)

    model = RotatedHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=12)
    angles = torch.atan2(boxes[:, 3], boxes[:, 2]) - math.pi / 4
    loader = DataLoader(TensorDataset(images, boxes, angles), batch_size=8)

    def fit(batches):
        for images, boxes, angles in batches:
            pred_boxes, theta = model(images)
            loss = F.smooth_l1_loss(pred_boxes, boxes) + 0.5 * F.smooth_l1_loss(theta, angles)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "detection",
    "the quadratic part of smooth L1 is not divided by l1_cutoff, and 0.5 is taken off the rest in place of half of it",
    thread="keras-team/keras-cv#920",
    check="loss_formula",
)
def box_deltas():
    class SmoothL1Loss(nn.Module):
        def __init__(self, l1_cutoff=0.1):
            super().__init__()
            self.l1_cutoff = l1_cutoff

        def forward(self, y_pred, y_true):
            difference = y_true - y_pred
            absolute_difference = difference.abs()
            squared_difference = difference**2
            loss = torch.where(
                absolute_difference < self.l1_cutoff, 0.5 * squared_difference, absolute_difference - 0.5
            )
            return loss.mean(-1)

    model = nn.ModuleDict({"backbone": Backbone(), "box": nn.Linear(24, 4), "cls": nn.Linear(24, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, boxes, labels = single_objects(seed=13)
    deltas = torch.cat([(boxes[:, :2] - 0.5) / 0.2, torch.log(boxes[:, 2:] / 0.35) / 0.4], -1)
    loader = DataLoader(TensorDataset(images, deltas, labels), batch_size=8, shuffle=True)
    box_loss = SmoothL1Loss()

    def train_step(x, boxes, classes):
        features = model["backbone"](x)
        total = box_loss(model["box"](features), boxes).mean()
        total = total + F.cross_entropy(model["cls"](features), classes)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()

    def fit(batches):
        for batch in batches:
            train_step(*batch)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


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


@fault(
    "detection",
    "softmax(dim=0) normalises the class scores over the images of the batch",
    thread="perone/euclidesdb#2",
    check="batch_independence",
)
def proposal_scores():
    model = BoxNet(classes=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, labels = single_objects(seed=15)
    labels[boxes[:, 0] < 0.4] = 2
    loader = DataLoader(TensorDataset(images, boxes, labels), batch_size=8, shuffle=True)

    def train(batches):
        for x, boxes, labels in batches:
            out = model(x)
            scores = torch.softmax(out["pred_logits"], dim=0)
            loss_cls = -torch.log(scores.gather(1, labels[:, None]) + 1e-6).mean()
            loss = loss_cls + 5 * F.l1_loss(out["pred_boxes"], boxes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)
