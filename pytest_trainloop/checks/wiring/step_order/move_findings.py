"""What ``step_order`` says of weights that are moved by hand around a step. Plain data, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.moved_by_hand import REACH
from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import count, direction, share, some

if TYPE_CHECKING:
    from pytest_trainloop.checks.wiring.step_order.moved_by_hand import KeptGradient, Pull


def of_kept_gradient(found: KeptGradient) -> Finding:
    return Finding(
        cause="first_gradient_kept",
        level="advice",
        summary=(
            "each step uses the sum of two gradients, g(w) + g(w + e), e being the move between them: the first is not "
            "zeroed before the second, and sharpness-aware steps use g(w + e) alone"
        ),
        measured=(
            f"in {found.steps} of {count(found.of_steps, 'step')} the weights moved along what stood in .grad "
            f"({direction(found.cosine)}), and another backward pass added to it"
        ),
        shown_by="order seen: backward, the weights move along the gradient, backward with no zeroing between, step",
        culprits=("zero_grad()",),
        kinds=("missing call",),
        where=str(found.second.place),
    )


def of_pull(found: Pull, line: str) -> Finding:
    towards = f"{some(found.towards)}, which never changes" if found.towards else "a point that never moves"
    stuck = found.reach <= REACH and not found.puts_back
    often = "each step" if found.every < 1.5 else f"every {found.every:.0f} steps"
    return Finding(
        cause="step_taken_back",
        level="fault" if stuck else "advice",
        summary=(
            f"after {often} {some(found.parameters)} go {share(min(found.rate, 1.0))} of the way back towards {towards}"
            + (": the weights never get further than a few steps from it" if stuck else "")
        ),
        measured=(
            f"{found.moves} pulls, each by {share(min(found.rate, 1.0))} of the distance: with what is left of earlier "
            f"steps that is {share(found.taken_back)} of the length of the last one (median)"
        ),
        shown_by=(
            "changes outside of steps are that share of the distance to one and the same point, up to rounding"
            + (": where the weights began" if found.to_start else "")
        ),
        culprits=found.parameters,
        where=line or str(found.step.place),
    )
