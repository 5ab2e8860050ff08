"""A model that predicts the next input cannot see it.

What it does
    Where the targets of a loss are the inputs of later positions, it makes one forward pass in training mode and one in
    evaluation mode, and takes the gradient of outputs at single positions with respect to what came in at each.

Why is this bad?
    A language model without its causal mask, or with one that is off by one, copies the answer: its loss falls faster
    than that of a correct one, and it generates noise. A mask that is missing in evaluation makes the validation loss
    meaningless.

How it decides
    The loss call shows that the model predicts the next input: its targets are, bit for bit, the inputs one position
    ahead (or a few) at all positions that count, and at no other offset; a sequence that is only rotated (its last
    target is the first input) is another task. The position of an output is followed back through views, transposes and
    slices to the layer that made it. Then the gradient of output t with respect to input t + 1 must be exactly 0:
    masked softmax weights are exact zeros, and so are products with them. Only behind a Fourier transform, which
    separates positions up to rounding, 1e3 machine epsilons of the largest gradient count as nothing. Positions whose
    target is ignored are left out (a prefix may see itself).
    The operation to blame is found by its own gradient, from its inputs to its outputs, and confirmed: without it
    nothing leaks. Otherwise it is the first whose result depends on later inputs.

Faulty
    >>> class Language(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
    ...
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         x = x + F.scaled_dot_product_attention(x, x, x)
    ...         return self.head(x).transpose(1, 2)
    >>>
    >>> model = Language()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    >>> text = torch.randint(20, (4, 10), generator=torch.Generator().manual_seed(0))
    >>> batch = text[:, :-1], text[:, 1:]

Fixed
    >>> class Language(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
    ...
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
    ...         return self.head(x).transpose(1, 2)
    >>>
    >>> model = Language()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    >>> text = torch.randint(20, (4, 10), generator=torch.Generator().manual_seed(0))
    >>> batch = text[:, :-1], text[:, 1:]

Known limits
    Cross entropies and distances of torch are looked at; where the scores come from no one layer, or targets are no
    inputs (a delay, differences), nothing is judged. What leaks without a gradient (a running mean, an argmax) is not
    seen. A leak in evaluation mode alone is advice unless the loop evaluates: a model may then decode step by step. So
    is one where outputs of another loss do not see the answer (a net that smooths a given output, as in Tacotron 2).

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    https://karpathy.github.io/2019/04/25/recipe/ (use backprop to chart dependencies)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.causality.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=40)
def causality(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.causality.passes import CausalPasses

    yield from evidence.shared(CausalPasses).leaks()
