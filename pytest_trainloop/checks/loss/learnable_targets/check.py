"""Targets can be learned from what the model is given.

What it does
    It looks at the calls of torch in the first two steps: where a prediction meets its target, and what each of the two
    was made of.

Why is this bad?
    The loss falls to the best that a constant can do and stays there. Noise that the model has not seen cannot be
    predicted, nor a value that its last function cannot give; a target that a cast has made 0 for every row teaches 0.

How it decides
    1. It judges by what values were made of and by data that contradict themselves, never by how the loss falls
       (docs/how-it-decides.md#targets-that-can-be-learned).
    2. Noise: a target is one draw of random numbers (or its difference to data) and of nothing else. The prediction
       depends on the batch and on trained weights. With this draw's numbers in a different order the prediction stays
       the same, bit for bit. A sum of data and a draw is silent: two noisy views look so.
    3. Units are standardised twice if the batch's targets are near the outputs, within three spreads, and a difference
       that the loop divides takes them away.
    4. An argmax over an axis of one entry can give one number only. A target is contained only in an input that has
       other columns too.
    5. One label for all is said where all that is backpropagated is a binary loss with such targets, and sizes of
       weights. The scores must come from weights that train.
    6. It passes if no comparison of a prediction and a target shows any row of the table.

    | seen | cause | advice if |
    |---|---|---|
    | the prediction depends on another draw of that shape | ``target_is_other_draw`` |  |
    | no draw reaches the prediction | ``noise_not_given`` | always |
    | a cast or an argmax gives one number in all calls, of rows that differ | ``target_cut_to_one_value`` |  |
    | a binary loss alone, all its targets filled with one number | ``one_label_for_all`` |  |
    | a sigmoid, tanh or ReLU cannot reach it; a constant is nearer | ``target_out_of_reach`` | a quarter is out |
    | item 3 | ``standardised_twice`` |  |
    | the targets' mean is ten times nearer to them than the first outputs | ``target_in_other_units`` | always |
    | each column of a target is in an input that outputs depend on | ``input_contains_target`` | always |
    | a loss function writes into an argument; put back, the loss differs | ``target_written_by_loss`` |  |

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
    yield from values.one_label(evidence)
    yield from reruns.other_draws(evidence)
    yield from values.out_of_reach(evidence)
    yield from values.far(evidence)
    yield from reruns.contained(evidence)
    yield from reruns.written_by_loss(evidence)
