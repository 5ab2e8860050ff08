"""Whether the labels of a padded batch are those of its rows: by their lengths, and by the ids that were read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_trainloop.batches.values import trailing

if TYPE_CHECKING:
    from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement


class TargetPositions(NamedTuple):
    """For each entry of the targets, where it lies in the batch."""

    row: torch.Tensor
    position: torch.Tensor
    shape: tuple[int, int]
    """(rows, positions) of the last layer's output."""


def of_own_row(call: Call, at: TargetPositions, real: torch.Tensor) -> bool:
    """Whether the labels of these entries are the ids that their rows were read with, at the same position or one
    ahead: then what is labelled at padded positions as well belongs to no other row."""
    target = call.tensor("target")
    if target is None or target.is_floating_point() or not bool(real.any()):
        return False
    for embedded in call.embedded:
        ids = embedded.ids.ids.to(target.device)
        if tuple(ids.shape) != at.shape:
            continue
        row, position, labels = at.row[real], at.position[real], target[real]
        for ahead in (0, 1):
            inner = position + ahead < ids.shape[1]
            if bool(inner.any()) and torch.equal(ids[row[inner], position[inner] + ahead], labels[inner]):
                return True
    return False


def misplaced(
    call: Call, at: TargetPositions, padded: torch.Tensor, labelled: torch.Tensor, *, declared: bool
) -> Judgement | None:
    """Rows with more labels than real positions, beside rows with fewer: their labels belong to one another.

    Where padding is not ``declared`` an output of padded positions may be meant, as in a translation that is written in
    one pass: then the lengths of all rows must come in another order, which no two texts of their own have.
    ``labelled`` are the entries that the loss takes. Where it takes all of them, the label that most padded positions
    have ends a row of labels, as ``ignore_index`` does elsewhere.
    """
    target = call.tensor("target")
    if target is None:
        return None
    grid = torch.zeros(at.shape, dtype=torch.bool)
    filled = bool(labelled.all())
    if filled:
        there = padded.to(target.device)[at.row, at.position]
        labelled = target != torch.mode(target[there].flatten()).values if bool(there.any()) else labelled
    grid[at.row[labelled].cpu(), at.position[labelled].cpu()] = True
    real = ~padded.cpu()
    if not trailing(padded.cpu()):
        grid, real = grid.flip(1), real.flip(1)
    labels, tokens = _ends(grid), _ends(real)
    more, fewer = labels > tokens, labels < tokens - 1  # shifted labels are one fewer in every row
    permuted = torch.equal(labels.sort().values, tokens.sort().values)
    if (
        not bool(more.any())
        or not (permuted or (declared and bool(fewer.any())))
        or not (filled or _one_run(grid[more | fewer]))
    ):
        return None  # labels of drawn positions may end anywhere
    first = int(more.nonzero()[0])
    second = int((labels < tokens).nonzero()[0])
    return call.judged(
        "labels_misplaced",
        f"{int((labels != tokens).sum())} of {len(tokens)} rows have the labels of another row in {call.name}: "
        "they have more or fewer labels than tokens",
        measured=f"row {first}: {int(labels[first])} labels, {int(tokens[first])} positions that are not padding; row "
        f"{second}: {int(labels[second])} labels, {int(tokens[second])} positions",
        shown_by="the same lengths occur among the rows of labels and of inputs, in another order"
        if permuted
        else "labels at padded positions of some rows, and real positions without labels at the end of others",
        culprit="target",
    )


def _ends(grid: torch.Tensor) -> torch.Tensor:
    """For each row the number of positions up to the last one that is true."""
    return (torch.arange(1, grid.shape[1] + 1) * grid).max(1).values


def _one_run(grid: torch.Tensor) -> bool:
    """Whether what is true lies side by side in every row."""
    return bool((grid.int().diff(dim=1) == 1).sum(1).add(grid[:, 0].int()).le(1).all())
