"""What is said of rows that meet outside of the model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding, code_of

if TYPE_CHECKING:
    from pytest_trainloop.checks.batch.batch_independence.meetings import Meeting
    from pytest_trainloop.checks.batch.batch_independence.order import OrderedRows
    from pytest_trainloop.checks.batch.batch_independence.unpaired import Unpaired
    from pytest_trainloop.compositions.composition import Composition
    from pytest_trainloop.finding import Level
    from pytest_trainloop.tracing.row_tape import TapedCall

_OPERATIONS = {
    "softmax": (
        "softmax_over_rows",
        "{} runs over the rows of the batch, not over one row's classes or keys",
        "with it along another axis",
    ),
    "normalised": (
        "normalised_over_rows",
        "{} brings columns of the batch to length 1, not each row",
        "with each row normalised alone",
    ),
    "similarity": (
        "similarity_over_rows",
        "{} compares columns of the batch, not the vectors of each row",
        "with it along another axis",
    ),
    "cumulated": (
        "cumulated_over_rows",
        "{} adds up over the rows of the batch, not over the steps of each row",
        "with it along another axis",
    ),
    "views": (
        "view_mixes_rows",
        "{} cuts the batch into rows that are not those it was joined from",
        "with the axes swapped by a transpose",
    ),
    "repeated": (
        "copies_in_two_orders",
        "{} puts copies of the whole batch one after the other, beside what has the copies of each row together",
        "with repeat_interleave in its place",
    ),
    "interleaved": (
        "copies_in_two_orders",
        "{} puts the copies of each row together, beside what has copies of the whole batch one after the other",
        "with repeat in its place",
    ),
    "strided": (
        "copies_in_two_orders",
        "a slice with a step takes apart what was joined as whole batches one after the other",
        "with one batch after the other in its place",
    ),
    "halved": (
        "copies_in_two_orders",
        "one part after the other is cut from what has the copies of each row together",
        "with a slice with a step in its place",
    ),
}
"""Cause, summary, and what keeps rows apart, by the kind of operation."""


def shrunk(finding: Finding, rows: int, least: Composition | None) -> Finding:
    """The finding with the fewest rows that show it, of the ``rows`` that were looked at."""
    if least is None:
        return replace(finding, smallest=f"{rows} rows")
    return replace(finding, smallest=f"{least}, as a batch of their own", composition=least.told())


def of_labels(met: Meeting) -> Finding:
    """Targets that are compared with outputs of other rows."""
    call = met.call
    named = call.named if call is not None else "the loss"
    place = str(call.place) if call is not None else ""
    if met.why == "every":
        shapes = " and ".join(str(shape) for shape in (call.shapes if call is not None else ()))
        broadcast, repair = _broadcast(call)
        return Finding(
            cause="labels_of_all_rows",
            summary=f"each row is compared with {met.target} of all rows, by {_words(call)}",
            measured=f"{broadcast}: one entry for each pair of the {met.rows} rows"
            if broadcast
            else f"of {met.rows} rows it makes {shapes}, one entry for each pair of rows",
            shown_by=f"with the rows of {met.target} in another order the gradient is the same",
            culprits=(named,),
            where=place,
            repair=repair,
        )
    label, row = next(pair for pair in met.pairs if pair[0] != pair[1])
    wrong = sum(a != b for a, b in met.pairs)
    return Finding(
        cause="labels_of_other_rows",
        summary=f"outputs are compared with {met.target} of other rows, by {_words(call)}",
        measured=f"{met.target} of row {label} changes the gradient of row {row}, and that of no other row; {wrong} of "
        f"the {len(met.pairs)} targets checked change that of another row than their own",
        shown_by="one target at a time was given another value, and the gradient of each row compared",
        culprits=(named,),
        where=place,
    )


def of_unpaired(lost: Unpaired) -> Finding:
    """Entries of rows that meet all rows alike."""
    call = lost.call
    named, place = (call.named, str(call.place)) if call is not None else ("the loss", "")
    if lost.kind == "weights":
        return Finding(
            cause="weights_averaged",
            summary=f"{lost.named} holds one weight for each row, and every row is weighted by their mean",
            measured=f"{lost.rows} rows with weights of their own; the gradient of each is scaled by the sum of all",
            shown_by=f"with the rows of {lost.named} in another order the gradient is the same",
            culprits=(named,),
            where=place,
            smallest=f"{lost.rows} rows",
        )
    return Finding(
        cause="all_pairs_of_rows",
        summary=f"{_words(call)} of (N, 1) and (N,) joins each row with all rows, and the loss sums up all pairs",
        measured=f"of {lost.rows} rows it makes ({lost.rows}, {lost.rows}), one entry for each pair of rows",
        shown_by="with the rows of one side in another order the gradient is the same",
        culprits=(named,),
        where=place,
    )


def _broadcast(call: TapedCall | None) -> tuple[str, str]:
    """What a row of numbers and a column make of each other, and the repair; empty for other shapes."""
    if call is None or len(call.given) != 2 or sorted(map(len, call.given)) != [1, 2] or len(call.shapes) == 0:
        return "", ""
    column = next(at for at, shape in enumerate(call.given) if len(shape) == 2)
    if call.given[column][1] != 1:
        return "", ""
    written = re.findall(r"(?<![\w.)\]])([A-Za-z_]\w*) - ([A-Za-z_]\w*)(?![\w.(\[])", code_of(str(call.place)))
    subtracts = call.name in ("sub", "__sub__") and len(written) == 1
    left, right = written[0] if subtracts else ("the first side", "the second side")
    what = f"{left} - {right} broadcasts" if subtracts else "they broadcast"
    told = f"{left} has shape {call.given[0]} and {right} {call.given[1]}, so that {what} to {call.shapes[0]}"
    side = (left, right)[column]
    return told, f"give {side} the shape {call.given[1 - column]}: {side if subtracts else 'it'}.squeeze(1)"


_NAMES = {"__getitem__": "an index", "sub": "a difference", "mul": "a product", "add": "a sum", "div": "a quotient"}


def _words(call: TapedCall | None) -> str:
    """A call in words: operators by what they give."""
    return "the loss" if call is None else _NAMES.get(call.name, call.named)


def of_operation(met: Meeting) -> Finding:
    """An operation along the rows that another axis keeps apart."""
    if met.fix is None:
        raise ValueError("no operation keeps these rows apart")
    cause, summary, fix = _OPERATIONS[met.fix.kind]
    if met.fix.dims is not None:
        fix = "with dim={1} in place of dim={0}".format(*met.fix.dims)
    return Finding(
        cause=cause,
        summary=summary.format(met.fix.named),
        measured=_measured(met),
        shown_by=f"{fix} that gradient stays the same",
        culprits=(met.fix.named,),
        where=str(met.fix.place),
        change="\n".join(map(str, met.fix.places)),
    )


def of_declared(met: Meeting) -> Finding:
    """Rows that meet although they are declared not to."""
    named = met.call.named if met.call is not None else "an unknown operation"
    return Finding(
        cause="rows_interact",
        summary=f"rows interact in the loss, through {named}",
        measured=_measured(met),
        shown_by="rows_interact=False is declared",
        culprits=(named,) if met.call is not None else (),
        where=str(met.call.place) if met.call is not None else "",
    )


def of_order(found: OrderedRows, level: Level) -> Finding:
    """A loss that changes when rows change places."""
    named = found.call.named if found.call is not None else ""
    return Finding(
        cause="order_matters",
        level=level,
        summary=f"the loss changes by {found.change:.2g} of itself when the rows of the batch change places together",
        measured=f"{found.before:.6g} as they are, {found.after:.6g} in the order {list(found.order)}",
        shown_by="ordered=False is declared"
        if level == "fault"
        else "two steps from the same weights over the same rows",
        culprits=(named,) if named else (),
        where=str(found.call.place) if found.call is not None else "",
    )


def _measured(met: Meeting) -> str:
    *others, last = map(str, met.changed)
    rows = f"rows {', '.join(others)} and {last}" if others else f"row {last}"
    return f"the gradient of row {met.share} changes with the values of {rows}"
