"""Each hyperparameter has a value that does what its name says.

What it does
    It builds the loop and reads the options of torch's norms, dropouts (also those of attention and recurrent layers)
    and leaky ReLUs, and those of SGD.

Why is this bad?
    ``BatchNorm2d(128, 0.8)`` sets eps and not momentum, ``SGD(parameters, 0.1, 5e-4)`` momentum and not weight decay.
    Torch takes each of them. The loop runs, and trains another model than the one that was written down.

How it decides
    1. It builds the loop and compares options with the limits of the table. They lie outside of every published recipe.
    2. Every finding is advice.
    3. Momentum is read of batch norms that keep statistics and run in training mode.
    4. Torch's momentum weighs the new batch, Keras' the old average.

    | seen | cause |
    |---|---|
    | eps of a norm, which is added to the variance, is above 1e-2 (recipes: at most 1e-3) | ``norm_eps_too_large`` |
    | momentum of a batch norm is 0.9 or more | ``statistics_of_the_last_batch`` |
    | it is 0, and statistics are still 0 and 1 (a checkpoint would have filled them) | ``statistics_never_move`` |
    | a dropout with p=1 runs in training mode | ``dropout_passes_nothing`` |
    | a leaky ReLU has slope 1, as ``LeakyReLU(True)`` | ``leaky_relu_is_the_identity`` |
    | SGD has momentum or dampening up to 0.01 and no weight decay | ``weight_decay_given_as_momentum`` |

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
