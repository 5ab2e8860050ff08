"""The causes of ``finite``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_cause = partial(Cause, explains=("overfit_one_batch", "loss_at_init", "update_ratio", "every_param_moves:not_updated"))

_LOST = "parameters hold NaN or inf when the run ends"
_OPERATION = (
    "its inputs lie in [{low:.3g}, {high:.3g}]; "
    "{lost:?{lost} of {parameters} " + _LOST + "|}"
    "{bad:?{bad} of {passes} losses that were backpropagated are not finite|}"
    "{unseen:?{steps:?fit raised an exception after it|no step was made}|}"
)
_TRAIL = "{trail:?; ranges of values on the way there: {trail}|}"

_STEP = {
    "summary": "step {steps} of {kind} leaves {names} non-finite, from finite gradients",
    "measured": (
        "largest gradient before it {largest:.3g}; {lost} weights are not finite after it"
        "{state:?; state of {first}: {state}|}"
    ),
    "shown_by": "in a second run weights and gradients are finite before this step, and nothing went wrong earlier",
}

CAUSES = {
    "nonfinite_parameter": _cause(
        proof="a weight is not finite before the first step, and nothing sets it before it is used",
        summary="{names} {names:are} not finite before the first step",
        measured="NaN or inf in {count:parameter} when training begins, and still when it ends",
        shown_by="read before fit was called",
        repair="initialise it: torch.empty and nn.Parameter(torch.Tensor(n)) hold what was in memory before",
        change=("module",),
        source="https://github.com/gordicaleksa/pytorch-GAT/issues/11",
    ),
    "made_in_forward": _cause(
        proof="the first operation with finite inputs and a result that is not lies in the forward pass",
        summary="{origin} makes {value} of {given:?infinite|finite} values, {when}",
        measured=_OPERATION,
        shown_by=(
            "{given:?the first operation of the run that makes NaN, from an infinity that is a literal or an input"
            "|the first operation of the run whose result is not finite while all its inputs are}" + _TRAIL
        ),
        change=("seen",),
        source="https://github.com/skorch-dev/skorch/issues/481",
    ),
    "nonfinite_input": _cause(
        proof="an operation has an input that is not finite and that no earlier operation made: the batch holds it",
        summary="an input of {origin} is not finite, and no operation of torch made it",
        measured="{lost:?{lost} " + _LOST + "|{bad} losses that were backpropagated are not finite}",
        shown_by="it is the first operation of the run with such an input",
        repair="look at the batch (assert x.isfinite().all() where it is loaded), and at what comes from numpy",
        source="https://github.com/prs-eth/Marigold/issues/111",
    ),
    "made_in_backward": _cause(
        proof="forward pass and loss are finite, and the slope of an operation is not",
        summary="{origin} makes non-finite gradients of finite values, {when}",
        measured=_OPERATION,
        shown_by="the loss is finite; gradients are finite at its result and not at its inputs" + _TRAIL,
        change=("seen",),
        source="https://github.com/mpariente/pytorch_stoi/issues/7",
    ),
    "gradients_explode": _cause(
        proof="gradients grow a hundredfold over the steps before a value is no longer finite",
        summary="the gradients of {names} grow from step {since} on, until nothing is finite",
        measured="largest entry by backward pass: {peaks}{lost:?; {lost} " + _LOST + "|}",
        shown_by=(
            "they had grown {growth:.2g} times before"
            "{origin:?; {origin} is the first operation whose result is not finite|}"
        ),
        repair="lower the learning rate, warm it up, or clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        change=("optimizer",),
        source="https://github.com/ivanvovk/WaveGrad/issues/3",
    ),
    "weights_lost": _cause(
        proof="a step leaves weights non-finite that were finite before it, and so were its gradients",
        summary="{names} {names:are} not finite after {steps} steps",
        measured="{lost} of {parameters} parameters were finite before training",
        shown_by="in a second run every operation of torch gave finite values: a step or a hook made it",
        repair=(
            "look at the optimizer's step (a root of zero, a division by zero, a product that overflows its dtype), "
            "and at what is written to weights in place"
        ),
        change=("step", "optimizer"),
        variants={
            "step": _STEP,
            "narrow state": {
                **_STEP,
                "measured": _STEP["measured"] + "; the weights are {weights}",
                "repair": "keep {narrow} of the optimizer in {weights} (or bfloat16): float16 holds no small squares",
            },
        },
        source="https://github.com/afiaka87/glide-finetune/issues/5",
    ),
    "nonfinite_masked": _cause(
        proof="an operation makes a non-finite loss or gradient finite, and the step is made all the same",
        summary="a loss that is not finite is replaced by {names}(), and training goes on without the batch",
        measured="first in step {step}",
        shown_by="the value that was replaced comes from {origin}",
        repair="fix the operation that it comes from",
        do_not="skip such batches, or replace what is not finite: the operation stays wrong, and these rows "
        "teach nothing",
        variants={
            "gradient": {
                "summary": "gradients that are not finite are replaced, and the step is made with the rest",
                "measured": "the gradients of {written} parameters were written by {names}",
                "shown_by": "gradients arrive with NaN or inf and the step reads them without; they come from {origin}",
            },
        },
        source="https://github.com/Holmeyoung/crnn-pytorch/issues/47",
    ),
}

found = finding_maker(CAUSES)
