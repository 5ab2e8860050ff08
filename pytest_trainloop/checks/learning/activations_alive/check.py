"""Units behind activations give different outputs for different inputs.

What it does
    It runs the loop for up to 25 steps over different batches and looks at the lowest and the highest output of each
    unit behind ReLU, tanh and sigmoid.

Why is this bad?
    A unit that gives zero for every input gets no gradient: the layer is as wide as its other units. Inputs that are
    not scaled, a bias far below zero or one step that is too large leave most of a layer so, and the loss still falls.

How it decides
    1. A unit is dead if its output is one number for all rows and positions of four or more different batches.
    2. It is saturated if in nine of ten of them tanh is above 0.99 in size, or a sigmoid outside 0.005 to 0.995.
    3. The run ends after 12 steps if less than 30 % of each layer were dead or saturated in the last six.
    4. In 426 layers of correct loops at most half of the units were dead after 25 steps (sparse codes, one-sided
       inputs, detection heads with few positives). So 60 % of a layer of 16 or more units is reported. Of a smaller
       layer all units must be dead.
    5. Every finding is advice. What gets no gradient from the first step on belongs to
       ``gradient_reaches_every_param``.

    | first that holds                               | cause                   |
    |------------------------------------------------|-------------------------|
    | 60 % are saturated                             | ``saturated``           |
    | 60 % are dead, and were in the first six steps | ``dead_from_the_start`` |
    | 60 % are dead                                  | ``dies_in_training``    |

When it is skipped
    It skips one fixed batch, on which an unneeded unit is not dead, and fewer than four different batches. If no such
    activation is called in three steps, it does not apply.

Faulty
    >>> def forward(self, x):
    ...     hidden = F.relu(self.encoder(x) - torch.linspace(0, 3, 16))  # a threshold for each unit
    ...     return self.head(hidden)

Fixed
    >>> def forward(self, x):
    ...     hidden = F.relu(self.encoder(x))
    ...     return self.head(hidden)

Known limits
    With one fixed batch nothing is judged: a unit that it does not need is not dead. Units inside nn.LSTM and
    nn.MultiheadAttention are not seen.

References
    https://cs231n.github.io/neural-networks-1/#actfun
    https://arxiv.org/abs/1903.06733
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.core.finding import Finding
from pytest_trainloop.core.registry import Cause, check
from pytest_trainloop.core.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.learning.activations_alive.units import Layer
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "dead_from_the_start": Cause(
        proof="most units of a layer give one number for all batches, in the first steps as in the last",
        repair="scale the inputs to unit variance, and start biases at 0; or another initialisation of this layer",
        source="https://github.com/lucidrains/deep-cross-attention/issues/2",
        change=("drawn", "module", "seen"),
    ),
    "dies_in_training": Cause(
        proof="most units of a layer give one number for all batches after 25 steps, and did not in the first ones",
        repair="a lower learning rate, a warm-up or a clip; inputs and targets of unit variance",
        change=("optimizer",),
        source="https://github.com/dangitstam/topic-rnn/pull/9",
    ),
    "saturated": Cause(
        proof="most units of a layer give an end of tanh or sigmoid for nine of ten rows and positions",
        repair="scale what goes into it: the inputs, the weights of the layer before, or a norm between",
        change=("module", "seen"),
        source="https://github.com/ZhihanLee/DDPG_Learning/issues/2",
    ),
}

WIDE = 10.0
"""Inputs of unit variance do not get this far: of normal ones, one in 10^22 does."""

MOST_DEAD = 0.6
"""The share of a layer from which on it is said."""


@check(needs={"fit"}, causes=CAUSES, rank=20, steps=12)
def activations_alive(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.activations_alive.units import FEWEST, Units

    found = evidence.shared(Units.of)
    for layer in found.layers:
        if layer.units < FEWEST and layer.dead < layer.units:
            continue
        if layer.saturated >= MOST_DEAD * layer.units:
            made = _finding("saturated", layer, layer.saturated, layer.saturated_at_start, "saturated", found.steps)
            yield _of_inputs(made, evidence) if layer is found.layers[0] else made
        elif layer.dead >= MOST_DEAD * layer.units:
            early = layer.dead_at_start >= MOST_DEAD * layer.units
            cause = "dead_from_the_start" if early else "dies_in_training"
            made = _finding(cause, layer, layer.dead, layer.dead_at_start, "dead", found.steps)
            yield _of_inputs(made, evidence) if layer is found.layers[0] else made


def _of_inputs(finding: Finding, evidence: Evidence) -> Finding:
    """The finding on the first layer: where its inputs are wide, they are those that the model is given."""
    from pytest_trainloop.instruments.tracing.statements import call_of_model

    return replace(finding, change=call_of_model(evidence.run())) if finding.repair else finding


def _finding(cause: str, layer: Layer, now: int, before: int, what: str, steps: int) -> Finding:
    how = "one number" if what == "dead" else "an end of it in nine of ten outputs or more,"
    wide = max(map(abs, layer.inputs)) > WIDE
    return Finding(
        cause=cause,
        level="advice",
        summary=(
            f"{now} of {layer.units} units of {layer.path or 'the model'} are {what} behind {layer.kind} "
            f"({100 * now / layer.units:.0f} %)"
        ),
        measured=f"{before} in the first 6 steps, {now} after {count(steps, 'step')}{_inputs(layer)}",
        shown_by=f"each gives {how} for all rows and positions of {layer.batches} different batches",
        culprits=(layer.path,) if layer.path else (),
        where=layer.place,
        repair=f"scale the inputs of {layer.path or 'the model'} to unit variance; {CAUSES[cause].repair}"
        if wide
        else "",
    )


def _inputs(layer: Layer) -> str:
    low, high = layer.inputs
    return "" if math.isnan(low) else f"; its inputs go from {low:.3g} to {high:.3g}"
