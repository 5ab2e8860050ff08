"""The causes of ``finite``, what is said of each, and what to write in place of an operation that is not finite.

A clamp hides a zero that is structural: a softmax or a sigmoid underflows for every score far enough away, and the
entries at the clamp get no gradient from then on. The logarithm is taken of the scores instead.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from pytest_trainloop.registry import Cause, finding_maker

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
        measured="{count} parameters hold NaN or inf when training begins, and still when it ends",
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


class Repair(NamedTuple):
    """One line of code where it is known, then alternatives; and what only silences the check."""

    text: str
    do_not: str = ""


_CLAMPED = "clamp it, or add an eps: {source} is exactly 0 for scores far enough away, and clamped entries never train"

_BY_SOURCE = {
    ("log", "softmax"): Repair(
        "F.log_softmax(scores, dim=-1) in place of the logarithm of a softmax; or cross_entropy on the scores",
        _CLAMPED.format(source="a softmax"),
    ),
    ("log", "sigmoid"): Repair(
        "F.logsigmoid(scores), and F.logsigmoid(-scores) for the logarithm of 1 - sigmoid; or "
        "binary_cross_entropy_with_logits",
        _CLAMPED.format(source="a sigmoid, or 1 minus one,"),
    ),
    ("log", "sub"): Repair(
        "make the difference positive where it is made: (F.softplus(raw) + eps).log(), or start from points that are "
        "apart",
        "clamp it: where both sides are equal no gradient would ever move them apart",
    ),
}

_BY_OPERATION = {
    ("log", "log2", "log10"): Repair(
        "(x + eps).log(), which keeps a gradient at 0; leave out entries that are 0 by design (a mask, an empty row)",
        "clamp_min: entries below it get no gradient",
    ),
    ("sqrt", "rsqrt", "norm", "vector_norm", "linalg_vector_norm", "cdist", "std"): Repair(
        "(x + eps).sqrt(): the slope of a root at 0 is infinite"
    ),
    ("div", "__truediv__", "__rtruediv__", "true_divide", "reciprocal", "div_"): Repair(
        "x / (y + eps), or y.clamp_min(eps) where y is a count; F.normalize does it for directions"
    ),
    ("exp", "exp2", "expm1", "logsumexp", "softmax", "cosh", "sinh"): Repair(
        "(x - x.amax(-1, keepdim=True)).exp(), or logsumexp and log_softmax; and cap the scale that multiplies x"
    ),
    ("pow", "__pow__"): Repair("(x + eps) ** p for exponents below 1; smaller numbers for large ones"),
    ("mean", "var"): Repair("leave out empty selections: the mean over no entries is NaN"),
}

_OTHERS = Repair("keep the inputs within bounds (normalise, an eps), or compute this operation in float32")

_LOG_OF_SOFTMAX = re.compile(r"(?:torch\.)log\(\s*(?:torch|F|nn\.functional)\.softmax\(([^()]*)\)\s*\)")
_LOG_OF_SIGMOID = re.compile(r"(?:torch\.)log\(\s*(?:torch|F)\.sigmoid\(([^()]*)\)\s*\)")


def repair_of(operation: str, source: str, lowest: float, code: str) -> Repair:
    """``source`` is the operation that made its input, ``lowest`` its smallest entry, ``code`` the user's line."""
    if lowest < 0 and operation in ("log", "log2", "log10", "sqrt", "rsqrt"):
        return Repair(
            f"{operation}() takes no negative numbers: make its input positive first (x.exp(), F.softplus(x), "
            "x.square()), or look for a sign",
            "clamp it: negative entries get no gradient from then on",
        )
    kind = "log" if operation in ("log", "log2", "log10") else operation
    repair = _BY_SOURCE.get((kind, source))
    if repair is None:
        return next((found for ops, found in _BY_OPERATION.items() if operation in ops), _OTHERS)
    for pattern, named in ((_LOG_OF_SOFTMAX, r"F.log_softmax(\1)"), (_LOG_OF_SIGMOID, r"F.logsigmoid(\1)")):
        if pattern.search(code):
            return Repair(f"{pattern.sub(named, code)}\n{repair.text}", repair.do_not)
    return repair
