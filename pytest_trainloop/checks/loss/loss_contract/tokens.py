"""What is known of the positions of a batch: token ids, and which positions are padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_trainloop.batches.padding import Ids, Proof, read_padding
from pytest_trainloop.tracing.provenance_queries import ancestors

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.loop import Padding
    from pytest_trainloop.tracing.provenance import Node

MOST_NODES = 20_000
"""Calls before the scores in which the model's inputs are looked for."""


class Embedded(NamedTuple):
    """Ids (rows, positions), or of one row (positions,), that an embedding looked up, and the result."""

    ids: Ids
    out: torch.Tensor
    table: str
    """The path of the embedding."""
    entries: int = 0
    """How many ids it has."""


@dataclass(slots=True)
class Tokens:
    """What the batch and the embeddings of the current step say of positions."""

    declared: Padding | None = None
    batch: Any = None
    embedded: list[Embedded] = field(default_factory=list)
    """What embeddings looked up since the last step."""

    def padded(self, shape: tuple[int, int], scores: Node | None) -> torch.Tensor | None:
        """Which of (rows, positions) are padding; None where that is not proven. Labels are no proof: those of
        padded positions are what is judged. Nor are boxes of which some are filled up: slots that ``scores`` were
        computed for, and that no input has, may all be asked for a class."""
        found = self._read(shape, None if scores is None else _sources(scores))
        return None if found is None else found.mask

    def never_real(self, token: int, padded: torch.Tensor, classes: int) -> bool:
        """Whether labels are of the vocabulary of the inputs, with so many classes, and this token is at no position
        that is not padding: then it is no class that a label could ask for."""
        same = [e.ids.ids for e in self.embedded if e.entries == classes and e.ids.ids.shape == padded.shape]
        return bool(same) and not any(bool((ids == token)[~padded.to(ids.device)].any()) for ids in same)

    def padded_in_code(self, shape: tuple[int, int]) -> str:
        """The same as an expression of the batch's own names, ``attention_mask == 0``; ``is_padding`` where none of two
        plain values says so."""
        found = self._read(shape)
        if found is None or found.source != "mask":
            return "is_padding"
        name, _, value = found.reason.removesuffix(" there").rpartition(" is ")
        written = {"False": f"~{name}", "True": name}
        return written.get(value) or (f"{name} == {float(value):g}" if float(value) in (0, 1) else "is_padding")

    def _read(self, shape: tuple[int, int], read: set[tuple[int, ...]] | None = None) -> PaddingMask | None:
        inputs = [found.ids for found in self.embedded if tuple(found.ids.ids.shape) == shape]
        return read_padding(
            self.batch, at_least=Proof.INPUTS, shape=shape, declared=self.declared, inputs=inputs, read=read
        )


def _sources(node: Node) -> set[tuple[int, ...]]:
    """The shapes of what a tensor was computed from."""
    return {n.shape for n in ancestors(node, MOST_NODES) if not n.parents and not n.parameter}
