"""A value written as a sum of a form's parts, or as a fraction of two such sums: coefficients by least squares.

A fit counts where it holds to half of the digits of float64 at all settings of the arguments, with more equations than
coefficients, where the coefficients are determined, and where the gradients agree as well.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.instruments.formulas.cut import close, slope
from pytest_trainloop.instruments.losses.calls import HALF_THE_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.instruments.formulas.cut import Cut
    from pytest_trainloop.instruments.formulas.form import Form, Variant

MOST_NUMBERS = 36
"""Settings of a form's free numbers that are tried."""


def fits(form: Form, variant: Variant, cut: Cut) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """The coefficients of a variant that agree with the value, each with the free numbers they belong to."""
    for numbers in _settings(form, cut):
        found = _fraction(variant, cut, numbers) if variant.fraction else _sum(variant, cut, numbers)
        if found is not None:
            yield found, numbers


def _settings(form: Form, cut: Cut) -> Iterator[dict[str, float]]:
    choices = [
        tuple(dict.fromkeys((*first, *(n for n in cut.numbers if form.among(name, n)))))
        for name, first in form.numbers.items()
    ]
    for chosen in itertools.islice(itertools.product(*choices), MOST_NUMBERS):
        yield dict(zip(form.numbers, chosen, strict=True))


def _parts(variant: Variant, cut: Cut, index: int, numbers: Mapping[str, float]) -> dict[str, torch.Tensor] | None:
    """The parts of a form at one setting, in the shape of the value."""
    value = cut.at(index)
    key = id(variant), tuple(numbers.values()), index
    if value is None:
        return None
    if key not in cut.given.parts:
        try:
            cut.given.parts[key] = variant.basis(*cut.given.at(index), **numbers)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # arguments of other shapes than the form's
            reraise_raised(error)
            cut.given.parts[key] = None
    parts = cut.given.parts[key]
    if parts is None:
        return None
    shaped = {name: _reduced(part, value) for name, part in parts.items()}
    return None if any(p is None for p in shaped.values()) else {n: p for n, p in shaped.items() if p is not None}


def _equations(
    variant: Variant, cut: Cut, numbers: Mapping[str, float]
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """The parts and the value at each setting, flat and without gradients; it ends early where shapes do not fit."""
    for index in range(cut.count):
        value = cut.at(index)
        if value is None:
            continue
        parts = _parts(variant, cut, index, numbers)
        if parts is None:
            return
        flat = value.detach().double().flatten()
        yield {n: p.detach().flatten() for n, p in parts.items()} | {"1": torch.ones_like(flat)}, flat


def _reduced(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """A part in the shape of the value: as it is, or its mean over all entries, or over trailing or leading axes."""
    part = part.to(torch.float64) if part.dtype is not torch.float64 else part
    if part.shape == value.shape:
        return part
    if part.numel() == value.numel():
        return part.reshape(value.shape)
    if value.numel() == 1:
        return part.mean().reshape(value.shape)
    kept = value.squeeze()
    if kept.dim() < part.dim() and part.shape[: kept.dim()] == kept.shape:
        return part.flatten(kept.dim()).mean(-1).reshape(value.shape)
    if kept.dim() < part.dim() and part.shape[-kept.dim() :] == kept.shape:
        return part.flatten(0, -1 - kept.dim()).mean(0).reshape(value.shape)
    return None


EARLY = 256
"""Equations of the first look, which rejects most forms."""


def _sum(variant: Variant, cut: Cut, numbers: Mapping[str, float]) -> dict[str, float] | None:
    names: list[str] = []
    rows, values = [], []
    looked = False
    for parts, value in _equations(variant, cut, numbers):
        names = list(parts)
        rows.append(torch.stack(list(parts.values()), 1))
        values.append(value)
        count = sum(map(len, values))
        if not looked and count >= len(names) + 2:
            looked = True
            step = -(-count // EARLY)
            if not _agrees(torch.cat(rows)[::step], torch.cat(values)[::step]):
                return None
    if len(values) < 2:
        return None
    solved = _solved(cut, torch.cat(rows), torch.cat(values))
    if solved is None:
        return None
    found = dict(zip(names, solved.tolist(), strict=True))
    return found if _same_slope(variant, cut, numbers, found) else None


def _agrees(matrix: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether some coefficients give the right side, determined or not."""
    finite = matrix.isfinite().all(1) & right.isfinite()
    matrix, right = matrix[finite], right[finite]
    if not len(right):
        return True
    sizes = matrix.abs().amax(0).clamp(min=1e-300)
    scaled = matrix / sizes
    if matrix.shape[1] == 2:  # a form and a constant: by far the most common
        form = scaled[:, 0]
        far = form - form.mean()
        if not bool((far != 0).any()):
            return True
        factor = (far * right).sum() / (far * far).sum()
        made = factor * form
        made = made + (right - made).mean()
        return close(made, right, 10 * float((made.abs() + factor.abs()).max()))
    solved = torch.linalg.lstsq(scaled, right.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return close(scaled @ solved, right, 10 * float((scaled.abs() @ solved.abs()).max()))


def _solved(cut: Cut, matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The coefficients with which the columns give the right side to rounding; small ones are 0."""
    finite = matrix.isfinite().all(1) & right.isfinite()
    matrix, right = matrix[finite], right[finite]
    if len(right) < matrix.shape[1] + 2 or float(right.max() - right.min()) == 0:
        cut.undetermined = True
        return None
    sizes = matrix.abs().amax(0)
    used = sizes > 0
    scaled = matrix[:, used] / sizes[used]
    u, s, vh = torch.linalg.svd(scaled, full_matrices=False)
    if float(s[-1]) <= 1e-7 * float(s[0]):
        cut.undetermined = True
        return None  # two parts are one at these settings
    solved = vh.T @ ((u.T @ right) / s)
    if not close(scaled @ solved, right, float((scaled.abs() @ solved.abs()).max())):
        return None
    solved = torch.where(solved.abs() <= 1e-7 * solved.abs().max(), 0.0, solved)
    out = sizes.new_zeros(matrix.shape[1], dtype=torch.float64)
    out[used] = solved / sizes[used]
    return out


def _same_slope(variant: Variant, cut: Cut, numbers: Mapping[str, float], found: Mapping[str, float]) -> bool:
    """Whether gradients agree too, at the setting of the run and at another one."""
    for index in (0, 1):
        value, mine = cut.at(index), cut.slope(index)
        if value is None or mine is None:
            continue
        parts = _parts(variant, cut, index, numbers)
        if parts is None:
            return False
        made = torch.stack([found[name] * part for name, part in parts.items()]).sum(0)
        theirs = slope(made, cut.given.at(index))
        if theirs is None or not close(mine, theirs, float(mine.abs().nan_to_num(0, 0, 0).max())):
            return False
    return True


def _fraction(variant: Variant, cut: Cut, numbers: Mapping[str, float]) -> dict[str, float] | None:
    """Coefficients above and below the bar: value x (sum below) = (sum above), determined up to a common factor."""
    columns: dict[str, list[torch.Tensor]] = {}
    looked, count = False, 0
    for parts, value in _equations(variant, cut, numbers):
        for name, entries in parts.items():
            columns.setdefault(name, []).append(entries)
            columns.setdefault(f"/{name}", []).append(-value * entries)
        count += len(value)
        if not looked and count >= len(columns) + 2:
            looked = True
            if not _dependent(torch.stack([torch.cat(c) for c in columns.values()], 1)[:: -(-count // EARLY)]):
                return None
    matrix = torch.stack([torch.cat(c) for c in columns.values()], 1) if columns else torch.zeros(0, 1)
    matrix = matrix[matrix.isfinite().all(1)]
    if len(matrix) < matrix.shape[1] + 2:
        cut.undetermined = True
        return None
    sizes = matrix.abs().amax(0)
    used = sizes > 0
    if int(used.sum()) < 3:
        cut.undetermined = True
        return None
    scaled = matrix[:, used] / sizes[used]
    _, s, vh = torch.linalg.svd(scaled, full_matrices=False)
    if float(s[-1]) > HALF_THE_DIGITS * float(s[0]):
        return None
    if float(s[-2]) <= 1e-7 * float(s[0]):
        cut.undetermined = True
        return None
    solved = sizes.new_zeros(matrix.shape[1], dtype=torch.float64)
    direction = torch.where(vh[-1].abs() <= 1e-7 * vh[-1].abs().max(), 0.0, vh[-1])
    solved[used] = direction / sizes[used]
    return dict(zip(columns, solved.tolist(), strict=True))


def _dependent(matrix: torch.Tensor) -> bool:
    """Whether the columns may be dependent: a bound far above that of the fit, as fewer rows are seen."""
    matrix = matrix[matrix.isfinite().all(1)]
    sizes = matrix.abs().amax(0) if len(matrix) else matrix.new_zeros(matrix.shape[1])
    if len(matrix) < matrix.shape[1] or not bool((sizes > 0).all()):
        return True
    s = torch.linalg.svdvals(matrix / sizes)
    return bool(s[-1] <= 1e4 * HALF_THE_DIGITS * s[0])
