"""Every pass reads the weights as they are, and the batch as it is.

What it does
    It notes in the first steps which weights the calls of torch are given, which parameters share their entries, which
    are made inside a forward pass, and what later batches are computed with.

Why is this bad?
    Gradients arrive, the optimizer moves the weights, and the loss is computed with others: with a copy that was taken
    once, with a layer that exists for one pass, or with the mask and the graph of the first batch. Nothing raises.

How it decides
    Read once: no call is given a weight, or a view of it, after the first step of its optimizer, though gradients go on
    coming. Weights moved after that step must change nothing that is backpropagated, bit for bit: in 12 steps where
    gradients arrive by backward passes; in 60 where they are assigned by hand (a copy that is brought up to date now
    and then looks the same for a while), and weights moved before ``fit`` must change it then.
    Tied by ``data``: two parameters in the optimizers have the same entries in memory. The loop is run in float64 with
    one parameter in both places; where the losses of the first steps differ by more than rounding, the two are stepped
    otherwise than one. (With plain SGD they are not: the two steps add up.)
    Made anew: inside a call of the model a parameter is used that did not exist a step before, at the same line in each
    step. Three things make it a fault: its entries are drawn, it is applied to what trained weights computed, and it
    gets a gradient that is lost with it. A layer that augments the batch, a norm with its initial weights and a copy of
    the net for an inner loop lack one of these: advice.
    Kept from the first batch: a value made of the first batch alone meets two later batches row by row (a mask, a
    product with an adjacency, an index), and the line that makes it does not run again. With another first batch it
    must be another value; statistics over the rows, which no order of rows changes, are no such value.
    Masters with other values: bfloat16 or float16 weights get the gradients, and float32 tensors of no module get the
    steps. After the first step each weight is its master, rounded, bit for bit. Before it most entries of a weight
    were more than one ULP away from its master: a checkpoint that was loaded after the masters were made is lost.

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
    yield from weights.made_anew(evidence)
    yield from weights.masters_with_other_values(evidence)
    yield from kept.kept_from_first_batch(evidence)
