"""What a difference by padding is called, by the first observation that proves a cause."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.padding_invariance.causes import CAUSES
from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import DIVISORS
from pytest_trainloop.checks.batch.padding_invariance.other_id import other_id, with_id
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import EXTREMES, MAX_POOLS_1D, MEAN_POOLS_1D, RECURRENT
from pytest_trainloop.wording import direction, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.checks.batch.padding_invariance.comparison import Comparison
    from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import PathCall
    from pytest_trainloop.checks.batch.padding_invariance.crossed import Crossed
    from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns
    from pytest_trainloop.finding import Level
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class _Path:
    """A path by which padding reaches the gradient, and what is said where blocking it makes both gradients equal."""

    cause: str
    blocked: frozenset[str]
    summary: str
    shown_by: str


_ATTENTION = _Path(
    "padded_keys_attended",
    frozenset({"attention"}),
    "attention looks at padded positions",
    "with padded keys left out there both gradients are equal",
)
_POOLING = _Path(
    "padding_pooled",
    frozenset({"pooling"}),
    "padded positions are pooled with the real ones",
    "over real positions only both gradients are equal",
)
_POSITIONS = _Path(
    "positions_shifted",
    frozenset({"positions"}),
    "positions are counted from the left edge, where the padding is",
    "the padding itself adds nothing: with positions counted from the first real one both gradients are equal",
)
_SINGLE = (_ATTENTION, _POOLING, _POSITIONS)
_PAIRS = ((_ATTENTION, _POSITIONS), (_ATTENTION, _POOLING), (_POOLING, _POSITIONS))

_DIVISORS = frozenset({DIVISORS})

_PACK = "pack the sequences: pack_padded_sequence(x, lengths, enforce_sorted=False)"
_POOL_MAXIMUM = (
    "leave padded positions out of the maximum: x.masked_fill(mask == 0, -torch.inf), the mask in the shape of x"
)
_FIRST_TOKEN = "give the first real token the ignored label too: a padded position predicts it"

_MAXIMA = EXTREMES | MAX_POOLS_1D
_MEANS = MEAN_POOLS_1D | {"mean", "nanmean", "embedding_bag"}


def explained(evidence: Evidence, made: PaddingRuns, found: Comparison) -> Finding:
    """The first cause that an observation proves."""
    if found.statistics:
        return _statistics(made, found)
    inverted = made.flow(found).inverted
    if inverted is not None:
        return _mask_inverted(made, found, inverted)
    if not found.agreement.difference < float("inf"):
        raise CannotDecide("the gradient is not finite, with the padding or without (see finite)")
    if found.factor:
        return _mean_over_padding(made, found)
    if (another := other_id(made, found)) is not None:
        return _other_pad_id(made, found, *another)
    for path in _SINGLE:
        if made.explained_by(found, path.blocked):
            return _of_path(made, found, path)
    if (targets := _targets_met(evidence, made, found)) is not None:
        return targets
    means = [c for c in made.flow(found, _DIVISORS).blocked if c.trained and made.explained_by(found, _DIVISORS)]
    if means:
        return _mean_over_padding(made, found, means[0])
    for first, second in _PAIRS:
        if made.explained_by(found, first.blocked | second.blocked):
            return _of_path(made, found, first, second)
    return _padded_targets(evidence, made, found) or _padding_counts(made, found)


def _of_path(made: PaddingRuns, found: Comparison, path: _Path, second: _Path | None = None) -> Finding:
    blocked = path.blocked | (second.blocked if second else frozenset())
    calls = [call for call in made.flow(found, blocked).blocked if call.path in path.blocked]
    if not calls:
        return _padding_counts(made, found)
    if path is _POOLING and (only := _recurrent_only(made, found, calls)):
        return _padding_counts(made, found, calls[0], only)
    reason, fixed = _excuse(made, found, path, calls, blocked), path is _POSITIONS and made.of_one_length(calls)
    shown = "with both set right both gradients are equal, and with either alone not" if second else path.shown_by
    return _finding(
        made,
        found,
        path.cause,
        f"{path.summary}, and {second.summary}" if second else path.summary,
        shown=f"{shown}{f' ({reason})' if reason else ''}",
        culprit=calls[0].op,
        where=str(calls[0].place),
        level="advice" if fixed or (reason and not made.declared) else "fault",
        repair=_unless_meant(
            made, path.cause, reason, _POOL_MAXIMUM if path is _POOLING and {c.op for c in calls} <= _MAXIMA else ""
        ),
        holds=lambda smaller: made.explained_by(smaller, blocked),
    )


def _recurrent_only(made: PaddingRuns, found: Comparison, calls: list[PathCall]) -> str:
    """Why a recurrent net that runs over padding may be meant; nothing where what is behind the padding is used."""
    if not {call.op for call in calls} & RECURRENT:
        return ""
    if made.left:
        return "it comes first, and changes the state that the row begins with"
    return "" if made.flow(found).behind else "only the backward direction begins in it, and nothing behind it is used"


def _excuse(made: PaddingRuns, found: Comparison, path: _Path, calls: list[PathCall], blocked: frozenset[str]) -> str:
    """Why the project may want it so; nothing where it cannot. A fault all the same where padding is declared."""
    flow, ops = made.flow(found), {call.op for call in calls}
    if path is _POSITIONS:
        if made.varying or (made.sure and not made.declared and made.for_longer_rows(calls)):
            return ""
        return "where all batches are of one length, positions may be counted from the end"
    if not made.sure:
        return f"that {made.reason} may mean something other than padding"
    if flow.length_is_target and made.by_lengths:
        return "the lengths are the targets"
    if path is _ATTENTION:
        return ""
    if made.flow(found, blocked).spread:
        return "what is pooled goes back to every position, as in a norm or a gate"
    if any("conv" in call.op for call in flow.mixing):
        return "pooling over padding behind convolutions is common"
    if ops <= _MAXIMA:
        return "a maximum over padding is common"
    if ops <= _MEANS and all(call.zeros for call in calls) and not made.varying:
        return "zeros are pooled in: where all batches are of one length, a constant factor"
    return ""


def _mask_inverted(made: PaddingRuns, found: Comparison, call: PathCall) -> Finding:
    return _finding(
        made,
        found,
        "padded_keys_attended",
        "the attention mask is inverted: real positions look at padded ones only",
        shown="the weights of all real keys are exactly zero, and those of padded ones are not",
        culprit=call.op,
        where=str(call.place),
        repair="invert the mask: key_padding_mask is true at padding, attn_mask of scaled_dot_product_attention at "
        "keys to attend to",
        level="fault" if made.sure else "advice",
        holds=lambda smaller: made.flow(smaller).inverted is not None,
    )


def _mean_over_padding(made: PaddingRuns, found: Comparison, mean: PathCall | None = None) -> Finding:
    """The loss as a whole, or by the call ``mean`` one part of it, divided by the number of all positions."""
    constant = "" if made.varying else "where all batches are of one length, it is a constant factor"
    if mean is None:
        summary = f"the loss of {found.trimmed.span.total} real positions is divided by all {found.full.span.total}"
        shown = f"both gradients are parallel: that with padding is exactly {found.factor:.4g} times the one without"
        shown += ", the share of real positions"
    else:
        summary = f"{mean.op}() divides by the number of all positions, and padded ones are zero in it"
        shown = "with the mean over real positions only both gradients are equal"
    return _finding(
        made,
        found,
        "mean_over_padding",
        summary,
        shown=f"{shown}{f' ({constant})' if constant else ''}",
        culprit="loss.backward()" if mean is None else mean.op,
        where="" if mean is None else str(mean.place),
        level="fault" if made.varying or made.declared else "advice",
        repair=_unless_meant(made, "mean_over_padding", constant),
        holds=lambda smaller: bool(smaller.factor) if mean is None else made.explained_by(smaller, _DIVISORS),
    )


def _targets_met(evidence: Evidence, made: PaddingRuns, found: Comparison) -> Finding | None:
    """What stands in the padding of targets, trained towards."""
    counted = made.meetings(found)
    met = [m for m in counted if not m.reduces]
    if not met:
        return None
    term = next((m for m in counted if m.reduces), None)
    aligned = met[-1].op == "ctc_loss"
    return _finding(
        made,
        found,
        "padded_targets",
        "ctc_loss aligns padded positions too: it is told their number as the length"
        if aligned
        else f"the loss includes padded positions: {met[-1].op} reads a target there"
        + (f", and {term.op}() counts it" if term else ""),
        shown="outputs at padded positions beyond the first have non-zero gradients",
        culprit=met[-1].op,
        where=str(met[-1].place),
        change=str(term.place) if term else "",
        level="fault" if made.sure or evidence.root_causes("padding_invariance") else "advice",
        repair="give each row's own length, as the model leaves it, as input_lengths"
        if aligned
        else _labels_first(evidence),
        holds=lambda smaller: any(not m.reduces for m in made.meetings(smaller)),
    )


def _padded_targets(evidence: Evidence, made: PaddingRuns, found: Comparison) -> Finding | None:
    """Padded positions that count in the loss like real ones."""
    without = made.without_outputs(found) if found.full.padded > 1 else None
    if without is None:
        return None
    in_the_mean = without.factor > 0 and made.sure
    token = made.left and made.of_ids
    other = "a first token predicted from the padding before it" if token else "a penalty on outputs"
    reduced = made.flow(found).reduced
    return _finding(
        made,
        found,
        "padded_targets",
        "outputs at padded positions count in the loss",
        shown="without their gradient, that of the real positions alone is left"
        + (", divided by all positions" if without.factor else f": {other} may be meant"),
        level="fault" if in_the_mean or made.declared or evidence.root_causes("padding_invariance") else "advice",
        repair=_labels_first(evidence)
        or ("" if without.factor else _unless_meant(made, "padded_targets", other, _FIRST_TOKEN if token else "")),
        change=str(reduced.place) if reduced else "",
        holds=lambda smaller: made.without_outputs(smaller) is not None,
    )


def _labels_first(evidence: Evidence) -> str:
    """What to repair before padded targets are masked: those of other rows would be hidden."""
    found = next((f for f in evidence.root_causes("padding_invariance") if f.cause == "labels_misplaced"), None)
    return "" if found is None else f"repair {found.check} first: {found.summary}"


def _other_pad_id(made: PaddingRuns, found: Comparison, taken: int, filled: float) -> Finding:
    """Rows that are filled with another id than the one that the model takes for padding."""
    first = next(iter((*made.path_calls(found), *made.flow(found).mixing)), None)
    return _finding(
        made,
        found,
        "other_pad_id",
        f"the model takes the id {taken} for padding, and rows are filled with {filled:g}",
        shown=f"with {taken} in the padding both gradients are equal",
        culprit=first.op if first else "loss.backward()",
        where=str(first.place) if first else "",
        level="fault" if made.sure else "advice",
        repair=f"fill rows with {taken}: pad_sequence(..., padding_value={taken}); or give the model pad id {filled:g}",
        holds=lambda smaller: made.agrees_with(smaller, functools.partial(with_id, pad_id=taken)),
    )


def _padding_counts(made: PaddingRuns, found: Comparison, through: PathCall | None = None, reason: str = "") -> Finding:
    if found.full.padded < 2:
        raise CannotDecide(
            "the gradient changes with the one padded position of a row, which may be the end of a text: give a batch "
            "with rows that are shorter by two or more",
            needs="a batch with shorter rows",
        )
    drawn = [] if reason else made.flow(found).drawn
    flow_in = (*made.flow(found).mixing, *made.path_calls(found))
    first = through or next(iter(flow_in), None) or next(iter(made.meetings(found)), None)
    return _finding(
        made,
        found,
        "padding_counts",
        f"the loss changes with padding{f', first through {first.op}' if first else ''}",
        shown=f"over real positions only both gradients are equal: {reason}"
        if reason
        else "not determined; ruled out as single causes: padded keys, pooling, shifted positions, a factor"
        + (f"; {drawn[0][0]} may draw what is trained on, by the length of the batch" if drawn else ""),
        culprit=first.op if first else "loss.backward()",
        where=str(first.place) if first else "",
        level="fault" if made.declared and not drawn else "advice",
        repair=_unless_meant(made, "padding_counts", reason or "padding is data here", _PACK if reason else ""),
        holds=lambda _smaller: True,
    )


def _statistics(made: PaddingRuns, found: Comparison) -> Finding:
    """Batch norms that count padded positions in the statistics that they train on."""
    call = made.flow(found).normed
    return _finding(
        made,
        found,
        "padding_counts",
        "the statistics of a batch norm are taken over padded positions too",
        shown="with its running statistics both gradients are equal, and with those of the batch not",
        culprit="batch_norm",
        where=str(call.place) if call else "",
        level="fault",
        repair="normalise real positions only: x[mask] = norm(x[mask]); or use a norm of each position (nn.LayerNorm)",
        holds=lambda smaller: smaller.statistics,
    )


def under_another_mask(made: PaddingRuns, other: Crossed) -> Finding:
    """One of two sequences of equal width, read under the other's mask."""
    return Finding(
        cause="mask_of_another",
        level="fault" if made.sure and (made.of_ids or made.declared) else "advice",
        summary=f"{made.name} is read under the mask of {other.name}: its padding counts where {other.name} is real"
        + ("" if made.sure and made.of_ids else "; if padding must not count, declare padding=Padding(...)"),
        measured=f"relative difference {share(other.difference)} with other values there, float64",
        shown_by="other values in padded positions change the gradient where the other sequence is real, and nowhere "
        f"else; these positions are padding: {made.reason}",
        culprits=(other.op or "loss.backward()",),
        where=str(other.place or ""),
        smallest="",
        repair=f"give {made.name} its own mask: pass it at the call that handles {made.name}",
    )


def _unless_meant(made: PaddingRuns, cause: str, reason: str, repair: str = "") -> str:
    """The repair, and what to write where padding is declared and this is meant all the same; the cause's own repair
    where none is given."""
    meant = f'; if this is meant ({reason}): skip={{"padding_invariance:{cause}": "why"}}'
    return f"{repair or CAUSES[cause].repair}{meant if reason and made.declared else ''}"


def _finding(
    made: PaddingRuns,
    found: Comparison,
    cause: str,
    summary: str,
    *,
    shown: str,
    level: Level,
    holds: Callable[[Comparison], bool],
    culprit: str = "loss.backward()",
    where: str = "",
    change: str = "",
    repair: str = "",
) -> Finding:
    """A finding at a call, or else where the loss is backpropagated; ``holds`` says whether a smaller batch shows the
    same cause."""
    smallest = (made.smallest(found, holds) or found).full
    rows, total, real = len(smallest.rows), smallest.span.total, smallest.last - smallest.first
    summary = f"{made.name}: {summary}" if made.name else summary
    return Finding(
        cause=cause,
        level=level,
        summary=(
            f"{summary}: the gradient of the same rows, {found.full.span.total} positions long and "
            f"{found.trimmed.span.total}, differs by {share(found.agreement.difference)}"
            + ("" if level == "fault" or made.declared else "; if padding must not count, declare padding=Padding(...)")
        ),
        measured=(
            f"relative difference {share(found.agreement.difference)}; |g| with padding / without = "
            f"{found.agreement.ratio:.4g}, {direction(found.agreement.cosine)}, "
            f"loss {found.losses[0]:.5g} and {found.losses[1]:.5g}, all {found.parameters} parameters, "
            f"{found.precision}"
        ),
        shown_by=f"{shown}; these positions are padding: {made.reason}",
        culprits=(culprit,),
        where=where or made.backward(found),
        change=change,
        smallest=f"{rows} row{'s' if rows > 1 else ''} of {total} positions, {real} of them real",
        composition=made.composition(smallest).told(),
        repair=repair,
        tried="in a run with that both gradients are equal" if "both gradients are equal" in shown else "",
    )
