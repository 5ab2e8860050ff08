"""The causes of ``causality``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

_ALONE = "without it no output depends on a later input"
_ahead = partial(
    Cause,
    measured="the targets of {loss} are {ahead:?the input {ahead} positions ahead|the next input}, and output t has a "
    "gradient with respect to inputs t{first} to t{last}, in {modes} mode",
    explains=(*LEARNING, "padding_invariance"),
    change=("seen",),
    shown_by="{alone:?" + _ALONE + "|its result is the first to do so}",
)

CAUSES = {
    "causal_mask_missing": _ahead(
        proof="an attention's product has weights for later keys; without it nothing leaks",
        summary="{some:?{some} of {attentions} attentions see later positions|attention without a causal mask: each "
        "position sees all later ones}",
        repair="mask later keys with -inf before the softmax, or pass is_causal=True",
        variants={
            "masked": {
                "summary": "{some:?{some} of {attentions} attentions see|attention sees} later positions: {some:?their "
                "masks hide|its mask hides} none of them",
                "repair": "hide later keys in the mask: triu(diagonal=1) filled with -inf, or pass is_causal=True",
            }
        },
        source="https://github.com/facebookresearch/xformers/issues/103",
    ),
    "mask_off_by_one": _ahead(
        proof="the output at position t depends on key t + 1 of an attention, and on no later key",
        summary="the causal mask is off by one: each position sees the next",
        repair="let position t see keys up to t: tril(diagonal=0), or triu(diagonal=1) filled with -inf",
        source="https://github.com/octo-models/octo/issues/75",
    ),
    "mask_inverted": _ahead(
        proof="an attention's product has weights for later keys, and none for earlier ones",
        summary="the causal mask is inverted: each position sees later ones and no earlier",
        repair="invert the mask: True keeps in scaled_dot_product_attention and blocks in nn.MultiheadAttention",
        source="https://github.com/rasbt/LLMs-from-scratch/pull/1062",
    ),
    "masked_after_softmax": _ahead(
        proof="later keys are in a softmax's sums and not in the product with the values",
        summary="the mask is applied after the softmax: later keys are in its sums",
        repair="fill the scores with -inf before the softmax: later keys must not be in its sums",
        source="https://github.com/lucidrains/memory-compressed-attention/issues/2",
    ),
    "softmax_over_queries": _ahead(
        proof="the softmax over pairs of positions has later queries in its sums",
        summary="the softmax of an attention runs over the queries, later ones included",
        repair="take the softmax over the keys: softmax(scores, dim=-1)",
        source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146",
    ),
    "view_mixes_positions": _ahead(
        proof="a view puts entries of different positions next to each other; with a transpose nothing leaks",
        summary="{op} to another order of axes mixes the positions",
        repair="use transpose or permute to swap axes: view and reshape only split the same numbers otherwise",
        source="https://github.com/jsbaan/transformer-from-scratch/pull/6",
    ),
    "bidirectional_layer": _ahead(
        proof="a recurrent layer's result at a position depends on its inputs at later ones",
        summary="a recurrent layer runs over the sequence from its end as well",
        repair="bidirectional=False in a model that predicts what comes next",
        source="https://github.com/timbmg/Sentence-VAE/issues/22",
        change=("layer", "seen"),
    ),
    "convolution_sees_ahead": _ahead(
        proof="a convolution's result is the first that depends on later inputs",
        summary="a convolution reaches beyond its own position",
        repair="pad on the left only, by dilation * (kernel_size - 1), and cut nothing off the left",
        source="https://github.com/lucidrains/magvit2-pytorch/pull/27",
        change=("padding before", "seen"),
    ),
    "statistics_over_time": _ahead(
        proof="a mean, a norm or another statistic is taken over all positions",
        summary="{op} is taken over all positions",
        repair="normalise or pool each position alone, or over earlier positions only",
        source="https://github.com/espnet/espnet/issues/5900",
        change=("layer", "seen"),
    ),
    "mask_missing_in_eval": _ahead(
        proof="no later input has a gradient in training mode, and some has in evaluation mode",
        summary="in evaluation mode the model sees the input that it predicts",
        repair="apply the mask in both modes: is_causal=True, not is_causal=self.training",
        judged="evaluate= makes it a fault where the loop evaluates",
        source="https://github.com/shiyu-coder/Kronos/issues/199",
    ),
    "sees_the_future": _ahead(
        proof="outputs depend on the inputs that they predict, through no operation that is known",
        summary="the model sees the input that it predicts",
        shown_by="the gradient of single outputs, exactly 0 where nothing is seen",
        repair="follow the inputs of the operation at this line: some operation before it joins all positions",
        source="https://github.com/huggingface/transformers/issues/48745",
    ),
}

found = finding_maker(CAUSES)
