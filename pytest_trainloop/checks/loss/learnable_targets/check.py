"""Targets can be learned from what the model is given.

What it does
    It looks at the calls of torch in the first two steps: where a prediction meets its target, and what each of the two
    was made of.

Why is this bad?
    The loss falls to the best that a constant can do and stays there. Noise that the model has not seen cannot be
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
    Contained: each column of a target of the batch is found in one input, entry by entry, which has other columns too,
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

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.learnable_targets.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=6, steps=10)
def learnable_targets(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.learnable_targets import reruns, values

    yield from values.cut(evidence)
    yield from reruns.other_draws(evidence)
    yield from values.out_of_reach(evidence)
    yield from values.far(evidence)
    yield from reruns.contained(evidence)
    yield from reruns.written_by_loss(evidence)
