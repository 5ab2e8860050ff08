"""Groups whose decay is the default of AdamW: with another default they decay otherwise."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.errors import CannotDecide, TrainLoopError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


@contextlib.contextmanager
def _no_default() -> Iterator[None]:
    init = torch.optim.AdamW.__init__
    names = [p.name for p in inspect.signature(init).parameters.values() if p.default is not p.empty]
    kept = init.__defaults__
    if kept is None or "weight_decay" not in names[: len(kept)]:
        yield
        return
    at = names.index("weight_decay")
    init.__defaults__ = (*kept[:at], 0.0, *kept[at + 1 :])
    try:
        yield
    finally:
        init.__defaults__ = kept


def by_default(evidence: Evidence) -> dict[tuple[int, int], bool]:
    """Whether each group, by optimizer and number, has no decay where the default of AdamW is 0; empty where the loop
    does not run so."""
    try:
        record: Record = evidence.rerun(around=_no_default, enough=lambda r: r.rounds >= 1, may_raise=True)
    except (TrainLoopError, CannotDecide):
        return {}
    if record.raised is not None:
        return {}
    return {
        (optimizer.index, number): decay == 0
        for optimizer in record.optimizers
        for number, decay in enumerate(optimizer.weight_decays)
    }
