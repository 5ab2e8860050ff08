"""Two networks that play against each other push the scores of what is made in opposite directions.

What it does
    Where two optimizers step, it looks for a module whose weights belong to one of them (a critic, a discriminator) and
    which scores data as well as what the weights of the other one made. In one further run it notes in which direction
    each step pushes these scores: the critic's own step on data, the critic's own step on what was made, and the
    maker's step.

Why is this bad?
    A generator that is trained towards the label that its discriminator learns to give it gets worse with every step,
    and both losses fall: it looks like training that succeeds. A critic that is pushed the same way by data and by
    what is made tells nothing apart.

How it decides
    By the sign of the gradient at the scores, never by a loss's value. In the further run a constant is added to the
    scores, another one at each step, so that a direction which depends on the score is seen on both sides of its
    target: least squares pushes a score of -3 up whether its target is 0 or 1, but not one of 0.5. It is a fault where
    at every constant the maker's step pushes all scores of what it makes as the critic's own step does, while the
    critic pushes those of data the other way. ``maximize`` turns a direction. Passes whose gradients both optimizers
    step with say nothing of this, nor do classifiers of data and of what is made alike (auxiliary classes), as data is
    then pushed the same way. A critic cannot tell where it pushes both the same way at every constant, and the maker
    pushes the other way; or all three push one way. A batch whose labels are all one class looks the same: where a
    tensor of the batch holds a single value, nothing is said. Where the critic sees data
    beside what is made of it, the two may be meant to work together (an estimate of mutual information): advice.
    Where the step of one side uses a pass of the other side's loss too, and that pass pushes the scores of what is made
    against its own at every constant, its gradients were not cleared in between.

Faulty
    >>> critic, critic_optimizer = model, optimizer
    >>> generator = nn.Linear(4, 8)
    >>> generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
    >>> for x, y in batches:
    ...     made = generator(torch.randn(len(x), 4))
    ...     critic_optimizer.zero_grad()
    ...     (critic(made.detach()).mean() - critic(x).mean()).backward()
    ...     critic_optimizer.step()
    ...     generator_optimizer.zero_grad()
    ...     critic(made).mean().backward()
    ...     generator_optimizer.step()

Fixed
    >>> critic, critic_optimizer = model, optimizer
    >>> generator = nn.Linear(4, 8)
    >>> generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
    >>> for x, y in batches:
    ...     made = generator(torch.randn(len(x), 4))
    ...     critic_optimizer.zero_grad()
    ...     (critic(made.detach()).mean() - critic(x).mean()).backward()
    ...     critic_optimizer.step()
    ...     generator_optimizer.zero_grad()
    ...     (-critic(made).mean()).backward()
    ...     generator_optimizer.step()

Known limits
    Both networks under one optimizer (gradient reversal) are not judged, nor a generator that steps less than three
    times in twelve steps of its critic.

References
    https://arxiv.org/abs/1406.2661
    https://arxiv.org/abs/1701.07875
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.adversaries_oppose.scores import Game, Mixed
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "maker_helps_critic": Cause(
        proof="both steps push the scores of what is made the same way, and the critic pushes those of data the other",
        repair="in the generator's loss give these scores the label of data: criterion(critic(made), ones); for "
        "Wasserstein losses -critic(made).mean() beside critic(made).mean() - critic(data).mean()",
        explains=("overfit_one_batch",),
        change=("seen",),
        settle="step both networks with one optimizer where they are meant to work together",
    ),
    "critic_cannot_tell": Cause(
        proof="the critic's step pushes the scores of data and of what is made the same way, at every score",
        repair="turn the sign of the half of what is made: F.relu(1 - critic(real)).mean() + "
        "F.relu(1 + critic(made)).mean(); with labels: ones for data, zeros for what is made",
        explains=("overfit_one_batch",),
        change=("seen",),
    ),
    "gradients_mixed": Cause(
        proof="a step uses the gradients of both losses, which push the scores of what is made against each other",
        repair="call zero_grad() of each optimizer right before the backward() of its own loss; detach() what is made "
        "where the critic trains on it",
        explains=("overfit_one_batch",),
        do_not="clear only behind the step: the other side's backward() fills these gradients again",
    ),
}


def _no_adversaries(evidence: Evidence) -> str:
    from pytest_trainloop.checks.loss.adversaries_oppose.scores import ScoreRecorder

    return "" if evidence.shared(ScoreRecorder.of) else "no network scores what another trained network makes"


@check(needs={"fit"}, causes=CAUSES, rank=15, steps=1, absent=_no_adversaries)
def adversaries_oppose(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.adversaries_oppose.scores import (
        LEAST,
        Mixed,
        ScoreRecorder,
        always,
        may_hold_one_label,
        one_way,
        opposed_at,
    )

    for game in evidence.shared(ScoreRecorder.of):
        if isinstance(game, Mixed):
            yield _mixed(game)
            continue
        together, opposed = always(game.back, game.made, 1.0), opposed_at(game.given, game.made)
        if together and opposed >= 2:
            yield _helps(game, together)
            continue
        alike = always(game.given, game.made, 1.0) if always(game.back, game.made, -1.0) else 0
        shown = "the generator's step pushes its scores the other way, and nothing else does"
        if not alike and (alike := one_way(game)) >= LEAST:
            shown = "no step pushes any score the other way: one constant is best for all"
        if alike >= LEAST and not may_hold_one_label(evidence.fresh_loop().batch):
            yield _cannot_tell(game, alike, shown)


def _way(game: Game) -> str:
    signs = set(game.made.by_offset.values())
    return "up" if signs == {-1.0} else "down" if signs == {1.0} else "towards one value"


def _helps(game: Game, offsets: int) -> Finding:
    return Finding(
        cause="maker_helps_critic",
        level="advice" if game.beside_data else "fault",
        summary=f"the generator's step pushes {game.critic}'s scores of what it makes {_way(game)}, as the step of "
        f"{game.critic} itself does",
        measured=f"the sign of the gradient at every score, also with {offsets} constants added to the scores",
        shown_by=f"the step of {game.critic} pushes the scores of data the other way: the two must be opponents",
        culprits=(game.critic,),
        where=str(game.back.place),
    )


def _cannot_tell(game: Game, offsets: int, shown_by: str) -> Finding:
    return Finding(
        cause="critic_cannot_tell",
        summary=f"the step of {game.critic} pushes its scores of data and of what is made the same way: {_way(game)}",
        measured=f"the sign of the gradient at every score, also with {offsets} constants added to the scores",
        shown_by=shown_by,
        culprits=(game.critic,),
        where=str(game.made.place),
    )


def _mixed(found: Mixed) -> Finding:
    own, other = (found.critic, "the generator") if found.by_critic else ("the generator", found.critic)
    return Finding(
        cause="gradients_mixed",
        summary=f"the step of {own} uses the gradient of {other}'s loss as well: nothing clears it in between",
        measured=f"the two push the scores of what is made against each other, also with {found.offsets} constants "
        "added to the scores",
        shown_by=f"what this step of {found.stepped} reads holds the gradients of both backward passes",
        culprits=(found.critic,),
        where=str(found.step),
    )
