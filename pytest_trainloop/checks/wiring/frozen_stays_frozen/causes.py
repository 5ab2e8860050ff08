"""The causes of ``frozen_stays_frozen``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_moves = partial(
    Cause,
    measured=(
        "{steps} of {rounds} steps moved {most}, {from_zero:?which began at zero|by up to {update:.1e} of its largest "
        "entry}"
    ),
    explains=("update_ratio",),
)

_ENTRIES = {
    "measured": (
        "{held} of {entries} entries, the same at {rounds} steps; {steps} steps moved them, by up to {update:.1e}"
        "{from_zero:? from zero|}"
    ),
}

CAUSES = {
    "still_trainable": _moves(
        proof="named in frozen=, requires grad, gets gradients and is moved by an optimizer's step",
        summary=(
            "{names} {names:are} named in frozen= and still trained: {names:they} {names:require} grad and the "
            "optimizer steps {names:them}"
        ),
        shown_by="it requires grad, a gradient arrives, and the step that reads it moves it",
        repair="requires_grad_(False) on them before this line, and give the optimizer only what requires grad",
        change=("asked", "group"),
        source="https://github.com/catalyst-team/catalyst/issues/79",
    ),
    "weight_decay": _moves(
        proof="moves along its own values in a step that finds no new gradient",
        summary="{names} {names:are} frozen, and moved by weight decay",
        shown_by="without weight decay the same run leaves it where it is",
        repair=(
            "give the optimizer only (p for p in parameters if p.requires_grad), or leave their .grad at None: zero is "
            "not none"
        ),
        change=("freeze", "group"),
        variants={
            "entries": {
                **_ENTRIES,
                "summary": "{held} entries of {most} get a gradient of zero by hand, and weight decay moves them",
                "shown_by": "without weight decay the same run leaves them where they are",
                "repair": (
                    "copy the old values back after step(), or give what is held to a group with weight_decay=0: a "
                    "gradient of zero does not stop decay"
                ),
            },
            "along its values": {
                "shown_by": (
                    "the step shrinks the weights: its direction agreement with them is {cosine:.4f} (-1 = opposite)"
                )
            },
        },
        source="https://github.com/ahrefs/ocannl/issues/673",
    ),
    "momentum": _moves(
        proof="moves in a step that finds no new gradient, and not along its own values",
        summary="{names} {names:are} frozen, and moved by the momentum that the optimizer kept",
        shown_by="the step finds a gradient of zero or none, and the update is no decay",
        repair="set parameter.grad = None for what is frozen (the optimizer skips it then), or build a new "
        "optimizer after this line",
        change=("freeze", "group"),
        variants={
            "entries": {
                **_ENTRIES,
                "summary": (
                    "{held} entries of {most} get a gradient of zero by hand, and the momentum that the optimizer kept "
                    "moves them"
                ),
                "shown_by": "they move in a run without weight decay as well, by what earlier gradients left",
                "repair": (
                    "put the mask on the weights again after step(), or copy the old values back; or set the state of "
                    "these entries in the optimizer to zero where the hold begins"
                ),
            }
        },
        source="https://discuss.pytorch.org/t/why-there-is-still-a-small-change-in-frozen-layer-parameters/153740",
    ),
    "stale_gradient": _moves(
        proof="moves by a gradient that is bit for bit one that an earlier step used",
        summary="{names} {names:are} frozen, and stepped with an old gradient that was left in .grad",
        shown_by="the gradient that the step reads is bit for bit one read before",
        repair="zero_grad(set_to_none=True) on what is frozen, after this line",
        change=("freeze", "seen"),
        source="https://github.com/neuralmagic/sparseml/issues/965",
    ),
    "statistics_drift": Cause(
        proof="the running statistics of a norm whose weights are all frozen change in the training forward pass",
        summary="{names} {names:drift}: the norm's weights are frozen and it runs in training mode",
        measured="{statistics:running statistic} of {norms:norm} changed over {steps:step}",
        shown_by="all weights of these norms are frozen through the run, and their statistics differ from the start",
        repair="eval() on the frozen part (model.backbone.eval()), after every train() of the whole model",
        explains=("update_ratio",),
        change=("freeze",),
        variants={
            "another buffer": {
                "summary": "{names} is named in frozen=, and changes with every training forward pass",
                "measured": "the buffer differs after a call of its module from what it was before",
                "shown_by": "seen around the call itself: the module writes it, not a copy or an average",
            }
        },
        source="https://github.com/kdexd/virtex/issues/16",
    ),
    "freeze_sets_an_attribute": Cause(
        proof="requires_grad is False as an attribute of the module, and its parameters get gradients and move",
        summary="requires_grad = False on {path} freezes nothing, since it is a module: {names} {names:are} trained",
        measured="gradients arrive at {names:them}, and steps move {names:them}",
        repair="requires_grad_(False), with an underscore, goes through the parameters of a module",
        source="https://github.com/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18",
    ),
    "freeze_matches_nothing": Cause(
        proof="a pattern is true of no name, and freezes parameters that train where it is answered yes for them",
        summary="the freeze by {patterns} matches no parameter: {names} {names:are} trained",
        measured="tested on {asked:name}, true for none",
        shown_by="with the condition forced to true, the same code freezes {names}",
        variants={
            "alone": {
                "summary": "the freeze by {patterns} matches no parameter and freezes nothing",
                "measured": "tested on {asked:name}, true for none; the names begin with {names}",
                "shown_by": "with the condition forced to true for one name, the same code freezes its parameter",
            }
        },
        repair="the names that named_parameters() gives in this model; raise where a pattern matches none of them",
        change=("seen",),
        source="https://github.com/huggingface/lerobot/issues/4018",
    ),
}

found = finding_maker(CAUSES)
