"""Every row of the batch that costs something teaches something.

What it does
    It makes one step of the loop on the batch, and again with another row in the place of the last one, and of the
    first. Where each row has 0 or 1 (labels), it makes one on rows with 0 alone. It looks at the losses of the watched
    run.

Why is this bad?
    A slice left from debugging, a loop over rows that ends one too early, labels of 0 and 1 where a hinge takes -1 and
    1, weights that an integer division makes 0: the loss falls, by what the other rows teach, and a part of the data
    is read and paid for in vain.

How it decides
    Rows that make no difference: whatever stands in them, losses, gradients and weights are the same, bit for bit, in
    float64, with the loop's own random numbers and at moved weights. All calls of torch up to the step are compared
    then: where rows end by their values (a mask, a clamp, a hardest example, an index that was computed) or are looked
    at without gradients (held out) nothing is said. A fault is what is left out of a batch of any size, or all beyond a
    constant number. What may be too much for parts of one size, every other row, and a constant share in front of the
    model (one process's part) are advice, and so are rows that change a batch norm's statistics and nothing else.
    A class that costs a constant: on rows with 0 alone the loss is not 0, equal bit for bit at three states of the
    weights, and no gradient is but exactly 0; each row costs the same, more than 0, before the reduction; rows with 1
    have gradients. (Rows of a mask cost 0, with or without a constant added.)
    One input for two: the model makes two equal calls with one tensor of the batch (the same function, the same
    numbers, gradients on), the same layers follow both calls, and nothing reads another tensor of its shape, dtype and
    kind (no mask, no positions). Different layers after the two calls are two heads on one trunk. With dropout it is
    advice: an input may pass twice for two views of it.
    One target for all: of a tensor whose rows differ only one row is read, taken by a constant index, and it meets a
    result of the model with all rows in one call.
    Flags as indices: whole numbers of the batch, one a row and never other than 0 and 1, index what has these rows, in
    the loss of several steps. A position that is pointed at must point elsewhere in one of them: the places of partners
    (the anchor of each view) point at rows that point at themselves.
    Weights of classes, picked by labels or given as ``weight=``, of which an integer division or a cast makes some 0
    and which are not 0 with their fractions kept.
    A loss that is exactly 0 at each pass, without any gradient, under five seeds of weights: it is followed back to the
    call that made 0 of something else. With a clamp left out, weights divided as fractions, or the target moved, a
    gradient must arrive. A clamp must also cut what it gets where all inputs are equal, so that no model could tell
    them apart: there a right margin costs something. All else (a reward of 0, a ramp that begins at 0) is a skip.

Faulty
    >>> for x, y in batches:
    ...     logits = model(x)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(logits[:-1], y[:-1]).backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     logits = model(x)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(logits, y).backward()
    ...     optimizer.step()

Known limits
    Rows in the middle of the batch, and rows that one part of the loss leaves out and another uses, are not looked at.
    What rows do by way of python or numpy (``tolist()``) is not followed. Of more than two classes none is looked at.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.HingeEmbeddingLoss.html (labels of -1 and 1)
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MarginRankingLoss.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.errors import Refused
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.every_row_teaches.constant_class import ConstantClass
    from pytest_trainloop.checks.batch.every_row_teaches.flags import FlagIndex
    from pytest_trainloop.checks.batch.every_row_teaches.left_out import LeftOut
    from pytest_trainloop.checks.batch.every_row_teaches.one_pass import CutWeights, ReadTwice
    from pytest_trainloop.checks.batch.every_row_teaches.one_target import OneTarget
    from pytest_trainloop.checks.batch.every_row_teaches.zero_losses import ZeroLoss
    from pytest_trainloop.runs.evidence import Evidence

_NO_GRADIENT = (*LEARNING, "every_param_moves", "gradient_reaches_every_param", "input_dependence", "loss_at_init")

CAUSES = {
    "hinge_never_active": Cause(
        proof="the loss is exactly 0 under every seed, and without its clamp gradients arrive",
        repair="add the margin to what is clamped, so that equal sides cost it: relu(rejected - chosen + margin), or "
        "relu(margin + d_positive - d_negative)",
        explains=_NO_GRADIENT,
        change=("seen",),
    ),
    "weights_cut_to_zero": Cause(
        proof="weights in the loss are 0, and with their fractions kept they are not",
        repair="compute weights in floating point: counts / total, not counts // total",
        explains=_NO_GRADIENT,
        source="https://github.com/tensorflow/tensorflow/issues/37747",
    ),
    "compared_with_itself": Cause(
        proof="both sides of the comparison are the same tensor",
        repair="compare the model's output with the target of the batch",
        explains=_NO_GRADIENT,
        change=("seen",),
        source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    ),
    "one_input_for_two": Cause(
        proof="two equal calls are made with one tensor of the batch, and none with another that is like it",
        repair="give each of the two calls its own input",
        explains=(*LEARNING, "input_dependence", "every_param_moves"),
        change=("seen",),
        settle="leave what is not used out of the batch",
        source="https://github.com/lin-tan/CoCoNut-Artifact/issues/3",
    ),
    "one_target_for_all_rows": Cause(
        proof="of a tensor of the batch whose rows differ one row is read, and meets the outputs of all rows",
        repair="compare each row's output with its own target",
        explains=(*LEARNING, "batch_independence", "loss_contract"),
        change=("seen",),
    ),
    "flags_as_indices": Cause(
        proof="of all rows only those at positions 0 and 1 are read, over and over, by flags of 0 and 1",
        repair="index with a boolean mask: x[flags.bool()]",
        explains=(*LEARNING, "batch_independence", "loss_contract", "loss_formula"),
        change=("seen",),
        source="https://github.com/Novartis/torchsurv/issues/117",
    ),
    "class_costs_a_constant": Cause(
        proof="rows of one class alone have a loss above 0 that no weight changes, and no gradient",
        repair="sign = 2 * y - 1   # labels of -1 and 1\nor give these rows a term of their own",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/bfortuner/ml-glossary/pull/113",
    ),
    "rows_left_out": Cause(
        proof="with any other rows in their place losses, gradients and weights are the same, bit for bit",
        repair="take all rows: leave out the slice ([:-1], [:n]), or let the loop over rows end at len(x)",
        explains=(*LEARNING, "accumulation_equivalence", "batch_independence", "edge_batches"),
        change=("seen",),
        settle="hand over a batch whose rows are all meant to be used",
        source="https://github.com/google-deepmind/gemma/issues/48",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=5)
def every_row_teaches(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.every_row_teaches.constant_class import constant_class
    from pytest_trainloop.checks.batch.every_row_teaches.flags import flag_index
    from pytest_trainloop.checks.batch.every_row_teaches.left_out import left_out
    from pytest_trainloop.checks.batch.every_row_teaches.one_pass import cut_weights, read_twice
    from pytest_trainloop.checks.batch.every_row_teaches.one_target import one_target
    from pytest_trainloop.checks.batch.every_row_teaches.zero_losses import zero_loss
    from pytest_trainloop.tracing.call_log import Calls

    zero = zero_loss(evidence)
    if zero is not None:
        yield _zero(zero)
        return
    constant = constant_class(evidence)
    if constant is not None:
        yield _constant(constant)
    twice = read_twice(evidence)
    if twice is not None:
        yield _twice(twice)
    seen, unused, undecided = Calls(), None, None
    try:
        unused = left_out(evidence, seen)
    except Refused as reason:
        undecided = reason
    if unused is not None:
        yield _left_out(unused)
    target = one_target(evidence, seen)
    if target is not None:
        yield _one_target(target)
    flags = flag_index(evidence, seen)
    if flags is not None:
        yield _flags(flags)
    weights = cut_weights(evidence, seen)
    if weights is not None:
        yield _cut(weights)
    if undecided is not None and not any((constant, twice, target, flags, weights)):
        raise undecided


def _zero(found: ZeroLoss) -> Finding:
    measured = f"{found.passes} backward passes under {found.seeds} seeds: the loss is 0.0, every gradient 0 or none"
    if found.why == "hinge":
        cut = f"cuts every entry: {found.largest:.3g} is the largest of {found.entries}"
        how = cut if found.entries > 1 else "finds each margin kept"
        return Finding(
            cause="hinge_never_active",
            summary=f"the loss is always exactly 0: {found.op} {how}",
            measured=measured,
            shown_by=f"without {found.op} gradients arrive; where both sides of a comparison are equal a hinge loss is "
            f"its margin, and with all inputs equal this {found.op} returns 0",
            culprits=(found.op,),
            where=str(found.place),
        )
    if found.why == "weights":
        return Finding(
            cause="weights_cut_to_zero",
            summary=f"the loss is always exactly 0: {found.op} multiplies it by weights that are all 0",
            measured=measured,
            shown_by=f"{found.cut_by} makes them 0; with the fractions kept gradients arrive",
            culprits=(found.cut_by,),
            where=str(found.place),
            change=str(found.source),
        )
    return Finding(
        cause="compared_with_itself",
        summary=f"the loss is always exactly 0: {found.op} compares the output of the model with itself",
        measured=measured,
        shown_by="both sides come from one tensor; with one of them moved gradients arrive",
        culprits=(found.op,),
        where=str(found.place),
    )


def _twice(found: ReadTwice) -> Finding:
    return Finding(
        cause="one_input_for_two",
        summary=f"{found.read} is given to the model twice, and {found.unread}, which is like it, never",
        level="advice" if found.noise else "fault",
        measured=f"{found.calls} function{'s' if found.calls > 1 else ''} of torch get{'' if found.calls > 1 else 's'} "
        f"{found.read} twice with the same weights, and give{'' if found.calls > 1 else 's'} the same numbers",
        shown_by=f"nothing reads {found.unread}; it has the shape and dtype of {found.read}, and other values",
        culprits=(found.unread, found.read),
        where=str(found.place),
        repair=f"give {found.unread} to one of the two calls; or leave it out of the batch",
    )


def _one_target(found: OneTarget) -> Finding:
    return Finding(
        cause="one_target_for_all_rows",
        summary=f"the outputs of all {found.rows} rows are compared with row {found.row} of {found.name}",
        measured=f"only {found.name}[{found.row}] is read; the loss is {found.before:.4g}, and {found.after:.4g} with "
        f"the whole of {found.name}",
        shown_by=f"{found.op} broadcasts it against all {found.rows} outputs; the rows of {found.name} differ",
        culprits=(found.name,),
        where=str(found.place),
        repair=f"take the whole of {found.name}, without the index",
    )


def _flags(found: FlagIndex) -> Finding:
    return Finding(
        cause="flags_as_indices",
        summary=f"{found.name}, which is 0 or 1 for each row, indexes the rows as positions: only the first two of "
        f"{found.rows} rows are read",
        measured=f"row 1 is read {found.ones} times and row 0 {found.rows - found.ones} times in the first step; over "
        f"{found.steps} steps no other number comes",
        shown_by="an integer tensor takes the rows at these positions; a boolean one takes the rows where it is True",
        culprits=(found.name,),
        where=str(found.place),
    )


def _cut(found: CutWeights) -> Finding:
    return Finding(
        cause="weights_cut_to_zero",
        summary=f"{found.rows} of {found.count} weights in the loss are 0, since {found.op} takes their fractions away",
        measured="rows with these weights cost nothing and have no gradient",
        shown_by="with the fractions kept the loss has another value",
        culprits=(found.op,),
        where=str(found.place),
        change=str(found.source),
    )


def _constant(found: ConstantClass) -> Finding:
    shown = "rows with 1 have gradients"
    if found.with_minus_one:
        shown += "; with -1 in place of 0 these rows have them too"
    return Finding(
        cause="class_costs_a_constant",
        summary=f"rows whose {found.name} is 0 cost {found.cost:.3g}, whatever the model gives, and teach nothing",
        measured=f"on such rows alone the loss is the same at {found.states} states of the weights, bit for bit, and "
        "every gradient is exactly 0",
        shown_by=shown,
        culprits=(found.name,),
        where=str(found.place) if found.place else "",
        smallest=str(found.smallest),
        composition=found.smallest.told(),
    )


def _left_out(found: LeftOut) -> Finding:
    number, used = len(found.rows), found.count - len(found.rows)
    end, other = ("last", "first") if found.rows[-1] == found.count - 1 else ("first", "last")
    several = f"the {end} {number} of {found.count} rows" if number > 1 else f"the {end} of {found.count} rows"
    summary, repair = f"{several} of the batch {_verb(number)} never used", ""
    shown = {
        "constant": f"of {2 * found.count} rows too, only the {other} {used if used > 1 else 'one'} {_verb(used)} used",
        "some": f"of {used} rows the {end} {_verb(number)} left out as well",
        "share": f"a batch of {used} rows loses a part of them as well",
        "remainder": f"a batch of {used} rows is used whole",
    }[found.sizes]
    if found.by_statistics:
        summary = f"{several} of the batch {_verb(number)} used for the statistics of a batch norm only"
        repair = "take all rows in the loss"
    elif found.others:
        summary = f"some rows of the batch are never used, {several} among them: every other one or so is taken"
        repair = "where this is the part of one process, nothing; else take all rows"
    elif found.sizes == "remainder":
        summary = f"{several} of the batch {_verb(number)} left out, which may be too many for parts of one size"
        repair = f"let the last part be smaller; or give a batch of {used} rows"
    return Finding(
        cause="rows_left_out",
        level="fault" if found.proven else "advice",
        summary=summary,
        measured=f"with other rows in place of {_named(found.rows)} losses, gradients and weights are the same, bit "
        f"for bit, over {found.steps} steps at moved weights",
        shown_by=shown + ("; the model computes their outputs" if found.ends.behind_model else ""),
        culprits=("batch",),
        where=str(found.ends.place) if found.ends.place else "",
        repair=repair,
        smallest=str(found.smallest),
        composition=found.smallest.told(),
    )


def _verb(number: int) -> str:
    return "is" if number == 1 else "are"


def _named(rows: Sequence[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
