"""Two runs that should train identically, compared: losses, updates and gradients, where a check found a difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.views.loop_facts.words import numbered
from pytest_trainloop.views.pictures.picture import Axis, Bar, Mark, Picture, curve, gaps, number, scale_of, widened
from pytest_trainloop.views.pictures.tensors import ROWS, out_of, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.checks.state.two_runs import RunComparison
    from pytest_trainloop.instruments.gradients.compare import Agreement
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.report_inputs import ReportInputs

SEEN = 5e-3
"""Of the height of a drawing: two curves that are nearer everywhere are one to the eye."""


def resumed(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The resumed run and the uninterrupted one, where ``resume_equivalence`` found that they differ."""
    from pytest_trainloop.checks.state.resume_equivalence.runs import Reported

    found = facts.ask(Reported) if facts.findings("resume_equivalence") else None
    if found is not None and found.courses is not None:
        yield from _courses(
            facts,
            found.courses,
            key="resumed",
            check="resume_equivalence",
            title="The resumed run and the uninterrupted one",
            updates="Updates of the resumed run that differ",
            names=("resumed", "uninterrupted"),
            mark="save, load",
        )


def evaluated(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """Training with ``evaluate()`` and without it, where ``evaluation_is_pure`` found that they differ."""
    from pytest_trainloop.checks.state.evaluation_is_pure.judgement import Judgement

    found = facts.ask(Judgement.of) if facts.findings("evaluation_is_pure") else None
    if found is not None and found.courses is not None:
        yield from _courses(
            facts,
            found.courses,
            key="evaluated",
            check="evaluation_is_pure",
            title="Training with evaluate() and without it",
            updates="Updates that differ with evaluate()",
            names=("with evaluate()", "without"),
            mark="evaluate()",
        )


def _courses(
    facts: Facts,
    courses: RunComparison,
    *,
    key: str,
    check: str,
    title: str,
    updates: str,
    names: tuple[str, str],
    mark: str,
) -> Iterator[Picture]:
    own, reference = dict(courses.own), dict(courses.reference)
    marks = (Mark(axis="x", at=courses.cut + 0.5, text=mark),)
    where = facts.where(next((finding.where for finding in facts.findings(check) if finding.where), ""))
    drawn = [curve(names[1], reference, reference.values(), "reference"), curve(names[0], own, own.values())]
    of = f"the runs of {check}, {numbered(len(reference), 'step')}"
    if _differ_visibly(own, reference):
        yield Picture(
            key=key,
            kind="curves",
            title=title,
            look="One curve lies on the other; where they part, something of the training was not as it had been.",
            of=of,
            checks=(check,),
            where=where,
            y=Axis(title="loss", scale=scale_of(drawn, span=100.0)),
            curves=tuple(drawn),
            marks=(*marks, *gaps(drawn)),
        )
    yield from _map(
        courses.updates,
        key=f"{key}_updates",
        title=updates,
        look="Nothing has a value; the rows and the step that have one first are where the difference begins.",
        of=of,
        check=check,
        where=where,
        colour="difference of |update|, over the larger",
    )


def _differ_visibly(own: Mapping[int, float], reference: Mapping[int, float]) -> bool:
    both = [(own[step], reference[step]) for step in own.keys() & reference.keys()]
    values = [value for pair in both for value in pair]
    if not values:
        return False
    low, high = widened([*own.values(), *reference.values()])
    return not max(abs(a - b) for a, b in both) <= SEEN * (high - low)


def baseline(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The loop and its baseline, where training differs."""
    from pytest_trainloop.checks.guard.baseline.judging import Reported

    found = facts.ask(Reported) if facts.findings("baseline") else None
    if found is None or not found.step:
        return
    where = facts.where(next((finding.where for finding in facts.findings("baseline") if finding.where), ""))
    marks = (Mark(axis="x", at=found.step, text=f"first difference: {found.kind}"),)
    of = f"the loop as it is, and as it was recorded, {numbered(len(found.new.losses or found.new.norms), 'step')}"
    kinds = (
        ("baseline", "Loss and the baseline", "loss", found.old.losses, found.new.losses),
        ("baseline_norm", "Norm of the gradient and the baseline", "norm of the gradient",
         found.old.norms, found.new.norms),
    )  # fmt: skip
    for key, title, unit, old, new in kinds:
        if not _differ_visibly(new, old):
            continue
        drawn = [curve("baseline", old, old.values(), "reference"), curve("now", new, new.values())]
        yield Picture(
            key=key,
            kind="curves",
            title=title,
            look="One curve lies on the other; the mark is where training is first another one, also where the curves "
            "part later.",
            of=of,
            checks=("baseline",),
            where=where,
            y=Axis(title=unit, scale=scale_of(drawn, span=100.0)),
            curves=tuple(drawn),
            marks=(*marks, *gaps(drawn)),
        )
    yield from _map(
        found.gap,
        key="baseline_gradients",
        title="Gradients that are not those of the baseline",
        look="Nothing has a value; rows that have one first are where the change acts, and all others follow.",
        of=of,
        check="baseline",
        where=where,
        colour="difference of the gradient, relative",
    )


def _map(
    differences: Mapping[str, Mapping[int, float]],
    *,
    key: str,
    title: str,
    look: str,
    of: str,
    check: str,
    where: str,
    colour: str,
) -> Iterator[Picture]:
    """A map of what differs, by tensor and step; none where nothing does."""
    steps = sorted({step for row in differences.values() for step in row})
    if not any(value for row in differences.values() for value in row.values()):
        return
    rows = _rows(differences, [name for name, row in differences.items() if any(row.values())])
    yield Picture(
        key=key,
        kind="map",
        title=title,
        look=look,
        of=of,
        checks=(check,),
        where=where,
        y=Axis(title="tensor"),
        labels=tuple(rows),
        columns=tuple(steps),
        cells=tuple(tuple(number(differences[name].get(step)) for step in steps) for name in rows),
        colour=Axis(title=colour, scale="log"),
        note=out_of(len(rows), len(differences), "tensors"),
    )


def _rows(every: Mapping[str, object], odd: Sequence[str]) -> list[str]:
    """Those that are drawn, in their order: of many those that differ, as far as there is room."""
    if len(every) <= ROWS:
        return list(every)
    return spread(list(odd))


def _registered(facts: Facts, names: Sequence[str]) -> list[str]:
    """In the order in which the model has them."""
    order = {parameter.name: number for number, parameter in enumerate(facts.record.parameters)}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def parity(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The error of the gradient in low precision, by tensor, where ``precision_parity`` found more than rounding."""
    from pytest_trainloop.checks.numerics.precision_parity.runs import TensorErrors

    found = facts.ask(TensorErrors) if facts.findings("precision_parity") else None
    errors = {} if found is None or found.runs is None else facts.ask(lambda _evidence: found.read()) or {}
    if found is None or found.runs is None or not errors:
        return
    lost = any(error.lost for error in errors.values())
    worst = sorted(errors, key=lambda name: -errors[name].measured / errors[name].explained)[:ROWS]
    rows = _registered(facts, _rows(errors, worst))
    if lost:
        bars: tuple[Bar, ...] = (
            Bar(name="not finite", values=tuple(number(100 * errors[name].lost) for name in rows)),
        )
    else:
        bars = (
            Bar(name="measured", values=tuple(number(errors[name].measured) for name in rows)),
            Bar(name="explained by rounding", values=tuple(number(errors[name].explained) for name in rows),
                role="reference"),
        )  # fmt: skip
    yield Picture(
        key="parity",
        kind="bars",
        title="Entries of the gradient that are inf or NaN in low precision" if lost
        else "Error of the gradient in low precision",
        look="No entry is: what cannot be held in low precision is computed in float32." if lost
        else "Each error is about as large as rounding explains; a tensor far above it is behind what went wrong.",
        of=f"precision_parity's runs {found.runs.name}, and in float64",
        checks=("precision_parity",),
        where=facts.where(next((f.where for f in facts.findings("precision_parity") if f.where), "")),
        x=Axis(title="share of the entries", unit="%") if lost else Axis(title="error, over the gradient's length"),
        labels=tuple(rows),
        bars=bars,
        note=out_of(len(rows), len(errors), "tensors"),
    )  # fmt: skip


def checkpointed(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """Gradients with and without checkpointing, where ``checkpointing_equivalence`` found that they differ."""
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing

    found = facts.ask(Checkpointing) if facts.findings("checkpointing_equivalence") else None
    if found is not None:
        yield from _tensors(
            facts,
            found.tensor_differences,
            key="checkpointed",
            check="checkpointing_equivalence",
            title="Gradients with checkpointing, relative to those without",
            of="the first backward pass that differs of the runs of checkpointing_equivalence, in the same weights",
        )


def accumulated(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """Accumulated gradients and those of one batch, where ``accumulation_equivalence`` found that they differ."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import Accumulation

    asked = facts.findings("accumulation_equivalence") and "accumulate" in facts.evidence.knobs
    found = facts.ask(Accumulation.of) if asked else None
    if found is not None and found.shown is not None:
        split = found.shown
        yield from _tensors(
            facts,
            facts.ask(lambda _evidence: split.tensor_differences()) or {},
            key="accumulated",
            check="accumulation_equivalence",
            title=f"Gradients accumulated over {split.accumulate} parts, relative to those of one batch",
            of="the runs of accumulation_equivalence over the same rows",
        )


def trimmed(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """Gradients with and without padding, where ``padding_invariance`` found that they differ."""
    from pytest_trainloop.checks.batch.padding_invariance.compared import comparisons

    runs = facts.ask(comparisons) if facts.findings("padding_invariance") else None
    found = next((each for each in runs or () if each.full is not None), None)
    if found is not None:
        yield from _tensors(
            facts,
            facts.ask(lambda _evidence: found.tensor_differences()) or {},
            key="trimmed",
            check="padding_invariance",
            title="Gradients with padding, relative to those without",
            of="the runs of padding_invariance over the same rows",
        )


def _tensors(
    facts: Facts, differences: Mapping[str, Agreement], *, key: str, check: str, title: str, of: str
) -> Iterator[Picture]:
    """Two bars for each tensor: 1 and 0 where nothing differs."""
    rows = _registered(
        facts, _rows(differences, sorted(differences, key=lambda name: -differences[name].difference)[:ROWS])
    )
    if not any(row.difference for row in differences.values()):
        return
    yield Picture(
        key=key,
        kind="bars",
        title=title,
        look="Each length is 1 and each difference 0; another length that all tensors share is a wrong factor.",
        of=of,
        checks=(check,),
        where=facts.where(next((f.where for f in facts.findings(check) if f.where), "")),
        x=Axis(title="relative to the gradient that is due"),
        labels=tuple(rows),
        bars=(
            Bar(name="length", values=tuple(number(differences[name].ratio) for name in rows)),
            Bar(
                name="difference, over the larger",
                values=tuple(number(differences[name].difference) for name in rows),
                role="reference",
            ),
        ),
        marks=(Mark(axis="x", at=1.0, text=""),),
        note=out_of(len(rows), len(differences), "tensors"),
    )


def graphs(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """How many graphs are alive after each step, where ``memory_growth`` found that some are kept."""
    from pytest_trainloop.checks.state.memory_growth.growth import Growth
    from pytest_trainloop.recording.graphs import SETTLED
    from pytest_trainloop.recording.watch import FULL_ROUNDS

    found = facts.ask(Growth.of) if facts.findings("memory_growth") else None
    if found is None or len(found.alive) < 2:
        return
    yield Picture(
        key="graphs",
        kind="curves",
        title="Graphs that are alive",
        look="A step or two keep theirs, and it falls to 0; where each step adds one, something holds them all.",
        of=f"memory_growth's run, {numbered(len(found.alive), 'step')}",
        checks=("memory_growth",),
        where=facts.where(next((f.where for f in facts.findings("memory_growth") if f.where), "")),
        y=Axis(title="steps whose graph is alive"),
        curves=(curve("alive", found.alive, found.alive.values()),),
        marks=(Mark(axis="y", at=SETTLED, text=f"at most {SETTLED} are usual"),),
        note=f"the graphs of the first {FULL_ROUNDS} steps are followed" if max(found.alive) > FULL_ROUNDS else "",
    )
