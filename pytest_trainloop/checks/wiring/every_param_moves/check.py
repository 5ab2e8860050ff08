"""Every parameter that is stepped with a gradient moves.

What it does
    It records each held parameter's values before and after the run, bit for bit, and the gradients and learning rates
    of its steps. One that never changed is looked at again in a float64 run.

Why is this bad?
    In bfloat16 the number after 1.0 is 1.0078: a norm's gain at 1.0 that is stepped by 1e-4 stays at 1.0 for ever. No
    error is raised, and the loss falls, since the rest of the model trains.

How it decides
    A fault needs all of: gradients other than zero that a step used, at a learning rate above zero, at least three
    times; no change by user code in between (a projection, a restore); the same bits at the end. Then one of two.
    Lost to rounding: float64 moves it, by less than half a ULP of its dtype at any learning rate that the schedule
    leads to. In float32 that is advice: the learning rate is far too low, which is for update_ratio to judge. So it is
    where the optimizer is not torch's own: it may keep what rounding takes (Kahan summation, stochastic rounding,
    master weights); where copies of it show that it does, nothing is said. Left out: such an optimizer does not move it
    by any means. Not in 156 steps from another start (it may stay at the bound of a projection), nor at 1e4 times the
    learning rate (its steps may be kept elsewhere until they are large enough), while it moves others, or nothing moves
    at all.
    Held at zero: it starts at exactly 0 and stays there, under an optimizer that is not torch's. From starts of 1e-2
    and 1e-5 the loop moves it by the same share of its own size: each step is as long as its norm (LARS, LAMB).
    A projection and a proximal step come back to zero, and an ordinary step does not know the size.
    Written to a copy: a parameter that got gradients in at least three backward passes and never changed, whoever
    updates it, is run again with the same values in another layout: contiguous, or with its axes in reverse order. In
    float64 it rests in its own layout and moves in the other one.
    Entries are counted as well: one is lost if it never changed and half a ULP at its value is more than the largest
    step on its tensor in float64. Half of all low-precision entries lost is a fault, whether a whole tensor stays or
    not.

Faulty
    >>> model = Classifier().to(torch.bfloat16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

Fixed
    >>> model = Classifier()                           # float32 weights; products in bfloat16 under torch.autocast
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

Known limits
    Of large tensors up to 128 entries are looked at.

References
    https://arxiv.org/abs/1710.03740 (Micikevicius et al., Mixed Precision Training, section 3.1: master weights)
    https://arxiv.org/abs/2010.06192 (Zamirai et al., Revisiting BFloat16 Training: updates lost to rounding)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.every_param_moves.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=1)
def every_param_moves(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.every_param_moves import unmoved as rules
    from pytest_trainloop.checks.wiring.every_param_moves.proportional_steps import held_at_zero

    record = evidence.run()
    if not record.steps and not record.changed():
        raise CannotDecide("no optimizer step was seen, and no weight changed")
    copied = list(rules.left_in_copies(evidence))
    yield from copied
    named = {name for finding in copied for name in finding.culprits}
    unmoved = [p for p in rules.bit_equal(record) if p.name not in named]
    depending = rules.depending(evidence, [p.name for p in unmoved])
    most = list(rules.most_entries(evidence))
    yield from most
    named = {name for finding in most for name in finding.culprits}
    unmoved = [p for p in unmoved if p.name in depending and p.name not in named]
    left_out = list(rules.left_out(evidence, unmoved))
    yield from left_out
    named = {name for finding in left_out for name in finding.culprits}
    unmoved = [p for p in unmoved if p.name not in named]
    at_zero = list(held_at_zero(evidence, unmoved))
    yield from at_zero
    named = {name for finding in at_zero for name in finding.culprits}
    yield from rules.whole_tensors(evidence, [p for p in unmoved if p.name not in named])
