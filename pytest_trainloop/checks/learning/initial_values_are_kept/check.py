"""Training begins with the initial values that the code loads or sets.

What it does
    It builds the loop once more and records which line writes into which parameter. If a later initialisation
    overwrites every value that one line wrote, the check restores these values and runs the first step.

Why is this bad?
    The line has no effect. A pretrained backbone starts from random weights. A classifier's bias that was set for rare
    classes starts at zero. The loss still falls, so nobody notices.

How it decides
    1. Chosen values come from ``load_state_dict``, ``from_pretrained``, ``copy_`` or an assignment. A constant counts
       as chosen if it is not 0 or 1. Zeros count if they fill a matrix.
    2. A chosen value is lost if random numbers, zeros or ones overwrite the whole parameter, and no code has read the
       value. The causes are ``loaded_values_overwritten`` and ``set_values_overwritten``.
    3. If another chosen value overwrites it, nothing is reported.
    4. Nothing is reported either if one parameter keeps a value of the same line. The last layers of a pretrained model
       are often initialised again on purpose.
    5. A ``load_state_dict(strict=False)`` that finds none of its keys in the module is a fault, ``nothing_loaded``.
    6. An overwritten value is a fault if ``pretrained=`` names the part. It is a fault if the first loss is lower with
       the restored values, by more than the factor of 1.5 that ``expected_init_loss`` allows. Otherwise it is advice.

When it is skipped
    It skips a loop in which no code chooses a value.

Faulty
    >>> class Detector(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.encoder = nn.Linear(8, 16)
    ...         self.head = nn.Linear(16, 3)
    ...         self.encoder.load_state_dict({"weight": torch.eye(16, 8), "bias": torch.zeros(16)})
    ...         for module in (self.encoder, self.head):
    ...             nn.init.normal_(module.weight, std=0.02)
    ...             nn.init.zeros_(module.bias)
    ...
    ...     def forward(self, x):
    ...         return self.head(self.encoder(x).tanh())
    ...
    >>> model = Detector()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

Fixed
    >>> class Detector(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.encoder = nn.Linear(8, 16)
    ...         self.head = nn.Linear(16, 3)
    ...         nn.init.normal_(self.head.weight, std=0.02)
    ...         nn.init.zeros_(self.head.bias)
    ...         self.encoder.load_state_dict({"weight": torch.eye(16, 8), "bias": torch.zeros(16)})
    ...
    ...     def forward(self, x):
    ...         return self.head(self.encoder(x).tanh())
    ...
    >>> model = Detector()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

Known limits
    The check does not see buffers, quantised or sharded weights, or what ``fit`` itself initialises. It loses track of
    a parameter that is cast to another dtype or moved to another device before the second initialisation.

References
    https://docs.pytorch.org/docs/stable/nn.init.html
    https://github.com/zshn25/DINOv2_mmseg/pull/1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.initial_values_are_kept.causes import CAUSES, found
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.learning.initial_values_are_kept.initial_values import Lost
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

FACTOR = 1.5
"""The first loss must be lower by this factor: the one that ``expected_init_loss`` allows."""


def _nothing_chosen(evidence: Evidence) -> str:
    from pytest_trainloop.checks.learning.initial_values_are_kept.initial_values import InitialValues

    noted = evidence.shared(InitialValues.of)
    return "" if noted.chose else "no line loads parameters or sets a value of its own in one"


def _prefixes(given: list[str], own: list[str]) -> dict[str, Any]:
    """What the keys have in front, of which the module has nothing, or the other way round."""
    for key in given:
        for name in own:
            for longer, shorter, edit in ((key, name, "without"), (name, key, "with")):
                prefix = longer.removesuffix(shorter)
                if prefix != longer and prefix.endswith("."):
                    of = f'k.removeprefix("{prefix}")' if edit == "without" else f'"{prefix}" + k'
                    return {"repair": f"load the keys {edit} {prefix!r}: {{{of}: v for k, v in state.items()}}"}
    return {}


@check(needs={"fit"}, causes=CAUSES, rank=24, steps=1, absent=_nothing_chosen)
def initial_values_are_kept(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.initial_values_are_kept.first_losses import first_losses
    from pytest_trainloop.checks.learning.initial_values_are_kept.initial_values import InitialValues
    from pytest_trainloop.recording.record import within

    noted, declared = evidence.shared(InitialValues.of), evidence.declared("pretrained")
    for load in noted.unmatched:
        facts: dict[str, Any] = {"keys": len(load.given), "first": load.given[0], **_prefixes(load.given, load.own)}
        facts |= {"own": len(load.own), "other": load.own[0]}
        yield found("nothing_loaded", load.place, ("load_state_dict",), **facts)
    by_line: dict[str, list[Lost]] = {}
    for one in noted.lost:
        by_line.setdefault(str(one.chosen.place), []).append(one)
    for line, lost in by_line.items():
        promised = [one for one in lost if one.chosen.loaded and declared and declared is not True]
        promised = [one for one in promised if within(one.name, declared)]
        if line in noted.kept and not promised:
            continue  # the last layers are initialised again on purpose (odd: last_block_initialised_again)
        if not promised and declared is True and lost[0].chosen.loaded:
            promised = lost
        named = promised or lost
        facts = {"written": len(named), "level": "advice", "change": line}
        variant = ""
        if promised:
            variant, facts["level"] = "declared", "fault"
        elif (losses := first_losses(evidence, lost)) is not None and losses[1] * FACTOR < losses[0]:
            variant, facts["level"] = "first loss", "fault"
            facts["first"], facts["back"] = losses
        cause = "loaded_values_overwritten" if named[0].chosen.loaded else "set_values_overwritten"
        yield found(cause, str(named[0].again), [one.name for one in named], variant, **facts)
