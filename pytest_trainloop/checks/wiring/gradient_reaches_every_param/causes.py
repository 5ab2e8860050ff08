"""The causes of ``gradient_reaches_every_param``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.core.registry import Cause, finding_maker

_PARTS = (
    "loss_contract:part_detached",
    "loss_contract:part_left_out",
    "every_term_trains:term_detached",
    "every_term_trains:penalty_off_graph",
)
"""What the terms of a loss look like whose graph is cut."""

_cut = partial(
    Cause,
    measured=(
        "0 gradients arrived there in {passes:backward pass}"
        "{shift:?; moving {names:them} changes the loss by {shift:.1e}|}"
    ),
    explains=(*_PARTS, *TRAINING),
    change=("seen",),
)
_zero = partial(
    Cause,
    measured="every gradient that arrived is zero in every entry",
    shown_by=(
        "in a run in which {op} gives back its input here, a gradient (largest entry {gradient:.2g}) reaches {first}"
    ),
    change=("seen",),
)
_NO_GRADIENT = "{names} {names:get} no gradient{shift:? although the loss depends on {names:them}|}"
_REFUSED = "{refused:?, and torch refuses to backpropagate a loss without history|}"
_OTHERS = "{others:?, and at {others:more line} on other paths|}"
_LEFT_OUT = (
    "in a run without the {op} here{others:? and the others|}, a gradient (largest entry {gradient:.2g}) reaches "
    "{first}"
)
_WITHOUT = "without the {op} the gradient arrives"
_TEACHER = {
    "summary": "{teacher} runs without gradients and gives targets only, and an optimizer holds its weights",
    "shown_by": (
        "gradients are off where it runs, and each result of it meets values that train only as the target of a loss "
        "or as what is subtracted"
    ),
    "repair": (
        "leave the weights of {teacher} out of the optimizer: weight decay would move them without a gradient; "
        "frozen=({teacher!r},) declares it as intended"
    ),
}
_PASSED_THROUGH = {"tried": "with {op} giving back its input in the backward pass the gradient arrives"}
_UNCHANGED = "0 gradients arrived; moving {names:them} does not change the loss"
_NO_RESULT = (
    "the parameter enters an operation in the training forward pass, and nothing that is backpropagated depends on the "
    "result"
)
_NOT_NAMED = "frozen={declared} does not name {names:them}"
_MOVES = "every gradient that arrived is zero in every entry, and moving {names:them} changes the loss"
_RULED_OUT = "ruled out: rounding, clamping, units that are off for all data, normalisation over one entry"

CAUSES = {
    "graph_cut": _cut(
        proof=(
            "no gradient ever arrives, and the loss depends on the parameter; or, in one run, its optimizer steps "
            "without one"
        ),
        summary=f"{_NO_GRADIENT}: the graph is cut by {{op}}{{module}}{_OTHERS}{_REFUSED}",
        shown_by="likely: moving the result of {op} here changes the loss by {moved:.1e}, and no gradient passes there",
        repair="keep the tensor and its history on the loss path",
        variants={
            "left out": {
                "shown_by": _LEFT_OUT,
                "tried": _WITHOUT,
            },
            "other side": {
                "shown_by": _LEFT_OUT,
                "tried": (
                    "with the other side detached in its place every parameter gets a gradient; learning was not tried"
                ),
                "do_not": "just delete the {op}: both sides then train, and the outputs may collapse to a constant",
            },
            "used twice": {
                "summary": f"{_NO_GRADIENT}: the loss uses the output of {{op}}, which is for another loss{_REFUSED}",
                "shown_by": (
                    "the same tensor is used in the loss of {other}, which trains other parameters, and again here"
                ),
                "repair": (
                    "use the tensor from before the {op} here: call the model again, or keep both (fake for this loss, "
                    "fake.detach() for the other)"
                ),
                "do_not": "remove the {op} at {cut_at}: the loss of {other} must stop there",
            },
            "own function": {
                "shown_by": "a gradient arrives at the output of {op}, and its backward() returns none for an input",
            },
            "unexplained": {
                "summary": _NO_GRADIENT + _REFUSED,
                "shown_by": (
                    "no operation seen restores the gradient; tried without: detach, .data, no_grad, and values taken "
                    "out of tensors in torch calls"
                ),
                "repair": (
                    "look for a value that leaves torch or comes from another thread on the way from these parameters "
                    "to the loss"
                ),
            },
            "one run": {
                "summary": (
                    "{steps:step} of {kind} found no gradient: the backward pass before each of them reaches none of "
                    "its parameters"
                ),
                "shown_by": (
                    "{unused:?the backward pass at {unused} comes right before the step, its gradients arrive at "
                    "{others} only, and no step uses them|{names} {names:run} with gradients switched on, and all "
                    "gradients arrive at {others}}"
                ),
                "repair": "compute this loss from what these parameters give, without detach(), .data and no_grad()",
            },
            "teacher": _TEACHER,
        },
        source="https://github.com/dragen1860/IntroVAE-Pytorch/issues/3",
    ),
    "no_grad_forward": _cut(
        proof="the operations on the path ran with gradients switched off",
        summary=f"{_NO_GRADIENT}: the forward pass{{module}} runs with gradients switched off{_OTHERS}{_REFUSED}",
        shown_by=(
            "in a run with gradients switched on here{others:? and the others|}, a gradient (largest entry "
            "{gradient:.2g}) reaches {first}"
        ),
        repair="run the training forward pass outside torch.no_grad() / inference_mode()",
        variants={"left out": {"tried": _WITHOUT}, "teacher": _TEACHER},
        source="https://github.com/rll-research/cic/issues/5",
        change=("without gradients", "seen"),
    ),
    "checkpoint_cut": Cause(
        proof="the module ran only inside a checkpointed segment none of whose inputs requires grad",
        summary=(
            "{names} {names:get} no gradient: {names:they} {names:are} behind a re-entrant checkpoint none of whose "
            "inputs requires grad"
        ),
        measured="0 gradients arrived; moving {names:them} changes the loss by {shift:.1e}",
        shown_by=(
            "{owner} ran only inside the checkpoint's forward pass without gradients and was never run again in "
            "backward"
        ),
        repair=(
            "checkpoint(..., use_reentrant=False); or make the segment's inputs require grad "
            "(enable_input_require_grads) before checkpointing is switched on"
        ),
        explains=("checkpointing_equivalence:inputs_need_grad", *TRAINING),
        change=("seen",),
        source="https://github.com/microsoft/LoRA/issues/120",
    ),
    "gradient_vanished": _zero(
        proof="a gradient arrives that is exactly zero, and an operation with a slope of zero lies on the path",
        summary="{names} {names:get} only zero gradients: {op}{module} has a slope of zero there",
        repair="keep it off the loss path, or pass the gradient straight through: x + (f(x) - x).detach()",
        explains=TRAINING,
        variants={
            "passed through": _PASSED_THROUGH,
            "bound": {
                "repair": (
                    "initialise it within its bounds; or name it in frozen=({first!r},), if it has reached them for "
                    "good"
                ),
            },
            "sloping": {
                "summary": "{names} {names:get} only gradients of exactly 0, although the loss changes with "
                "{names:them}",
                "measured": _MOVES,
                "shown_by": (
                    f"central differences with two steps give one slope ({{slope:.2g}} of the loss, float64); "
                    f"{_RULED_OUT}"
                ),
                "repair": (
                    "look for a backward() of your own that returns zeros, or a factor that is zero in backward; or "
                    "name {names:them} in frozen="
                ),
            },
            "flat": {
                "summary": "{names} {names:get} only gradients that are exactly zero",
                "measured": _MOVES,
                "shown_by": (
                    "around {several:?their values|its value} the loss is flat, or a hook zeroes the gradient; "
                    f"{_RULED_OUT}"
                ),
                "repair": (
                    "look at what multiplies the result (a gate at zero, an expert without tokens), or give batches= "
                    'that use it; frozen=("...",) declares that it keeps its values'
                ),
            },
        },
        source="https://github.com/pytorch/pytorch/issues/7002",
    ),
    "dead_activation": _zero(
        proof=(
            "a gradient arrives that is exactly zero, and an activation or normalisation returns the same for every "
            "input"
        ),
        summary="{names} {names:get} only zero gradients: {op}{module} returns the same for every input",
        repair=(
            "check the bias and the scale in front of it: every unit is off for all of this data; lower the learning "
            "rate or use a leaky activation"
        ),
        explains=("input_dependence", "loss_at_init", *TRAINING),  # weights of 1 add up where they should average
        variants={
            "passed through": _PASSED_THROUGH,
            "softmax": {"repair": "a softmax over one entry is always 1: check its dim, or use a sigmoid"},
            "norm": {"repair": "a norm over one entry is always its bias: check the normalised shape"},
            "one key": {
                "repair": (
                    "give batches= with more than one key; where no batch ever has more, these weights never train"
                ),
            },
            "saddle": {
                "summary": (
                    "{names} {names:start} at exactly 0, and so does the factor that multiplies {names:them}: the "
                    "gradient stays 0 for good"
                ),
                "shown_by": (
                    "with all weights moved a little a gradient (largest entry {gradient:.2g}) reaches {first}"
                ),
                "repair": "initialise only one of the two factors to 0 (LoRA: B at 0, A random)",
            },
        },
        source="https://github.com/PetrochukM/PyTorch-NLP/issues/2",
        change=("seen", "drawn", "module"),
    ),
    "parameter_unused": Cause(
        proof="the parameter is computed with in the training forward pass, and the result goes nowhere",
        summary="every forward pass computes with {names}, but the result never reaches the loss",
        measured=_UNCHANGED,
        shown_by=_NO_RESULT,
        repair="use the result, x = self.module(x), add its loss, or take the module out of the optimizer",
        explains=(*_PARTS, "input_dependence", *TRAINING),
        variants={
            "given out": {
                "summary": (
                    "every forward pass computes with {names}, but no loss uses the result"
                    f"{{target:?: nothing reads {{target}}, which has the shape of its target|}}"
                    f"{{declared:?: {_NOT_NAMED}|}}"
                ),
                "shown_by": (
                    f"{_NO_RESULT}{{target:?; nothing reads {{target}}, which has the shape of its target|}}"
                    f"{{declared:?; {_NOT_NAMED}|}}"
                ),
                "repair": (
                    "add the loss of that result{target:?, with {target} as target|, or take the module out of the "
                    'optimizer}; {sure:?or name the module in frozen=|frozen=("...",) declares it as intended, '
                    "frozen=() that all must train}"
                ),
            },
            "no part": {
                "summary": (
                    "an optimizer holds {names}, but no operation used {names:them} in these batches"
                    "{kept:?: {kept}, made without gradients before training began, is used in place of {names:them}|}"
                    f"{{declared:?: {_NOT_NAMED}|}}"
                ),
                "measured": "no gradient arrived and no operation used {names:them}",
                "shown_by": "moving {names:them} does not change the loss{kept:?; without {kept} a gradient arrives|}"
                f"{{declared:?; {_NOT_NAMED}|}}",
                "repair": (
                    "{kept:?make {kept} again in each training step, or clear it after the evaluation; |}"
                    "{declared:?call the module and use its result, or take it out of the optimizer; or name it in "
                    'frozen=|give batches= that use it; frozen=("...",) declares that it keeps its values, '
                    "frozen=() that all must train}"
                ),
            },
            "left out": {
                "summary": (f"{{call}} drops every value that is computed with {{names}}{{declared:?: {_NOT_NAMED}|}}"),
                "measured": (
                    "gradients of exactly 0 in {passes:backward pass}; moving {names:them} does not change the loss"
                ),
                "shown_by": "the input of {call} changes with {names:them}, its output does not",
                "repair": (
                    "look at the mask, the index or the weight on this line: is it the wrong way round, or 0 for all "
                    'of this data? frozen=("...",) declares it as intended'
                ),
            },
        },
        source="https://github.com/lucidrains/x-transformers/issues/273",
        change=("use", "forward"),
    ),
    "module_uncalled": Cause(
        proof="a module that model= names is never called in training, and no loss depends on it",
        summary=(
            "{names} is in model=, but training never calls it{moved:?, although it is updated|}: no loss of "
            "{rounds:optimizer step} depends on it"
        ),
        measured="0 calls in training, and moving its {parameters} parameters does not change the loss",
        shown_by="no module in it was called, with or without gradients{made:?; it was made at {made}|}",
        repair=(
            "call it under torch.no_grad() before this line and put its output in the loss; or leave it out of model="
        ),
        change=("targets", "seen"),
        source="https://github.com/tambetm/gym-minecraft/issues/4",
    ),
    "frozen_by_mistake": Cause(
        proof="frozen= declares what is frozen, and a layer's weight outside of it does not require grad",
        summary="{names} {names:are} frozen, but frozen= does not name {names:them}: it names {declared}",
        measured="{weights} weights of layers do not require grad and are in none of the paths of frozen=",
        shown_by="their modules run in the training forward pass, and requires_grad is False on them",
        repair=(
            "switch requires_grad on for them (a prefix like 'layer1' also matches 'layer10'), or name them in frozen="
        ),
        explains=TRAINING,
        settle='name what is to stay at random values: frozen=("projection",)',
        variants={
            "drawn": {
                "summary": "{names} {names:are} frozen at random values: nothing loads or trains {names:them}",
                "measured": "{loaded} other frozen matrices of layers were loaded",
                "shown_by": "another seed gives {names:them} other values, and the others the same",
                "repair": "train {names:them}: requires_grad_(True), or modules_to_save=[...] in a LoraConfig",
            }
        },
        source="https://github.com/ChenDelong1999/ITRA/issues/1",
        change=("names of freeze", "freeze", "module"),
    ),
    "nothing_trainable": Cause(
        proof="no parameter of the model requires grad",
        summary="nothing trains: none of the {all} parameters requires grad",
        measured="0 of {all} parameters require grad",
        shown_by="requires_grad is False on every parameter when the loop starts, and no gradient arrives anywhere",
        repair="leave requires_grad on for what should train; with adapters: freeze the base first, then attach them",
        explains=TRAINING,
        change=("asked", "freeze"),
        source="https://github.com/huggingface/peft/issues/282",
    ),
    "adapters_frozen": Cause(
        proof="adapters are in the model and none of them requires grad",
        summary=(
            "the model has {adapters} adapter parameters and none of them requires grad: the adapters never train"
        ),
        measured="0 of {adapters} adapter parameters require grad; of all others {others} do",
        shown_by="requires_grad is False on every adapter when the loop starts",
        repair="freeze the base before the adapters are attached, or switch requires_grad on again for the adapters",
        explains=TRAINING,
        change=("freeze", "module"),
        source="https://github.com/LLaVA-VL/LLaVA-NeXT/pull/510",
    ),
    "base_left_trainable": Cause(
        proof="adapters and the weights they adapt are both trained",
        summary="{names} {names:train} together with the adapters on {names:them}: the base was never frozen",
        measured=(
            "{weights} adapted weights require grad, get gradients and are held by an optimizer; {adapters} adapter "
            "parameters"
        ),
        shown_by="the adapted weight and its adapter both receive gradients",
        repair=(
            "base.requires_grad_(False) before the optimizer is built, or pass only the adapters to it: "
            "(p for n, p in model.named_parameters() if 'lora' in n)"
        ),
        explains=("frozen_stays_frozen",),
        change=("thawed", "groups", "group"),
        source="https://github.com/Blaizzy/mlx-vlm/issues/2178",
    ),
}

found = finding_maker(CAUSES)
