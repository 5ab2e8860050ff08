"""The alignments of CTC: labels, blanks and lengths."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_contract.call import listed
from pytest_trainloop.checks.loss.loss_contract.padding import inputs_of
from pytest_trainloop.instruments.batches.padding import Proof, read_padding
from pytest_trainloop.instruments.tracing.definitions import argument
from pytest_trainloop.instruments.tracing.tape_queries import constant, layout, statement, unmoved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding

SPARE_FRAMES = 2
"""Frames of padding that rounding may leave: of a stride, and of a convolution that is wider than its stride."""

FEWEST_FRAMES = 8
"""Frames below which half of them may be lost by rounding in each layer."""


def ctc(call: LossCall) -> Iterator[Finding]:
    given = call.tensor("log_probs")
    if given is None or not given.numel():
        return
    at = layout(call.values["log_probs"])
    if at is not None and at.position.dim() == 3 and not at.picked and len(at.leading) == 2:
        axes = sum(not constant(c, 0) for c in at.coordinates(at.position.select(2, 0)))
        if axes > 1:
            yield call.finds("class_axis", "steps", layer=tuple(at.layer.shape), size=tuple(given.shape))
    rows, blank, classes = list(_labels(call)), int(call.given.get("blank", 0)), given.shape[-1]
    with_blank = [row for row in rows if blank in row]
    if with_blank:
        facts = {"count": len(with_blank), "all": len(rows), "blank": blank, "seen": listed(with_blank[0])}
        repair = f"number the labels without {blank}, or give another blank="
        behind = all(blank not in row[: len(row) - row.count(blank)] for row in with_blank)
        lengths = statement(call.values.get("target_lengths")) if behind else ""  # they count the padding
        yield call.finds("blank_in_targets", **facts, repair=repair, change=lengths)
    yield from _short_inputs(call, rows, given.shape[0])
    yield from _padded_inputs(call, given)
    beyond = [row for row in rows if any(label >= classes or label < 0 for label in row)]
    if beyond:
        low, high = (f(label for row in beyond for label in row) for f in (min, max))
        facts = {"low": low, "high": high, "last": classes - 1, "hint": "", "seen": listed(beyond[0])}
        how, repair = "the labels within target_lengths", "widen the head, or remap the labels"
        yield call.finds("target_out_of_range", **facts, how=how, repair=repair)


def _short_inputs(call: LossCall, rows: list[list[int]], given: int) -> Iterator[Finding]:
    """Targets that are longer than their inputs, of which ``given`` frames are there: by their lengths, or in truth.

    The longest row of a batch has all frames, but for rounding. Counted after one more step of downsampling than the
    model makes it has half of them, rounded up, at most.
    """
    lengths = _ints(call.given.get("input_lengths"))
    needs = [len(row) + sum(a == b for a, b in itertools.pairwise(row)) for row in rows]  # a blank between equal ones
    short = [(need, frames, row) for need, frames, row in zip(needs, lengths, rows, strict=False) if frames < need]
    counted = unmoved(call.values.get("input_lengths"))
    if not short:
        if lengths and max(lengths) <= (given + 1) // 2 and given >= FEWEST_FRAMES:
            change = counted.call.place if counted is not None and counted.call is not None else None
            facts = {"given": given, "most": max(lengths), "rows": len(lengths)}
            yield call.finds("frames_left_out", **facts, change=change, level="advice", every=True)
        return
    needed, frames, row = max(short, key=lambda one: one[0])
    made = ""
    dropped, miscounted = bool(call.given.get("zero_infinity")), needed <= given and max(lengths) <= (given + 1) // 2
    change = counted.call.place if miscounted and counted is not None and counted.call is not None else None
    repair = "check input_lengths (frames after the model) and target_lengths (labels without padding); if both are "
    repair += "right, leave such rows out"
    if miscounted:
        repair = f"input_lengths is too small: give the lengths after the model (here up to {given})"
    elif needed > given:
        made = argument(str(call.place), call.name, "log_probs", 0)
        repair = f"the model gives {given} frames, and {needed} are needed: use fewer downsampling steps; or "
        repair += "target_lengths counts padding as labels"
    yield call.finds(
        "alignment_impossible", count=len(short), all=len(rows), given=given, frames=frames, labels=len(row),
        needed=needed, repeats=needed > len(row), dropped=dropped, repair=repair,
        change=change or made,
        level="advice" if dropped and len(short) < len(rows) else "fault",
    )  # fmt: skip


def _padded_inputs(call: LossCall, given: torch.Tensor) -> Iterator[Finding]:
    """Lengths that are those of the longest row, though lengths or a mask of the batch say that rows are shorter.

    Images that are padded to one width, and of which nothing gives the width, are read whole.
    """
    lengths, frames = call.given.get("input_lengths"), len(given)
    found = read_padding(
        call.step.batch, at_least=Proof.INPUTS, declared=call.step.declared, read=inputs_of(call, "log_probs")
    )
    if found is None or found.source not in ("mask", "lengths") or set(_ints(lengths)) != {frames}:
        return
    wide, counts = found.mask.shape[1], (~found.mask).sum(1)
    real = -(-counts * frames // wide)
    if len(real) != given.shape[1] or int(real.min()) > frames - SPARE_FRAMES:
        return
    others = {"log_probs": given, "input_lengths": real.clamp(min=1)}
    loss = float(torch.nn.functional.ctc_loss(**{**call.given, **others}).mean())
    facts = {"given": frames, "by": found.reason, "rows": len(real), "fewest": int(real.min()), "wide": wide}
    counted = unmoved(call.values.get("input_lengths"))
    change = counted.call.place if counted is not None and counted.call is not None else None
    yield call.finds("frames_of_padding", **facts, loss=loss, was=float(call.out.detach().mean()), change=change)


def _labels(call: LossCall) -> Iterator[list[int]]:
    targets, start = call.given.get("targets"), 0
    if not isinstance(targets, torch.Tensor):
        return
    values = targets.detach().tolist()
    for n, length in enumerate(_ints(call.given.get("target_lengths"))):
        if targets.dim() == 2 and n < len(values):
            yield values[n][:length]
        elif targets.dim() == 1:
            yield values[start : start + length]
            start += length


def _ints(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        value = value.detach().reshape(-1).tolist()
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else []
