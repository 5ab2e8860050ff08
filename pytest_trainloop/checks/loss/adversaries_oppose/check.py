"""Two networks that play against each other push the scores of what is made in opposite directions.

What it does
    Where two optimizers step, it looks for a module whose weights belong to one of them (a critic, a discriminator). It
    must score data, and what the weights of the other one made. One further run notes in which direction each step
    pushes these scores: the critic's step on data, its step on what was made, and the maker's step.

Why is this bad?
    A generator that is trained towards the label that its discriminator learns to give it gets worse with every step,
    and both losses fall: it looks like training that succeeds. A critic that is pushed the same way by data and by
    what is made cannot distinguish the two.

How it decides
    1. It judges the sign of the gradient at the scores, never the value of a loss
       (docs/how-it-decides.md#two-networks-that-play-against-each-other).
    2. In the further run a constant is added to the scores, a different one at each step. So a direction that depends
       on the score is seen on both sides of its target. Least squares pushes -3 up for a target of 0 or 1, but not 0.5.
       ``maximize`` turns a direction.
    3. Passes whose gradients both optimizers step with are left out. So are classifiers that both sides read in the
       same way (auxiliary classes).
    4. Nothing is said of a critic that cannot tell if a tensor of the batch holds a single value: one class of labels
       looks the same.

    | at every constant | cause | advice if |
    |---|---|---|
    | maker and critic push what is made one way, the critic data the other | ``maker_helps_critic`` | below |
    | the critic pushes both one way and the maker the other; or all three push one way | ``critic_cannot_tell`` |  |
    | a pass of both sides opposes one side's own passes: gradients were not cleared | ``gradients_mixed`` |  |

    ``maker_helps_critic`` is advice where the critic sees data together with what is made of it. The two may then
    estimate mutual information together.

When it is skipped
    It skips a loop in which no network scores what another trained network makes.

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

from pytest_trainloop.checks.loss.adversaries_oppose.causes import CAUSES, found
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.checks.loss.adversaries_oppose.scores import Output, Pushed
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


def _no_adversaries(evidence: Evidence) -> str:
    from pytest_trainloop.checks.loss.adversaries_oppose.scores import ScoreRecorder

    played = any(pushed.keys() >= {"given", "made", "back"} for pushed in evidence.shared(ScoreRecorder.of).values())
    return "" if played else "no network scores what another trained network makes"


@check(needs={"fit"}, causes=CAUSES, rank=15, steps=1, absent=_no_adversaries)
def adversaries_oppose(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.adversaries_oppose.scores import ScoreRecorder

    named = set()  # critics: one that gives several outputs gets each finding once
    for output, pushed in evidence.shared(ScoreRecorder.of).items():
        if output.critic in named:
            continue
        findings = list(_mixed(evidence, output, pushed))
        if pushed.keys() >= {"given", "made", "back"}:
            findings += _one_way(evidence, output.critic, pushed["given"], pushed["made"], pushed["back"])
        if findings:
            named.add(output.critic)
        yield from findings


def _one_way(evidence: Evidence, critic: str, given: Pushed, made: Pushed, back: Pushed) -> Iterator[Finding]:
    """What the critic's own steps and those of the other side do to the scores."""
    from pytest_trainloop.checks.loss.adversaries_oppose.scores import LEAST_OFFSETS, may_hold_one_label

    signs = set(made.by_offset.values())
    way = "up" if signs == {-1.0} else "down" if signs == {1.0} else "towards one value"
    offsets = back.always(made, 1.0)
    if offsets and given.opposed(made) >= 2:
        # with data next to what is made of them, the two may estimate mutual information together
        level = "advice" if made.with_data == {True} else "fault"
        yield found("maker_helps_critic", back, (critic,), level=level, way=way, offsets=offsets)
        return
    offsets, variant = given.always(made, 1.0) if back.always(made, -1.0) else 0, ""
    if not offsets:
        three = (given.by_offset, made.by_offset, back.by_offset)
        agree = len({sign for by_offset in three for sign in by_offset.values()}) == 1
        offsets, variant = min(map(len, three)) if agree else 0, "one way"
    if offsets >= LEAST_OFFSETS and not may_hold_one_label(evidence.fresh_loop().batch):
        yield found("critic_cannot_tell", made, (critic,), variant, way=way, offsets=offsets)


def _mixed(evidence: Evidence, output: Output, pushed: Mapping[str, Pushed]) -> Iterator[Finding]:
    """Passes that both optimizers step with, which push what is made against those that one side steps with alone."""
    shared, critic, maker = pushed.get("shared"), output.critic, "the generator"
    if shared is None or True in shared.with_data:
        return
    sides = (  # the shared passes may be the maker's, or the critic's
        (output.owner, critic, maker, pushed.get("made"), pushed.get("given"), pushed.get("made")),
        (output.maker, maker, critic, pushed.get("back"), pushed.get("shared given"), shared),
    )
    for optimizer, own, other, alone, given, made in sides:
        offsets = shared.always(alone, -1.0) if alone else 0
        if offsets and given and made and given.opposed(made) >= 2:
            record = evidence.run()
            step = next(step for step in record.innermost_steps() if step.optimizer == optimizer)
            facts = {"own": own, "other": other, "stepped": record.optimizers[optimizer].kind, "offsets": offsets}
            yield found("gradients_mixed", step, (critic,), **facts)
