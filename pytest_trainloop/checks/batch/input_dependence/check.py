"""The outputs of the model depend on the batch.

What it does
    It runs the loop for two steps as it is. It runs it again with the first row of the batch in place of all rows, and
    with the last; then the same for one tensor after the other. It compares the outputs of models and the losses.

Why is this bad?
    A variable is overwritten, a cast turns ids into zeros, or a modality is never added. The model then learns the mean
    of the labels, and its loss falls as far as that goes.

How it decides
    1. Seeds, weights and all other tensors are equal. So results are equal bit for bit, or they depend on what was
       replaced. Weights are moved a little first: nothing passes a layer that starts at zero.
    2. Outputs are compared as long as the weights are equal. A discriminator may read the batch after the generator's
       first step.
    3. Not judged are a model called without the batch (an optimised picture), and one without weight matrices (a
       baseline).
    4. If a loop makes its own data, the inputs of its models take the place of the batch.
    5. A single tensor without effect needs a second observation to be a fault. A trainable layer that takes such inputs
       never runs. Or other values behind a mask (by its name, or of 0 and 1) change the loss. Or the project declares
       it: ``@pytest.mark.trainloop(input_dependence={"uses": ["batch['mask']"]})``. A declared tensor need not reach a
       model.

    | seen | cause | advice if |
    |---|---|---|
    | no output depends on the batch, and some tensor changes no loss | ``inputs_ignored`` |  |
    | nothing depends on one tensor that a model is called with | ``input_ignored`` | item 5 does not hold |
    | nothing reads ``advantages``, or ``done`` with a next state | ``input_ignored`` | item 5 does not hold |
    | a float input of 3 or more axes varies under 1 %, outputs under 5 % | ``inputs_hardly_vary`` | always |

When it is skipped
    It skips a batch whose rows are all equal.

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
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.registry import Cause, check, finding_maker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.input_dependence.input_probe import InputRuns
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

_WHY = (
    "{layer:?: its submodule {layer}, which is trainable and takes such inputs, is never called|}"
    "{hidden:?: with other values in {hidden} where it is 0, the loss changes|}"
    "{declared:?: uses= declares that it is needed|}"
)

CAUSES = {
    "inputs_ignored": Cause(
        proof="any rows in the batch give the same outputs of the model, bit for bit",
        summary="no output of the model depends on {own_data:?what it is called with|the batch}",
        measured="with any one row in place of all others outputs are the same, bit for bit; unused: {listed}",
        shown_by="the same weights and seeds; the rows of these tensors differ",
        repair="follow the input from the batch to the first layer: it is overwritten, cast to zeros or left out",
        explains=(*LEARNING, "batch_independence", "causality", "padding_invariance"),
    ),
    "input_ignored": Cause(
        proof="any rows in one tensor give the same outputs and losses, bit for bit",
        summary="the model receives {name}, and nothing depends on it" + _WHY,
        measured="with the first or the last row in place of all others outputs and losses are the same, bit for bit",
        shown_by="weights, seeds and all other tensors were the same",
        repair="use it; or leave it out of the call",
        variants={
            "unread": {"summary": "the batch has {name}, and nothing reads it" + _WHY},
            "not passed": {"summary": "nothing depends on {name}, and no model is called with it" + _WHY},
        },
        source="https://github.com/facebookresearch/fairseq/issues/1339",
    ),
    "inputs_hardly_vary": Cause(
        proof="the input is a constant and a hundredth of it, and so are the outputs for different rows",
        summary="{name} is {mean:.3g} with a standard deviation of {deviation:.2g}: the model sees a constant",
        measured="from row to row the first outputs change by {differ:.2g} of their size",
        shown_by="entries of the example batch, and the model's first outputs, before any step",
        repair="scale it once: (x - x.mean()) / x.std() of the training data; a division by 255 may be made twice",
        settle="normalise it in the data or in the model",
        source="https://github.com/4uiiurz1/pytorch-nested-unet/issues/62",
        change=("data",),
    ),
}
found = finding_maker(CAUSES)


@check(needs={"run"}, causes=CAUSES, rank=60)
def input_dependence(evidence: Evidence, *, uses: Sequence[str] = ()) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.input_dependence.input_probe import InputRuns, idle_layer

    runs = InputRuns(evidence)
    unused = runs.unused(uses)
    _require_known(uses, runs)
    at = runs.unchanged.place
    if unused and runs.blind:
        names = tuple(tensor.name for tensor in unused)
        listed = " and ".join(", ".join(names).rsplit(", ", 1))
        change = runs.to_change(*unused)
        yield found("inputs_ignored", at, names, own_data=runs.own_data, listed=listed, change=change)
        return
    for tensor, differ in runs.hardly_varying():
        facts = {"mean": tensor.mean, "deviation": tensor.deviation, "differ": differ}
        yield found("inputs_hardly_vary", at, (tensor.name,), level="advice", name=tensor.name, **facts)
    mask, hidden = runs.read_behind(unused, uses) or (None, None)
    for tensor in unused:
        name = tensor.name
        layer = idle_layer(evidence.run(), tensor)
        behind = hidden.name if hidden is not None and tensor == mask and not layer else ""
        declared = name in uses and not layer and not behind
        variant, repair = "", f"use {name}; or leave it out of the call"
        if tensor.unread and name not in uses:
            variant, repair = "unread", f"use {name} in the loss; or leave it out of the batch"
        elif not tensor.passed:
            variant = "not passed"
            repair = f"hand {name} over, and not another tensor in its place; or leave it out of uses="
        if layer:
            repair = f"call {layer} with {name} and use the result; or name it in frozen="
        elif behind:
            repair = f"leave out of attention, sums and means what {name} masks; or leave it out of the call"
        elif not declared:
            repair += f"; if it must be used, declare that: input_dependence={{'uses': [{name!r}]}} in the marker"
        yield found(
            "input_ignored",
            at,
            (name, layer) if layer else (name,),
            variant,
            level="fault" if layer or behind or declared else "advice",
            repair=repair,
            change=runs.to_change(tensor) if variant != "not passed" else "",
            name=name,
            layer=layer,
            hidden=behind,
            declared=declared,
        )


def _require_known(uses: Sequence[str], runs: InputRuns) -> None:
    if isinstance(uses, str):
        raise UsageError(f"input_dependence got uses={uses!r}; a list of names is needed: uses=[{uses!r}]")
    names = [tensor.name for tensor in runs.inputs]
    for name in uses:
        if name not in names:
            raise UsageError(
                f"input_dependence got uses={name!r}, which is no input whose rows differ; those are "
                f"{', '.join(names) or 'none'}"
            )
