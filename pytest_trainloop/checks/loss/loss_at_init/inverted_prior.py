"""A bias that is filled with the log-odds of a rare class, of which the sign is turned.

The last layer's bias is one constant: of several entries that are equal, or of one that is the same under another seed,
as torch's own initialisation draws it. What is backpropagated before the first step is computed again with outputs of
0, which are even odds, and with the outputs that the layer gives under the opposite sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_at_init.causes import found
from pytest_trainloop.instruments.formulas.origins import MOVES, origin
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay
from pytest_trainloop.instruments.tracing.loss_tape import Tapes
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.runs.weight_origins import drawn, pretrained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.loss_slice import Slice, Value
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

TIMES = 2.0
"""Times the loss of even odds from which a start is none that a prior is chosen for."""

_ODDS = frozenset({"sigmoid", "logsigmoid", "log_sigmoid", "softplus", "binary_cross_entropy_with_logits"})
"""What reads its input as the logarithm of odds."""


def inverted_prior(evidence: Evidence) -> Finding | None:
    """The bias whose sign is turned; None where there is none. Pretrained weights have learned theirs."""
    if not evidence.repeatable:
        return None
    first = [(part, _log_odds(part)) for part in evidence.shared(Tapes.of).slices if part.step == 0]
    first = [(part, values) for part, values in first if values and part.values[part.root].tensor.numel() == 1]
    names = sorted({name for _, values in first for v in values for name in v.parameters if name.endswith("bias")})
    filled: dict[str, float] = {}
    for name in names:
        given = [(part, own) for part, values in first if (own := [v for v in values if name in v.parameters])]
        try:
            loss, even = _total(given, None), _total(given, 0.0)
            if not loss >= TIMES * even > 0:
                continue
            filled = filled or _constant_biases(evidence)
            if name not in filled:
                continue
            turned = _total(given, -2 * filled[name], shifts=True)
        except CannotReplay:
            continue
        if turned < even:
            if evidence.shared(pretrained):
                return None
            change = str(evidence.shared(MadeAt.of).drawn([name]) or "")
            facts = {"filled": filled[name], "wanted": -filled[name], "loss": loss, "even": even, "turned": turned}
            return found("prior_inverted", given[0][1][0], (name,), "filled", change=change, **facts)
    return None


def _log_odds(part: Slice) -> list[Value]:
    """The outputs of layers that are read as log-odds, and as nothing else."""
    read: dict[int, bool] = {}
    for call in part.calls:
        for number in call.inputs[:1] if call.name not in MOVES else ():
            value, _ = origin(part, number)
            if value.kind == "layer" and value.requires_grad:
                read[value.number] = read.get(value.number, True) and call.name in _ODDS
    return [part.values[number] for number, odds in read.items() if odds]


def _total(given: Sequence[tuple[Slice, Sequence[Value]]], number: float | None, *, shifts: bool = False) -> float:
    """The sum of all losses with ``number`` as these outputs, or added to them."""
    total = 0.0
    for part, values in given:
        others = {} if number is None else {v.number: (v.tensor if shifts else 0 * v.tensor) + number for v in values}
        total += float(part.replay(others, [part.root])[0])
    return total


def _constant_biases(evidence: Evidence) -> dict[str, float]:
    """The biases of which all entries are one number other than 0, before the first step."""
    found: dict[str, float] = {}

    def prepare(watch: Watch) -> None:
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            if entry.name.endswith("bias") and tensor.dim() == 1 and not torch.nn.parameter.is_lazy(tensor):
                values = torch.unique(tensor.detach().double())
                if len(values) == 1 and float(values[0]):
                    found[entry.name] = float(values[0])

    evidence.rerun(prepare=prepare, enough=lambda record: record.begun)
    others = evidence.shared(drawn) if found else frozenset()
    return {name: value for name, value in found.items() if name not in others}
