"""Each forward pass computes with the current weights and the current batch.

What it does
    It notes in the first steps which weights the calls of torch are given, and which parameters share their entries. It
    also notes which parameters are made inside a forward pass, and what later batches are computed with.

Why is this bad?
    Gradients arrive, the optimizer moves the weights, and the loss is computed with others: with a copy that was taken
    once, with a layer that exists for one pass, or with the mask and the graph of the first batch. Nothing raises.

How it decides
    1. ``weights_read_once``: after the first step no call gets a weight or a view of it, though gradients go on.
       Weights moved then must change nothing that is backpropagated, bit for bit. That takes 12 steps where backward
       passes bring gradients. Where they are assigned by hand it takes 60, and weights moved before ``fit`` must change
       it.
    2. ``tied_through_data``: two parameters in the optimizers share their entries in memory. The loop is run in float64
       with one parameter in both places. It is a fault if the losses differ by more than rounding. With plain SGD they
       do not: two steps add up.
    3. ``layer_made_anew``: a parameter is used that did not exist a step before, at one line in each step. It is a
       fault if its entries are drawn, trained weights computed its input, and its gradient is lost with it; else
       advice.
    4. ``kept_from_first_batch``: a value made of the first batch alone meets two later batches row by row, and its line
       does not run again. With another first batch it must differ. Statistics that no order of rows changes are none.
    5. ``masters_hold_others``: low-precision weights get the gradients, and float32 tensors of no module get the steps.
       After the first step each weight is its master, rounded, bit for bit. Before it most entries were more than one
       ULP away: a loaded checkpoint is lost.
    6. It passes if none of these is seen (docs/how-it-decides.md#weights-and-batches-as-they-are).

Faulty
    >>> joined = torch.cat([model.head.weight, model.head.bias[:, None]], 1)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     scores = F.linear(F.pad(model.encoder(x), (0, 1), value=1.0), joined)
    ...     F.cross_entropy(scores, y).backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     joined = torch.cat([model.head.weight, model.head.bias[:, None]], 1)
    ...     scores = F.linear(F.pad(model.encoder(x), (0, 1), value=1.0), joined)
    ...     F.cross_entropy(scores, y).backward()
    ...     optimizer.step()

Known limits
    Parameters that share a part of their entries are not looked at. What numpy keeps is not seen.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (parameters are made in __init__)
    https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.weights_are_read.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=15)
def weights_are_read(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.weights_are_read import kept, weights

    yield from weights.read_once(evidence)
    yield from weights.tied_through_data(evidence)
    yield from weights.created_in_forward(evidence)
    yield from weights.masters_with_other_values(evidence)
    yield from kept.kept_from_first_batch(evidence)
