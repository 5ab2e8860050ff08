"""Detectors in small that are right, and look odd."""

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


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


def giou(a, b):
    iou, union = iou_union(a, b)
    hull = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])).prod(-1)
    return iou - (hull - union) / (hull + 1e-7)


class Trunk(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 36, dim)

    def forward(self, x):
        return F.relu(self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1)))


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


def object_pairs(n=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    left = torch.tensor([0.1, 0.3]) + torch.tensor([0.3, 0.4]) * torch.rand(n, 2, generator=g)
    other = torch.tensor([0.6, 0.3]) + torch.tensor([0.3, 0.4]) * torch.rand(n, 2, generator=g)
    boxes = torch.cat([torch.stack([left, other], 1), 0.15 + 0.2 * torch.rand(n, 2, 2, generator=g)], -1)
    return render(boxes[:, 0]) + render(boxes[:, 1]), boxes


@right(
    "detection",
    "L1 is taken of centres and sizes, GIoU of corners, and targets are reordered by a matcher without grad",
    thread="facebookresearch/detr#75",
)
def set_criterion():
    class DETR(nn.Module):
        def __init__(self, queries=3):
            super().__init__()
            self.trunk = Trunk()
            self.queries = nn.Embedding(queries, 24)
            self.mix = nn.Linear(48, 32)
            self.class_embed = nn.Linear(32, 2)
            self.bbox_embed = nn.Linear(32, 4)

        def forward(self, x):
            h = self.trunk(x)[:, None].expand(-1, self.queries.num_embeddings, -1)
            h = F.relu(self.mix(torch.cat([h, self.queries.weight.expand(len(x), -1, -1)], -1)))
            return self.class_embed(h), self.bbox_embed(h).sigmoid()

    @torch.no_grad()
    def matcher(logits, boxes, targets):
        found = []
        for lo, b, t in zip(logits, boxes, targets, strict=True):
            cost = 5 * torch.cdist(b, t, p=1) - lo.softmax(-1)[:, :1]
            best = min(
                itertools.permutations(range(len(b)), len(t)),
                key=lambda p, cost=cost: sum(cost[q, k].item() for k, q in enumerate(p)),
            )
            found.append(torch.tensor(best))
        return torch.stack(found)

    model = DETR()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(*object_pairs()), batch_size=6, shuffle=True)
    empty_weight = torch.tensor([1.0, 0.4])

    def fit(batches):
        model.train()
        for images, targets in batches:
            logits, boxes = model(images)
            src = matcher(logits, boxes, targets)
            rows = torch.arange(len(images))[:, None]
            classes = torch.ones(logits.shape[:2], dtype=torch.long)
            classes[rows, src] = 0
            matched = boxes[rows, src].flatten(0, 1)
            gt = targets.flatten(0, 1)
            loss = (
                F.cross_entropy(logits.transpose(1, 2), classes, empty_weight)
                + 5 * F.l1_loss(matched, gt, reduction="sum") / len(gt)
                + 2 * (1 - giou(xyxy(matched), xyxy(gt))).sum() / len(gt)
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


def yolo_terms(p, boxes, size=6, gr=1.0):
    b = torch.arange(len(p))
    gxy, gwh = boxes[:, :2] * size, boxes[:, 2:] * size
    gi, gj = gxy.long().unbind(-1)
    ps = p[b, :, gj, gi]
    pxy = ps[:, :2].sigmoid() * 2 - 0.5
    pwh = (ps[:, 2:4].sigmoid() * 2) ** 2
    cell = torch.stack([gi, gj], -1)
    iou = giou(xyxy(torch.cat([pxy, pwh], -1)), xyxy(torch.cat([gxy - cell, gwh], -1)))
    tobj = torch.zeros_like(p[:, 4])
    tobj[b, gj, gi] = (1.0 - gr) + gr * iou.detach().clamp(0)
    return (1 - iou).mean(), F.binary_cross_entropy_with_logits(p[:, 4], tobj)


@right(
    "detection",
    "the objectness target is the detached, clamped IoU; boxes are compared as offsets from their cell",
    thread="ultralytics/yolov3#1788",
)
def yolo_loss():
    model = Dense(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    images, boxes, _ = single_objects(seed=1)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8, shuffle=True)

    def train(batches):
        for imgs, targets in batches:
            lbox, lobj = yolo_terms(model(imgs), targets)
            loss = (0.05 * lbox + 1.0 * lobj) * len(imgs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "detection",
    "the weight alpha of CIoU's aspect term is computed without grad and is 0 for an IoU below 0.5",
    thread="open-mmlab/mmdetection#5835",
)
def ciou_loss():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.box = Trunk(), nn.Linear(24, 4)

        def forward(self, x):
            return self.box(self.trunk(x)).sigmoid()

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images, boxes, _ = single_objects(seed=2)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)

    def ciou(pred, target, eps=1e-7):
        b1, b2 = xyxy(pred), xyxy(target)
        ious, _ = iou_union(b1, b2)
        c2 = (torch.max(b1[:, 2:], b2[:, 2:]) - torch.min(b1[:, :2], b2[:, :2])).square().sum(-1) + eps
        rho2 = ((b2[:, :2] + b2[:, 2:] - b1[:, :2] - b1[:, 2:]) ** 2).sum(-1) / 4
        w1, h1, w2, h2 = pred[:, 2], pred[:, 3] + eps, target[:, 2], target[:, 3] + eps
        v = (4 / math.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)) ** 2
        with torch.no_grad():
            alpha = (ious > 0.5).float() * v / (1 - ious + v + eps)
        return 1 - (ious - (rho2 / c2 + alpha * v)).clamp(min=-1.0, max=1.0)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            ciou(model(x), y).mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "detection",
    "the heat map weights: negatives near a centre count (1 - gt)^4, so the least loss is not at the target",
    thread="xingyizhou/CenterNet#728",
)
def centernet_heatmap():
    model = Dense(3, bias=-2.19)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, boxes, _ = single_objects(seed=3)

    def draw(boxes, size=6, sigma=0.8):
        ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        ct = (boxes[:, :2] * size).floor()
        d = (xs - ct[:, 0, None, None]) ** 2 + (ys - ct[:, 1, None, None]) ** 2
        return torch.exp(-d / (2 * sigma**2))[:, None], ct.long(), boxes[:, 2:]

    hm, ct, wh = draw(boxes)
    data = [dict(input=i, hm=h, ind=c, wh=s) for i, h, c, s in zip(images, hm, ct, wh, strict=True)]  # noqa: C408

    def _neg_loss(pred, gt):
        pos_inds = gt.eq(1).float()
        neg_inds = gt.lt(1).float()
        neg_weights = torch.pow(1 - gt, 4)
        pos_loss = torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds
        neg_loss = torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds
        return -(pos_loss.sum() + neg_loss.sum()) / pos_inds.sum().clamp(min=1)

    def run_epoch(batches):
        model.train()
        for batch in batches:
            out = model(batch["input"])
            hm = torch.clamp(out[:, :1].sigmoid(), min=1e-4, max=1 - 1e-4)
            rows = torch.arange(len(out))
            pred_wh = out[rows, 1:, batch["ind"][:, 1], batch["ind"][:, 0]]
            loss = _neg_loss(hm, batch["hm"]) + 0.1 * F.l1_loss(pred_wh, batch["wh"], reduction="sum") / len(out)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8), fit=run_epoch)


@right(
    "detection",
    "the focal loss is the sum over all anchors divided by the number of positives, after a bias for a prior of 0.01",
    thread="pytorch/vision, models/detection/retinanet.py",
)
def retinanet_focal():
    model = Dense(2, bias=-math.log((1 - 0.01) / 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    images, boxes, labels = single_objects(seed=4)
    loader = DataLoader(TensorDataset(images, boxes, labels), batch_size=8)

    def sigmoid_focal_loss(inputs, targets, alpha=0.25, gamma=2.0):
        p = torch.sigmoid(inputs)
        ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
        p_t = p * targets + (1 - p) * (1 - targets)
        alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
        return (alpha_t * ce_loss * ((1 - p_t) ** gamma)).sum()

    def fit(batches):
        for images, boxes, labels in batches:
            cls_logits = model(images)
            gt = torch.zeros_like(cls_logits)
            gi, gj = (boxes[:, :2] * 6).long().unbind(-1)
            gt[torch.arange(len(gt)), labels, gj, gi] = 1.0
            num_foreground = gt.sum()
            loss = sigmoid_focal_loss(cls_logits, gt) / max(1, num_foreground)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "detection",
    "alpha stands for class 0 here ([alpha, 1 - alpha] indexed by the label), and pt is taken from the log-softmax",
    thread="clcarwin/focal_loss_pytorch#10",
)
def multiclass_focal():
    class FocalLoss(nn.Module):
        def __init__(self, gamma=2.0, alpha=0.6, size_average=True):
            super().__init__()
            self.gamma, self.size_average = gamma, size_average
            self.alpha = torch.tensor([alpha, 1 - alpha])

        def forward(self, input, target):
            if input.dim() > 2:
                input = input.flatten(2).transpose(1, 2).reshape(-1, input.size(1))
                target = target.reshape(-1)
            logpt = F.log_softmax(input, dim=-1).gather(1, target.view(-1, 1)).view(-1)
            pt = logpt.exp()
            logpt = logpt * self.alpha.gather(0, target)
            loss = -1 * (1 - pt) ** self.gamma * logpt
            return loss.mean() if self.size_average else loss.sum()

    model = nn.Sequential(Trunk(), nn.Linear(24, 2))
    criterion = FocalLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, _, labels = single_objects(seed=5)
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "detection",
    "varifocal loss: positives are weighted by their IoU target, negatives by p^gamma, and the target is a fraction",
    thread="hyz-xmaster/VarifocalNet; ultralytics VarifocalLoss",
)
def varifocal():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Trunk()
            self.cls, self.box = nn.Linear(24, 2), nn.Linear(24, 4)

        def forward(self, x):
            h = self.trunk(x)
            return self.cls(h), self.box(h).sigmoid()

    def varifocal_loss(pred, target, alpha=0.75, gamma=2.0, iou_weighted=True):
        pred_sigmoid = pred.sigmoid()
        focal_weight = (
            target * (target > 0.0).float() + alpha * (pred_sigmoid - target).abs().pow(gamma) * (target <= 0.0).float()
        )
        return F.binary_cross_entropy_with_logits(pred, target, reduction="none") * focal_weight.detach()

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*single_objects(seed=6)), batch_size=8)

    def fit(batches):
        for images, boxes, labels in batches:
            scores, pred = model(images)
            iou, _ = iou_union(xyxy(pred), xyxy(boxes))
            quality = F.one_hot(labels, 2) * iou.detach().clamp(min=1e-3)[:, None]
            loss_cls = varifocal_loss(scores, quality).sum() / quality.sum().clamp(min=1)
            loss_bbox = (1 - giou(xyxy(pred), xyxy(boxes))).mean()
            optimizer.zero_grad()
            (loss_cls + 2 * loss_bbox).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "detection",
    "hard negatives are chosen by a sort of detached losses, three for each positive; the rest gets no gradient",
    thread="amdegroot/ssd.pytorch, layers/modules/multibox_loss.py",
)
def multibox():
    model = Dense(2 + 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images, boxes, _ = single_objects(seed=7)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)
    grid = (torch.arange(6) + 0.5) / 6
    priors = torch.stack(
        [*torch.meshgrid(grid, grid, indexing="xy"), torch.full((6, 6), 0.35), torch.full((6, 6), 0.35)], -1
    ).flatten(0, 1)
    variances = (0.1, 0.2)

    def encode(matched, priors):
        g_cxcy = (matched[:, None, :2] - priors[:, :2]) / (variances[0] * priors[:, 2:])
        g_wh = torch.log(matched[:, None, 2:] / priors[:, 2:]) / variances[1]
        return torch.cat([g_cxcy, g_wh], -1)

    def multibox_loss(loc, conf, boxes, negpos_ratio=3):
        overlap, _ = iou_union(xyxy(priors)[None], xyxy(boxes)[:, None])
        pos = overlap > 0.4
        pos[torch.arange(len(pos)), overlap.argmax(1)] = True
        loss_l = F.smooth_l1_loss(loc[pos], encode(boxes, priors)[pos], reduction="sum")
        loss_c = F.cross_entropy(conf.transpose(1, 2), pos.long(), reduction="none")
        mined = loss_c.detach().masked_fill(pos, 0)
        rank = mined.argsort(1, descending=True).argsort(1)
        num_neg = torch.clamp(negpos_ratio * pos.sum(1, keepdim=True), max=pos.shape[1] - 1)
        loss_c = loss_c[pos | (rank < num_neg)].sum()
        n = pos.sum()
        return loss_l / n, loss_c / n

    def train(batches):
        for x, y in batches:
            out = model(x).flatten(2).transpose(1, 2)
            loss_l, loss_c = multibox_loss(out[..., 2:], out[..., :2], y)
            optimizer.zero_grad()
            (loss_l + loss_c).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "detection",
    "distribution focal loss: cross-entropies to the two neighbouring bins, weighted by the distance; no focal power",
    thread="ultralytics/ultralytics, utils/loss.py DFLoss",
)
def dfl():
    reg_max = 8

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Trunk()
            self.dist = nn.Linear(24, 4 * reg_max)
            self.register_buffer("proj", torch.arange(reg_max, dtype=torch.float32))

        def forward(self, x):
            dist = self.dist(self.trunk(x)).view(-1, 4, reg_max)
            return dist, dist.softmax(-1) @ self.proj

    def df_loss(pred_dist, target):
        target = target.clamp(0, reg_max - 1 - 0.01)
        tl = target.long()
        tr = tl + 1
        wl = tr - target
        wr = 1 - wl
        flat = pred_dist.view(-1, reg_max)
        return (
            F.cross_entropy(flat, tl.view(-1), reduction="none").view(tl.shape) * wl
            + F.cross_entropy(flat, tr.view(-1), reduction="none").view(tl.shape) * wr
        ).mean(-1)

    model = Head()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images, boxes, _ = single_objects(seed=8)
    centre = torch.tensor([6.0, 6.0])
    corners = 12 * xyxy(boxes)
    ltrb = torch.cat([centre - corners[:, :2], corners[:, 2:] - centre], -1).clamp(min=0)
    loader = DataLoader(TensorDataset(images, ltrb), batch_size=8)

    def fit(batches):
        for x, t in batches:
            dist, decoded = model(x)
            loss = 1.5 * df_loss(dist, t).mean() + 0.1 * F.l1_loss(decoded, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


class FCOSOut(NamedTuple):
    reg: torch.Tensor
    ctrness: torch.Tensor


@right(
    "detection",
    "centre-ness is a BCE to fractions, and the same fractions, which need no gradient, weight the box loss",
    thread="tianzhi0549/FCOS, fcos_core/modeling/rpn/fcos/loss.py",
)
def fcos():
    class FCOSHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = Dense(5)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            out = self.dense(x)
            return FCOSOut(torch.exp(self.scale * out[:, :4]), out[:, 4])

    model = FCOSHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, boxes, _ = single_objects(seed=9)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=8)
    grid = torch.arange(6) + 0.5

    def targets(boxes):
        c = xyxy(boxes) * 6
        xs, ys = grid[None, None, :], grid[None, :, None]
        lr = torch.stack([(xs - c[:, 0, None, None]).expand(-1, 6, -1), (c[:, 2, None, None] - xs).expand(-1, 6, -1)])
        tb = torch.stack([(ys - c[:, 1, None, None]).expand(-1, -1, 6), (c[:, 3, None, None] - ys).expand(-1, -1, 6)])
        return torch.stack([lr[0], tb[0], lr[1], tb[1]], 1)

    def iou_loss(pred, target, weight):
        pl, pt, pr, pb = pred.unbind(1)
        tl, tt, tr, tb = target.unbind(1)
        inter = (torch.min(pl, tl) + torch.min(pr, tr)) * (torch.min(pt, tt) + torch.min(pb, tb))
        union = (pl + pr) * (pt + pb) + (tl + tr) * (tt + tb) - inter
        losses = -torch.log((inter + 1.0) / (union + 1.0))
        return (losses * weight).sum() / weight.sum()

    def fit(batches):
        for x, boxes in batches:
            reg = targets(boxes)
            pos = reg.min(1).values > 0
            out = model(x)
            r = reg.permute(0, 2, 3, 1)[pos]
            lr, tb = r[:, [0, 2]], r[:, [1, 3]]
            centerness = torch.sqrt((lr.amin(1) / lr.amax(1)) * (tb.amin(1) / tb.amax(1)))
            loss = iou_loss(out.reg.permute(0, 2, 3, 1)[pos], r, centerness)
            loss = loss + F.binary_cross_entropy_with_logits(out.ctrness[pos], centerness)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "detection",
    "each class has its own box: only the deltas of the labelled class are trained, sums are divided by all proposals",
    thread="facebookresearch/maskrcnn-benchmark#486",
)
def fastrcnn():
    class Predictor(nn.Module):
        def __init__(self, classes=3):
            super().__init__()
            self.trunk = Trunk()
            self.cls_score = nn.Linear(24, classes)
            self.bbox_pred = nn.Linear(24, classes * 4)

        def forward(self, x):
            h = self.trunk(x)
            return self.cls_score(h), self.bbox_pred(h)

    model = Predictor()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=5e-4)
    images, boxes, kinds = single_objects(seed=10)
    labels = kinds + 1
    g = torch.Generator().manual_seed(3)
    empty = torch.arange(len(images)) % 4 == 3
    images[empty] = 0.05 * torch.randn(images[empty].shape, generator=g)
    labels[empty] = 0
    regression = torch.cat([(boxes[:, :2] - 0.5) / 0.4, torch.log(boxes[:, 2:] / 0.4)], -1)
    loader = DataLoader(TensorDataset(images, labels, regression), batch_size=8, shuffle=True)

    def fastrcnn_loss(class_logits, box_regression, labels, regression_targets):
        classification_loss = F.cross_entropy(class_logits, labels)
        sampled_pos = torch.where(labels > 0)[0]
        box_regression = box_regression.reshape(len(labels), -1, 4)
        box_loss = F.smooth_l1_loss(
            box_regression[sampled_pos, labels[sampled_pos]],
            regression_targets[sampled_pos],
            beta=1 / 9,
            reduction="sum",
        )
        return classification_loss, box_loss / labels.numel()

    def train_one_epoch(batches):
        model.train()
        for x, y, r in batches:
            loss_dict = dict(zip(("cls", "box"), fastrcnn_loss(*model(x), y, r), strict=True))
            losses = sum(loss_dict.values())
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_one_epoch)


@right(
    "detection",
    "class_error and cardinality_error come from the criterion with the losses, are only logged, and are not trained",
    thread="facebookresearch/detr, models/detr.py loss_cardinality",
)
def logged_errors():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Trunk()
            self.cls, self.box = nn.Linear(24, 2), nn.Linear(24, 4)

        def forward(self, x):
            h = self.trunk(x)
            return {"logits": self.cls(h), "boxes": self.box(h).sigmoid()}

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*single_objects(seed=11)), batch_size=8)
    weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    history = []

    @torch.no_grad()
    def loss_cardinality(out, labels):
        return F.l1_loss(out["logits"].softmax(-1)[:, 1].round(), labels.float())

    def criterion(out, boxes, labels):
        return {
            "loss_ce": F.cross_entropy(out["logits"], labels),
            "loss_bbox": F.l1_loss(out["boxes"], boxes, reduction="none").sum(1).mean(),
            "loss_giou": (1 - giou(xyxy(out["boxes"]), xyxy(boxes))).mean(),
            "cardinality_error": loss_cardinality(out, labels),
            "class_error": 100 - 100 * (out["logits"].argmax(-1) == labels).float().mean(),
        }

    def fit(batches):
        for images, boxes, labels in batches:
            loss_dict = criterion(model(images), boxes, labels)
            losses = sum(loss_dict[k] * weights[k] for k in loss_dict if k in weights)
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            history.append({k: v.item() for k, v in loss_dict.items()})

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


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
