"""What a difference by padding is called: each rule asks for one observation, and names its cause."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.checks.batch.padding_invariance.causes import CAUSES, EQUAL, found
from pytest_trainloop.checks.batch.padding_invariance.compared import (
    ATTENDED,
    DIVIDED,
    EVERY,
    MEANS,
    PATHS,
    POOLED,
    READS,
    SHIFTED,
    TRAINED,
)
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding, SmallestBatch
from pytest_trainloop.core.wording import direction, filled
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing import definitions
from pytest_trainloop.instruments.tracing.data_lines import DataLines
from pytest_trainloop.instruments.tracing.lockstep import Seen, Tape, Unlike
from pytest_trainloop.recording.torch_names import EXTREMES, LOSSES, MAX_POOLS_1D, RECURRENT
from pytest_trainloop.runs.weight_origins import drawn_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.batch.padding_invariance.compared import Compared
    from pytest_trainloop.checks.batch.padding_invariance.padded import Slice
    from pytest_trainloop.core.finding import Level
    from pytest_trainloop.instruments.compositions.experiment import Difference
    from pytest_trainloop.instruments.tracing.lockstep import Entry, Meeting

_CAUSE = {ATTENDED: "padded_keys_attended", POOLED: "padding_pooled", SHIFTED: "positions_shifted"}
_UNREAD = ("input_dependence:input_ignored", "batch_roles_hold:role_without_effect")
"""What other checks say of a mask that nothing reads."""

_MAXIMA = EXTREMES | MAX_POOLS_1D
_ONE_LENGTH = "where all batches are of one length, it is a constant factor"
_IDS = 3
"""Ids of models that are tried in the padding, at most."""


class Case:
    """A slice whose gradient changes with its padding."""

    def __init__(self, made: Compared, full: Slice, difference: Difference) -> None:
        self.made, self.full, self.difference, self.group = made, full, difference, made.group

    @property
    def follows(self) -> bool:
        """Whether it follows from a fault that another check names."""
        return bool(self.made.experiment.evidence.root_causes("padding_invariance"))

    def named(
        self,
        cause: str,
        at: Entry | Meeting | Seen | None,
        variant: str = "",
        *,
        holds: Callable[[Slice], bool],
        level: Level = "fault",
        reason: str = "",
        **facts: Any,
    ) -> Finding:
        """The finding at a call, or else where the loss is backpropagated. ``holds`` says whether a smaller slice shows
        the same cause, ``reason`` why the project may want it so."""
        made, group, full, gradients = self.made, self.group, self.full, self.difference.agreement
        smallest = made.smallest(full, holds)
        facts |= {"by": at.op if at else "", "group": group.mask.name, "known": group.mask.reason, "reason": reason}
        facts |= {"total": full.total, "real": full.real, "undeclared": level == "advice" and not group.declared}
        facts |= {
            "difference": gradients.difference,
            "ratio": gradients.ratio,
            "direction": direction(gradients.cosine),
        }
        facts |= {"loss": self.difference.losses[0], "other_loss": self.difference.losses[1], "level": level}
        facts |= {"parameters": self.difference.parameters, "precision": self.difference.precision}
        where = at.place if at else made.outcome(full).backward
        if (
            cause == "padded_keys_attended"
            and not variant
            and definitions.mask(str(where), of=definitions.PADDING_MASKS)
        ):
            variant = "masked"
        intended = reason or facts.get("why", "")
        template = CAUSES[cause].variants.get(variant, {}).get("repair") or CAUSES[cause].repair
        facts["repair"] = facts.get("repair") or filled(template, facts)
        if intended and group.declared:
            skip = f'@pytest.mark.trainloop(skip={{"padding_invariance:{cause}": "why"}})'
            facts["repair"] += f"; if this is intended ({intended}): {skip}"
        if made.masks_unread(full):
            facts["explains"] = (*CAUSES[cause].explains, *_UNREAD)
        finding = found(cause, where, (at.op if at else "loss.backward()",), variant, **facts)
        side = "before" if group.left else "after"
        rows = f"{len(smallest.rows)} {'row' if len(smallest.rows) == 1 else 'rows'}"
        padded = f"{smallest.padding} padded position{'s' if smallest.padding > 1 else ''}"
        change = f"{padded} {side} {smallest.real} real one{'s' if smallest.real > 1 else ''}"
        return replace(
            finding,
            smallest=f"{rows} of {smallest.total} positions, {smallest.real} of them real",
            composition=SmallestBatch(smallest.rows, (), change),
            tried=f"in a run with that {EQUAL}" if EQUAL in finding.shown_by else "",
        )

    def first_call(self) -> Entry | Seen | None:
        """The first call through which padding comes in."""
        seen = self.made.in_step(self.full, EVERY)[1]
        return seen.entries[0] if seen.entries else seen.unlike


def batch_statistics(case: Case) -> Iterator[Finding]:
    """Batch norms that count padded positions in the statistics that they train on."""
    if case.made.statistics:
        calls = case.made.tape(case.full.kept(0)).calls
        normed = next((Seen(name, taped.place) for (name, *_), taped in calls.items() if name == "batch_norm"), None)
        yield case.named("padding_counts", normed, "statistics", holds=lambda few: True)


def row_of_padding_drawn(case: Case) -> Iterator[Finding]:
    """The row of ``padding_idx``, which torch made zero, is drawn with the rest of its table."""
    made, pad = case.made, case.group.fill
    if pad is None:
        return
    evidence = made.experiment.evidence
    tables = [
        f"{path}.weight"
        for prefix, module in evidence.fresh_loop().modules.items()
        for path, m in members.named_modules(module, prefix)
        if isinstance(m, nn.Embedding) and m.padding_idx == pad and bool(m.weight.detach()[m.padding_idx].any())
    ]
    rows = evidence.shared(drawn_rows) if tables else {}
    # of a table from a file single rows may be drawn: those of words that it lacks
    tables = [t for t in tables if t in rows and bool(rows[t][int(pad)]) and float(rows[t].double().mean()) > 0.5]
    if tables and made.equal_with_zeros(case.full, int(pad)):

        def holds(few: Slice) -> bool:
            return made.equal_with_zeros(few, int(pad))

        calls = made.tape(case.full.kept(0)).calls
        at = next((Seen(name, taped.place) for (name, *_), taped in calls.items() if name == "embedding"), None)
        finding = case.named("pad_row_drawn", at, holds=holds, pad=int(pad), table=tables[0])
        yield replace(finding, culprits=tuple(tables))


def mask_inverted(case: Case) -> Iterator[Finding]:
    made = case.made
    if at := made.in_step(case.full)[1].looks_elsewhere:
        level: Level = "fault" if case.group.sure else "advice"

        def holds(few: Slice) -> bool:
            return made.in_step(few)[1].looks_elsewhere is not None

        yield case.named("padded_keys_attended", at, "inverted", level=level, holds=holds)


def mask_of_batch_inverted(case: Case) -> Iterator[Finding]:
    """A mask that the batch holds, and that is 1 at padding where the model takes 1 for a real position."""
    made, wrong = case.made, case.group.inverted
    if wrong and made.equal_with_masks_inverted(case.full):
        entries = made.entries(case.full, POOLED)
        names = [nested.shown(leaf.path) for leaf in wrong]
        change = made.experiment.evidence.shared(DataLines.of).at(names)
        at = entries[0] if entries else case.first_call()
        yield case.named(
            "padding_pooled",
            at,
            "inverted",
            holds=made.equal_with_masks_inverted,
            change=change,
            masks=" and ".join(names),
        )


def share_of_real_positions(case: Case) -> Iterator[Finding]:
    """The loss as a whole, divided by the number of all positions."""
    if not case.difference.agreement.difference < math.inf:
        raise CannotDecide("the gradient is not finite, with the padding or without (see finite)")
    if factor := factor_of(case.difference, case.full):
        reason, level = _constant_factor(case)

        def holds(few: Slice) -> bool:
            return bool(factor_of(case.made.difference(few), few))

        yield case.named("mean_over_padding", None, level=level, reason=reason, holds=holds, factor=factor)


def factor_of(found: Difference | None, full: Slice, keep: int = 0) -> float:
    """The share of real positions, where the gradient with padding is exactly this share of the one without; of all
    positions, or of all but one (targets that are shifted). 0 otherwise."""
    real = full.real + keep
    shares = [real / full.total, *([(real - 1) / (full.total - 1)] if real > 1 else [])]
    return next((s for s in shares if found is not None and found.is_factor(s)), 0.0)


def _constant_factor(case: Case) -> tuple[str, Level]:
    # batches of one fixed length: the divisor is a constant (odd: divided_by_the_longest_length)
    return "" if case.group.varying else _ONE_LENGTH, "fault" if case.group.varying or case.group.declared else "advice"


def other_pad_id(case: Case) -> Iterator[Finding]:
    """Rows that are filled with another id than the one that the model takes for padding."""
    group, filling = case.group, case.group.fill
    if not group.mask.of_ids or case.full.uneven or filling is None:
        return
    others = (i for i in group.pad_ids[:_IDS] if i != filling)
    taken = next((i for i in others if case.made.takes_for_padding(case.full, i)), None)
    if taken is not None:
        level: Level = "fault" if group.sure else "advice"

        def holds(few: Slice) -> bool:
            return case.made.takes_for_padding(few, taken)

        first = case.first_call()
        yield case.named("other_pad_id", first, "ids", level=level, holds=holds, taken=taken, filled=filling)


def one_path(case: Case) -> Iterator[Finding]:
    for kind in PATHS:
        if case.made.explained(case.full, kind) and (entries := case.made.entries(case.full, kind)):
            yield from _by_path(case, entries, kind)
            return


def two_paths(case: Case) -> Iterator[Finding]:
    for kind, other in ((ATTENDED, SHIFTED), (ATTENDED, POOLED), (POOLED, SHIFTED)):
        if case.made.explained(case.full, kind, other) and (entries := case.made.entries(case.full, kind)):
            yield from _by_path(case, entries, kind, other)
            return


def _by_path(case: Case, entries: list[Entry], kind: str, other: str = "") -> Iterator[Finding]:
    if kind == POOLED and (reason := _recurrent_only(case, entries)):
        yield from padding_counts(case, entries[0], reason)
        return
    group, reason, variant = case.group, _excuse(case, entries, kind), ""
    # a table of just these positions: the last one is always the same (odd: history_of_one_length)
    fits = any(e.table in (group.mask.grid.length, group.mask.grid.length + 1) for e in entries)
    one_length = kind == SHIFTED and fits and bool(group.lengths) and not group.varying
    level: Level = "advice" if one_length or (reason and not group.declared) else "fault"
    if other:
        variant = "positions too" if other == SHIFTED else "pooling too"
    elif kind == ATTENDED and case.made.in_step(case.full)[1].hides_queries:
        variant = "queries"
    elif kind == POOLED and {e.op for e in entries} <= _MAXIMA:
        variant = "a maximum"

    def holds(few: Slice) -> bool:
        return case.made.explained(few, *filter(None, (kind, other)))

    seen = next((entry for entry in entries if entry.used), entries[0])
    yield case.named(_CAUSE[kind], seen, variant, level=level, reason=reason, holds=holds)


def _recurrent_only(case: Case, entries: list[Entry]) -> str:
    """Why a recurrent net may run over padding; empty where what is behind the padding is used."""
    ops = {entry.op for entry in entries}
    if not ops & RECURRENT or not ops <= RECURRENT | READS:
        return ""
    if case.group.left:  # (odd: recurrent_behind_left_padding)
        return "it comes first, and changes the state that the row begins with"
    if any(e.behind for e in case.made.in_step(case.full)[1].entries if e.op in RECURRENT):
        return ""
    # (odd: both_directions_not_packed)
    return "only the backward direction begins in it, and nothing behind it is used"


def _excuse(case: Case, entries: list[Entry], kind: str) -> str:
    """Why the project may want it so; empty where it cannot. It is a fault all the same where padding is declared."""
    group, seen = case.group, case.made.in_step(case.full, frozenset({kind}))[1]
    ops = {entry.op for entry in entries}
    if kind == SHIFTED:
        longer = not group.lengths and all(e.table > group.mask.grid.length + 1 for e in entries)
        if group.varying or (group.sure and not group.declared and longer):
            return ""
        return "where all batches are of one length, positions may be counted from the end"
    if not group.sure:  # a mask next to features (odd: observed_in_part)
        return f"that {group.mask.reason} may mean something other than padding"
    if seen.length_is_target and group.mask.source == "lengths" and not group.declared:  # (odd: size_of_a_set)
        return "the lengths are the targets"
    if kind == ATTENDED:
        return ""
    if any(entry.spreads for entry in seen.entries):  # (odd: norm_over_time_by_hand, gate_by_a_mean_over_time)
        return "what is pooled goes back to every position, as in a norm or a gate"
    if any("conv" in name for name in seen.names):  # (odd: sound_filled_with_silence)
        return "pooling over padding behind convolutions is common"
    if ops <= _MAXIMA:  # (odd: clouds_filled_with_zeros)
        return "a maximum over padding is common"
    # (odd: bag_of_words_with_a_configured_padding_id)
    if ops <= MEANS and all(entry.zeros for entry in entries) and not group.varying:
        return "zeros are pooled in: where all batches are of one length, a constant factor"
    return ""


def targets_met(case: Case) -> Iterator[Finding]:
    """Outputs at padded positions that are trained towards what the batch has there, in whichever term of the loss. The
    first padded position is not looked at: it may end a text."""
    made, full = case.made, case.full
    met = made.in_step(full, keep=1)[1].meetings if full.padding > 1 else []
    if not met:
        return
    last, variant = met[-1], ""
    reducing = (e for e in made.entries(full, TRAINED) if e.op not in LOSSES and e.trained)
    reduction = next((e for e in reducing if any((m.op, m.place) == (last.op, last.place) for m in e.met)), None)
    if last.op == "ctc_loss":
        variant = "aligned"
    elif reduction is not None:
        variant = "reduced"

    def holds(few: Slice) -> bool:
        return bool(made.in_step(few, keep=min(1, few.padding - 1))[1].meetings)

    level: Level = "fault" if case.group.sure or case.follows else "advice"
    facts = {"change": str(reduction.place) if reduction else "", "reduction": reduction.op if reduction else ""}
    facts["repair"] = "" if variant == "aligned" else _labels_first(case)
    yield case.named("padded_targets", last, variant, level=level, holds=holds, **facts)


def _labels_first(case: Case) -> str:
    """What to repair before padded targets are masked: those of other rows would be hidden."""
    causes = case.made.experiment.evidence.root_causes("padding_invariance")
    other = next((f for f in causes if f.cause == "labels_misplaced"), None)
    return "" if other is None else f"repair {other.check} first: {other.summary}"


def mean_of_one_term(case: Case) -> Iterator[Finding]:
    """One term of the loss, divided by the number of all positions."""
    means = [e for e in case.made.entries(case.full, DIVIDED) if e.trained]
    if means and case.made.explained(case.full, DIVIDED):
        reason, level = _constant_factor(case)

        def holds(few: Slice) -> bool:
            return case.made.explained(few, DIVIDED)

        yield case.named("mean_over_padding", means[0], "of one term", level=level, reason=reason, holds=holds)


def outputs_count(case: Case) -> Iterator[Finding]:
    """Terms of the loss that padded outputs enter without a target: an entropy, a penalty."""
    made, group = case.made, case.group
    left = _without_padded_outputs(made, case.full) if case.full.padding > 1 else ""
    if not left:
        return
    counted = _counted(made, case.full)
    # (odd: penalty_over_all_positions, first_token_from_padding)
    token, divided = group.left and group.mask.of_ids, left == "share"
    reason = "" if divided else "it may be a penalty on outputs"
    if token and not divided:
        reason = "a first token may be predicted from the padding before it"
    level: Level = "fault" if (divided and group.sure) or group.declared or case.follows else "advice"

    def holds(few: Slice) -> bool:
        return bool(_without_padded_outputs(made, few))

    variant = "first token" if token and not divided else "no target"
    facts: dict[str, Any] = {"repair": _labels_first(case), "divided": divided}
    yield case.named(
        "padded_targets", counted[-1] if counted else None, variant, level=level, reason=reason, holds=holds, **facts
    )


def _counted(made: Compared, full: Slice) -> list[Entry]:
    """Terms of the loss that padded outputs enter. What weights take up is a statistic of the model, and what has no
    gradient one of the data."""
    return [e for e in made.entries(full, TRAINED) if e.trained and not e.in_the_model]


def _without_padded_outputs(made: Compared, full: Slice) -> str:
    """What is left where padded outputs get no gradient, or the terms that they enter are replaced: "equal" gradients,
    the "share" of real positions times that without padding, or neither."""
    for keep in range(min(2, full.padding)):
        left = made.without_outputs(full, keep)
        if left is not None and (left.equal or factor_of(left, full, keep)):
            return "equal" if left.equal else "share"
    if not _counted(made, full):
        return ""
    if made.explained(full, TRAINED):
        return "equal"
    return "share" if made.explained(full, TRAINED, DIVIDED) else ""


def padding_counts(case: Case, at: Entry | Seen | None, why: str = "") -> Iterator[Finding]:
    """Nothing else explains it; or ``why`` a recurrent net that runs over padding may be intended."""
    if case.full.padding < 2:
        raise CannotDecide(
            "the gradient changes with the one padded position of a row, which may be the end of a text: give a batch "
            "with rows that are shorter by two or more",
            needs="a batch with shorter rows",
        )
    # what is drawn may choose what is trained on (odd: declared_windows_of_padded_rows)
    drawn = [] if why else case.made.in_step(case.full)[1].drawn
    level: Level = "fault" if case.group.declared and not drawn else "advice"
    facts = {"draws": drawn[0][0] if drawn else "", "why": why or "padding is data here"}
    yield case.named("padding_counts", at, "recurrent" if why else "", level=level, holds=lambda few: True, **facts)


def under_another_mask(made: Compared) -> Iterator[Finding]:
    """One sequence that is read under the mask of another of the same width: other values in its padding change the
    gradient where the other is real, and nowhere else."""
    group, experiment = made.group, made.experiment
    for other in group.same_width:
        read, unread = group.mask.mask & ~other.mask, group.mask.mask & other.mask
        # never the longer one: both may be one series, known for a shorter time (odd: inputs_end_before_their_targets)
        longer = bool((other.mask & ~group.mask.mask).any())
        if other.side != group.mask.side or not (longer and bool(read.any()) and bool(unread.any())):
            continue
        tape, name = Tape(), other.name
        as_is = experiment.arm((made, name), functools.partial(group.other_values, read & False), tape)
        arm = experiment.arm((made, name, "unread"), functools.partial(group.other_values, unread))
        same = experiment.difference(as_is, arm)
        if same is None or not same.equal:
            continue
        unlike = Unlike(tape, group.mask.grid.length)
        arm = experiment.arm((made, name, "read"), functools.partial(group.other_values, read), unlike)
        differs = experiment.difference(as_is, arm)
        if differs is None or differs.within_float32:
            continue
        first = unlike.first
        sure = group.sure and (group.declared or group.mask.of_ids)
        facts = {"group": group.mask.name, "other": name, "known": group.mask.reason, "undeclared": not sure}
        facts |= {"difference": differs.agreement.difference, "level": "fault" if sure else "advice"}
        culprits = (first.op if first else "loss.backward()",)
        facts["change"] = definitions.reading(str(first.place), name) if first else ""
        yield found("mask_of_another", first.place if first else "", culprits, "named", **facts)
        return
