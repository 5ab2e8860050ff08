"""A model that predicts the next input cannot see it.

What it does
    Where the targets of a loss are the inputs of later positions, it makes one forward pass in training mode and one in
    evaluation mode. It takes the gradient of outputs at single positions with respect to what came in at each.

Why is this bad?
    A language model without its causal mask, or with one that is off by one, copies the answer: its loss falls faster
    than that of a correct one, and it generates noise. A mask that is missing in evaluation makes the validation loss
    meaningless.

How it decides
    1. The loss call shows the task: its targets are, bit for bit, the inputs one to four positions ahead, at all
       positions that count and at no other offset. A sequence that is only rotated is another task.
    2. An output's position is followed back through views, transposes and slices to the layer that made it.
    3. The gradient of output t with respect to input t + 1 must be exactly 0: masked softmax weights are exact zeros.
       Behind a Fourier transform 1e3 eps of the largest gradient count as 0
       (docs/how-it-decides.md#rows-and-positions-by-exact-gradients).
    4. Positions whose target is ignored, or whose loss has no gradient, are left out: a prefix may see itself. With
       other later inputs the outputs must change: a backward pass written by hand may add the gradient of another loss.
    5. Each operation is judged by its own gradient. It is the cause if nothing leaks without it.
    6. A leak in evaluation mode alone is advice unless the loop evaluates. A leak is advice too if outputs of another
       loss do not see the answer (Tacotron 2).

    | operation                                                    | cause                                  |
    |--------------------------------------------------------------|----------------------------------------|
    | an attention weights later keys                              | ``causal_mask_missing``                |
    | it weights the next key only; later keys and no earlier ones | ``mask_off_by_one``, ``mask_inverted`` |
    | a softmax sums later keys that the product leaves out        | ``masked_after_softmax``               |
    | a softmax sums over the queries                              | ``softmax_over_queries``               |
    | a view, where a transpose does not leak                      | ``view_mixes_positions``               |
    | a recurrent layer; a convolution; a statistic                | ``bidirectional_layer``,
      ``convolution_sees_ahead``, ``statistics_over_time`` |
    | nothing leaks in training mode                               | ``mask_missing_in_eval``               |
    | none of these                                                | ``sees_the_future``                    |

When it is skipped
    It skips a loop in which no loss of torch has the next inputs as targets.

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
    Cross entropies and distances of torch are looked at. Where the scores come from no one layer, or targets are no
    inputs (a delay, differences), nothing is judged. What leaks without a gradient (a running mean, an argmax) is not
    seen.

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
    from pytest_trainloop.checks.batch.causality.causal_probe import CausalPasses

    yield from evidence.shared(CausalPasses).leaks()
