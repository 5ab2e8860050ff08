"""Each hyperparameter has a value that does what its name says.

What it does
    It builds the loop and reads the options of torch's norms, dropouts (also those of attention and recurrent layers)
    and leaky ReLUs, and those of SGD.

Why is this bad?
    ``BatchNorm2d(128, 0.8)`` sets eps and not momentum, ``SGD(parameters, 0.1, 5e-4)`` momentum and not weight decay.
    Torch takes each of them. The loop runs, and trains another model than the one that was written down.

How it decides
    Only values that no recipe uses are reported, and all as advice. eps of a norm is added to the variance: it is
    1e-3 at most in published models, and is reported above 1e-2. Torch weighs the new batch by the momentum of a batch
    norm, and Keras the old average: from 0.9 on the running statistics are those of the last batch. At 0 they never
    change: reported where they are still 0 and 1, and not where a checkpoint has filled them (a freeze). Both need a
    norm that keeps statistics and runs in training mode. A dropout with p=1 that runs in training mode passes nothing
    on. A leaky ReLU with slope 1, as ``LeakyReLU(True)`` has it, is the identity. A momentum or dampening of SGD up to
    0.01 beside no weight decay is that.

Faulty
    >>> model = Classifier()
    >>> model.encoder[1] = nn.BatchNorm1d(16, 0.8)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

Fixed
    >>> model = Classifier()
    >>> model.encoder[1] = nn.BatchNorm1d(16, momentum=0.2)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

Known limits
    Calls of functions (``F.dropout``, ``F.leaky_relu``) and norms of a project's own are not looked at, nor are modules
    that are made inside fit. Other checks judge eps and betas of Adam, weight decay and learning rates.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html (its note on momentum)
    https://github.com/eriklindernoren/PyTorch-GAN/issues/116
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.hyperparameters_are_plausible.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(
    needs={"fit"},
    causes=CAUSES,
    rank=55,
    steps=1,
    instrument="pytest_trainloop.checks.wiring.hyperparameters_are_plausible.options:BuiltOptions",
)
def hyperparameters_are_plausible(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.hyperparameters_are_plausible.options import BuiltOptions

    yield from evidence.shared(BuiltOptions.of).findings(evidence)
