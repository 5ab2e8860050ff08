"""What is wrong with the textbook forms that the first steps of a loop compute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_formula.compared import compared, culprits_of, layer_of
from pytest_trainloop.checks.loss.loss_formula.excuses import others_train, plays_a_game
from pytest_trainloop.finding import Finding
from pytest_trainloop.formulas.catalogue import FORMS
from pytest_trainloop.formulas.cut import slope
from pytest_trainloop.formulas.roles import class_axes, predicts, violates
from pytest_trainloop.formulas.search import Match, Ruled, matches
from pytest_trainloop.formulas.trial import Aim, Step, tried
from pytest_trainloop.runs.weight_origins import pretrained
from pytest_trainloop.tracing.loss_slice import CannotReplay
from pytest_trainloop.tracing.loss_tape import Tapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

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


def judged(evidence: Evidence) -> tuple[Finding, ...]:
    """What is wrong with the losses of the first steps, each line and cause once."""
    found: dict[tuple[str, str], Finding] = {}
    alone: dict[str, list[Match]] = {}
    known: Ruled = {}
    slices = evidence.shared(Tapes.of).slices
    for part in slices:
        step = Step(part, slices)
        formed = list(matches(part, FORMS, known))
        for match in formed:
            if match.form.always_judged:
                alone.setdefault(match.form.name, []).append(match)
        mistakes = [finding for match in formed for finding in _judge(match, step, evidence)]
        if not mistakes:
            mistakes = list(compared(part, step, evidence))
        wrong = [f for f in mistakes if f.cause != "sign_flipped"] or mistakes[:1]
        for finding in wrong:
            found.setdefault((finding.cause, finding.where), finding)
    for of_form in alone.values():
        for finding in _all_worse(of_form, slices, evidence):
            found.setdefault((finding.cause, finding.where), finding)
    return tuple(found.values())


def _judge(match: Match, step: Step, evidence: Evidence) -> Iterator[Finding]:
    if match.form.arguments[0].name == "prediction" and not predicts(match.cut.slice, match.cut.arguments[0]):
        return
    mistake = match.reading.mistake or match.variant.mistake
    if mistake is not None:
        yield from _mistaken(match, mistake, step)
        return
    wrong_role = [*_wrong_roles(match, step), *_wrong_axes(match, step)]
    yield from wrong_role
    if wrong_role or match.form.always_judged or not match.form.judges_direction:
        return
    if _rises(match) and not others_train(match.cut.slice, match.cut.number) and not _is_meant(match, evidence):
        yield from _flipped(match, step, evidence)


def _all_worse(of_form: Sequence[Match], slices: Sequence[Slice], evidence: Evidence) -> Iterator[Finding]:
    """What is wrong with a form that is made worse wherever it is in the loop. Where it is made better too, two
    networks play against each other."""
    if any(o.maximizes for o in evidence.run().optimizers):
        return
    right = [m for m in of_form if m.reading.mistake is None and m.variant.mistake is None]
    if right and all(map(_rises, right)):
        for match in right:
            worse, step = match.reading.worse, Step(match.cut.slice, slices)
            yield from _flipped(match, step, evidence) if worse is None else _mistaken(match, worse, step)


def _tried(
    match: Match, step: Step, aim: Aim | None, *, level: Level, otherwise: Level | None = None, shifted: bool = False
) -> tuple[Level | None, str]:
    """Whether what is recognised is a fault, advice or nothing, by what training the outputs comes to, and that in
    words. Where nothing can be tried it is advice."""
    cut = match.cut
    outcome = None if aim is None else tried(step, cut.arguments, cut.number, aim, match.numbers, shifted=shifted)
    if outcome is None:
        return "advice", _measured(match)
    return (level if outcome.confirmed else otherwise), outcome.text


def _mistaken(match: Match, mistake: Mistake, step: Step) -> Iterator[Finding]:
    numbers = match.reading.numbers
    aim = match.variant.aim
    if aim is not None and mistake.shifted:
        aim = replace(aim, endless=False)
    level, measured = _tried(
        match, step, aim, level=mistake.level, otherwise=mistake.otherwise, shifted=mistake.shifted
    )
    if level is None:
        return
    yield Finding(
        cause=mistake.cause,
        level=level,
        summary=f"{match.form.name}: {mistake.summary.format(**numbers)}",
        measured=measured,
        shown_by=mistake.shown_by.format(**numbers)
        or "the textbook form does not give this value; with the difference named above it does, at "
        f"{match.cut.count} values of its inputs, in float64",
        culprits=_culprits(match),
        where=_where(match),
        repair=mistake.repair,
    )


def _wrong_roles(match: Match, step: Step) -> Iterator[Finding]:
    found = match.cut.slice
    roles = match.variant.roles or tuple(a.role for a in match.form.arguments)
    for role, number in zip(roles, match.cut.arguments, strict=True):
        instead = violates(found, number, role)
        if not instead or (instead == "labels" and not _all_count(match, number)):
            continue
        level, measured = _tried(match, step, match.form.aim, level="fault")
        if level is None:
            continue
        cause, words = _ROLES[role, instead]
        entries = found.values[number].tensor
        name = layer_of(found, number)
        layer = f"module {name!r}" if name else "the model"
        text = words.format(low=float(entries.min()), high=float(entries.max()), layer=layer, rows=_inverted(entries))
        yield Finding(
            cause=cause,
            level=level,
            summary=f"{match.form.name} {text}",
            measured=measured,
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


def _wrong_axes(match: Match, step: Step) -> Iterator[Finding]:
    roles = [a.role for a in match.form.arguments]
    if roles[:2] != ["probabilities", "labels"]:
        return
    axes = class_axes(match.cut.slice, *match.cut.arguments[:2])
    level, measured = _tried(match, step, match.form.aim, level="fault") if axes else (None, "")
    if axes is not None and level is not None:
        yield Finding(
            cause="wrong_axes",
            level=level,
            summary=f"{match.form.name}: probabilities sum to 1 along axis {axes[1]}, and classes lie along axis "
            f"{axes[0]}",
            measured=measured,
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


def _flipped(match: Match, step: Step, evidence: Evidence) -> Iterator[Finding]:
    rises = match.reading.direction < 0
    kind = "a score, and is minimised" if rises else "a cost, and is maximised"
    aim = match.variant.aim or Aim(match.form.name, lambda value: value, rises=rises, of_value=True)
    level, measured = _tried(match, step, aim, level="advice" if evidence.shared(pretrained) else "fault")
    if level is None:
        return
    yield Finding(
        cause="sign_flipped",
        level=level,
        summary=f"{match.form.name} is {kind}: training makes it worse",
        measured=measured,
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
    return culprits_of(match.cut.slice, match.cut.arguments) or (match.form.name,)


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


def _is_meant(match: Match, evidence: Evidence) -> bool:
    """Whether it may be made worse on purpose: a game, or the target says nothing (all equal, or none of the batch)."""
    found = match.cut.slice
    targets = [n for n in match.cut.arguments if not found.values[n].requires_grad]
    told = any(found.from_batch(n) and _varies(found.values[n].tensor) for n in targets)
    return not told or plays_a_game(found, match.cut.number, evidence)


def _varies(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and bool((tensor != tensor.flatten()[0]).any())
