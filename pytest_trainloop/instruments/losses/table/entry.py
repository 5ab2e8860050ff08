"""One row of the table of loss functions: its names, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_trainloop.declare.callcontract import CallContract

Chance = Literal["", "zeros", "halves", "log_uniform", "log_uniform_last", "constants"]
"""What an uninformed model gives: equal scores (zeros), even odds (halves), the logarithm of equal probabilities along
axis 1 or the last one, or zero and the mean of the targets, of which the larger loss counts; "" where that is not
known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A loss function, or a method that gives losses, of a library."""

    names: tuple[str, ...]
    """Public names: "torchvision.ops.sigmoid_focal_loss", "monai.losses.DiceLoss" (its ``forward``), or of a method
    "torch.distributions.Distribution.log_prob". Only the library and the last part count, so that a module that moves
    within its library is known."""
    contracts: tuple[CallContract, ...]
    """The first whose flags fit counts; where none does, the call is not judged."""
    page: str
    chance: Chance = ""
    weights: bool = False
    """Whether it has weights of its own, which an optimizer must hold."""
    degree: int = 1
    """The power of its input with which the loss grows."""

    @property
    def name(self) -> str:
        """The last part of its first name, for messages."""
        return self.names[0].rpartition(".")[2]
