"""The causes of ``adversaries_oppose``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_seen = partial(Cause, change=("seen",), explains=("overfit_one_batch",))

CAUSES = {
    "maker_helps_critic": _seen(
        proof="both steps push scores of generated samples the same way, and the critic pushes those of data the other",
        summary="the generator's step pushes {names}'s scores of generated samples {way}, as {names}'s own step does",
        measured="the sign of the gradient at every score, also with {offsets} constants added to the scores",
        shown_by="the step of {names} pushes the scores of data the other way: the two must be opponents",
        repair=(
            "in the generator's loss give these scores the label of data: criterion(critic(made), ones); for "
            "Wasserstein losses -critic(made).mean(), where the critic has critic(made).mean() - critic(data).mean()"
        ),
        settle="step both networks with one optimizer where they are to work together",
        change=("use of the score",),
        source="https://arxiv.org/abs/1406.2661",
    ),
    "critic_cannot_tell": _seen(
        proof="the critic's step pushes the scores of data and of generated samples the same way, at every score",
        summary="the step of {names} pushes its scores of data and of generated samples the same way: {way}",
        measured="the sign of the gradient at every score, also with {offsets} constants added to the scores",
        shown_by="the generator's step pushes its scores the other way, and nothing else does",
        variants={
            "one way": {"shown_by": "no step pushes any score the other way: one constant is best for all"},
        },
        repair=(
            "change the sign of the term of generated samples: F.relu(1 - critic(real)).mean() + F.relu(1 + "
            "critic(made)).mean(); with labels: ones for data, zeros for generated samples"
        ),
        source="https://arxiv.org/abs/1701.07875",
    ),
    "gradients_mixed": _seen(
        proof="a step uses the gradients of both losses, which push the scores of generated samples in opposite "
        "directions",
        summary="the step of {own} uses the gradient of {other}'s loss as well: nothing clears it in between",
        measured=(
            "the two push the scores of generated samples in opposite directions, also with {offsets} constants added "
            "to the scores"
        ),
        shown_by="what this step of {stepped} reads holds the gradients of both backward passes",
        repair=(
            "call zero_grad() of each optimizer right before the backward() of its own loss; detach() the generated "
            "samples where the critic trains on them"
        ),
        change=(),
        do_not="clear only after the step: the other side's backward() fills these gradients again",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/557",
    ),
}

found = finding_maker(CAUSES)
