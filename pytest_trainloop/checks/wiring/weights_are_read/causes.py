"""The causes of ``weights_are_read``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

_LEARNING = ("overfit_one_batch", "update_ratio", "loss_at_init")

CAUSES = {
    "weights_read_once": Cause(
        proof="gradients arrive, and moved after the first step they change nothing that is backpropagated",
        summary="{names} {names:are} read {begun:?before the first step|while the loop is built} and never again",
        measured=(
            "{unread} of the {held} parameters in optimizers: gradients reach {one:?it|them} in every step, and no "
            "call is given the new values"
        ),
        shown_by=("moved by 0.25 after the first step, the losses of {steps} further steps stay the same, bit for bit"),
        repair="run this line in every forward pass, on the parameters themselves: in forward(), by model(x), "
        "or by functional_call(model, dict(model.named_parameters()), x)",
        explains=(*_LEARNING, "memory_growth", "every_param_moves", "input_dependence"),
        change=("seen",),
        source="https://github.com/apache/mxnet/pull/12512",
    ),
    "tied_through_data": Cause(
        proof="the two are one place in memory, and with one parameter in both places the losses differ",
        summary="{first} and {second} are two parameters with the same entries in memory, and each is stepped",
        measured=(
            "with one parameter in both places the losses of the first steps change by {difference:share}; rounding is "
            "below {bound:share}"
        ),
        shown_by="both ways were run in float64 from the same weights",
        repair="decoder.weight = embedding.weight   # the parameter itself, before the optimizer is built",
        variants={"named": {"repair": "{second} = {first}   # the parameter itself, before the optimizer is built"}},
        explains=("resume_equivalence:untied", "weight_decay_groups"),
        change=("seen",),
        source="https://github.com/BVLC/caffe/issues/1659",
    ),
    "layer_made_anew": Cause(
        proof="a parameter is used in each forward pass that did not exist in the one before",
        summary="{names} makes new weights of shape {shape} in every forward pass, and no step trains them",
        measured="in each of the steps another parameter is used at this line",
        shown_by="none of them existed when the step before was made",
        repair="make the layer once, in __init__, as self.layer = nn.Linear(...)",
        variants={
            "lost": {
                "measured": "in {steps} steps, {lost} of these weights got a gradient; no optimizer held any of them, "
                "and the next forward pass drew new ones",
                "shown_by": "what they are applied to was computed by trained weights: no augmentation of the batch",
            }
        },
        explains=_LEARNING,
        change=("seen",),
        settle="draw such weights under torch.no_grad(), or as plain tensors, where they are an augmentation",
        source="https://github.com/leaderj1001/Stand-Alone-Self-Attention/issues/2",
    ),
    "masters_hold_others": Cause(
        proof="the first gradient is taken at other weights than the step starts from, and its result replaces them",
        summary=(
            "the optimizer steps float32 masters that hold other values than {names}: the first step writes the "
            "masters over these weights"
        ),
        measured=(
            "{other} of {copies} weights differ from their masters, by up to {difference:.3g}, where one ULP of "
            "{dtype} is {ulp:.2g}"
        ),
        shown_by="after the first step each weight is its master, rounded, bit for bit",
        repair="make the float32 masters after the checkpoint is loaded, or copy the weights into them once, before "
        "the loop",
        explains=(*_LEARNING, "resume_equivalence"),
        source="https://github.com/NVIDIA/apex/pull/42",
    ),
    "kept_from_first_batch": Cause(
        proof="a value made from the first batch meets the rows of later ones, and another batch gives another value",
        summary="a tensor computed from {names} of the first batch is used for all later batches",
        measured=(
            "a tensor of shape {shape}; made from the second batch it differs by {difference:share} of its largest "
            "entry"
        ),
        shown_by="later batches meet it row by row in {function}, and the line that makes it runs once",
        repair="compute it in every forward pass, or keep it under a key that differs between batches",
        explains=(
            *_LEARNING,
            "batch_independence",
            "batch_roles_hold:first_value_kept",
            "determinism",
            "accumulation_equivalence",
            "input_dependence",
        ),
        change=("seen",),
        source="https://github.com/NVIDIA/Megatron-LM/pull/6981",
    ),
}
found = finding_maker(CAUSES)
