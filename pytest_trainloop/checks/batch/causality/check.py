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

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.causality.passes import Leak
    from pytest_trainloop.runs.evidence import Evidence

EXPLAINS = (*LEARNING, "padding_invariance")

CAUSES = {
    "causal_mask_missing": Cause(
        proof="an attention's product has weights for later keys; without it nothing leaks",
        repair="mask later keys with -inf before the softmax, or pass is_causal=True",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "mask_off_by_one": Cause(
        proof="the same, for the next key only",
        repair="let position t see keys up to t: tril(diagonal=0), or triu(diagonal=1) filled with -inf",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "mask_inverted": Cause(
        proof="the same, and none for earlier keys",
        repair="invert the mask: True keeps in scaled_dot_product_attention and blocks in nn.MultiheadAttention",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "masked_after_softmax": Cause(
        proof="later keys are in a softmax's sums and not in the product with the values",
        repair="fill the scores with -inf before the softmax: later keys must not be in its sums",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "softmax_over_queries": Cause(
        proof="the softmax over pairs of positions has later queries in its sums",
        repair="take the softmax over the keys: softmax(scores, dim=-1)",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "view_mixes_positions": Cause(
        proof="a view puts entries of different positions next to each other; with a transpose nothing leaks",
        repair="use transpose or permute to swap axes: view and reshape only split the same numbers otherwise",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "bidirectional_layer": Cause(
        proof="a recurrent layer's result at a position depends on its inputs at later ones",
        repair="bidirectional=False in a model that predicts what comes next",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "convolution_sees_ahead": Cause(
        proof="a convolution's result is the first that depends on later inputs",
        repair="pad on the left only, by dilation * (kernel_size - 1), and cut nothing off the left",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "statistics_over_time": Cause(
        proof="a mean, a norm or another statistic is taken over all positions",
        repair="normalise or pool each position alone, or over earlier positions only",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "mask_missing_in_eval": Cause(
        proof="no later input has a gradient in training mode, and some has in evaluation mode",
        repair="apply the mask in both modes: is_causal=True, not is_causal=self.training",
        explains=EXPLAINS,
        change=("seen",),
        settle="evaluate= makes it a fault where the loop evaluates",
    ),
    "sees_the_future": Cause(
        proof="outputs depend on the inputs that they predict, through no operation that is known",
        repair="follow the inputs of the operation at this line: some operation before it joins all positions",
        explains=EXPLAINS,
        change=("seen",),
    ),
}

_BY_KIND = {
    "softmax": "softmax_over_queries",
    "views": "view_mixes_positions",
    "recurrent": "bidirectional_layer",
    "convolution": "convolution_sees_ahead",
    "statistics": "statistics_over_time",
}


@check(needs={"run"}, causes=CAUSES, rank=40)
def causality(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.causality.passes import CausalPasses

    found = evidence.shared(CausalPasses).leak()
    if found is not None:
        evaluates = "evaluate" in evidence.offers or any(not f.training for f in evidence.run().root_forwards())
        yield _finding(found, evaluates)


def _cause(found: Leak) -> str:
    if found.modes == ("evaluation",):
        return "mask_missing_in_eval"
    if found.kind != "attention":
        return _BY_KIND.get(found.kind or "", "sees_the_future")
    offsets = [offset for operation in found.operations for offset in operation.offsets]
    if not offsets:
        only_softmax = {a.op.name for a in found.operations} == {"softmax"}
        return "masked_after_softmax" if only_softmax else "causal_mask_missing"
    if min(offsets) >= 0:
        return "mask_inverted"
    return "mask_off_by_one" if max(offsets) == 1 else "causal_mask_missing"


def _finding(found: Leak, evaluates: bool) -> Finding:
    cause = _cause(found)
    first = found.operations[0].op if found.operations else None
    open_to = len({a.op.module for a in found.operations})
    summary = {
        "causal_mask_missing": f"{open_to} of {found.attentions} attentions see later positions"
        if found.attentions > open_to
        else "attention without a causal mask: each position sees all later ones",
        "mask_off_by_one": "the causal mask is off by one: each position sees the next",
        "mask_inverted": "the causal mask is inverted: each position sees later ones and no earlier",
        "masked_after_softmax": "the mask is applied after the softmax: later keys are in its sums",
        "softmax_over_queries": "the softmax of an attention runs over the queries, later ones included",
        "view_mixes_positions": f"{first.name if first else 'a view'} to another order of axes mixes the positions",
        "bidirectional_layer": "a recurrent layer runs over the sequence from its end as well",
        "convolution_sees_ahead": "a convolution reaches beyond its own position",
        "statistics_over_time": f"{first.name if first else 'a statistic'} is taken over all positions",
        "mask_missing_in_eval": "in evaluation mode the model sees the input that it predicts",
        "sees_the_future": "the model sees the input that it predicts",
    }
    shown = "without it no output depends on a later input" if found.confirmed else "its result is the first to do so"
    if cause == "sees_the_future" or found.kind is None:
        shown = "the gradient of single outputs, exactly 0 where nothing is seen"
    target = "the next input" if found.ahead == 1 else f"the input {found.ahead} positions ahead"
    advice = found.other_loss_is_clean or (cause == "mask_missing_in_eval" and not evaluates)
    return Finding(
        cause=cause,
        level="advice" if advice else "fault",
        summary=summary[cause],
        measured=(
            f"the targets of {found.loss} are {target}, and output t has a gradient with respect to inputs "
            f"t{found.offsets[0]:+d} to t{found.offsets[-1]:+d}, in {' and '.join(found.modes)} mode"
        ),
        shown_by=shown,
        culprits=tuple(dict.fromkeys(a.op.named for a in found.operations)),
        where=str(first.place) if first is not None else found.loss_place,
        change="\n".join(dict.fromkeys(str(a.op.place) for a in found.operations if first and a.op.name == first.name)),
        smallest=f"{found.length} positions",
        tried="in a run without the later positions there no output depends on a later input"
        if found.confirmed and found.kind in ("attention", "softmax", "views")
        else "",
    )
