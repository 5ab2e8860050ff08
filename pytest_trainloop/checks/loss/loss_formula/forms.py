"""What is wrong with the textbook forms that the first steps of a loop compute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.loss.loss_formula.causes import found
from pytest_trainloop.checks.loss.loss_formula.entries import entries
from pytest_trainloop.checks.loss.loss_formula.noise_scale import other_scale
from pytest_trainloop.checks.loss.loss_formula.opposed import opposed
from pytest_trainloop.checks.loss.loss_formula.summands import summands
from pytest_trainloop.checks.loss.loss_formula.values import (
    culprits_of,
    layer_of,
    others_train,
    plays_a_game,
    slope_of,
    trained,
)
from pytest_trainloop.instruments.formulas.boxes import IN_ORDER
from pytest_trainloop.instruments.formulas.catalogue import FORMS
from pytest_trainloop.instruments.formulas.roles import class_axes, predicts, violates
from pytest_trainloop.instruments.formulas.search import Match, Ruled, maker, matches
from pytest_trainloop.instruments.formulas.trial import Aim, Step
from pytest_trainloop.instruments.tracing.data_lines import DataLines
from pytest_trainloop.instruments.tracing.loss_tape import Tapes
from pytest_trainloop.recording.torch_names import CASTS, VIEWS
from pytest_trainloop.runs.weight_origins import pretrained

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.formulas.form import Mistake
    from pytest_trainloop.instruments.tracing.loss_slice import Slice
    from pytest_trainloop.runs.evidence import Evidence

_ROLES = {
    ("probabilities", "scores"): ("scores_as_probabilities", ""),
    ("log_probabilities", "scores"): ("scores_as_probabilities", "logarithms"),
    ("probabilities", "squashed twice"): ("probabilities_as_scores", "squashed twice"),
    ("scores", "probabilities"): ("probabilities_as_scores", ""),
    ("signs", "labels"): ("labels_as_signs", ""),
    ("corner_boxes", "centre"): ("box_format", ""),
}
"""By what an argument is to hold, and what it holds instead."""


def judged(evidence: Evidence) -> tuple[Finding, ...]:
    """What is wrong with the losses of the first steps, each line and cause once."""
    wrong: dict[tuple[str, str], Finding] = {}
    alone: dict[str, list[Match]] = {}
    known: Ruled = {}
    right: list[Match] = []
    compared: set[tuple[str, str]] = set()
    slices = evidence.shared(Tapes.of).slices
    for part in slices:
        step = Step(part, slices)
        formed = list(matches(part, FORMS, known))
        right += [match for match in formed if not match.reading.mistake and not match.variant.mistake]
        for match in formed:
            if match.form.always_judged:
                alone.setdefault(match.form.name, []).append(match)
        mistakes = [finding for match in formed for finding in _judge(match, step, evidence)]
        # of a slice without a wrong form, what needs no textbook form
        mistakes = mistakes or [*entries(part, step, evidence), *summands(part, evidence)]
        mistakes = mistakes or [*opposed(part, evidence, compared)]
        for finding in [f for f in mistakes if f.cause != "sign_flipped"] or mistakes[:1]:
            wrong.setdefault((finding.cause, finding.where), finding)
    for finding in other_scale(evidence, right):
        wrong.setdefault((finding.cause, finding.where), finding)
    for of_form in alone.values():
        for finding in _all_worse(of_form, slices, evidence):
            wrong.setdefault((finding.cause, finding.where), finding)
    return tuple(wrong.values())


def _judge(match: Match, step: Step, evidence: Evidence) -> Iterator[Finding]:
    part, number, form = match.cut.slice, match.cut.number, match.form
    mistake, aim = match.reading.mistake or match.variant.mistake, match.variant.aim
    # of two gradients of the same scores it does not matter what these are made of: labels go into those with margins
    parallel = mistake is not None and aim is not None and aim.parallel
    if form.arguments[0].name == "prediction" and not parallel and not predicts(part, match.cut.arguments[0]):
        return
    if mistake is not None:
        yield from _mistaken(match, mistake, step)
        return
    wrong_role = [*_wrong_roles(match, step, evidence), *_wrong_axes(match, step)]
    yield from wrong_role
    if wrong_role or form.always_judged or not form.judges_direction:
        return
    if not _rises(match) or others_train(part, number):
        return
    # made worse on purpose: a game, or a target that says nothing (all equal, or none of the batch)
    targets = [n for n in match.cut.arguments if not part.values[n].requires_grad and part.from_batch(n)]
    tensors = [part.values[n].tensor for n in targets]
    if any(t.numel() and bool((t != t.flatten()[0]).any()) for t in tensors) and not plays_a_game(
        part, number, evidence
    ):
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


def _found(match: Match, step: Step, cause: str, variant: str, aim: Aim | None, **more: Any) -> Iterator[Finding]:
    """A finding, unless training the outputs shows that the loss gets the form to its aim all the same."""
    cut = match.cut
    chosen = {name: more.pop(name) for name in ("otherwise", "shifted") if name in more}
    level, text = trained(
        step, cut.arguments, cut.number, aim, match.numbers, level=more.pop("level", "fault"), **chosen
    )
    if level is not None:
        call = maker(cut.slice, cut.number)
        # the layer that gave the prediction, and the tensors of the batch
        culprits = culprits_of(cut.slice, cut.arguments) or (match.form.name,)
        facts = {"form": match.form.name, "trained": text, "count": cut.count, "level": level, **more}
        yield found(cause, call or "", culprits, variant, **facts)


def _mistaken(match: Match, mistake: Mistake, step: Step) -> Iterator[Finding]:
    numbers, aim = match.reading.numbers, match.variant.aim
    if aim is not None and mistake.shifted:
        aim = replace(aim, endless=False)
    facts: dict[str, Any] = {"mistake": mistake.summary.format(**numbers), "repair": mistake.repair}
    if mistake.shown_by:
        facts["shown_by"] = mistake.shown_by.format(**numbers)
    at = {str(c.place) for n in match.cut.between if (c := match.cut.slice.calls[n]).name in mistake.at}
    facts |= {"change": at.pop()} if len(at) == 1 else {}
    facts |= {"level": mistake.level, "otherwise": mistake.otherwise, "shifted": mistake.shifted}
    yield from _found(match, step, mistake.cause, "", aim, **facts)


def _given_at(match: Match, number: int) -> str:
    """The line that made or reshaped an argument of the form; of what a layer or the batch gives the only line of the
    form that reads it."""
    part, lines = match.cut.slice, dict[str, None]()
    while (call := part.call_of(number)) is not None and call.name in VIEWS | CASTS and call.inputs:
        lines, number = {str(call.place): None}, call.inputs[0]
    if not lines and call is not None:
        return str(call.place)
    readers = (part.calls[n] for n in match.cut.between if number in part.calls[n].inputs)
    return next(iter(lines := lines or {str(c.place): None for c in readers}), "") if len(lines) == 1 else ""


def _wrong_roles(match: Match, step: Step, evidence: Evidence) -> Iterator[Finding]:
    part = match.cut.slice
    roles = match.variant.roles or tuple(a.role for a in match.form.arguments)
    for role, number in zip(roles, match.cut.arguments, strict=True):
        instead = violates(part, number, role)
        if not instead or (instead == "labels" and not _all_count(match, number)):
            continue
        cause, variant = _ROLES[role, instead]
        entries, name = part.values[number].tensor, layer_of(part, number)
        facts = {"low": float(entries.min()), "high": float(entries.max()), "rows": _inverted(entries)}
        layer = f"module {name!r}" if name else "the model"
        given = {"change": line} if (line := _given_at(match, number)) else {}
        made = list(_found(match, step, cause, variant, match.form.aim, layer=layer, **facts, **given))
        if cause == "box_format" and not made:
            of_batch = evidence.shared(DataLines.of).at(culprits_of(part, (number,)))
            given = {"change": of_batch} if of_batch else {}
            made = list(_found(match, step, cause, "reversed", IN_ORDER, **facts, **given))
        yield from made


def _all_count(match: Match, number: int) -> bool:
    """Whether entries whose label is 0 count in what is backpropagated: nothing masks them afterwards."""
    part, labels = match.cut.slice, match.cut.slice.values[number].tensor
    if match.cut.value.shape != labels.shape or match.cut.number == part.root:
        return True
    gradient = slope_of(part, match.cut.number)
    return gradient is not None and bool((gradient[labels.flatten() == 0] != 0).any())


def _wrong_axes(match: Match, step: Step) -> Iterator[Finding]:
    if [a.role for a in match.form.arguments][:2] == ["probabilities", "labels"]:
        axes = class_axes(match.cut.slice, *match.cut.arguments[:2])
        if axes is not None:
            facts = {"classes": axes[0], "summed": axes[1], "change": _given_at(match, match.cut.arguments[0])}
            yield from _found(match, step, "wrong_axes", "softmax", match.form.aim, **facts)


def _inverted(entries: torch.Tensor) -> str:
    """Which boxes have their second corner before the first."""
    if entries.shape[-1:] != (4,):
        return ""
    boxes = entries.reshape(-1, 4)
    rows = ((boxes[:, 2:] < boxes[:, :2]).any(1)).nonzero().flatten().tolist()
    return f"{len(rows)} of {len(boxes)} boxes (box {rows[0]} first)" if rows else ""


def _flipped(match: Match, step: Step, evidence: Evidence) -> Iterator[Finding]:
    score = match.reading.direction < 0
    aim = match.variant.aim or Aim(match.form.name, lambda value: value, rises=score, of_value=True)
    level = "advice" if evidence.shared(pretrained) else "fault"
    yield from _found(match, step, "sign_flipped", "form", aim, score=score, level=level)


def _rises(match: Match) -> bool:
    """Whether what is backpropagated falls as the form gets worse, in all entries that have a gradient."""
    direction, gradient = match.reading.direction, slope_of(match.cut.slice, match.cut.number)
    if match.cut.number == match.cut.slice.root:  # a detached score may weigh a multiplier (odd: multiplier_of_a_score)
        part = match.cut.slice
        through = [slope_of(part, n) for n in match.cut.arguments if part.values[n].tensor.is_floating_point()]
        return direction < 0 and any(g is not None and bool((g != 0).any()) for g in through)
    return gradient is not None and bool((gradient != 0).any()) and bool((gradient * direction <= 0).all())
