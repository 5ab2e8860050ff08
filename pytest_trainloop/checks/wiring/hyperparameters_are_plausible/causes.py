"""The causes of hyperparameters_are_plausible, with their texts."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

CAUSES = {
    "norm_eps_too_large": Cause(
        proof="eps of a norm is above 1e-2; a norm divides by the root of variance + eps",
        summary="eps={value:g} in {names} is added to each variance: small differences in the input stay small",
        measured="{number:norm}; an input of variance 1 leaves with {one:.2g}, one of variance 0.01 with {little:.2g}",
        change=("module",),
        source="https://github.com/eriklindernoren/PyTorch-GAN/issues/116",
    ),
    "statistics_of_the_last_batch": Cause(
        proof="momentum of a batch norm in training mode is 0.9 or more: the weight of the new batch",
        summary="momentum={value:g} in {names}: the last batch makes up {value:share} of the running statistics",
        measured="running = {old:g} * running + {value:g} * batch, in {number:norm}",
        change=("module",),
        source="https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/230",
    ),
    "statistics_never_move": Cause(
        proof="momentum of a batch norm in training mode is 0, and its running statistics are 0 and 1",
        summary="momentum=0 in {names}: the running statistics stay at mean 0 and variance 1, and eval() uses these",
        measured="running = 1 * running + 0 * batch, in {number:norm}",
        repair="momentum=0.1, the default; or track_running_stats=False, to use those of each batch in evaluation too",
        change=("module",),
        source="https://github.com/Cadene/pretrained-models.pytorch/issues/5",
    ),
    "dropout_passes_nothing": Cause(
        proof="p of a dropout that runs in training mode is 1: the probability to drop, not to keep",
        summary="{option}=1 in {names}: in training nothing passes this dropout",
        measured="{number:module} with {option}=1",
        repair="p is the share that is dropped: Dropout(1 - keep_prob)",
        change=("module",),
        source="https://github.com/hassony2/kinetics_i3d_pytorch/issues/6",
    ),
    "leaky_relu_is_the_identity": Cause(
        proof="negative_slope is 1: values below 0 pass unchanged, as those above 0 do",
        summary="negative_slope={given} in {names}: {names:they} {names:are} the identity",
        measured="{number:activation} with negative_slope={given}, which is 1",
        repair="LeakyReLU(inplace=True): the first argument is the slope, 0.01 by default",
        change=("module",),
        source="https://github.com/PantoMatrix/PantoMatrix/issues/52",
    ),
    "weight_decay_given_as_momentum": Cause(
        proof="momentum or dampening of SGD is above 0 and at most 0.01, and its weight_decay is 0",
        summary="{kind} has {option}={value:g} and no weight decay: a weight decay in the place of {option}",
        measured="lr={lr:g}, {option}={value:g}, weight_decay=0",
        source="https://github.com/YudeWang/SEAM/issues/21",
    ),
}
found = finding_maker(CAUSES)
