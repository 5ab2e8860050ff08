"""Whether the last token of a document is compared with the first one of the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CLASS_LOSSES
from pytest_trainloop.tracing.arguments import bound_arguments

if TYPE_CHECKING:
    from pytest_trainloop.batches.segments import Segments
    from pytest_trainloop.tracing.forward_pass import ForwardPass

SHARE = 0.99
"""Of the targets that are the next token each, from which on they are taken for these."""


@dataclass(slots=True)
class BorderLabels:
    """``across``: the documents whose last token has the first one of the next as its target, of ``borders`` in all."""

    across: list[int] = field(default_factory=list)
    borders: int = 0
    loss: str = ""
    where: str = ""

    def look(
        self, segments: Segments | None, seen: ForwardPass, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Judge the first call of a loss over classes whose targets are the next tokens."""
        if self.loss or segments is None or segments.kind != "document" or name not in CLASS_LOSSES:
            return
        given = bound_arguments(getattr(F, name), args, kwargs)
        target = given.get("target")
        if not isinstance(target, torch.Tensor) or target.is_floating_point():
            return
        documents = segments.ids.cpu().reshape(-1, segments.ids.shape[-1])
        for ids in (e.ids for e in seen.data_inputs if e.ids is not None and e.ids.numel() == documents.numel()):
            self._compare(documents, ids.detach().reshape(documents.shape).cpu(), target, given, name)
            if self.loss:
                return

    def _compare(
        self, documents: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, given: dict[str, Any], name: str
    ) -> None:
        rows, length = documents.shape
        if target.numel() not in (rows * length, rows * (length - 1)) or length < 2:
            return
        labels = target.detach().reshape(rows, -1).cpu()[:, : length - 1]
        counted = labels != given.get("ignore_index", -100)
        if not bool(counted.any()) or float((labels == ids[:, 1:])[counted].double().mean()) < SHARE:
            return
        here_, after = documents[:, :-1], documents[:, 1:]
        borders = (here_ != after) & (here_ >= 0) & (after >= 0)
        self.borders, self.across = int(borders.sum()), here_[borders & counted].tolist()
        self.loss, self.where = name, str(here()[0])
