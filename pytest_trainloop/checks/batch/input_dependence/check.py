"""What the model gives depends on the batch that it is given.

What it does
    It runs the loop for two steps as it is, and again with all rows of the batch replaced by its first row, and by its
    last, then those of one tensor after the other, and compares what models give and what is backpropagated.

Why is this bad?
    A variable that is overwritten, ids that a cast turns into zeros, a modality that is never added: the model learns
    the mean of the labels, and its loss falls as far as that goes.

How it decides
    Seeds, weights and all other tensors are the same, so results are the same bit for bit or they depend on what was
    replaced. Weights are moved a little first: behind a layer that starts at zero nothing depends on anything yet.
    It is a fault where no output of any model depends on anything in the batch, although rows differ, and some tensor
    of it makes no difference to what is backpropagated either. (A model that is asked without the batch, as a picture
    that is optimised or equations at fixed points, has no such tensor; one without weight matrices is a baseline; a
    loop to which nothing of the batch makes a difference makes its own data.)
    One tensor that a model is handed and nothing depends on is advice.

Faulty
    >>> def forward(self, x):
    ...     hidden = self.encoder(torch.zeros(len(x), 8))
    ...     return self.head(hidden)

Fixed
    >>> def forward(self, x):
    ...     hidden = self.encoder(x)
    ...     return self.head(hidden)

Known limits
    A tensor that the loop copies before it hands it on is not told apart from others; of more than eight the first are
    tried. Tensors whose rows are all the same say nothing.

References
    https://karpathy.github.io/2019/04/25/recipe/ (input-independent baseline)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio", "batch_independence", "causality", "padding_invariance")

CAUSES = {
    "inputs_ignored": "with any rows in the batch the model's outputs are the same, bit for bit",
    "input_ignored": "with any rows in one tensor outputs and losses are the same, bit for bit",
}


@check(needs={"run"}, causes=CAUSES, rank=60)
def input_dependence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.input_dependence.passes import Inputs

    found = Inputs(evidence).unread()
    if found is None:
        return
    names = tuple(leaf.name for leaf in found.leaves)
    listed = " and ".join(", ".join(names).rsplit(", ", 1))
    if found.all_of_them:
        yield Finding(
            cause="inputs_ignored",
            summary="no output of the model depends on the batch",
            measured=f"with any one row in place of all others outputs are the same, bit for bit; unread: {listed}",
            shown_by="the same weights and seeds; the rows of these tensors differ",
            culprits=names,
            where=found.place,
            repair="follow the input from the batch to the first layer: it is overwritten, cast to zeros or left out",
            explains=CONSEQUENCES,
        )
        return
    yield Finding(
        cause="input_ignored",
        level="advice",
        summary=f"{listed} {'is' if len(names) == 1 else 'are'} handed to the model and read by nothing",
        measured="with the first or the last row in place of all others outputs and losses are the same, bit for bit",
        shown_by="the same weights, seeds and other tensors",
        culprits=names,
        where=found.place,
        repair="use it, or leave it out of the call",
    )
