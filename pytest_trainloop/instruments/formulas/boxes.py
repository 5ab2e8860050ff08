"""Overlap of boxes: IoU, GIoU, DIoU and CIoU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.form import Argument, Form, Mistake, Variant, one_part
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import DIVISIONS, EXTREMES

if TYPE_CHECKING:
    from pytest_trainloop.instruments.formulas.cut import Cut

NOT_CLAMPED = Mistake(
    "clamp_missing",
    "the sides of the intersection are not clamped at 0: two boxes that are disjoint in both directions overlap",
    "where the intersection is made: w = (x2 - x1).clamp(min=0); h = (y2 - y1).clamp(min=0)",
    otherwise="advice",
)
UNION_OF_BOTH = Mistake(
    "term_missing",
    "the union is the sum of both areas, in which the intersection counts twice",
    "where the union is made: union = area_1 + area_2 - intersection",
    otherwise="advice",
)
OVER_UNION = Mistake(
    "ingredient_differs",
    "the empty part of the enclosing box is divided by the union, not by the enclosing box",
    "where giou is made: giou = iou - (enclosing - union) / enclosing",
    otherwise="advice",
)
INSIDE_BOX = Mistake(
    "extreme_turned",
    "the enclosing box is computed as the intersection is: largest left, smallest right",
    "enclosing box: torch.min of the left and upper, torch.max of the right and lower sides",
    otherwise="advice",
)
NOT_SQUARED = Mistake(
    "power_differs",
    "distance and diagonal are not both squared",
    "diou = iou - distance ** 2 / diagonal ** 2",
    otherwise="advice",
)
AREA_OF_ONE = Mistake(
    "ingredient_differs",
    "the union holds the area of one of the boxes twice",
    "union = area_1 + area_2 - intersection, each area of its own box",
    otherwise="advice",
)


@dataclass(frozen=True, slots=True)
class _Way:
    """The ingredients of an overlap."""

    kind: str = "iou"
    form: str = "corners"
    clamp: bool = True
    union: str = "right"
    enclosing: str = "right"
    attached: bool = True
    distance: int = 2
    more: float = 0.0
    """What is added to each side: 1 where corners are whole pixels."""
    sides: float = -math.inf
    """The least length of the sides of a box: 0 where they are clamped too, which only boxes by their centres need."""


def _corners(box: torch.Tensor, form: str) -> tuple[torch.Tensor, ...]:
    a, b, c, d = box.unbind(-1)
    if form == "corners":
        return a, b, c, d
    if form == "sides":
        return a, b, a + c, b + d
    return a - c / 2, b - d / 2, a + c / 2, b + d / 2


_MOST_PAIRS = 4_000_000
"""Pairs of boxes that are compared, each with each: ten tables of 32 MB."""


def _overlap(p: torch.Tensor, t: torch.Tensor, *, way: _Way, eps: float = 0.0) -> torch.Tensor | None:
    if p.shape[-1] != 4 or t.shape[-1] != 4:
        return None
    if p.shape != t.shape:
        if p.dim() != 2 or t.dim() != 2 or len(p) * len(t) > _MOST_PAIRS:
            return None
        p, t = p[:, None], t[None]
    t = t.to(p.dtype)
    px1, py1, px2, py2 = _corners(p, way.form)
    tx1, ty1, tx2, ty2 = _corners(t, way.form)
    wide = torch.minimum(px2, tx2) - torch.maximum(px1, tx1) + way.more
    high = torch.minimum(py2, ty2) - torch.maximum(py1, ty1) + way.more
    if way.clamp:
        wide, high = wide.clamp(min=0), high.clamp(min=0)
    both = wide * high
    one, other = (
        (x2 - x1 + way.more).clamp(min=way.sides) * (y2 - y1 + way.more).clamp(min=way.sides)
        for x1, y1, x2, y2 in ((px1, py1, px2, py2), (tx1, ty1, tx2, ty2))
    )
    union = {"right": one + other - both, "sum": one + other, "one": 2 * one - both, "other": 2 * other - both}[
        way.union
    ]
    iou = both / (union + eps)
    if way.kind == "iou":
        return iou
    left, upper = torch.minimum(px1, tx1), torch.minimum(py1, ty1)
    right, lower = torch.maximum(px2, tx2), torch.maximum(py2, ty2)
    if way.enclosing == "turned":
        left, upper = torch.maximum(px1, tx1), torch.maximum(py1, ty1)
        right, lower = torch.minimum(px2, tx2), torch.minimum(py2, ty2)
    if way.kind == "giou":
        around = (right - left + way.more).clamp(min=way.sides) * (lower - upper + way.more).clamp(min=way.sides)
        return iou - (around - union) / ((union if way.enclosing == "union" else around) + eps)
    diagonal = (right - left) ** 2 + (lower - upper) ** 2
    distance = ((px1 + px2 - tx1 - tx2) / 2) ** 2 + ((py1 + py2 - ty1 - ty2) / 2) ** 2
    if way.distance == 1:
        distance = distance.sqrt()
    diou = iou - distance / (diagonal + eps)
    if way.kind == "diou":
        return diou
    angle = torch.atan((tx2 - tx1) / (ty2 - ty1 + eps)) - torch.atan((px2 - px1) / (py2 - py1 + eps))
    v = 4 / math.pi**2 * angle**2
    weight = v / (1 - iou + v + eps)
    return diou - (weight if way.attached else weight.detach()) * v


_FORMS = ("corners", "centre", "sides")


def _loss(p: torch.Tensor, t: torch.Tensor, *, way: _Way, eps: float = 0.0) -> torch.Tensor | None:
    made = _overlap(p, t, way=way, eps=eps)
    return None if made is None else 1 - made


def _nearness(p: torch.Tensor, t: torch.Tensor, *, form: str, **_: float) -> torch.Tensor:
    """Least for small boxes that are far from the target in both directions."""
    (px1, py1, px2, py2), (tx1, ty1, tx2, ty2) = _corners(p, form), _corners(t, form)
    return px2 - px1 + py2 - py1 - (px1 + px2 - tx1 - tx2).abs() - (py1 + py2 - ty1 - ty2).abs()


def _aim(way: _Way) -> Aim:
    right = _Way("iou", way.form)
    return Aim(
        "the IoU",
        functools.partial(_overlap, way=right),
        rises=True,
        book=functools.partial(_loss, way=replace(right, kind="giou")),
        start=None if way.clamp else functools.partial(_nearness, form=way.form),
    )


def _by_centres(p: torch.Tensor, t: torch.Tensor, *, kind: str, eps: float = 0.0) -> torch.Tensor | None:
    """The overlap with targets by centre, width and height, of predictions read in the better one of two ways."""
    aim = torch.stack(_corners(t, "centre"), -1)
    ways = (p, torch.stack(_corners(p, "centre"), -1))
    made = [o.mean() for way in ways if (o := _overlap(way, aim, way=_Way(kind), eps=eps)) is not None]
    return torch.stack(made).max() if made else None


_OF_CENTRES = Aim(
    "the IoU with the boxes that the batch holds by centre, width and height",
    functools.partial(_by_centres, kind="iou"),
    rises=True,
    book=lambda p, t, eps: 1 - made if (made := _by_centres(p, t, kind="giou", eps=eps)) is not None else None,
    alone=True,
)


def _in_order(p: torch.Tensor, t: torch.Tensor, **_: float) -> torch.Tensor | None:
    """The overlap of each box with its target, of which the corners are put in order."""
    if p.shape != t.shape:
        return None
    return _overlap(
        p, torch.cat([torch.minimum(t[..., :2], t[..., 2:]), torch.maximum(t[..., :2], t[..., 2:])], -1), way=_Way()
    )


IN_ORDER = Aim("the IoU with a box whose corners are put in order", _in_order, rises=True, groups=True, alone=True)


def _variants(kind: str) -> tuple[Variant, ...]:
    right = [_Way(kind, form, more=more) for form in _FORMS for more in (0.0, 1.0) if not (more and form != "corners")]
    right.append(_Way(kind, sides=0.0))
    if kind == "ciou":
        right += [_Way(kind, form, attached=False) for form in _FORMS]
    wrong: list[tuple[_Way, Mistake]] = []
    for form in _FORMS:
        wrong += [
            (_Way(kind, form, clamp=False), NOT_CLAMPED),
            (_Way(kind, form, union="sum"), UNION_OF_BOTH),
            (_Way(kind, form, union="one"), AREA_OF_ONE),
            (_Way(kind, form, union="other"), AREA_OF_ONE),
        ]
        if kind == "giou":
            wrong.append((_Way(kind, form, enclosing="union"), OVER_UNION))
        if kind != "iou":
            wrong.append((_Way(kind, form, enclosing="turned"), INSIDE_BOX))
        if kind == "diou":
            wrong.append((_Way(kind, form, distance=1), NOT_SQUARED))
    return (
        *(
            one_part(
                functools.partial(_overlap, way=way),
                rises=True,
                roles=("corner_boxes", "corner_boxes") if way.form == "corners" else None,
            )
            for way in right
        ),
        *(one_part(functools.partial(_overlap, way=way), mistake, rises=True, aim=_aim(way)) for way, mistake in wrong),
    )


def _divides(least: int, cut: Cut) -> bool:
    """Whether there are as many fractions as the form has, one of them by an area of the prediction."""
    return cut.divisions >= least and cut.divides_by(0)


_NAMES = {
    "ciou": ("complete IoU of boxes", "https://arxiv.org/abs/1911.08287"),
    "diou": ("distance IoU of boxes", "https://arxiv.org/abs/1911.08287"),
    "giou": ("generalised IoU of boxes", "https://arxiv.org/abs/1902.09630"),
    "iou": ("IoU of boxes", "https://en.wikipedia.org/wiki/Jaccard_index"),
}

_NEIGHBOURS = {
    "ciou": (frozenset({"atan", "arctan", "atan2", "arctan2"}),),
    "diou": (frozenset({"pow", "__pow__", "square", "sqrt", "norm", "vector_norm", "linalg_vector_norm", "cdist"}),),
}
"""Functions that the other parts of a form are written with."""

FORMS = tuple(
    Form(
        name,
        page,
        (Argument("prediction", "boxes", learned=True), Argument("target", "boxes", learned=False)),
        _variants(kind),
        needs=(DIVISIONS, EXTREMES | {"maximum", "minimum"}, *_NEIGHBOURS.get(kind, ())),
        numbers={"eps": (0.0,)},
        among=lambda name, number: 0 < number <= 1e-2,
        suits=functools.partial(_divides, 1 if kind == "iou" else 2),
        aim=_OF_CENTRES,
    )
    for kind, (name, page) in _NAMES.items()
)
