"""The outputs of the model depend on the batch.

What it does
    It runs the loop for two steps as it is, and again with all rows of the batch replaced by its first row, and by its
    last; then the same for one tensor after the other. It compares the outputs of models and the losses.

Why is this bad?
    A variable that is overwritten, ids that a cast turns into zeros, a modality that is never added: the model learns
    the mean of the labels, and its loss falls as far as that goes.

How it decides
    Seeds, weights and all other tensors are the same, so results are equal bit for bit or they depend on what was
    replaced. Weights are moved a little first: nothing passes a layer that starts at zero.
    It is a fault where no output of any model depends on anything in the batch, although rows differ, and some
    tensor of the batch makes no difference to the losses either. Outputs are compared as long as the weights are
    the same: a discriminator may read the batch after a first step of the generator, which does not. (A model that
    is called without the batch, as a picture that is optimised or equations at fixed points, has no such tensor;
    one without weight matrices is a baseline.)
    One tensor that a model is called with and nothing depends on is a fault where a second observation says that it was
    to be used: a layer that trains and never runs takes just such inputs; it is a mask (by its name, with two values,
    one of them zero) and other values behind it change the loss; or the project declares it, as in
    ``@pytest.mark.trainloop(input_dependence={"uses": ["batch['mask']"]})``; a declared one also where no model is
    called with it. Else it is advice: models are called with
    whole batches that hold ids of rows, edges' features or times of day, and share signatures of which they need a
    part.
    A tensor that no model is called with is advice where no call of torch is given it and its name is that of a part of
    a loss: ``advantages``, and ``done`` where a next state is read.
    A loop that makes its own data (an environment, a ``get_batch()`` inside ``fit``) is judged by what its models are
    called with, in the place of the batch.

Faulty
    >>> def forward(self, x):
    ...     hidden = self.encoder(torch.zeros(len(x), 8))
    ...     return self.head(hidden)

Fixed
    >>> def forward(self, x):
    ...     hidden = self.encoder(x)
    ...     return self.head(hidden)

Known limits
    A tensor that the loop copies before it passes it to the model cannot be followed; of more than eight tensors the
    first are tried. Tensors whose rows are all equal show nothing. What lies behind a mask is changed only in tensors
    of the mask's shape that go into the model.

References
    https://karpathy.github.io/2019/04/25/recipe/ (input-independent baseline)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.input_dependence.passes import BatchTensor, UnusedInputs
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "inputs_ignored": Cause(
        proof="with any rows in the batch the model's outputs are the same, bit for bit",
        repair="follow the input from the batch to the first layer: it is overwritten, cast to zeros or left out",
        explains=(*LEARNING, "batch_independence", "causality", "padding_invariance"),
    ),
    "input_ignored": Cause(
        proof="with any rows in one tensor outputs and losses are the same, bit for bit",
        repair="use it; or leave it out of the call",
        source="https://github.com/facebookresearch/fairseq/issues/1339",
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=60)
def input_dependence(evidence: Evidence, *, uses: Sequence[str] = ()) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.input_dependence.passes import InputRuns

    runs = evidence.shared(InputRuns)
    found = runs.unused(uses)
    _require_known(uses, runs.names)
    if found is None:
        return
    if found.no_input_used:
        names = tuple(tensor.name for tensor in found.tensors)
        listed = " and ".join(", ".join(names).rsplit(", ", 1))
        yield Finding(
            cause="inputs_ignored",
            summary=f"no output of the model depends on {'what it is called with' if runs.own_data else 'the batch'}",
            measured=f"with any one row in place of all others outputs are the same, bit for bit; unused: {listed}",
            shown_by="the same weights and seeds; the rows of these tensors differ",
            culprits=names,
            where=found.place,
        )
        return
    for tensor in found.tensors:
        yield _ignored(evidence, found, tensor, uses)


def _require_known(uses: Sequence[str], names: Sequence[str]) -> None:
    from pytest_trainloop.errors import UsageError

    if isinstance(uses, str):
        raise UsageError(f"input_dependence got uses={uses!r}; a list of names is needed: uses=[{uses!r}]")
    for name in uses:
        if name not in names:
            raise UsageError(
                f"input_dependence got uses={name!r}, which is no input whose rows differ; those are "
                f"{', '.join(names) or 'none'}"
            )


def _ignored(evidence: Evidence, found: UnusedInputs, tensor: BatchTensor, uses: Sequence[str]) -> Finding:
    from pytest_trainloop.checks.batch.input_dependence.idle_layers import idle_layer

    name = tensor.name
    summary, shown = f"the model receives {name}, and nothing depends on it", ""
    culprits: tuple[str, ...] = (name,)
    repair = f"use {name}; or leave it out of the call"
    if tensor.unread and name not in uses:
        summary = f"the batch has {name}, and nothing reads it"
        repair = f"use {name} in the loss; or leave it out of the batch"
    elif not tensor.passed:
        summary = f"nothing depends on {name}, and no model is called with it"
        repair = f"hand {name} over, and not another tensor in its place; or leave it out of uses="
    layer = idle_layer(evidence.run(), tensor)
    if layer:
        shown = f"its submodule {layer}, which is trainable and takes such inputs, is never called"
        culprits, repair = (name, layer), f"call {layer} with {name} and use the result; or name it in frozen="
    elif found.hidden is not None and tensor == found.mask:
        shown = f"with other values in {found.hidden.name} where it is 0, the loss changes"
        repair = f"leave out of attention, sums and means what {name} masks; or leave it out of the call"
    elif name in uses:
        shown = "uses= declares that it is needed"
    else:
        repair += f"; if it must be used, declare that: input_dependence={{'uses': [{name!r}]}} in the marker"
    return Finding(
        cause="input_ignored",
        level="fault" if shown else "advice",
        summary=f"{summary}: {shown}" if shown else summary,
        measured="with the first or the last row in place of all others outputs and losses are the same, bit for bit",
        shown_by="weights, seeds and all other tensors were the same",
        culprits=culprits,
        where=found.place,
        repair=repair,
    )
