"""The causes of ``optimizer_holds_every_param``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.wiring.consequences import TRAINING
from pytest_trainloop.core.registry import Cause, finding_maker

_trains = partial(Cause, explains=TRAINING)
_LEFT_OUT = "{names} {names:get} gradients but {names:are} in no optimizer"
_ARRIVES = "gradients that are not zero arrive there, no optimizer holds them, and nothing else moved them"
_HELD = (
    "the optimizer holds {held:tensor} that no gradient reaches; {count:parameter} that {names:get} gradients "
    "{names:are} in no optimizer"
)
_IS_NO_MODULE = {
    "summary": f"{_LEFT_OUT}: the object at {{path}} is of class {{kind}}, which is no nn.Module",
    "measured": "{count:parameter} in {path}",
}
_LISTS = "{lists:?\nand nn.ModuleList (nn.ModuleDict) in place of the list (dict) on the way to the layers|}"

CAUSES = {
    "not_in_optimizer": _trains(
        proof="a gradient arrives at the parameter, and no optimizer holds it",
        summary=f"{_LEFT_OUT}, so {{names:they}} never {{names:train}}",
        measured="{count} of {trainable} trainable parameters are held by no optimizer",
        shown_by=_ARRIVES,
        repair=(
            "pass them to the optimizer here, or add_param_group() where they are made\n"
            'if they should stay fixed: requires_grad_(False), or frozen=("...",)'
        ),
        settle='frozen=("...",) says what is not to train; given and without these it is a fault',
        variants={
            "masters": {
                "shown_by": f"{_ARRIVES}; the optimizer steps tensors outside the model, and nothing writes them back",
                "repair": (
                    "write the tensors that the optimizer steps back into the model after every step "
                    "(p.copy_(master)), or pass it the model's own parameters"
                ),
            },
            "copied part": {
                "summary": (
                    "{names} {names:get} gradients and {names:are} in no optimizer; {copy} began with the values of "
                    "{original}"
                ),
                "shown_by": (
                    "in {steps:step} no optimizer held {names:them}, and nothing else moved {names:them}; the values "
                    "of {copy} and {original} were equal bit for bit"
                ),
                "repair": (
                    "if {copy} is to train, pass its parameters to the optimizer here\n"
                    "if it is a target network that follows {original}: {copy}.requires_grad_(False)"
                ),
            },
        },
        source="https://github.com/zjunlp/HVPNeT/issues/5",
    ),
    "swapped_after_optimizer": _trains(
        proof="the optimizer holds tensors that are no longer in the model, and not those that replaced them",
        summary="{names} {names:are} in no optimizer: {names:they} replaced tensors that the optimizer still holds",
        measured=_HELD,
        shown_by="the optimizer's tensors {shapes} are in no module any more{new:?; {owner} was made at {new}|}",
        repair=(
            "move this line behind the change of the model (new head, resized embedding), or add_param_group() for the "
            "new part"
        ),
        source="https://github.com/microsoft/nni/issues/4521",
    ),
    "stale_copy": _trains(
        proof="the optimizer holds none of the tensors that train, but as many others that no gradient reaches",
        summary=(
            "the optimizer holds none of the {count:parameter} that {names:train}: it was built on another copy of the "
            "model"
        ),
        measured=_HELD,
        shown_by="gradients arrive at the running model's tensors only; the optimizer's own get none",
        repair=(
            "move this line behind the last copy, re-wrap or rebuild of the model, and take that model's parameters()"
        ),
        source="https://github.com/skorch-dev/skorch/issues/317",
    ),
    "replaced_in_forward": Cause(
        proof="the optimizer holds the first parameter; each forward pass makes another one, and only that gets "
        "gradients",
        summary=(
            "{names} {names:are} replaced by a new Parameter inside of the forward pass, and the optimizer steps the "
            "one of the beginning"
        ),
        measured="{tensors} other tensors took the place of {count:parameter} in {steps:step}",
        shown_by="gradients arrive at the new ones only, no optimizer holds them, and the held one is in no module",
        repair=(
            "write into the parameter (with torch.no_grad(): weight.copy_(...)), or compute with another value: "
            "F.linear(x, F.normalize(self.weight))"
        ),
        explains=(*TRAINING, "weights_are_read:layer_made_anew", "loss_at_init"),
        change=("seen",),
        source="https://github.com/jonasgrebe/pt-femb-face-embeddings/issues/3",
    ),
    "not_registered": _trains(
        proof="a list, tuple, dict or plain object holds the parameter, and parameters() does not find it there",
        summary=f"{_LEFT_OUT}: the model never registered {{names:them}}",
        measured="{count:parameter} in plain lists, tuples or dicts",
        shown_by="gradients arrive there, and model.parameters() does not have them",
        repair=(
            "nn.ModuleList([...]) in place of the list (nn.ModuleDict of a dict, nn.ParameterList of parameters), so "
            "that parameters(), to() and state_dict() find them"
        ),
        variants={
            "class of the project": _IS_NO_MODULE
            | {
                "repair": (
                    "class {kind}({bases}):\nwith super().__init__() as the first line of its __init__"
                    f"{{called:?; rename __call__ to forward|}}{_LISTS}"
                )
            },
            "other object": _IS_NO_MODULE
            | {
                "repair": (
                    "assign its layers to attributes of the model, or keep them in an nn.ModuleDict in place of {kind}"
                    f"{_LISTS}"
                )
            },
        },
        source="https://github.com/kanezaki/pytorch-unsupervised-segmentation/pull/6",
    ),
    "held_twice": _trains(
        proof="one group holds the same tensor more than once",
        summary=("{kind} holds {names} more than once, so every step updates {names:them} more than once"),
        measured="{entries} entries in its groups, {count:tensor}",
        shown_by="its groups hold the same tensor repeatedly",
        repair="pass each parameter once: model.parameters() already leaves out repeated (tied) ones",
        source="https://github.com/thu-ml/tianshou/issues/395",
    ),
}

found = finding_maker(CAUSES)
