"""The causes of ``loss_at_init``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_at_chance = partial(
    Cause,
    summary="{function} is {times:.1f} times chance level before the first step",
    measured="{value:.4g}, at chance level {chance:.4g}; outputs of root mean square {outputs:.3g}",
)
_settle = "expected_init_loss= says what the first loss must be, and is judged in place of chance"
_AT_USUAL = (
    "with {layer} at a standard deviation of {usual:.2g} in place of {std:.2g}{others:?, and {others} more at their "
    "usual one,|} it is {narrow:.4g}"
)

CAUSES = {
    "too_high": _at_chance(
        proof="ten times the loss of an uninformed input, and the outputs shrink when the weights are halved",
        summary="{function} is {times:.0f} times chance level before the first step",
        shown_by=(
            "with all layers' weights halved it is {halved:.4g}: their size is the cause; none that is drawn too wide "
            "explains it"
        ),
        repair=(
            "look for a factor on the outputs (a temperature that is applied twice), or a stack of layers without a "
            "norm; else initialise the last layer smaller (std 0.02)"
        ),
        explains=("update_ratio",),
        variants={
            "wide": {
                "summary": (
                    "{function} is {times:.0f} times chance level before the first step: {layers} {layers:are} drawn "
                    "too wide"
                ),
                "shown_by": _AT_USUAL,
                "repair": (
                    "initialise {layer} with std={usual:.2g}, that of torch's own layers"
                    "{others:?; and {rest} likewise|}"
                ),
                "tried": "with this change the loss is {narrow:.4g}, at chance level {narrow_chance:.4g}",
            },
            "by hand": {
                "summary": (
                    "{function} is {times:.0f} times what it is for outputs of 0, before the first step: {layers} "
                    "{layers:are} drawn too wide"
                ),
                "measured": (
                    "{value:.4g}, and {chance:.4g} with zeros as the last layers' outputs, which have a root mean "
                    "square of {outputs:.3g}"
                ),
                "shown_by": _AT_USUAL,
                "repair": "initialise {layer} with std={usual:.2g}, that of torch's own layers",
            },
        },
        source="https://karpathy.github.io/2019/04/25/recipe/",
    ),
    "not_as_declared": Cause(
        proof="the first loss that is backpropagated is not what expected_init_loss says",
        summary=(
            "the first loss is {value:.4g}{scaled:? (before a factor of {factor:g})|}, and expected_init_loss says "
            "{expected:.4g}"
        ),
        measured="{value:.4g}",
        shown_by="the first value that is backpropagated",
        repair="look at the initialisation and at the scale of the inputs; or correct what is declared",
        explains=("update_ratio",),
        variants={
            "ratio": {"measured": "{ratio:.2f} times what is declared"},
            "over seeds": {"measured": "under eight seeds the mean is {mean:.4g}, its standard error {error:.2g}"},
        },
        source="https://karpathy.github.io/2019/04/25/recipe/",
    ),
    "inputs_too_large": _at_chance(
        proof="the loss is three times chance or more, and not with inputs scaled to unit size",
        summary=(
            "{function} is {times:.1f} times chance level before the first step, since the inputs are of size "
            "{size:.3g}"
        ),
        shown_by="with inputs divided by their root mean square it is {unit:.4g}",
        repair="bring the inputs to unit variance (images to [0, 1], columns by mean and spread), or put a norm first",
        settle=_settle,
        source="https://github.com/jaredleekatzman/DeepSurv/issues/14",
    ),
    "prior_inverted": Cause(
        proof=(
            "the last layer's bias is one number; a binary loss begins at twice that of even odds or more, and with "
            "the other sign of that number below it"
        ),
        summary="{names} is filled with {filled:.4g}, and lacks a minus: the rare class begins as the likely one",
        measured=(
            "loss {loss:.4g} before the first step; {even:.4g} for even odds, {turned:.4g} with {wanted:.4g} as the "
            "bias"
        ),
        shown_by="the same outputs with the bias' sign turned, in float64",
        repair="fill the bias with -log((1 - p) / p), which is log(p / (1 - p))",
        explains=("update_ratio",),
        change=("drawn", "module"),
        variants={"filled": {"repair": "fill {names} with {wanted:.4g}: log(p / (1 - p)) for a share p of positives"}},
        source="https://github.com/princeton-vl/CornerNet/issues/13",
    ),
    "above_chance": _at_chance(
        proof="the loss is above that of an uninformed input, or far above it by a scale that no weight sets",
        shown_by="with all weights halved it is {halved:.4g}",
        repair="a smaller initialisation of the last layer",
        settle=_settle,
        variants={
            "far targets": {"repair": "scale the targets to unit variance, or make the last layer smaller"},
        },
        source="https://github.com/jsboige/CoursIA/issues/13279",
    ),
    "below_chance": Cause(
        proof="under five seeds the loss is five standard errors below the entropy of the labels at the start",
        summary="{names} is {value:.4g} before the first step, below the entropy of its labels",
        measured="loss {value:.4g}, entropy {entropy:.4g}: a difference of {errors:.0f} standard errors",
        shown_by="no step was made yet, and other random weights under four more seeds give it too",
        repair="look whether the input contains the labels; pretrained weights and copying tasks may start below",
        settle=_settle,
        source="https://github.com/huggingface/transformers/issues/20797",
    ),
}

found = finding_maker(CAUSES)
