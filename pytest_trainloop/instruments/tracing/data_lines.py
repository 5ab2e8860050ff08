"""Where the tensors of a batch were made: the line of a data set, a collator or a function of the project's."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.paths import BUILD_CALLER
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.construction import Lines
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.runs.batch_stream import first_batch, first_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence


class DataLines:
    """The lines by the path of each tensor in the first batch that a fresh loop trains on."""

    def __init__(self, places: dict[str, Place], chosen: dict[str, Place], filled: dict[str, Place]) -> None:
        self._places, self._chosen, self._filled = places, chosen, filled

    @classmethod
    def of(cls, evidence: Evidence) -> DataLines:
        noted = _Made()
        places: dict[str, Place] = {}
        chosen: dict[str, Place] = {}
        filled: dict[str, Place] = {}
        with contextlib.suppress(CannotDecide, UsageError, UserCodeError), noted:
            loop = evidence.fresh_loop()
            noted.asked = True
            given = [] if loop.batches is None else first_batches(loop, 1)
            for path, tensor in nested.paths(given[0] if given else first_batch(loop)):
                name = name_in_batch(nested.shown(path))
                for found, lines in ((places, noted.lines), (chosen, noted.chosen), (filled, noted.filled)):
                    if (place := lines.of(tensor)) is not None:
                        found[name] = place
        return cls(places, chosen, filled)

    def at(self, names: Sequence[str]) -> str:
        """The statement that made the first tensor of the batch among these names; empty where numpy or a file did."""
        return str(next((self._places[name] for name in map(name_in_batch, names) if name in self._places), ""))

    def chosen(self, names: Sequence[str] = ()) -> str:
        """The statement that made the first of these tensors, without names of any, as the batch was asked for; empty
        where a library did, of what was there before."""
        known = [self._chosen[name] for name in map(name_in_batch, names) if name in self._chosen]
        return str(next(iter(known or ([] if names else self._chosen.values())), ""))

    def filled_at(self, names: Sequence[str]) -> str:
        """The statement that put another value in the place of each entry of one value; empty where none did."""
        return str(next((self._filled[name] for name in map(name_in_batch, names) if name in self._filled), ""))

    def called(self, names: str) -> str:
        """The statement that made the first tensor whose name matches."""
        return self.at([name for name in self._places if re.search(names, name)])


def name_in_batch(path: str) -> str:
    """The name of a tensor of the batch in a finding, by its path as it is written in code."""
    first, dot, rest = path.partition(".")
    return path.replace('"', "'") if path.startswith("batch") else f"batch['{first}']{dot}{rest}"


class _Made(FunctionMode):
    """Notes the project's line at which each tensor without a history was made."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.chosen, self.filled = Lines(), Lines(), Lines()
        """Of all tensors, of those that were made as the batch was asked for, and of writes by value."""
        self.asked = False

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_value = _by_value(name, args)
        out = super().call(name, func, args, kwargs)
        for tensor in tensors_in(args[:1] if name == "__setitem__" else (out,)):
            if not tensor.requires_grad:
                own, given = _line(), list(tensors_in(args, kwargs))
                made = [(self.lines, own), (self.filled, own if by_value else None)]
                for lines, line in (*made, (self.chosen, own)) if self.asked else made:
                    if place := line or next(filter(None, map(lines.of, given)), None):
                        lines.note(tensor, place)
        return out


def _by_value(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call writes to all entries of one value, and to no others."""
    if name == "where":
        args = args[1::-1]
    elif name not in ("__setitem__", "masked_fill", "masked_fill_"):
        return False
    written, mask = (*args, None, None)[:2]
    if not isinstance(written, torch.Tensor) or not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return False
    if written.shape != mask.shape or written.is_floating_point() or not bool(mask.any()):
        return False
    return torch.equal(written == written[mask][0], mask)


def _line() -> Place | None:
    """The statement of the project's that makes a tensor; None where a loader of a library does, which moves rows."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != BUILD_CALLER:
        filename = frame.f_code.co_filename
        if layer(filename) == 2 and not is_stand_in(frame.f_code):
            return place_of(filename, frame.f_lineno)
        if layer(filename) == 1 or "/torch/utils/data/" in filename.replace("\\", "/"):
            return None
        frame = frame.f_back
    return None
