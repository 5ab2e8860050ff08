"""The causes of ``weight_decay_groups``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_optimizer = partial(Cause, change=("optimizer",))
_overdone = partial(_optimizer, explains=("overfit_one_batch", "update_ratio"))

CAUSES = {
    "filter_matches_nothing": Cause(
        proof="weights that a filter is to keep from decay all decay, and do not once it answers yes for them",
        repair="the names that these modules have in this model, or a filter by dimension: p.dim() < 2",
        variants={
            "asked": {
                "summary": "the filter {pattern} matches no parameter, and {all} ({names})",
                "measured": "tested on {asked} names of named_parameters(), true for none",
                "shown_by": "were it true of {names}, a group without decay would hold {names:them}",
            },
            "renamed": {
                "summary": "a filter for names with {pattern} finds no such name, and {all} ({names})",
                "measured": "no name of the model has {pattern} in it",
                "shown_by": (
                    "named with {pattern} as their last segment but one, {names:they} would be in a group without decay"
                ),
            },
            "prefix": {
                "summary": "the filter knows {pattern} and gets {given}: {names} {names:decay} at {decay:g}",
                "measured": "named_parameters() gives {asked} names",
                "shown_by": "named {pattern} it would be in a group without decay; with any prefix, it does not",
            },
            "promised": {
                "summary": "{written}.no_weight_decay() names {names}, which {names:decay} at {decay:g}",
                "measured": "the module that the optimizer is made from has no {written}.no_weight_decay()",
                "shown_by": (
                    "where each module passes on what those below it name, a group without decay holds {names:them}"
                ),
            },
            "isinstance": {
                "summary": "isinstance(module, {written}) is true of no {module}, and {all} ({names})",
                "measured": "{module} is a class of the project's own",
                "shown_by": "where {module} passes for {written}, a group without decay holds {names:them}",
            },
        },
        source="https://github.com/namisan/mt-dnn/pull/37",
        change=("names", "seen"),
    ),
    "filter_misses_some": Cause(
        proof="a filter by name keeps weights of a kind from decay, and others of the same class not",
        summary="a filter by name keeps {kept} of {module} from decay and misses {names}",
        measured="{names} {names:decay} at {decay:g}",
        shown_by="with {pattern} as their last segment but one, {names:they} would be there too",
        repair="the names that these modules have in this model, or a filter by dimension: p.dim() < 2",
        change=("seen",),
        source="https://github.com/huggingface/transformers/issues/16908",
    ),
    "groups_swapped": _optimizer(
        proof="norms and biases decay and no matrix does, in an optimizer that trains both",
        summary=(
            "group {on}, which decays at {decay:g}, holds norms and biases only, and no matrix decays: the groups are "
            "swapped"
        ),
        measured="{contents} decay; {others} in group {off} do not",
        shown_by="no trained matrix is in a group with weight decay",
        repair='give the decay to the group of the matrices, and "weight_decay": 0.0 to the other',
        change=("groups", "group"),
        source="https://github.com/facebookresearch/BalancingGroups/issues/6",
    ),
    "groups_not_given": _optimizer(
        proof="a variable holds the optimizer's parameters in groups with other options, and no code reads it",
        summary=(
            "{variable} holds {groups:group} for {optimizer}, and no code reads it: {optimizer} got other parameters, "
            "with {option} {given:g} for {names}"
        ),
        measured="{variable} has the parameters of {optimizer}, with {option} {wanted} for {names}",
        shown_by="no code around the line reads {variable}; the groups of {optimizer} have {option} {given:g}",
        change=("seen",),
        source="https://github.com/marvis/pytorch-yolo2/issues/34",
    ),
    "decays_by_default": _optimizer(
        proof="the group of norms and biases gives no weight_decay and takes that of its optimizer",
        summary=(
            "group {vectors} holds {contents} and gives no weight_decay, so it takes {default:?the default|that} of "
            "{optimizer}{default:?|(...)}: {decay:g}"
        ),
        measured="weight_decay {other:g} in group {matrices}, {decay:g} in group {vectors}",
        shown_by=(
            "group {matrices} holds matrices, and group {vectors}, which holds none, is given no option that differs"
        ),
        repair='"weight_decay": 0.0 in that group',
        source="https://github.com/mindspore-lab/mindcv/pull/752",
    ),
    "split_without_effect": _optimizer(
        proof="groups that divide matrices from norms and biases decay both equally, at one learning rate",
        summary=(
            "matrices (group {matrices}) and {contents} (group {vectors}) have a group each, and "
            "{decay:?both decay at {decay:g}|neither decays}"
        ),
        measured="the same learning rate, {lr:g}, and the same weight_decay in both",
        shown_by="every option of the optimizer is the same in both groups",
        repair='"weight_decay": 0.0 in the group of norms and biases',
        change=("groups", "optimizer"),
        source="https://github.com/yandex-research/tabular-dl-tabr/issues/19",
    ),
    "norms_and_biases_decay": _optimizer(
        proof="gains of norms, biases or tables of embeddings are in groups with weight decay",
        summary="weight decay shrinks {shares}",
        measured=(
            "{groups}; learning rate {lr:g}{known:?; over the steps of steps= decay alone shrinks them by "
            "{percent:.2g} %|}"
        ),
        shown_by="each gets gradients, and its group has weight_decay above 0",
        repair='two groups: p.dim() > 1 with the decay, the others with "weight_decay": 0.0',
        judged="give steps= (optimizer steps of the real run): less than 5 % of shrinkage is not reported",
        source="https://github.com/dingo-actual/om/issues/12",
    ),
    "decay_inside_adam": _optimizer(
        proof="Adam adds its weight decay to the gradient, which it then divides by its size",
        summary=(
            "{optimizer} adds weight_decay={decay:g} to the gradient and divides both by the gradient's size: weights "
            "with large gradients hardly decay"
        ),
        measured="{groups:group} of {optimizer} with decoupled_weight_decay=False",
        shown_by="{optimizer}(weight_decay=...) is L2 regularisation; AdamW decays each weight by lr * weight_decay",
        repair="torch.optim.AdamW, with weight_decay chosen again: the same number has another effect there",
        source="https://github.com/mapbox/robosat/pull/166",
    ),
    "momentum_and_decay_swapped": _overdone(
        proof="the weight decay is as large as a momentum, and the momentum as small as a weight decay",
        summary="{optimizer} has weight_decay={decay:g} and momentum={momentum:g}: they are swapped",
        measured="each step shrinks all weights of group {group} by {percent:.2g} %",
        shown_by="a momentum below 0.01 does nothing, and no recipe has a decay of 0.5 or more with a momentum",
        repair="give both by name: momentum=0.9, weight_decay=5e-4",
        source="https://github.com/YudeWang/SEAM/issues/21",
    ),
    "decay_turns_weights_over": _overdone(
        proof="lr * weight_decay is above 1: decay alone changes the sign of each weight in each step",
        summary=(
            "lr * weight_decay is {each:.3g} in group {group} of {optimizer}: each step multiplies its weights by "
            "{left:.3g}"
        ),
        measured="lr {lr:g}, weight_decay {decay:g}",
        shown_by="a step leaves (1 - lr * weight_decay) of each weight, which is below 0",
        repair="a smaller weight_decay: after 1 / (lr * weight_decay) steps a weight has decayed to 37 %",
    ),
    "decay_on_last_only": _optimizer(
        proof="more weight decay changes the first step of the last weight of a group, and of no other weight",
        summary=(
            "the weight decay of {optimizer} shrinks {names} only, the last of its group; {others} other weights, "
            "{matrices:matrix} among them, never decay"
        ),
        measured="with weight_decay 0 and 1 in every group, {others} of the weights end at the same bits",
        repair="shrink each weight inside the loop over group['params'], not the variable left over behind a loop",
        change=("seen", "optimizer"),
        source="https://github.com/lessw2020/Ranger21/issues/53",
    ),
    "decayed_twice": _optimizer(
        proof="the loss has a term whose gradient is a constant times each weight that weight decay shrinks too",
        summary=(
            "{names} {names:are} decayed twice: by a term of the loss whose gradient is {factor:.3g} * weight, and by "
            "weight_decay={decay:g}"
        ),
        measured="the gradient of the term is {factor:.6g} times the weight in {tensors:tensor}",
        shown_by="without this term the first gradient differs by just that, in float64",
        repair="leave the term out of the loss, or weight_decay=0.0",
        source="https://github.com/rutgerswiselab/NCR/issues/2",
    ),
}

found = finding_maker(CAUSES)
