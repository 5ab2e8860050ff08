"""Overlap of two masks: Dice, Jaccard, Tversky. Each is a fraction of sums over products, predictions and targets."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.form import (
    Argument,
    Basis,
    Coefficients,
    Form,
    Mistake,
    Reading,
    Variant,
    same,
)
from pytest_trainloop.instruments.formulas.roles import unflattened
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import DIVISIONS, MULTIPLICATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.instruments.formulas.cut import Cut

_PRODUCTS = MULTIPLICATIONS | {"matmul", "einsum", "dot", "bmm", "mm", "logical_and", "__and__", "minimum", "tensordot"}

FACTOR_MISSING = Mistake(
    "factor_missing",
    "the overlap of a perfect prediction with its target is {perfect:.3g}, not 1",
    "dice = 2 * (p * t).sum() / (p.sum() + t.sum()); or jaccard = i / (p.sum() + t.sum() - i) with i = (p * t).sum()",
    at=MULTIPLICATIONS,
    shown_by="in the limit without smoothing the fraction is {perfect:.3g} where prediction and target are equal masks",
    level="advice",
)


FACTOR_OF_DICE = Mistake(
    "ingredient_differs",
    "twice the intersection is divided by the union: 2 for equal masks, where its smoothing makes two empty masks 1",
    "jaccard = i / (p.sum() + t.sum() - i) with i = (p * t).sum(); or dice = 2 * i / (p.sum() + t.sum())",
    shown_by="the fraction fitted to the value: with the factor 2 for the intersection, and not for the smoothing, "
    "over the areas less one intersection",
    level="advice",
)


def _sums(p: torch.Tensor, t: torch.Tensor, *, power: int, axes: tuple[int, ...]) -> Mapping[str, torch.Tensor]:
    """Of products, predictions and targets."""
    return {"both": (p * t).sum(axes), "prediction": (p**power).sum(axes), "target": (t**power).sum(axes)}


def _overlap(p: torch.Tensor, t: torch.Tensor, *, power: int, kept: int) -> Mapping[str, torch.Tensor] | None:
    """Sums over all axes but the first ``kept`` ones."""
    if p.numel() != t.numel() or kept >= p.dim():
        return None
    return _sums(p, t.to(p.dtype).reshape(p.shape), power=power, axes=tuple(range(kept, p.dim())))


def _by_class(p: torch.Tensor, t: torch.Tensor, *, power: int) -> Mapping[str, torch.Tensor] | None:
    """The same with one entry for each class, on axis 1, over the whole batch."""
    if p.shape != t.shape or p.dim() < 2:
        return None
    return _sums(p, t.to(p.dtype), power=power, axes=(0, *range(2, p.dim())))


def _read(found: Coefficients) -> Reading | None:
    """What the fraction is for equal masks, and for masks that share nothing."""

    def limit(both: float, alone: float) -> float:
        above = found["both"] * both + found["prediction"] * alone + found["target"] * alone
        below = found["/both"] * both + found["/prediction"] * alone + found["/target"] * alone
        return above / below if below else float("nan")

    perfect, disjoint = limit(1, 1), limit(0, 1)
    if not (found["/prediction"] and found["/target"] and (found["both"] or found["/both"])):
        return None
    best, worst = (perfect, disjoint) if perfect > disjoint else (disjoint, perfect)
    direction = -1 if perfect > disjoint else 1
    numbers = {"perfect": perfect if direction < 0 else 1 - perfect}
    if perfect == disjoint:
        return None
    numbers["union"] = float(same(found["/both"], -found["/prediction"]) and same(found["/both"], -found["/target"]))
    if _near(best - worst, 1.0):
        return Reading(direction)
    if _near(best - worst, 0.5) and same(found["/prediction"], found["/target"]):
        return Reading(direction, FACTOR_MISSING, numbers)
    return Reading(direction, numbers=numbers)


def _look(cut: Cut, reading: Reading) -> Reading:
    """Whether the intersection counts twice above the union. A loss that is multiplied by 2 has its smoothing twice as
    well: of two empty masks it is what it is of equal ones, not halfway to masks that share nothing."""
    if reading.mistake is not None or not reading.numbers.get("union"):
        return reading
    target = (cut.recorded[1] > 0.5).double()
    ones, zeros = torch.ones_like(target), torch.zeros_like(target)
    shape = cut.recorded[0].shape
    values = []
    for p, t in ((ones, ones), (zeros, zeros), (1 - target, target)):
        given = {cut.arguments[0]: p.reshape(shape), cut.arguments[1]: t.to(cut.recorded[1].dtype)}
        values.append(float(cut.slice.replay(given, [cut.number])[0].mean()))
    equal, empty, disjoint = values
    halfway = abs((empty - disjoint) / (equal - disjoint) - 0.5) <= 1e-3 if equal != disjoint else False
    return replace(reading, mistake=FACTOR_OF_DICE) if halfway else reading


def _mean(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.mean()


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6


_WAYS = tuple(functools.partial(_overlap, power=power, kept=kept) for power in (1, 2) for kept in (0, 1, 2))
_CLASSES = tuple(functools.partial(_by_class, power=power) for power in (1, 2))

PIXEL_BY_PIXEL = Mistake(
    "wrong_axes",
    "sums run over the batch, with one overlap for each pixel",
    "sum over the pixels of each image: p.flatten(1), then sum(1)",
    level="advice",
)


def _over_batch(p: torch.Tensor, t: torch.Tensor, *, power: int) -> Mapping[str, torch.Tensor] | None:
    return _sums(p, t.to(p.dtype), power=power, axes=(0,)) if p.shape == t.shape and p.dim() == 2 else None


def _of_images(cut: Cut) -> bool:
    """Whether the columns are the pixels of images: of (rows, features) each column may be a class."""
    flat, images = cut.recorded[0], unflattened(cut.slice, cut.arguments[0])
    merged = sum(size > 1 for size in images.shape[1:]) > 1
    return flat.dim() == 2 and merged and len(images) == len(flat)


def _read_pixels(found: Coefficients) -> Reading | None:
    reading = _read(found)
    return None if reading is None else Reading(reading.direction, PIXEL_BY_PIXEL)


def _distance(p: torch.Tensor, t: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor | None:
    t = t.to(p.dtype)
    if p.numel() != t.numel():
        return None
    far = (p - t.reshape(p.shape)).abs()
    return far if mask is None else far[mask.reshape(p.shape).bool()]


OVERLAP = Form(
    "the overlap of two masks (Dice, Jaccard, Tversky)",
    "https://arxiv.org/abs/1606.04797",
    (Argument("prediction", "probabilities", learned=True), Argument("target", "labels", learned=False)),
    (
        *(Variant(way, _read, fraction=True, look=_look) for way in _WAYS),
        *(Variant(way, _read, fraction=True, suits=lambda cut: not _of_images(cut), look=_look) for way in _CLASSES),
        *(
            Variant(
                functools.partial(_over_batch, power=power),
                _read_pixels,
                PIXEL_BY_PIXEL,
                fraction=True,
                suits=_of_images,
            )
            for power in (1, 2)
        ),
    ),
    needs=(DIVISIONS, _PRODUCTS, frozenset({"sum", "mean", "einsum", "dot", "matmul", "tensordot"})),
    suits=lambda cut: cut.divides_by(0),
    on_unit=True,
    aim=Aim("the distance between prediction and target", lambda p, t: _mean(_distance(p, t)), best=0.0),
)


def _masked(way: Basis, p: torch.Tensor, t: torch.Tensor, mask: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
    if mask.shape != p.shape or t.shape != p.shape:
        return None
    mask = mask.to(p.dtype)
    return way(p * mask, t.to(p.dtype) * mask)


MASKED = replace(
    OVERLAP,
    name="the overlap of two masks where a third one lets count",
    arguments=(*OVERLAP.arguments, Argument("mask", "labels", learned=False)),
    aim=Aim("the distance between prediction and target", lambda p, t, m: _mean(_distance(p, t, m)), best=0.0),
    variants=tuple(Variant(functools.partial(_masked, way), _read, fraction=True) for way in (*_WAYS, *_CLASSES)),
)

FORMS = (OVERLAP, MASKED)
