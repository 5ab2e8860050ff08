"""What is wrong with the textbook forms that the first steps of a loop compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.row_axis import drawn_by_a_loader
from pytest_trainloop.checks.loss.loss_formula.assignments import chosen_together
from pytest_trainloop.checks.loss.loss_formula.branches import equal_branches
from pytest_trainloop.checks.loss.loss_formula.distances import cancelling, growing, misaligned
from pytest_trainloop.checks.loss.loss_formula.excuses import trained_otherwise
from pytest_trainloop.checks.loss.loss_formula.groups import split_groups
from pytest_trainloop.finding import Finding
from pytest_trainloop.formulas.catalogue import FORMS
from pytest_trainloop.formulas.cut import close, slope
from pytest_trainloop.formulas.roles import class_axes, violates
from pytest_trainloop.formulas.search import Match, Ruled, matches
from pytest_trainloop.runs.weight_origins import pretrained
from pytest_trainloop.tracing.loss_slice import CannotReplay
from pytest_trainloop.tracing.loss_tape import Tapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Level
    from pytest_trainloop.formulas.form import Mistake
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Slice

_ROLES = {
    ("probabilities", "scores"): (
        "scores_as_probabilities",
        "takes probabilities and is given the output of {layer}, from {low:.3g} to {high:.3g}",
    ),
    ("log_probabilities", "scores"): (
        "scores_as_probabilities",
        "takes log-probabilities and is given the output of {layer}, up to {high:.3g}",
    ),
    ("probabilities", "squashed twice"): (
        "probabilities_as_scores",
        "is given a sigmoid or softmax taken twice: after the second the values lie in {low:.3g} to {high:.3g}",
    ),
    ("scores", "probabilities"): (
        "probabilities_as_scores",
        "takes scores and is given probabilities, from {low:.3g} to {high:.3g}",
    ),
    ("signs", "labels"): ("labels_as_signs", "takes -1 and 1 and is given 0 and 1"),
    ("corner_boxes", "centre"): ("box_format", "takes two corners, and the second is not the larger one in {rows}"),
}

_REPAIRS = {"squashed twice": "leave one of the two out: the one in the model, or the one in the loss"}

_INSTEAD = {
    "scores": "the loss equals the form with the output of a layer in the place of its probabilities",
    "probabilities": "the loss equals the form with the result of a sigmoid or softmax in the place of its scores",
    "squashed twice": "no layer lies between the two: the model's output is squashed, and squashed again",
    "labels": "the loss equals the form with targets of 0 and 1: rows with 0 cost the margin, whatever the model gives",
    "centre": "the loss equals the form with boxes read by corners; read as centre, width and height all are boxes",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """What was found, and how many forms agreed with something."""

    findings: tuple[Finding, ...]
    agreed: int
    too_large: bool

    @classmethod
    def of(cls, evidence: Evidence) -> Judged:
        tapes = evidence.shared(Tapes.of)
        found: dict[tuple[str, str], Finding] = {}
        agreed = 0
        alone: dict[str, list[Match]] = {}
        known: Ruled = {}
        for part in tapes.slices:
            formed = list(matches(part, FORMS, known))
            agreed += len(formed)
            for match in formed:
                if match.form.always_judged:
                    alone.setdefault(match.form.name, []).append(match)
            mistakes = [finding for match in formed for finding in _judge(match, evidence)]
            if not mistakes:
                mistakes = list(_compared(part, evidence))
            wrong = [f for f in mistakes if f.cause != "sign_flipped"] or mistakes[:1]
            for finding in wrong:
                found.setdefault((finding.cause, finding.where), finding)
        for of_form in alone.values():
            for finding in _all_worse(of_form, evidence):
                found.setdefault((finding.cause, finding.where), finding)
        return cls(tuple(found.values()), agreed, tapes.too_large)


def _judge(match: Match, evidence: Evidence) -> Iterator[Finding]:
    mistake = match.reading.mistake or match.variant.mistake
    if mistake is not None:
        excused = (mistake.alone and _others_train(match)) or (mistake.linear and not _is_added(match))
        excused = excused or (mistake.apart and trained_otherwise(match))
        if not excused:
            yield _mistaken(match, mistake)
        return
    wrong_role = [*_wrong_roles(match), *_wrong_axes(match)]
    yield from wrong_role
    if wrong_role or match.form.always_judged or not match.form.judges_direction:
        return
    if _rises(match) and not _others_train(match) and not _is_meant(match, evidence):
        yield _flipped(match, "advice" if evidence.shared(pretrained) else "fault")


def _compared(part: Slice, evidence: Evidence) -> Iterator[Finding]:
    """What is wrong with differences and products of predictions and targets, whatever is made of them."""
    for call, mine, theirs in misaligned(part):
        yield Finding(
            cause="entries_misaligned",
            summary=f"{call.name}() compares entries of different places: one side is laid out as {mine}, the other as "
            f"{theirs}",
            measured=f"{part.values[call.outputs[0]].tensor.numel()} pairs of entries, in two orders",
            shown_by="the same reshapes and transposes, applied to the places of the entries",
            culprits=_culprits_of(part, call.inputs) or (call.name,),
            where=str(call.place),
        )
    for call, moved in split_groups(part):
        yield Finding(
            cause="entries_misaligned",
            summary=f"{call.name} compares labels with the scores of other positions: {moved}, which spreads the "
            "scores of one position over several",
            measured=f"{part.values[call.outputs[0]].tensor.numel()} pairs of entries",
            shown_by="the same reshapes, applied to the places of the entries: whichever axis holds the classes, some "
            "label meets another position's scores",
            culprits=_culprits_of(part, call.inputs) or (call.name,),
            where=str(call.place),
            repair="scores.movedim(1, -1).reshape(-1, classes)",
        )
    for call, label in equal_branches(part):
        yield Finding(
            cause="ingredient_differs",
            summary="what is multiplied by the label and what is multiplied by 1 - label are the same function: the "
            "label says nothing",
            measured="equal in the run, and at other settings of all that both are computed of",
            shown_by="the loop's own calls made again, with other outputs of layers and other batches",
            culprits=_culprits_of(part, (label,)) or (call.name,),
            where=str(call.place),
            repair="give the other label its own term",
        )
    together = () if evidence.declared("rows_interact") else chosen_together(part)
    for call, rows, count in together:
        yield Finding(
            cause="mean_taken_early",
            level="fault" if _rows_are_apart(evidence) else "advice",
            summary=f"{call.name} chooses one permutation for all rows: {len(rows)} of {count} rows alone choose "
            f"another (row {rows[0]} first)",
            measured=f"the costs of each permutation, of all {count} rows and of each row alone",
            shown_by="the loop's own calls made again with one row each: their mean is the cost of all, and each cost "
            "is the first one with the outputs permuted",
            culprits=_culprits_of(part, call.inputs) or (call.name,),
            where=str(call.place),
            repair="keep one cost per row and permutation, take the minimum along the permutations, and then the mean",
        )
    for call in cancelling(part):
        yield Finding(
            cause="errors_cancel",
            summary="only the mean of the differences counts: errors of opposite sign cancel",
            measured=f"{part.values[call.outputs[0]].tensor.numel()} differences",
            shown_by="the loss is the same with random errors of mean 0 added to them, and another with all raised by "
            "1; nothing else trains these outputs",
            culprits=_culprits_of(part, call.inputs) or (call.name,),
            where=str(call.place),
        )
    for call, counted in growing(part):
        if not _plays_a_game(part, call.outputs[0], evidence):
            yield Finding(
                cause="sign_flipped",
                level="advice" if evidence.shared(pretrained) else "fault",
                summary="the distance between prediction and target is made larger",
                measured=f"all {counted} entries with a gradient, above and below the target",
                shown_by="the gradient of what is backpropagated with respect to the differences; nothing else trains "
                "these outputs",
                culprits=_culprits_of(part, call.inputs) or (call.name,),
                where=str(call.place),
                repair="between this line and backward() the sign is turned: leave that minus out",
            )


def _rows_are_apart(evidence: Evidence) -> bool:
    """Whether rows are samples of their own, and not the frames of one."""
    loop = evidence.fresh_loop()
    return loop.rows_interact is False or (loop.batch is None and drawn_by_a_loader(loop.batches))


def _all_worse(of_form: Sequence[Match], evidence: Evidence) -> Iterator[Finding]:
    """What is wrong with a form that is made worse wherever it is in the loop. Where it is made better too, two
    networks play against each other."""
    if any(o.maximizes for o in evidence.run().optimizers):
        return
    right = [m for m in of_form if m.reading.mistake is None and m.variant.mistake is None]
    if right and all(_rises(m) and _is_added(m) for m in right):
        for match in right:
            worse = match.reading.worse
            level: Level = "advice" if evidence.shared(pretrained) else "fault"
            yield _flipped(match, level) if worse is None else _mistaken(match, worse)


def _mistaken(match: Match, mistake: Mistake) -> Finding:
    numbers = match.reading.numbers
    return Finding(
        cause=mistake.cause,
        level=mistake.level,
        summary=f"{match.form.name}: {mistake.summary.format(**numbers)}",
        measured=_measured(match),
        shown_by=mistake.shown_by.format(**numbers)
        or "the textbook form does not give this value; with the difference named above it does",
        culprits=_culprits(match),
        where=_where(match),
        repair=mistake.repair,
    )


def _wrong_roles(match: Match) -> Iterator[Finding]:
    found = match.cut.slice
    roles = match.variant.roles or tuple(a.role for a in match.form.arguments)
    for role, number in zip(roles, match.cut.arguments, strict=True):
        instead = violates(found, number, role)
        if not instead or (instead == "labels" and not _all_count(match, number)):
            continue
        cause, words = _ROLES[role, instead]
        entries = found.values[number].tensor
        name = _layer(found, number)
        layer = f"module {name!r}" if name else "the model"
        text = words.format(low=float(entries.min()), high=float(entries.max()), layer=layer, rows=_inverted(entries))
        yield Finding(
            cause=cause,
            summary=f"{match.form.name} {text}",
            measured=_measured(match),
            shown_by=_INSTEAD[instead],
            culprits=_culprits(match),
            where=_where(match),
            repair=_REPAIRS.get(instead, ""),
        )


def _all_count(match: Match, number: int) -> bool:
    """Whether entries whose label is 0 count in what is backpropagated: nothing masks them afterwards."""
    found, value = match.cut.slice, match.cut.value
    labels = found.values[number].tensor
    if value.shape != labels.shape or match.cut.number == found.root:
        return True
    leaf = value.clone().requires_grad_()
    try:
        (root,) = found.replay({match.cut.number: leaf}, [found.root])
    except CannotReplay:
        return False
    gradient = slope(root, (leaf,))
    return gradient is not None and bool((gradient[labels.flatten() == 0] != 0).any())


def _wrong_axes(match: Match) -> Iterator[Finding]:
    roles = [a.role for a in match.form.arguments]
    if roles[:2] != ["probabilities", "labels"]:
        return
    axes = class_axes(match.cut.slice, *match.cut.arguments[:2])
    if axes is not None:
        yield Finding(
            cause="wrong_axes",
            summary=f"{match.form.name}: probabilities sum to 1 along axis {axes[1]}, and classes lie along axis "
            f"{axes[0]}",
            measured=_measured(match),
            shown_by="the sums of both along each axis",
            culprits=_culprits(match),
            where=_where(match),
            repair=f"softmax(dim={axes[0]})",
        )


def _inverted(entries: torch.Tensor) -> str:
    if entries.shape[-1:] != (4,):
        return ""
    boxes = entries.reshape(-1, 4)
    rows = ((boxes[:, 2:] < boxes[:, :2]).any(1)).nonzero().flatten().tolist()
    return f"{len(rows)} of {len(boxes)} boxes (box {rows[0]} first)" if rows else ""


def _flipped(match: Match, level: Level) -> Finding:
    kind = "a cost, and is maximised" if match.reading.direction > 0 else "a score, and is minimised"
    return Finding(
        cause="sign_flipped",
        level=level,
        summary=f"{match.form.name} is {kind}: training makes it worse",
        measured=_measured(match),
        shown_by="the gradient of what is backpropagated with respect to it; nothing else trains these outputs",
        culprits=_culprits(match),
        where=_where(match),
        repair="1 - score, or -score, for a score; the cost without its minus for a cost",
    )


def _measured(match: Match) -> str:
    count = match.cut.count
    return f"value and gradient equal the form named above, to rounding, at {count} values of its inputs, in float64"


def _where(match: Match) -> str:
    call = match.cut.slice.call_of(match.cut.number)
    return str(call.place) if call is not None else ""


def _culprits(match: Match) -> tuple[str, ...]:
    """The layer that gave the prediction, and the tensors of the batch."""
    return _culprits_of(match.cut.slice, match.cut.arguments) or (match.form.name,)


def _culprits_of(found: Slice, numbers: Sequence[int]) -> tuple[str, ...]:
    names = [name for n in numbers if (name := _layer(found, n))]
    leaves = [nested.shown(v.path) for n in numbers for v in found.from_batch(n) if v.path is not None]
    return tuple(dict.fromkeys((*names, *leaves)))


def _layer(found: Slice, number: int) -> str:
    """The module whose weights gave a value."""
    layers = [v for v in found.trained(number) if v.parameters]
    names = [name for v in layers[:1] for name in v.parameters]
    return names[0].rpartition(".")[0] if names else ""


def _rises(match: Match) -> bool:
    """Whether what is backpropagated falls as the form gets worse, in all entries that have a gradient."""
    found = match.cut.slice
    value = match.cut.value.clone().requires_grad_()
    try:
        (root,) = found.replay({match.cut.number: value}, [found.root])
    except CannotReplay:
        return False
    if match.cut.number == found.root:
        return match.reading.direction < 0
    gradient = slope(root, (value,))
    if gradient is None or not bool((gradient != 0).any()):
        return False
    return bool((gradient * match.reading.direction <= 0).all())


def _others_train(match: Match) -> bool:
    """Whether anything else of what is backpropagated trains a layer."""
    found = match.cut.slice
    if match.cut.number == found.root:
        return False
    layers = {v.number: v.tensor.clone().requires_grad_() for v in found.trained(found.root)}
    given = {**layers, match.cut.number: match.cut.value}
    try:
        (root,) = found.replay(given, [found.root])
    except CannotReplay:
        return True
    if not root.requires_grad:
        return False
    gradients = torch.autograd.grad(root.sum(), list(layers.values()), allow_unused=True)
    return any(g is not None and bool((g != 0).any()) for g in gradients)


def _is_added(match: Match) -> bool:
    """Whether what is backpropagated is linear in the value, also far from it and below 0: a distance from a capacity
    is linear on each side of it."""
    found, value = match.cut.slice, match.cut.value
    made = []
    for factor in (-1000.0, 1.0, 1002.0):
        try:
            made.append(found.replay({match.cut.number: value * factor}, [found.root])[0].detach().sum())
        except CannotReplay:
            return False
    size = float(torch.stack(made).abs().max())
    return close(made[0] + made[2], 2 * made[1], size)


def _is_meant(match: Match, evidence: Evidence) -> bool:
    """Whether it may be made worse on purpose: a game, or the target says nothing (all equal, or none of the batch)."""
    found = match.cut.slice
    targets = [n for n in match.cut.arguments if not found.values[n].requires_grad]
    told = any(found.from_batch(n) and _varies(found.values[n].tensor) for n in targets)
    return not told or _plays_a_game(found, match.cut.number, evidence)


def _plays_a_game(found: Slice, number: int, evidence: Evidence) -> bool:
    """Whether an optimizer maximises, or none holds the layers that gave the prediction."""
    record = evidence.run()
    held = {record.parameters[i].name for i in record.held}
    holds = any(name in held for v in found.trained(number) for name in v.parameters)
    return not holds or any(o.maximizes for o in record.optimizers)


def _varies(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and bool((tensor != tensor.flatten()[0]).any())
