"""Targets can be learned from what the model is given.

What it does
    It looks at the calls of torch in the first two steps: where a prediction meets its target, and what each of the two
    was made of.

Why is this bad?
    The loss falls to the best that a constant can do and stands there. Noise that the model has not seen cannot be
    predicted, nor a value that its last function cannot give; a target that a cast has made 0 for every row teaches 0.

How it decides
    By what values were made of, and by data that contradict themselves; never by how the loss falls.
    Noise: a target is the result of one draw of random numbers (or the difference of a draw and data), and of nothing
    else: no batch, no weights, no sorting. The prediction depends on the batch and on trained weights, not on this draw
    (with its numbers in another order the prediction is the same, bit for bit), but on another draw of the same shape:
    the noise was drawn twice. Without another draw it is advice. A sum of data and a draw is silent: two noisy views of
    one row look so.
    Cut: a cast to whole numbers or an argmax makes the target; what it is given differs between rows, and what it
    gives is one number, in all calls. An argmax over an axis of one entry can give nothing else.
    Range: the last function before the comparison is a sigmoid, a tanh, a ReLU or the like, and targets of the batch
    lie outside of what it can give. Where its best output is further from them than one constant number is, that is a
    fault; where at least a quarter of them lie outside it is advice, since noise around the end of a range looks so.
    Units: the mean of the targets, one constant for each output, is ten times nearer to them than the first outputs
    are: advice. Where the targets of the batch are near the outputs (within three spreads), and a difference that the
    loop itself divides takes them away, they were standardised before: a fault.
    Contained: each column of a target of the batch stands in one input, entry by entry, which has other columns too,
    and the prediction changes where these columns change rows: advice, since a task may be to copy.
    Written in place: a function that computes a loss writes into a tensor of the batch that it was given, and what
    comes after reads it. With the tensor put back when the function returns the loss that is backpropagated is another.

Faulty
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     share = torch.sigmoid(y / 10).unsqueeze(1)
    ...     F.cross_entropy(model(x), share.argmax(1)).backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Only comparisons of two tensors of one shape are seen, by torch's distances or by a subtraction. Noise that numpy
    draws is not seen.

References
    https://arxiv.org/abs/2006.11239 (Algorithm 1: one draw makes the input and is the target)
    https://docs.pytorch.org/docs/stable/generated/torch.argmax.html
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.learnable_targets.contained import Contained
    from pytest_trainloop.checks.loss.learnable_targets.cut_targets import CutTarget
    from pytest_trainloop.checks.loss.learnable_targets.other_draws import OtherDraw
    from pytest_trainloop.checks.loss.learnable_targets.reach import OutOfReach
    from pytest_trainloop.checks.loss.learnable_targets.units import FarTargets
    from pytest_trainloop.checks.loss.learnable_targets.written import Written
    from pytest_trainloop.runs.evidence import Evidence

_LEARNING = ("overfit_one_batch", "loss_at_init", "update_ratio")

CAUSES = {
    "target_is_other_draw": Cause(
        proof="the prediction depends on one draw of random numbers, and its target is made from another of the same "
        "shape",
        repair="draw once and use it twice: noise = torch.randn_like(x), for the input and for the target",
        explains=_LEARNING,
        change=("seen",),
    ),
    "noise_not_given": Cause(
        proof="the target is a draw of random numbers, and with other numbers the prediction is the same, bit for bit",
        repair="give the model what the noise was added to: model(x + noise)",
        explains=_LEARNING,
        change=("seen",),
        settle="draw the noise once, before fit, where it is meant as fixed targets",
    ),
    "target_cut_to_one_value": Cause(
        proof="what is cast, or given to argmax, differs between rows, and the result is one number",
        repair="keep the values: labels.float() where the loss takes numbers, indices where it takes classes",
        explains=(*_LEARNING, "loss_contract", "input_dependence", "gradient_reaches_every_param"),
        change=("seen",),
    ),
    "target_out_of_reach": Cause(
        proof="targets lie outside of what the last function can give",
        repair="scale the targets into its range, or leave the function out after the last layer",
        explains=_LEARNING,
        change=("seen",),
        settle="scale the targets into the range",
    ),
    "standardised_twice": Cause(
        proof="the targets of the batch are in reach, and the loop's own (y - mean) / spread takes them out of it",
        repair="standardise once: leave it out here, or in the data set",
        explains=_LEARNING,
        change=("seen",),
    ),
    "target_in_other_units": Cause(
        proof="one constant, the mean of the targets, is ten times nearer to them than the first outputs",
        repair="train on (y - mean) / spread of the training set, and undo it for what is reported",
        explains=_LEARNING,
        change=("seen",),
        settle="set the bias of the last layer to the mean of the targets, where they are to stay in their units",
    ),
    "input_contains_target": Cause(
        proof="each column of the target stands in the input in all rows, and the prediction depends on it",
        repair="take the target's columns out of the input: x = table.drop(columns=[target])",
        explains=("loss_at_init:below_chance",),
        change=("seen",),
        settle="leave these columns out of the input",
    ),
    "target_written_by_loss": Cause(
        proof="a loss function writes into the batch, and with the batch put back afterwards the loss differs",
        repair="work on a copy: target = target.clone()",
        explains=(*_LEARNING, "loss_components", "accumulation_equivalence", "determinism"),
        change=("seen",),
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=6, steps=10)
def learnable_targets(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.learnable_targets.contained import contained_targets
    from pytest_trainloop.checks.loss.learnable_targets.cut_targets import cut_targets
    from pytest_trainloop.checks.loss.learnable_targets.other_draws import other_draws
    from pytest_trainloop.checks.loss.learnable_targets.reach import out_of_reach
    from pytest_trainloop.checks.loss.learnable_targets.units import far_targets
    from pytest_trainloop.checks.loss.learnable_targets.written import written_by_loss

    yield from map(_cut, cut_targets(evidence))
    yield from map(_other_draw, other_draws(evidence))
    yield from map(_out_of_reach, out_of_reach(evidence))
    yield from map(_far, far_targets(evidence))
    yield from map(_contained, contained_targets(evidence))
    yield from map(_written, written_by_loss(evidence))


def _other_draw(found: OtherDraw) -> Finding:
    shape = " x ".join(map(str, found.shape)) or "one number"
    whole = "the difference of data and a draw" if found.velocity else "a draw"
    if found.given is None:
        return Finding(
            cause="noise_not_given",
            level="advice",
            summary=f"the target is {whole} of {found.function} ({shape}) that the model is not given",
            measured=f"drawn at {found.target}; the prediction depends on the batch and on no such draw",
            shown_by="with the same numbers in another order the prediction is the same, bit for bit",
            culprits=(found.function,),
            where=str(found.place),
            change=str(found.target),
        )
    return Finding(
        cause="target_is_other_draw",
        summary=f"the target is {whole} of {found.function} ({shape}); the prediction was given another draw",
        measured=f"drawn for the input at {found.given}\ndrawn for the target at {found.target}",
        shown_by="with other numbers in the target's draw the prediction is the same, bit for bit",
        culprits=(found.function,),
        where=str(found.place),
        change=str(found.target),
    )


def _cut(found: CutTarget) -> Finding:
    if found.dim is not None:
        how = f"axis {found.dim} has one entry, so {found.op} is 0 for any values"
        repair = "take the class indices themselves: leave the argmax out"
    else:
        how = f"{found.op} cuts off what distinguishes them"
        repair = ""
    known = found.name or "what it is made of"
    return Finding(
        cause="target_cut_to_one_value",
        summary=f"the target is {found.value:g} for every row, though {known} differs between rows",
        measured=f"values from {found.low:.4g} to {found.high:.4g} of shape {found.shape} become {found.value:g}",
        shown_by=how,
        culprits=(found.name or found.op,),
        where=str(found.met_at),
        change=str(found.place),
        repair=repair,
    )


def _out_of_reach(found: OutOfReach) -> Finding:
    low, high = found.bounds
    ends = f"above {low:g}" if math.isinf(high) else f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"
    beyond = share(found.outside / found.count)
    return Finding(
        cause="target_out_of_reach",
        level="fault" if found.hopeless else "advice",
        summary=f"{beyond} of the targets lie outside of what {found.function} can give ({ends})",
        measured=f"{found.outside} of {found.count} targets; they go from {found.smallest:.4g} to {found.largest:.4g}",
        shown_by=f"even the best output of {found.function} is {found.least:.3g} from them in root mean square; "
        f"their mean, one number for all, is {found.constant:.3g} from them",
        culprits=(found.function,),
        where=str(found.place),
        change=str(found.made_at),
    )


def _far(found: FarTargets) -> Finding:
    told = f"targets have mean {found.mean:.4g} and spread {found.spread:.3g}; the first outputs are "
    told += f"{found.start:.4g} from them in root mean square"
    if found.scaled_at is not None:
        mean, spread = found.before
        return Finding(
            cause="standardised_twice",
            summary=f"{found.name or 'the target'} is standardised already, and is standardised again",
            measured=told,
            shown_by=f"before it they have mean {mean:.3g} and spread {spread:.3g}, which the outputs are near to",
            culprits=(found.name or "target",),
            where=str(found.place),
            change=str(found.scaled_at),
        )
    return Finding(
        cause="target_in_other_units",
        level="advice",
        summary="one constant, the mean of the targets, is far nearer to them than the first outputs are",
        measured=told,
        shown_by="until that constant is found, every step moves all outputs alike",
        culprits=(found.name or "target",),
        where=str(found.place),
    )


def _contained(found: Contained) -> Finding:
    columns = ", ".join(map(str, found.columns[:4])) + (" and more" if len(found.columns) > 4 else "")
    return Finding(
        cause="input_contains_target",
        level="advice",
        summary=f"{found.target} stands in {found.input}, which the prediction is computed from",
        measured=f"column {columns} of {found.of} is the target, in each of {found.rows} rows",
        shown_by="with these entries in other rows the prediction differs",
        culprits=(found.input, found.target),
        where=str(found.place),
    )


def _written(found: Written) -> Finding:
    return Finding(
        cause="target_written_by_loss",
        summary=f"{found.function}() writes into {found.name}, and another term of the loss reads it afterwards",
        measured=f"the loss is {found.loss:.6g}; with {found.name} put back when {found.function}() returns it is "
        f"{found.restored:.6g}",
        shown_by="both were taken with the same weights, batch and random numbers",
        culprits=(found.name,),
        where=str(found.place),
        repair=found.repair,
    )
