"""The line that writes to weights outside of optimizer steps, found in a further run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


def line_of_write(evidence: Evidence, names: Sequence[str]) -> str:
    """The first line that writes to one of these parameters after the first step; empty where none is seen."""
    if not evidence.repeatable:
        return ""
    modes: list[_Writes] = []

    def contexts(watch: Watch) -> list[_Writes]:
        modes.append(_Writes(watch, frozenset(names)))
        return modes[-1:]

    evidence.rerun(contexts=contexts, enough=lambda record: record.rounds >= 2, may_raise=True)
    return modes[-1].place


class _Writes(FunctionMode):
    """Notes the first call that writes in place to a parameter, to its ``data``, or that replaces them."""

    def __init__(self, watch: Watch, names: frozenset[str]) -> None:
        super().__init__()
        self._watch, self._names = watch, names
        self.place = ""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        writes = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
        if writes and args and not self.place and self._watch.record.steps and not self._watch.stepping:
            targets = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
            written = {address(t) for t in targets if isinstance(t, torch.Tensor)} - {0}
            table = self._watch.table
            mine = (t for e, t in zip(table.entries, table.tensors, strict=False) if e.name in self._names)
            if name != "__set__" or getattr(func, "__self__", None) is torch.Tensor.data:
                with self._watch.suspended():
                    self.place = str(here()[0]) if any(address(t) in written for t in mine) else ""
        return super().call(name, func, args, kwargs)
