"""Overlap of boxes written by hand."""

from __future__ import annotations

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair


class Boxes(nn.Module):
    """A box by its corners, or by centre, width and height, for each row of features."""

    def __init__(self, corners):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.corners = corners

    def forward(self, x):
        out = self.head(self.body(x).relu()).sigmoid()
        centre, size = out[:, :2], 0.1 + out[:, 2:]
        return torch.cat([centre - size / 2, centre + size / 2], 1) if self.corners else torch.cat([centre, size], 1)


def detector(loss_of, by_centre=False, corners=True, changed=lambda boxes: boxes):
    def make():
        features = torch.randn(8, 6)
        centre = 0.3 + 0.4 * torch.sigmoid(features[:, :2])
        size = 0.15 + 0.3 * torch.sigmoid(features[:, 2:4])
        boxes = torch.cat([centre, size] if by_centre else [centre - size / 2, centre + size / 2], 1)
        model = Boxes(corners)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, target in batches:
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(features, changed(boxes)), fit=fit)

    return make


def areas(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def intersection(p, t, clamp=True):
    sides = torch.min(p[:, 2:], t[:, 2:]) - torch.max(p[:, :2], t[:, :2])
    sides = sides.clamp(min=0) if clamp else sides
    return sides[:, 0] * sides[:, 1]


def enclosing(p, t):
    sides = torch.max(p[:, 2:], t[:, 2:]) - torch.min(p[:, :2], t[:, :2])
    return sides[:, 0] * sides[:, 1]


def iou_loss(p, t, clamp=True):
    both = intersection(p, t, clamp)
    return 1 - (both / (areas(p) + areas(t) - both + 1e-7)).mean()


def giou_loss(p, t, over=enclosing):
    both = intersection(p, t)
    union = areas(p) + areas(t) - both
    around = enclosing(p, t)
    giou = both / union - (around - union) / (union if over is None else around)
    return (1 - giou).mean()


def corners_of(boxes):
    centre, size = boxes[:, :2], boxes[:, 2:]
    return torch.cat([centre - size / 2, centre + size / 2], 1)


pair(
    "centre_boxes_read_as_corners",
    "loss_formula",
    "box_format",
    quick=True,
    faulty=detector(lambda p, t: giou_loss(p, t), by_centre=True),
    fixed=detector(lambda p, t: giou_loss(p, corners_of(t)), by_centre=True),
)


def flipped(order):
    """Every other box by a horizontal flip, whose sides come in the order that is given."""

    def changed(boxes):
        boxes[::2, [0, 2]] = 1 - boxes[::2, order]
        return boxes

    return changed


pair(
    "flipped_boxes_run_backwards",
    "loss_formula",
    "box_format",
    faulty=detector(giou_loss, changed=flipped([0, 2])),
    fixed=detector(giou_loss, changed=flipped([2, 0])),
)


def detection_loss(p, t, convert):
    """As in DETR: the distance of centres and sizes trains the boxes too."""
    corners, others = convert(p), convert(t)
    one, other = ((b[:, 2:] - b[:, :2]).clamp(min=0).prod(1) for b in (corners, others))
    both = (torch.min(corners[:, 2:], others[:, 2:]) - torch.max(corners[:, :2], others[:, :2])).clamp(min=0).prod(1)
    around = (torch.max(corners[:, 2:], others[:, 2:]) - torch.min(corners[:, :2], others[:, :2])).clamp(min=0).prod(1)
    union = one + other - both
    giou = both / (union + 1e-7) - (around - union) / (around + 1e-7)
    return 5.0 * (p - t).abs().mean() + 2.0 * (1 - giou).mean()


pair(
    "centre_boxes_beside_a_distance_that_trains_them",
    "loss_formula",
    "box_format",
    where="return 5.0 * (p - t).abs().mean() + 2.0 * (1 - giou).mean()",
    faulty=detector(lambda p, t: detection_loss(p, t, lambda boxes: boxes), by_centre=True, corners=False),
    fixed=detector(lambda p, t: detection_loss(p, t, corners_of), by_centre=True, corners=False),
)
pair(
    "sides_of_the_intersection_not_clamped",
    "loss_formula",
    "clamp_missing",
    quick=True,
    faulty=detector(lambda p, t: iou_loss(p, t, clamp=False)),
    fixed=detector(iou_loss),
)
pair(
    "empty_part_divided_by_the_union",
    "loss_formula",
    "ingredient_differs",
    level="advice",
    where="return (1 - giou).mean()",
    faulty=detector(lambda p, t: giou_loss(p, t, over=None)),
    fixed=detector(giou_loss),
)


def union_of_both(p, t):
    return 1 - (intersection(p, t) / (areas(p) + areas(t))).mean()


pair(
    "intersection_counted_twice_in_the_union",
    "loss_formula",
    "term_missing",
    level="advice",
    where="return 1 - (intersection(p, t) / (areas(p) + areas(t))).mean()",
    faulty=detector(union_of_both),
    fixed=detector(iou_loss),
)
