"""Units of a layer do not stay copies of each other.

What it does
    It builds the loop and looks for linear and convolutional layers in which units have equal weights. Where there are
    any, it runs the loop and compares these weights again after its steps.

Why is this bad?
    Units with equal weights on both sides get equal gradients: no step makes them differ, and a layer of 512 units is
    as good as one of 1. The loss still falls, so nothing shows.

How it decides
    1. A unit is a row of the weight with its bias.
    2. Equal weights at the start are no fault. Those of LoRA, of a head that starts at zero and of ICNR separate with
       the first step.
    3. Units stay copies if they began equal, each gradient was equal for all of them, and they differ by less than a
       thousandth of the way that they went.
    4. It is a fault if all units of a layer stay copies: ``all_units_alike``. It is advice if at least half of them are
       copies of another one: ``units_repeated``.

When it is skipped
    It skips a loop without a linear or convolutional layer of two units.

Faulty
    >>> for parameter in model.parameters():
    ...     nn.init.constant_(parameter, 0.1)

Fixed
    >>> for module in model.modules():
    ...     if isinstance(module, nn.Linear):
    ...         nn.init.xavier_uniform_(module.weight)
    ...         nn.init.zeros_(module.bias)

Known limits
    Dropout separates copies slowly: such a layer is not reported. Of a row 64 entries are compared. Recurrent layers,
    transposed convolutions, layers written by hand and those that the first batch makes are not seen.

References
    https://cs231n.github.io/neural-networks-2/#init
    https://arxiv.org/abs/1511.05641
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.registry import Cause, check, finding_maker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "all_units_alike": Cause(
        proof="all units of a layer began with equal weights, and equal gradients moved them",
        summary="all {units:unit} of {names} stay copies of each other",
        measured="after {steps:step} they went up to {moved:.2g} and differ by at most {gap:.2g}",
        repair="nn.init.xavier_uniform_(layer.weight): a draw for each weight of this layer, or of the one behind it",
        do_not="another constant: the units stay equal",
        explains=("overfit_one_batch",),
        source="https://cs231n.github.io/neural-networks-2/#init",
        change=("drawn", "module"),
    ),
    "units_repeated": Cause(
        proof="some units of a layer began with the weights of another one, and equal gradients moved both",
        summary="{copies} of {units:unit} in {names} stay copies of another one",
        measured="after {steps:step} they went up to {moved:.2g} and differ by at most {gap:.2g} from it",
        repair="weight += 0.01 * weight.std() * torch.randn_like(weight) after repeating units",
        source="https://arxiv.org/abs/1511.05641",
        change=("drawn", "module"),
    ),
}
found = finding_maker(CAUSES)

MOST_COPIES = 0.5
"""The share of copies among a layer's units from which on it is said: with one input and no bias, some of 64 weights in
bfloat16 are equal by chance."""


def _no_layer(evidence: Evidence) -> str:
    from pytest_trainloop.checks.learning.units_differ.copies import units_at_start

    return "" if evidence.shared(units_at_start) else "no linear or convolutional layer has two units"


@check(needs={"fit"}, causes=CAUSES, rank=25, steps=1, absent=_no_layer)
def units_differ(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.units_differ.copies import still_equal

    for name, facts in still_equal(evidence):
        if facts["copies"] == facts["units"] - 1:
            yield found("all_units_alike", "", (name,), **facts)
        elif facts["copies"] >= MOST_COPIES * facts["units"]:
            yield found("units_repeated", "", (name,), level="advice", **facts)
