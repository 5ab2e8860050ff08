"""Everything that a loop's model, optimizer and functions can touch, found in one walk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.reach.copies import same_bits
from pytest_trainloop.reach.places import shown_value
from pytest_trainloop.reach.snapshot import Snapshot
from pytest_trainloop.reach.walker import MOST, Walked, quiet, walk
from pytest_trainloop.recording.torch_internals import has_values

if TYPE_CHECKING:
    from pytest_trainloop.loop import TrainLoop


class Reach:
    """What a loop can touch at this moment: its leaves by path, with the objects behind them.

    A reach holds the loop's own objects; it is meant to be dropped after use. Nothing is changed by a walk and no code
    of the project runs: attributes are read from ``__dict__`` and ``__slots__``, entries by the methods of ``dict`` and
    ``list`` themselves.

    ``leaves`` maps paths to leaves; ``cut`` is empty, or says in one sentence what was not looked at.
    """

    def __init__(self, walked: Walked) -> None:
        self.walked = walked
        self.leaves, self.cut = walked.leaves, walked.cut

    @classmethod
    def of(cls, loop: TrainLoop, *, most: int = MOST) -> Reach:
        """Walk from the declared objects and from the functions of a loop, through at most ``most`` objects."""
        return cls(walk(loop, most))

    def value(self, path: str) -> Any:
        """The live value of a leaf, or the object at any other place that the walk came by. Raises ``KeyError``."""
        return shown_value(self.walked.places[path], self.walked.objects)

    def path_of(self, thing: Any) -> str:
        """The path of an object that was reached; empty for any other."""
        return self.walked.objects.get(id(thing), "")

    def holders(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The paths that hold this very tensor, or another with exactly its bits."""
        found = []
        with quiet():
            for path, place in self.walked.places.items():
                held = None if place.kind == "reference" else place.value
                if held is tensor or (isinstance(held, torch.Tensor) and has_values(held) and same_bits(held, tensor)):
                    found.append(path)
        return tuple(found)

    def snapshot(self) -> Snapshot:
        """Copies of all values, and references to the objects that hold them."""
        return Snapshot(self.walked)
