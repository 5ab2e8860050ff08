"""The causes of ``learnable_targets``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_LEARNING = ("overfit_one_batch", "loss_at_init", "update_ratio")

_seen = partial(Cause, change=("seen",), explains=_LEARNING)
_far = partial(
    _seen,
    measured=(
        "targets have mean {mean:.4g} and spread {spread:.3g}; the first outputs are {start:.4g} from them in root "
        "mean square"
    ),
)

CAUSES = {
    "target_is_other_draw": _seen(
        proof=(
            "the prediction depends on one draw of random numbers, and its target is made from another of the same "
            "shape"
        ),
        summary=(
            "the target is {velocity:?the difference of data and a draw|a draw} of {names} ({shape}); the prediction "
            "was given another draw"
        ),
        measured="drawn for the input at {given}\ndrawn for the target at {target}",
        shown_by="with other numbers in the target's draw the prediction is the same, bit for bit",
        repair="draw once and use it twice: noise = torch.randn_like(x), for the input and for the target",
        source="https://arxiv.org/abs/2006.11239",
    ),
    "noise_not_given": _seen(
        proof="the target is a draw of random numbers, and with other numbers the prediction is the same, bit for bit",
        summary="the target is a draw of {names} ({shape}) that the model is not given",
        measured="drawn at {target}; the prediction depends on the batch and on no such draw",
        shown_by="with the same numbers in another order the prediction is the same, bit for bit",
        repair="give the model what the noise was added to: model(x + noise)",
        settle="draw the noise once, before fit, where the targets are to stay fixed",
        source="https://arxiv.org/abs/2006.11239",
    ),
    "target_cut_to_one_value": _seen(
        proof="what is cast, or given to argmax, differs between rows, and the result is one number",
        summary="the target is {value:g} for every row, though {known} differs between rows",
        measured="values from {low:.4g} to {high:.4g} of shape {shape} become {value:g}",
        shown_by="{op} cuts off what distinguishes them",
        repair="keep the values: labels.float() where the loss takes numbers, indices where it takes classes",
        explains=(*_LEARNING, "loss_contract", "input_dependence", "gradient_reaches_every_param"),
        variants={
            "argmax": {
                "shown_by": "axis {axis} has one entry, so {op} is 0 for any values",
                "repair": "take the class indices themselves: leave the argmax out",
            }
        },
        source="https://docs.pytorch.org/docs/stable/generated/torch.argmax.html",
    ),
    "one_label_for_all": _seen(
        proof="all targets of the only loss are filled with one number: one score for every input is its best answer",
        summary="every target of {op} is {value:g}: one score for all inputs is the best answer",
        measured="{calls:call} in the first steps, the first with {entries:target}; other terms are sizes alone",
        shown_by="the targets are made without the batch, and no other term pushes the scores the other way",
        repair="give what is made or drawn to be wrong the other label: torch.cat([torch.ones_like(real), "
        "torch.zeros_like(fake)])",
        source="https://github.com/pyg-team/pytorch_geometric/pull/2977",
    ),
    "target_out_of_reach": _seen(
        proof="targets lie outside of what the last function can give",
        summary="{beyond:share} of the targets lie outside of what {names} can give ({ends})",
        measured="{outside} of {count} targets; they go from {lowest:.4g} to {highest:.4g}",
        shown_by=(
            "even the best output of {names} is {least:.3g} from them in root mean square; their mean, one number for "
            "all, is {constant:.3g} from them"
        ),
        repair="scale the targets into its range, or leave the function out after the last layer",
        settle="scale the targets into the range",
        source="https://github.com/LuEE-C/PPO-Keras/issues/13",
    ),
    "standardised_twice": _far(
        proof="the targets of the batch are in reach, and the loop's own (y - mean) / spread takes them out of it",
        summary="{known:?{names}|the target} is standardised already, and is standardised again",
        shown_by="before it they have mean {before:.3g} and spread {before_spread:.3g}, which the outputs are near to",
        repair="standardise once: leave it out here, or in the data set",
        source="https://github.com/deepset-ai/FARM/issues/456",
    ),
    "target_in_other_units": _far(
        proof="one constant, the mean of the targets, is ten times nearer to them than the first outputs",
        summary="one constant, the mean of the targets, is far nearer to them than the first outputs are",
        shown_by="until that constant is found, every step moves all outputs by nearly the same amount",
        repair="train on (y - mean) / spread of the training set, and undo it for what is reported",
        settle="set the bias of the last layer to the mean of the targets, where they are to stay in their units",
        source="https://github.com/atomistic-machine-learning/schnetpack/issues/336",
    ),
    "input_contains_target": _seen(
        proof="each column of the target occurs in the input in all rows, and the prediction depends on it",
        summary="{target} is part of {input}, which the prediction is computed from",
        measured="column {columns}{more:? and more|} of {of} is the target, in each of {rows} rows",
        shown_by="with these entries in other rows the prediction differs",
        repair="take the target's columns out of the input: x = table.drop(columns=[target])",
        explains=("loss_at_init:below_chance",),
        settle="leave these columns out of the input",
        source="https://github.com/sktime/pytorch-forecasting/issues/182",
        change=("data", "seen"),
    ),
    "target_written_by_loss": _seen(
        proof="a loss function writes into what it is given, and with that put back afterwards the loss differs",
        summary="{function}() writes into {names}, and another term of the loss reads it afterwards",
        measured=("the loss is {loss:.6g}; with {names} put back when {function}() returns it is {restored:.6g}"),
        shown_by="both were taken with the same weights, batch and random numbers",
        repair="work on a copy: target = target.clone()",
        explains=(*_LEARNING, "loss_components", "accumulation_equivalence", "determinism"),
        variants={"argument": {"repair": "{argument} = {argument}.clone()"}},
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3917",
    ),
}

found = finding_maker(CAUSES)
