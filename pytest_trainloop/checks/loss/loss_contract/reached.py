"""Which positions of a loss function's input train what gave them, past the masks that lie in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import Call

FARTHEST = 12
"""Operations before the loss function that are gone back through: masks, casts, reshapes, a softmax."""


def trained_positions(call: Call, shape: tuple[int, int]) -> torch.Tensor | None:
    """Of (rows, positions), those at which the gradient is not 0 wherever it can be read: at the input of the loss
    function, and at each tensor that this was made of alone.

    A prediction that is multiplied by 0, filled, replaced or written over before the call, or whose gradient is taken
    out, has a gradient of exactly 0 at one of these places: whatever is predicted there, no weight moves by it. None
    where no gradient has these axes.
    """
    grids = [(slope != 0).flatten(2).any(-1) if slope.dim() > 2 else slope != 0 for slope in _slopes(call, shape)]
    return torch.stack(grids).all(0) if grids else None


def _slopes(call: Call, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """The gradients that have rows and positions in front."""
    given, arrived = call.given.get("input"), call.arrived
    if not isinstance(given, torch.Tensor) or arrived is None or given.grad_fn is None:
        return
    edges = list(_before(given.grad_fn))
    try:
        found = torch.autograd.grad(given, edges, arrived, retain_graph=True, allow_unused=True) if edges else ()
    except RuntimeError:
        found = ()  # a tensor of the graph was written to since: only the gradient that arrived is known
    for slope in (arrived, *found):
        if slope is not None and tuple(slope.shape[:2]) == shape:
            yield slope.detach()


def _before(node: torch.autograd.graph.Node) -> Iterator[GradientEdge]:
    """What a node's result was made of, as long as that is one tensor with a history."""
    for _ in range(FARTHEST):
        following = [(before, number) for before, number in node.next_functions if before is not None]
        if len(following) != 1 or not following[0][0].next_functions:
            return
        node, number = following[0]
        yield GradientEdge(node, number)
