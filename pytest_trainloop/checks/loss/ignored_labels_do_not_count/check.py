"""Labels that are to be ignored do not count: other labels in their place leave the gradient as it is.

What it does
    It looks for tensors of whole numbers in the batch that hold -100 next to labels from 0 on, the declared
    ``ignore_index``, or a -1 that the code replaces. The first step is repeated in float64 with the label of another
    class wherever something is computed from these places. Comparisons still get the labels as they are, so that the
    loop finds the places to leave out.

Why is this bad?
    A place without a label then trains as if it were of class 0 (after ``clamp(min=0)``), or its label enters the loss
    as a number. Overlap losses, focal losses and losses written by hand forget an ``ignore_index`` that the cross
    entropy next to them respects. With an inverted mask only these places train.

How it decides
    1. The first step is repeated with labels of another class at the ignored places. Its gradient must not change, to
       the last bit.
    2. If it changes, each line that computes with the labels is tried alone. The first that changes it is named:
       ``ignored_labels_count``.
    3. If other labels at all other places leave the gradient as it is there, the mask is inverted:
       ``only_ignored_labels_count``.
    4. -100 and a declared ``ignore_index`` are promises. A -1 that is not declared may be mapped to a class on purpose
       (uncertain findings as negatives). It is advice, and a fault only if the mask is inverted.
    5. Labels that a decoder embeds are left as they are: they are inputs there.

When it is skipped
    It skips a batch without ignored labels, and a loop that raises.

Faulty
    >>> batch = torch.linspace(-2, 2, 48).view(6, 8), torch.tensor([0, 1, -100, 2, -100, 1])
    >>> for x, labels in batches:
    ...     optimizer.zero_grad()
    ...     chosen = model(x).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    ...     (-chosen.mean()).backward()
    ...     optimizer.step()

Fixed
    >>> batch = torch.linspace(-2, 2, 48).view(6, 8), torch.tensor([0, 1, -100, 2, -100, 1])
    >>> for x, labels in batches:
    ...     optimizer.zero_grad()
    ...     chosen = model(x).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    ...     keep = labels != -100
    ...     (-(chosen * keep).sum() / keep.sum()).backward()
    ...     optimizer.step()

Known limits
    Labels that fit makes itself are not seen, nor what is computed from them outside torch.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html (ignore_index)
    https://github.com/qubvel-org/segmentation_models.pytorch/pull/366
    https://github.com/QwenAudio/CosyVoice/issues/1449
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.ignored_labels_do_not_count.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


def absent(evidence: Evidence) -> str:
    """Why there is nothing to look at; empty where there is."""
    from pytest_trainloop.checks.loss.ignored_labels_do_not_count.edited_steps import ignored_labels

    if evidence.shared(ignored_labels):
        return ""
    return "no label of the batch is to be ignored: none is -100, or the one of padding=Padding(ignore_index=)"


@check(needs={"fit"}, causes=CAUSES, rank=15, steps=4, absent=absent)
def ignored_labels_do_not_count(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.ignored_labels_do_not_count.edited_steps import counted_labels

    yield from counted_labels(evidence)
