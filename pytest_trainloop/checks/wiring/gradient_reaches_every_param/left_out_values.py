"""Which call leaves out all that is computed from a parameter: what it is given changes with it, its result does not.

The first step is written down twice, call by call, with all else the same: a product with a mask of zeros, or a choice
of other positions. The calls before it change, and nothing after it does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.instruments.gradients.dependence import mover
from pytest_trainloop.instruments.tracing.row_tape import RowTape, changed, leads_to
from pytest_trainloop.recording.torch_names import INDEXING, MASKING, MULTIPLICATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.instruments.tracing.row_tape import Tape, TapedCall
    from pytest_trainloop.runs.evidence import Evidence

LEAVES_OUT = INDEXING | MASKING | MULTIPLICATIONS

_NO_ROWS = 1 << 62
"""The tape's checksums by row are not needed."""


def leaves_out(evidence: Evidence, names: Sequence[str]) -> tuple[TapedCall, TapedCall] | None:
    """The last call on the way to the loss that leaves these parameters out, and the one that made its mask, its index
    or its weight, if it is known; None where both steps do not make the same calls, or where no single call shows."""
    base, other = _tape(evidence, ()), _tape(evidence, names)
    shapes = [[(call.name, call.shapes) for call in tape.calls] for tape in (base, other)]
    carrying = [at for at, call in enumerate(base.calls) if call.carries_gradient]
    if shapes[0] != shapes[1] or not carrying or not (base.double and other.double):
        return None
    roots = base.roots or carrying[-1:]  # the tape notes roots of data that entered the model as numbers only
    moved = [changed(one, two) for one, two in zip(base.calls, other.calls, strict=True)]
    found = [
        base.calls[at]
        for at in sorted(leads_to(base, roots))
        if base.calls[at].carries_gradient and not moved[at] and any(i >= 0 and moved[i] for i in base.calls[at].inputs)
    ]
    found = [call for call in found if not call.name.endswith(("_as", "_like"))]  # of these the shape alone is read
    # a number that is 0 is written so: a gate, a weight that grows, + 0 * unused.sum() (odd: branch_faded_in_later)
    products = [call.given for call in found if call.name in MULTIPLICATIONS]
    if any(len(given) < 2 or min(map(math.prod, given)) == 1 for given in products):
        return None
    # a difference does not depend on what is added to both of its sides (odd: siamese_contrastive)
    if not found or not all(call.name in LEAVES_OUT for call in found):
        return None
    masks = [base.calls[i] for i in found[-1].inputs if i >= 0 and not moved[i]]
    return found[-1], masks[0] if len(masks) == 1 else found[-1]


def _tape(evidence: Evidence, moved: Sequence[str]) -> Tape:
    mode = RowTape(rows=_NO_ROWS, open_inputs=False, coarse=True)
    plan = replace(mode.plan(evidence.plan()), prepare=mover(moved, jitter=True), double=True)
    mode.tape.double = evidence.rerun(replace(plan, before_item=lambda _number, item: mode.take(item))).double
    return mode.tape
