"""Losses that begin far above chance level: by their inputs, by weights that are drawn too wide, or by neither.

A weight is too wide where it is drawn wider than torch draws a layer, and the loss comes down in a run in which it has
torch's width. ``nn.Linear`` and convolutions are drawn uniformly within 1 / sqrt(fan_in), with a standard deviation of
1 / sqrt(3 fan_in), where fan_in is the number of inputs that one output sums up.
Losses that are written by hand are judged by the calls between the last layers and what is backpropagated, made again
with zeros as the outputs of these layers: equal scores, even odds and an output that says nothing; for targets far from
zero they are a high chance level. By how much the value grows with the outputs (its degree) is asked of the same calls
with outputs twice as large.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.checks.loss.loss_at_init.causes import found
from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss, InitialLosses, InitialRuns, size_of
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.data_lines import DataLines
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay
from pytest_trainloop.instruments.tracing.loss_tape import LossTape
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.runs.weight_origins import pretrained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.loss_slice import Slice
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Losses = Callable[[Callable[[Watch], None]], list[InitialLoss]]
    """The losses before the first step of a run that is prepared so."""

FAULT, ADVICE = 10.0, 3.0
"""Times chance from which a loss is a fault, and advice."""

UNIT = 1.0
"""Root mean square that outputs do not exceed with usual initialisations, for inputs of unit size."""

REMAINS = 2 / 3
"""Share of the outputs' size that may remain when weights are halved: half or less, where the weights cause it."""

WIDE = math.sqrt(6)
"""Times torch's own standard deviation up to which a usual initialisation draws: that of He for ReLU is the widest."""

MOST_WEIGHTS = 3
"""Weights that are tried one by one, the widest first."""

HIGHEST_DEGREE = 4.0


def called(evidence: Evidence, known: Iterable[InitialLoss]) -> Iterator[Finding]:
    """Of calls of loss functions, the highest above chance whose targets do not depend on the weights."""
    runs = evidence.shared(InitialRuns)
    for loss in sorted(known, key=lambda one: -one.times):
        if not loss.times > ADVICE:
            return
        halved = _same_call(runs.losses(0.5), loss)
        if halved is None or abs(halved.chance - loss.chance) > 1e-3 * loss.chance:
            continue  # its targets depend on the weights, and chance with them
        yield _judged(evidence, loss, halved)
        return


def _same_call(losses: Iterable[InitialLoss], loss: InitialLoss) -> InitialLoss | None:
    """The call from the same line in another run."""
    return next((other for other in losses if other.where == loss.where), None)


def _judged(evidence: Evidence, loss: InitialLoss, halved: InitialLoss) -> Finding:
    """Whether the inputs, the weights, or neither make the loss high."""
    runs = evidence.shared(InitialRuns)
    unit, size = runs.losses_of_unit_inputs()
    with_unit_inputs = _same_call(unit, loss)
    # without floating inputs their size is 0, and a run with other random numbers may begin lower
    if size > 1 and with_unit_inputs is not None and with_unit_inputs.times <= ADVICE:
        facts: dict[str, Any] = {"size": size, "unit": with_unit_inputs.value, "level": "advice"}
        given = nested.paths(evidence.fresh_loop().batch)
        large = [nested.shown(path) for path, t in given if t.is_floating_point() and size_of(t) == size]
        facts["change"] = evidence.shared(DataLines.of).at(large)
        return _found("inputs_too_large", loss, **facts)
    tables = _same_call(runs.losses(0.5, "embeddings"), loss)
    by_weights = loss.times > FAULT and loss.outputs > UNIT and halved.outputs <= REMAINS * loss.outputs
    # torch's own tables of embeddings have unit variance, and may be tied to the output
    by_tables = tables is not None and tables.outputs <= REMAINS * loss.outputs
    if not by_weights or by_tables or evidence.shared(pretrained):
        variant = "" if loss.outputs > UNIT else "far targets"
        known = by_tables or variant or evidence.shared(pretrained)
        line = "" if known else _drawn_wide(evidence, loss)[1]
        return _found("above_chance", loss, variant, halved=halved.value, level="advice", change=line)
    facts, line = _drawn_wide(evidence, loss)
    if not facts:
        return _found("too_high", loss, halved=halved.value)
    return _found("too_high", loss, "wide", change=line, **facts)


def _drawn_wide(evidence: Evidence, loss: InitialLoss) -> tuple[dict[str, Any], str]:
    """What ``_too_wide`` finds, and the line that drew the layer."""

    def losses(prepare: Callable[[Watch], None]) -> list[InitialLoss]:
        seen = InitialLosses()
        evidence.rerun(contexts=seen.contexts, enough=lambda r: r.begun, prepare=prepare)
        return seen.recorded

    facts = _too_wide(loss, losses)
    made = evidence.shared(MadeAt.of) if facts else None
    return facts, made.drawn([facts["layer"]]) or made.module(facts["layer"].rpartition(".")[0]) if made else ""


def _found(cause: str, loss: InitialLoss, variant: str = "", layers: tuple[str, ...] = (), **facts: Any) -> Finding:
    facts |= {"value": loss.value, "chance": loss.chance, "times": loss.value / loss.chance, "outputs": loss.outputs}
    return found(cause, loss.where, (loss.name, *layers), variant, function=loss.name, layers=layers, **facts)


def written(evidence: Evidence) -> list[Finding] | None:
    """What is said of losses that are written by hand; None where their chance level is not known."""
    known = [one for one in _written_losses(evidence) if math.isfinite(one.times)] if evidence.repeatable else []
    if not known:
        return None
    loss = max(known, key=lambda one: one.times)
    if loss.times <= FAULT or loss.outputs <= UNIT or evidence.shared(pretrained):
        return []
    facts = _too_wide(loss, lambda prepare: _written_losses(evidence, prepare))
    return [_found("too_high", loss, "by hand", **facts)] if facts else []


class _Width(NamedTuple):
    """The standard deviation of a weight, and what torch would have drawn."""

    name: str
    std: float
    usual: float

    @property
    def times(self) -> float:
        return self.std / self.usual


def _too_wide(loss: InitialLoss, losses: Losses) -> dict[str, Any]:
    """One weight, or else all that are too wide, where the loss is near chance once they have the usual width, as
    facts; empty where they are not the cause."""
    widths: list[_Width] = []
    losses(lambda watch: widths.extend(_widths(watch)))
    wide = sorted((w for w in widths if w.times > WIDE), key=lambda w: -w.times)
    tried = [[w] for w in wide[:MOST_WEIGHTS]]
    for chosen in [*tried, wide] if len(wide) > 1 else tried:
        narrow = _same_call(losses(_narrowed({w.name: 1 / w.times for w in chosen})), loss)
        if narrow is not None and narrow.times <= ADVICE:
            first, names = chosen[0], tuple(w.name for w in chosen)
            return {
                "layer": first.name,
                "layers": names,
                "others": len(names) - 1,
                "rest": names[1:],
                "std": first.std,
                "usual": first.usual,
                "narrow": narrow.value,
                "narrow_chance": narrow.chance,
            }
    return {}


def _widths(watch: Watch) -> list[_Width]:
    tables = {id(m.weight) for _, m in watch.table.named_modules() if isinstance(m, nn.Embedding)}
    seen = []
    for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
        drawn = tensor.dim() > 1 and tensor.is_floating_point() and not nn.parameter.is_lazy(tensor)
        if drawn and id(tensor) not in tables and tensor.numel() > 1:
            inputs = tensor.numel() // tensor.shape[0] if entry.layer else max(tensor.shape)
            std = float(tensor.detach().double().square().mean().sqrt())
            seen.append(_Width(entry.name, std, 1 / math.sqrt(3 * inputs)))
    return seen


def _narrowed(factors: dict[str, float]) -> Callable[[Watch], None]:
    def prepare(watch: Watch) -> None:
        with torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if entry.name in factors:
                    tensor.mul_(factors[entry.name])

    return prepare


def _written_losses(evidence: Evidence, prepare: Callable[[Watch], None] = lambda watch: None) -> list[InitialLoss]:
    """The values that are backpropagated before the first step, with what they are for outputs of zero."""
    tape = LossTape()
    evidence.rerun(
        contexts=tape.contexts,
        before_item=tape.take,
        enough=lambda record: record.begun,
        double=True,
        may_raise=True,
        prepare=prepare,
    )
    return [loss for part in tape.slices if part.step == 0 and (loss := _written_loss(part)) is not None]


def _written_loss(part: Slice) -> InitialLoss | None:
    outputs = part.trained(part.root)
    if not outputs or part.values[part.root].tensor.numel() != 1:
        return None
    value = float(part.values[part.root].tensor)
    try:
        chance, doubled = (
            float(part.replay({v.number: factor * v.tensor.detach() for v in outputs}, [part.root])[0])
            for factor in (0.0, 2.0)
        )
    except CannotReplay:
        return None
    degree = math.log2(doubled / value) if doubled > value > 0 else 1.0
    squares = torch.cat([v.tensor.detach().double().reshape(-1) for v in outputs]).square()
    return InitialLoss(
        "the loss",
        str(part.place or ""),
        value,
        chance=chance,
        degree=round(min(max(degree, 1.0), HIGHEST_DEGREE)),
        outputs=float(squares.mean().sqrt()),
    )
