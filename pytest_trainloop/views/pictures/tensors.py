"""Maps over tensors, layers and steps: updates, the sizes of weights, gradients and outputs; units that are dead."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pytest_trainloop.views.loop_facts.words import names, numbered
from pytest_trainloop.views.pictures.picture import Axis, Bar, Picture, number
from pytest_trainloop.views.pictures.sizes import A_DECADE, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.report_inputs import Moment, ReportInputs

T = TypeVar("T")

ROWS = 40
"""Rows of a map, or labels of bars: what can be read on one screen."""

DECADES = 16
"""Powers of ten that a map of sizes shows, counted from the largest: float64 resolves no more."""

TAIL = 0.005
"""Share of the entries that are counted together as smaller than all that is shown."""

SHARE = Axis(title="share of the entries", unit="%")

RUN = "a run like the watched one"


def updates(facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    """By how much of its size each tensor moves at each step."""
    known: dict[int, dict[int, float]] = {}
    for moment in looked.moments:
        for index, ratio in moment.updates.items():
            known.setdefault(index, {})[moment.number] = ratio
    steps = _steps(looked)
    if not known or len(steps) < 2 or looked.measured.record is None:
        return
    parameters = looked.measured.record.parameters
    unheld = _unheld(looked.measured.record)
    known.update((i, dict.fromkeys(steps, 0.0)) for i in unheld)
    large = [i for i in known if len(parameters[i].shape) > 1]
    of = sorted(large if len(known) > ROWS and large else known)
    named = {name for result in facts.results.values() for finding in result.findings for name in finding.culprits}
    rows = sorted({*spread(of), *[i for i in known if parameters[i].name in named][:ROWS]})
    still = [parameters[i].name for i in sorted(known) if i not in unheld and not any(known[i].values())]
    held_by_none = [parameters[i].name for i in unheld]
    notes = [out_of(len(rows), len(known), "tensors")]
    notes.append(f"{numbered(len(still), 'tensor')} never moved: {names(still)}" if still else "")
    notes.append(f"no optimizer holds {names(held_by_none)}" if held_by_none else "")
    began_at_zero = any(step not in known[i] for i in rows if known[i] for step in range(1, max(known[i])))
    notes.append("no value where a tensor was 0 before the step" if began_at_zero else "")
    yield Picture(
        key="updates",
        kind="map",
        title="Update of each tensor, relative to its size",
        look="Rows should agree within a factor of about ten; a row far below hardly learns.",
        of=f"{RUN}, {numbered(len(steps), 'step')}",
        checks=(
            "update_ratio",
            "every_param_moves",
            "optimizer_holds_every_param",
            "frozen_stays_frozen",
            "weight_decay_groups",
            "parameter_precision",
            "optimizer_numerics",
            "schedule",
        ),
        y=Axis(title="tensor"),
        labels=tuple(parameters[i].name for i in rows),
        columns=steps,
        cells=tuple(tuple(number(known[i].get(step)) for step in steps) for i in rows),
        colour=Axis(title="|update| / |weights|", scale="log", zero="did not move"),
        note="; ".join(filter(None, notes)),
    )


def _unheld(record: Record) -> list[int]:
    """The parameters of the model that require grad, and that neither an optimizer holds nor anything else moves."""
    others = record.held.keys() | record.moved_outside_steps()
    return [p.index for p in record.parameters if p.role != "foreign" and p.trainable and p.index not in others]


def gradient_sizes(_facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    yield from _over_steps(
        looked,
        lambda moment: moment.gradient_sizes,
        key="gradients",
        title="Sizes of the entries of the gradient",
        look="One hill that keeps its place; entries at 0 got nothing, and in float16 those below 6e-8 become 0.",
        checks=("gradient_reaches_every_param", "precision_parity", "grad_scaler", "finite"),
    )


def weight_sizes(_facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    yield from _over_steps(
        looked,
        lambda moment: moment.weight_sizes,
        key="weights",
        title="Sizes of the entries of the weights",
        look="One hill that keeps its place; a second one, or one that wanders, is a part that was drawn otherwise.",
        checks=("parameter_precision", "loss_at_init", "finite"),
    )


def _over_steps(
    looked: ReportInputs,
    sizes_of: Callable[[Moment], Sizes],
    *,
    key: str,
    title: str,
    look: str,
    checks: tuple[str, ...],
) -> Iterator[Picture]:
    """A map of sizes over steps: those of all tensors that are stepped, joined."""
    steps = _steps(looked)
    at = {step: Sizes() for step in steps}
    for moment in looked.moments:
        at[moment.number].add(sizes_of(moment))
    known = {step: sizes for step, sizes in at.items() if sizes.entries}
    labels, columns = _shares(list(known.values()))
    if len(known) > 1 and labels:
        yield Picture(
            key=key,
            kind="map",
            title=title,
            look=look,
            of=f"{RUN}, {numbered(len(known), 'step')}",
            checks=checks,
            y=Axis(title="size of an entry"),
            labels=labels,
            columns=tuple(known),
            cells=tuple(zip(*columns, strict=True)),
            colour=SHARE,
        )


def output_sizes(_facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    """How large the outputs of each layer are, in the order of the calls."""
    paths = spread(list(looked.outputs))
    labels, rows = _shares([looked.outputs[path] for path in paths])
    if len(paths) > 1 and labels:
        yield Picture(
            key="outputs",
            kind="map",
            title="Sizes of the outputs of each layer",
            look="Layers of one kind should look similar; a hill that moves from row to row grows or fades with depth.",
            of=f"the last forward pass of {RUN}",
            checks=("activations_alive", "finite", "loss_at_init", "input_dependence", "precision_parity"),
            x=Axis(title="size of an entry"),
            y=Axis(title="layer"),
            labels=tuple(paths),
            columns=labels[::-1],
            cells=tuple(row[::-1] for row in rows),
            colour=SHARE,
            note=out_of(len(paths), len(looked.outputs), "layers"),
        )


def units(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The share of dead and of saturated units behind each activation, as ``activations_alive`` counted them."""
    from pytest_trainloop.checks.learning.activations_alive.units import Units

    found = facts.ask(Units.of) if "activations_alive" in facts.results else None
    layers = () if found is None else found.layers
    if found is None or not any(layer.units for layer in layers):
        return
    shown = sorted((layer for layer in layers if layer.units), key=lambda layer: -layer.dead / layer.units)[:ROWS]
    kinds = {
        "dead at the start": [layer.dead_at_start for layer in shown],
        "dead at the end": [layer.dead for layer in shown],
        "saturated at the start": [layer.saturated_at_start for layer in shown],
        "saturated at the end": [layer.saturated for layer in shown],
    }
    yield Picture(
        key="units",
        kind="bars",
        title="Dead and saturated units",
        look="Few units give one number for every batch, and not more at the end than at the start.",
        of=f"activations_alive's run, {numbered(found.steps, 'step')}",
        checks=("activations_alive", "overfit_one_batch:input_unused", "input_dependence"),
        x=Axis(title="share of the units", unit="%"),
        labels=tuple(f"{layer.path} {layer.kind}({layer.units})" for layer in shown),
        bars=tuple(
            Bar(
                name=name,
                values=tuple(number(100 * n / layer.units) for n, layer in zip(counts, shown, strict=True)),
                role="reference" if name.endswith("start") else "own",
            )
            for name, counts in kinds.items()
            if name.startswith("dead") or any(counts)
        ),
        note=out_of(len(shown), len([layer for layer in layers if layer.units]), "layers"),
    )


def _steps(looked: ReportInputs) -> tuple[int, ...]:
    return tuple(sorted({moment.number for moment in looked.moments}))


def spread(of: list[T]) -> list[T]:
    """As many as a map has rows, in equal distances, the first and the last among them."""
    if len(of) <= ROWS:
        return of
    return [of[round(n * (len(of) - 1) / (ROWS - 1))] for n in range(ROWS)]


def out_of(shown: int, of: int, things: str) -> str:
    return f"{shown} of {of:,} {things}" if shown < of else ""


def _shares(of: Sequence[Sizes]) -> tuple[tuple[str, ...], list[tuple[float | None, ...]]]:
    """The labels of the sizes from the largest down, and for each of these the share of entries in percent; what is 0
    or not finite comes last and first, where there is any."""
    known = sorted({size for sizes in of for size in sizes.bins}, reverse=True)
    if not known:
        return (), []
    least = max(known[0] - DECADES * A_DECADE, min(_least(sizes, known[0]) for sizes in of))
    bins = list(range(known[0], least - 1, -1))
    smaller = known[-1] < least
    zero, bad = any(s.zero for s in of), any(s.not_finite for s in of)
    labels = [*(["not finite"] if bad else []), *map(_label, bins)]
    labels += [f"below {_label(least)}"] if smaller else []
    labels += ["0"] if zero else []
    columns = []
    for sizes in of:
        counts = [sizes.not_finite] if bad else []
        counts += [sizes.bins.get(size, 0.0) for size in bins]
        counts += [sum(n for size, n in sizes.bins.items() if size < least)] if smaller else []
        counts += [sizes.zero] if zero else []
        columns.append(tuple(number(100 * n / (sizes.entries or 1.0)) for n in counts))
    return tuple(labels), columns


def _least(sizes: Sizes, largest: int) -> int:
    """The smallest size below which no more than ``TAIL`` of the entries lie."""
    below = 0.0
    for size in sorted(sizes.bins):
        below += sizes.bins[size]
        if below > TAIL * sizes.entries:
            return size
    return largest


def _label(size: int) -> str:
    """Where a bin begins: "1e-3", "3e-3"."""
    return f"{'3' if size % A_DECADE else '1'}e{size // A_DECADE}"
