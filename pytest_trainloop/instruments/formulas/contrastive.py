"""Losses that compare the rows of a batch with each other, and penalties of gradients."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.formulas.form import Argument, Form, Mistake, one_part
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import DIVISIONS, MULTIPLICATIONS, PRODUCTS

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.instruments.formulas.cut import Cut
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice

_MATRICES = PRODUCTS | MULTIPLICATIONS | DIVISIONS | frozenset({"einsum", "matmul", "mm", "__matmul__", "inner"})
_POWERS = frozenset({"pow", "__pow__", "square"})
_NORMS = frozenset({"norm", "vector_norm", "sqrt", "linalg_norm", "linalg_vector_norm", "pow", "__pow__"})


_MOST_ROWS = 4096
"""Rows of a table of pairs: 128 MB. What has more are entries, as pixels, and not the rows of a contrastive loss."""


def _chosen_from(found: Slice, number: int) -> list[int]:
    """The entries of the rows of a matrix that a cross entropy chooses, with nothing masked before."""
    todo, seen = [number], {number}
    while todo:
        at = todo.pop()
        for call in (c for c in found.calls if c.inputs[:1] == (at,)):
            if call.name == "cross_entropy":
                return _indices(found, call)
            if call.name == "log_softmax":
                chosen = [
                    c for c in found.calls if c.name in {"nll_loss", "gather"} and c.inputs[:1] == call.outputs[:1]
                ]
                return _indices(found, chosen[0]) if chosen else []
            if call.name in {"view", "reshape", "contiguous", "float", "double", "to"}:
                todo.extend(n for n in call.outputs if n not in seen)
                seen.update(call.outputs)
    return []


def _indices(found: Slice, call: Call) -> list[int]:
    index = found.values[call.inputs[1]].tensor if len(call.inputs) > 1 else None
    return [] if index is None or index.is_floating_point() else [int(i) for i in index.flatten().tolist()]


def _with_themselves(cut: Cut) -> bool:
    """Whether rows of length 1 are compared with all rows, themselves included, to choose another one of them."""
    (z,) = cut.recorded
    if z.dim() != 2 or len(z) < 3 or cut.value.shape != (len(z), len(z)):
        return False
    off = (z.double().norm(dim=1) - 1).abs().max()
    chosen = _chosen_from(cut.slice, cut.number)
    return float(off) <= 1e-6 and len(chosen) == len(z) and all(i != row for row, i in enumerate(chosen))


_DIAGONAL = Mistake(
    "pairs_with_itself",
    "each row is compared with itself too: its similarity with itself is always 1, the largest there is, and counts "
    "as a negative",
    'logits = logits.masked_fill(torch.eye(len(logits), dtype=torch.bool), float("-inf")) before the cross entropy',
    shown_by="the loss equals the form with the diagonal counted, and a mask would change it; the rows have length 1",
)
SIMILARITIES = Form(
    "similarities within a batch (NT-Xent, InfoNCE)",
    "https://arxiv.org/abs/2002.05709",
    (Argument("rows", learned=True),),
    (
        one_part(
            lambda z: z @ z.T if z.dim() == 2 and len(z) <= _MOST_ROWS else None,
            _DIAGONAL,
            aim=Aim(
                "the share of a softmax that goes to the row itself",
                lambda logits: logits.softmax(1).diagonal(),
                best=0.0,
                of_value=True,
            ),
        ),
    ),
    ops=_MATRICES,
    suits=_with_themselves,
    judges_direction=False,
)


def _penalty(gradient: torch.Tensor, *, by_rows: bool, eps: float) -> torch.Tensor | None:
    """The squared distance of norms from 1: one for each row, or along the second axis alone."""
    if gradient.dim() < 3:
        return None
    squares = gradient.flatten(1).square().sum(1) if by_rows else gradient.square().sum(1)
    return ((squares + eps).sqrt() - 1).square()


def _of_a_critic(cut: Cut) -> bool:
    """Whether a gradient that no call made belongs to scores of which there is one for each row."""
    found, (gradient,) = cut.slice, cut.recorded
    if found.values[cut.arguments[0]].kind != "unknown" or gradient.dim() < 3:
        return False
    places = math.prod(gradient.shape) // gradient.shape[1]
    sizes = {v.tensor.numel() for v in found.trained(found.root)}
    return len(gradient) > 1 and places > len(gradient) and len(gradient) in sizes and places not in sizes


_OTHER_NORM = Mistake(
    "wrong_axes",
    "the norm runs over the channels of each position, where the gradient of a row has one norm over all of its "
    "entries",
    "((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()",
    shifted=True,
    shown_by="with the norm over all axes but the first, this loss equals the textbook penalty; the critic gives one "
    "score a row",
)
PENALTY = Form(
    "the gradient penalty of a critic",
    "https://arxiv.org/abs/1704.00028",
    (Argument("gradient", learned=True),),
    tuple(
        one_part(
            functools.partial(_penalty, by_rows=by_rows, eps=eps),
            mistake,
            aim=Aim("the squared distance of a row's norm from 1", functools.partial(_penalty, by_rows=True, eps=eps)),
        )
        for by_rows, mistake in ((True, None), (False, _OTHER_NORM))
        for eps in (0.0, 1e-12)
    ),
    ops=_POWERS,
    needs=(_NORMS,),
    suits=_of_a_critic,
    judges_direction=False,
)

FORMS = (SIMILARITIES, PENALTY)
