"""What is wrong with differences and products of predictions and targets, whatever is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop import nested
from pytest_trainloop.batches.row_axis import drawn_by_a_loader
from pytest_trainloop.checks.loss.loss_formula.assignments import chosen_together
from pytest_trainloop.checks.loss.loss_formula.branches import equal_branches
from pytest_trainloop.checks.loss.loss_formula.distances import cancelling, growing, misaligned
from pytest_trainloop.checks.loss.loss_formula.excuses import plays_a_game
from pytest_trainloop.checks.loss.loss_formula.groups import split_groups
from pytest_trainloop.finding import Finding
from pytest_trainloop.formulas.trial import Aim, tried
from pytest_trainloop.runs.weight_origins import pretrained

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Level
    from pytest_trainloop.formulas.trial import Step
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Call, Slice


def compared(part: Slice, step: Step, evidence: Evidence) -> Iterator[Finding]:
    """Findings of one slice, for which no textbook form is needed."""
    yield from _placed(part, step)
    for call, label in equal_branches(part):
        yield _at(
            part,
            call,
            "ingredient_differs",
            "what is multiplied by the label and what is multiplied by 1 - label are the same function: the label says "
            "nothing",
            measured="equal in the run, and at other settings of all that both are computed of",
            shown_by="the loop's own calls made again, with other outputs of layers and other batches",
            repair="give the other label its own term",
            of=(label,),
        )
    for call, rows, count in () if evidence.declared("rows_interact") else chosen_together(part):
        yield _at(
            part,
            call,
            "mean_taken_early",
            f"{call.name} chooses one permutation for all rows: {len(rows)} of {count} rows alone choose another (row "
            f"{rows[0]} first)",
            measured=f"the costs of each permutation, of all {count} rows and of each row alone",
            shown_by="the loop's own calls made again with one row each: their mean is the cost of all, and each cost "
            "is the first one with the outputs permuted",
            repair="keep one cost per row and permutation, take the minimum along the permutations, and then the mean",
            level="fault" if _rows_are_apart(evidence) else "advice",
        )
    for call in cancelling(part):
        level, measured = _tried(step, call.outputs[0], _SPREAD, otherwise=None)
        if level is None:
            continue
        yield _at(
            part,
            call,
            "errors_cancel",
            "only the mean of the differences counts: errors of opposite sign cancel",
            level=level,
            measured=measured or f"{_entries(part, call)} differences",
            shown_by="the loss is the same with random errors of mean 0 added to them, and another with all raised by "
            "1; nothing else trains these outputs",
        )
    for call, counted in growing(part):
        level, measured = (
            (None, "")
            if plays_a_game(part, call.outputs[0], evidence)
            else _tried(step, call.outputs[0], _DISTANCE, otherwise=None)
        )
        if level is not None:
            yield _at(
                part,
                call,
                "sign_flipped",
                "the distance between prediction and target is made larger",
                measured=measured or f"{counted} differences",
                shown_by=f"the gradient of what is backpropagated with respect to all {counted} differences that have "
                "one, above and below the target; nothing else trains these outputs",
                repair="between this line and backward() the sign is turned: leave that minus out",
                level="advice" if evidence.shared(pretrained) else level,
            )


_SPREAD = Aim("the spread of the differences", lambda error: (error - error.mean()).abs(), best=0.0)
_DISTANCE = Aim("the distance between prediction and target", lambda error: error.abs())


def _tried(step: Step, number: int, aim: Aim, *, otherwise: Level | None) -> tuple[Level | None, str]:
    """Whether what is recognised is a fault, advice or nothing, and what training the outputs came to."""
    outcome = tried(step, (number,), number, aim)
    if outcome is None:
        return "advice", ""
    return ("fault" if outcome.confirmed else otherwise), outcome.text


def _placed(part: Slice, step: Step) -> Iterator[Finding]:
    """Entries that meet those of other places."""
    for found in misaligned(part):
        aim = Aim("the distance of each entry from the target of its own place", found.distance, best=0.0)
        level, measured = _tried(step, found.learned, aim, otherwise="advice")
        yield _at(
            part,
            found.call,
            "entries_misaligned",
            f"{found.call.name}() compares entries of different places: one side is laid out as {found.mine}, the "
            f"other as {found.theirs}",
            level=level or "advice",
            measured=measured or f"{_entries(part, found.call)} pairs of entries, in two orders",
            shown_by="the same reshapes and transposes, applied to the places of the entries",
        )
    for call, moved, scores, share in split_groups(part):
        aim = Aim("the share of positions whose highest score is at their label", share, rises=True, best=1.0)
        level, measured = _tried(step, scores, aim, otherwise="advice")
        yield _at(
            part,
            call,
            "entries_misaligned",
            f"{call.name} compares labels with the scores of other positions: {moved}, which spreads the scores of one "
            "position over several",
            level=level or "advice",
            measured=measured or f"{_entries(part, call)} pairs of entries",
            shown_by="the same reshapes, applied to the places of the entries: whichever axis holds the classes, some "
            "label meets another position's scores",
            repair="scores.movedim(1, -1).reshape(-1, classes)",
        )


def _at(
    part: Slice,
    call: Call,
    cause: str,
    summary: str,
    *,
    measured: str,
    shown_by: str,
    repair: str = "",
    level: Level = "fault",
    of: Sequence[int] = (),
) -> Finding:
    """A finding at the line of a call, whose culprits are behind the values ``of``, or behind its inputs."""
    return Finding(
        cause=cause,
        level=level,
        summary=summary,
        measured=measured,
        shown_by=shown_by,
        culprits=culprits_of(part, of or call.inputs) or (call.name,),
        where=str(call.place),
        repair=repair,
    )


def _entries(part: Slice, call: Call) -> int:
    return part.values[call.outputs[0]].tensor.numel()


def _rows_are_apart(evidence: Evidence) -> bool:
    """Whether rows are samples of their own, and not the frames of one. A single run does not show it."""
    if not evidence.repeatable:
        return False
    loop = evidence.fresh_loop()
    return loop.rows_interact is False or (loop.batch is None and drawn_by_a_loader(loop.batches))


def culprits_of(found: Slice, numbers: Sequence[int]) -> tuple[str, ...]:
    """The layers that gave values, and the tensors of the batch behind them."""
    names = [name for n in numbers if (name := layer_of(found, n))]
    leaves = [nested.shown(v.path) for n in numbers for v in found.from_batch(n) if v.path is not None]
    return tuple(dict.fromkeys((*names, *leaves)))


def layer_of(found: Slice, number: int) -> str:
    """The module whose weights gave a value."""
    layers = [v for v in found.trained(number) if v.parameters]
    names = [name for v in layers[:1] for name in v.parameters]
    return names[0].rpartition(".")[0] if names else ""
