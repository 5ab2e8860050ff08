"""Every parameter that is stepped with a gradient moves.

What it does
    It records each held parameter's values before and after the run, bit for bit, and the gradients and learning rates
    of its steps. One that never changed is looked at again in a float64 run.

Why is this bad?
    In bfloat16 the number after 1.0 is 1.0078: a norm's gain at 1.0 that is stepped by 1e-4 stays at 1.0 for ever. No
    error is raised, and the loss falls, since the rest of the model trains.

How it decides
    1. A fault needs three steps that used gradients other than zero at a learning rate above zero. User code changed
       nothing in between (a projection, a restore), and the bits are equal at the end.
    2. Then the first experiment of the table that holds names the cause
       (docs/how-it-decides.md#whether-a-step-changes-a-parameter).
    3. Rounding in float32 is advice: the learning rate is far too low, which ``update_ratio`` judges.
    4. Zero as a start must be exact. Steps in proportion to the size (LARS, LAMB) never leave it; ordinary steps do not
       know the size. The optimizer must not be torch's.
    5. A copy needs gradients in three backward passes and no change, whoever updates the parameter. The other layout is
       contiguous, or has its axes in reverse order.
    6. An optimizer that does not update it must move other parameters, or none at all. The other start leaves the bound
       of a projection.
    7. An optimizer that is not torch's may keep what rounding takes (Kahan summation, master weights): advice, or
       silent if copies of it show that it does.
    8. Parameters on which no loss depends are left out.

    | experiment | cause | advice if |
    |---|---|---|
    | in float64 it rests in its own memory layout and moves in the other | ``written_to_a_copy`` |  |
    | 156 steps from another start, and 1e4 times the learning rate, do not move it | ``not_updated`` |  |
    | it starts and stays at 0; from 1e-2 and 1e-5 it moves by the same share of its size | ``stays_at_zero`` |  |
    | float64 moves it, always by less than half a ULP of its dtype | ``lost_to_rounding`` | float32; not torch's |

When it is skipped
    It skips a loop without an optimizer step.

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
    unmoved = [p for p in unmoved if p.name in depending]
    left_out = list(rules.left_out(evidence, unmoved))
    yield from left_out
    named = {name for finding in left_out for name in finding.culprits}
    unmoved = [p for p in unmoved if p.name not in named]
    at_zero = list(held_at_zero(evidence, unmoved))
    yield from at_zero
    named = {name for finding in at_zero for name in finding.culprits}
    yield from rules.whole_tensors(evidence, [p for p in unmoved if p.name not in named])
