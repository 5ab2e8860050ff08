"""One order of the sources for all rows: the minimum over permutations of a mean over rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.formulas.cut import close
from pytest_trainloop.recording.torch_names import EXTREMES, JOINS, VIEWS
from pytest_trainloop.tracing.loss_slice import CannotReplay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.tracing.loss_slice import Call, Slice

_CHOICES = EXTREMES | frozenset({"minimum", "maximum"})

MOST_SOURCES = 4
"""Sources whose permutations are tried."""


def chosen_together(found: Slice) -> Iterator[tuple[Call, list[int], int]]:
    """Minima (or maxima) over costs of permuted outputs, each a mean over rows, where some rows alone choose another
    one: with these rows, and the number of all rows."""
    needed = found.ancestors(found.root)
    for call in found.calls:
        if call.name not in _CHOICES or not needed.intersection(call.outputs):
            continue
        costs = _scalars(found, call)
        if not 2 <= len(costs) <= 24 or not all(found.values[n].requires_grad for n in costs):
            continue
        largest = call.name in {"max", "amax", "maximum"}
        for outputs, targets in _sides(found, costs):
            rows = _differing(found, costs, outputs, targets, largest=largest)
            if rows:
                yield call, rows, found.values[outputs].tensor.shape[0]
                break


def _scalars(found: Slice, call: Call) -> list[int]:
    """The scalars of which a call takes one: its arguments, or those that it was given stacked."""
    inputs = list(call.inputs)
    while len(inputs) == 1 and (made := found.call_of(inputs[0])) is not None:
        if made.name in JOINS:
            inputs = list(made.inputs)
            break
        if made.name not in VIEWS or len(made.inputs) != 1:
            return []
        inputs = list(made.inputs)
    return inputs if all(found.values[n].tensor.numel() == 1 for n in inputs) else []


def _sides(found: Slice, costs: list[int]) -> Iterator[tuple[int, int]]:
    """Outputs and targets that all costs are computed from, with as many rows: the first from which no other learned
    value, and none of the batch, leads past them."""
    common = frozenset.intersection(*(found.ancestors(n) for n in costs))
    wide = [n for n in common if found.values[n].tensor.dim() > 1 and found.values[n].tensor.shape[0] > 1]
    learned = [n for n in wide if found.values[n].requires_grad][:4]
    data = [n for n in wide if not found.values[n].requires_grad and found.from_batch(n)][:4]
    for one, other in itertools.product(learned, data):
        if found.values[one].tensor.shape[0] == found.values[other].tensor.shape[0]:
            yield one, other


def _differing(found: Slice, costs: list[int], outputs: int, targets: int, *, largest: bool) -> list[int]:
    """The rows that alone choose another permutation than all rows together."""
    mine, theirs = found.values[outputs].tensor, found.values[targets].tensor
    whole = torch.stack([found.values[n].tensor.double().reshape(()) for n in costs])
    try:
        alone = torch.stack([
            _of(found, costs, {outputs: mine[r : r + 1], targets: theirs[r : r + 1]}) for r in range(len(mine))
        ])  # fmt: skip
        if not close(alone.mean(0), whole, float(alone.abs().max())) or not _permuted(found, costs, outputs, whole):
            return []
    except CannotReplay:
        return []
    sign = -1.0 if largest else 1.0
    best = int((sign * whole).argmin())
    margin = 1e-6 * float(alone.abs().max())
    better = (sign * alone[:, best : best + 1] - sign * alone).amax(1) > margin
    return better.nonzero().flatten().tolist()


def _of(found: Slice, costs: list[int], given: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([made.detach().double().reshape(()) for made in found.replay(given, costs)])


def _permuted(found: Slice, costs: list[int], outputs: int, whole: torch.Tensor) -> bool:
    """Whether each cost is the first one with the outputs permuted along an axis other than that of rows."""
    mine = found.values[outputs].tensor
    size = float(whole.abs().max())
    for axis in range(1, mine.dim()):
        if 2 <= mine.shape[axis] <= MOST_SOURCES:
            made = [
                _of(found, costs[:1], {outputs: mine.index_select(axis, torch.tensor(order, device=mine.device))})
                for order in itertools.permutations(range(mine.shape[axis]))
            ]
            if all(any(close(m, cost.reshape(1), size) for m in made) for cost in whole):
                return True
    return False
