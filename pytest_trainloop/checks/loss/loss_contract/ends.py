"""Texts that end in an id which is the one of padding too, and whose end is left out with the padding.

The ids that an embedding looked up are compared with the labels of the loss: by the mask or the lengths of the batch
the last real id of every padded row is the one that fills it, and its label is ignored, while the label before it is
the id that it should be. No label of any call may be this id, and no gradient may raise its score.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.causes import found
from pytest_trainloop.checks.loss.loss_contract.padding import inputs_of, of_labels, padded_positions
from pytest_trainloop.instruments.tracing.definitions import criterion
from pytest_trainloop.recording.torch_names import CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.batches.padding import PaddingMask

ROWS = 3
"""Different rows from which an end that is ignored in all of them is no accident of their labels."""


@dataclass(slots=True)
class Ended:
    """The rows of one line whose end is ignored."""

    first: Finding
    alone: bool
    """Whether this loss is all that is backpropagated: another one may train the model to stop."""
    facts: dict[str, Any]
    rows: set[tuple[int, ...]] = field(default_factory=set)


class Ends:
    """What the calls of a run say of the ends of their rows."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Ended] = {}
        self._trained: set[int] = set()
        """Ids that are a label of some row, or whose score some gradient raises."""

    def compare(self, call: LossCall) -> tuple[Finding, ...]:
        """Collect the ends of a call. They are judged when all calls are known."""
        target, at = call.tensor("target"), of_labels(call) if call.name in CLASS_LOSSES else None
        if target is None or at is None or call.error is not None:
            return ()
        ignored = call.given.get("ignore_index", -100)
        counts = (target != ignored) & call.counted(target)
        self._trained |= {*torch.unique(target[counts]).tolist()}
        labels = torch.full(at.shape, -1, device=target.device)
        labels[at.row, at.position] = torch.where(counts, target, -1)
        counted = labels[:, :-1] >= 0  # a model over two devices looks its ids up on the other one
        following = [e.ids.to(target.device) for e in call.embedded if tuple(e.ids.shape) == at.shape]
        following = [ids for ids in following if torch.equal(ids[:, 1:][counted], labels[:, :-1][counted])]
        padded = padded_positions(call.step, at.shape, inputs_of(call)) if following and bool(counted.any()) else None
        if padded is not None and padded.any and padded.source != "id":
            for ids in following:
                self._add(call, ids.cpu(), labels.cpu(), padded, ignored)
        return ()

    def _add(self, call: LossCall, ids: torch.Tensor, labels: torch.Tensor, padded: PaddingMask, ignored: int) -> None:
        fill = torch.unique(ids[padded.mask]).tolist()
        ends = (torch.arange(ids.shape[1]) * ~padded.mask).max(1).values
        # a row without padding may be cut, and with it its end
        rows = (padded.mask.any(1) | (ids[torch.arange(len(ids)), ends] == fill[0])).nonzero().flatten()
        last = ends[rows]
        if len(fill) != 1 or bool((ids[rows, last] != fill[0]).any()) or int(last.min()) < 2:
            return
        end, slope = int(fill[0]), call.arrived
        raised = slope is None or end >= slope.shape[1] or bool((slope.select(1, end) < 0).any())
        if raised or bool((labels[rows, last - 1] >= 0).any()) or bool((labels[rows, last - 2] < 0).any()):
            self._trained.add(end)
            return
        key = call.name, call.site, call.layer, end
        if key not in self._found:
            facts = {"token": end, "known": padded.reason, "by_id": ignored == end, "call": call.name}
            # an id that the call ignores is given to the criterion, and by no line that makes labels
            at = str(call.place)
            change = criterion(at) or at if ignored == end else ""
            first = call.finds("end_never_a_target", culprit="labels", rows=len(rows), change=change, **facts)
            self._found[key] = Ended(first, call.alone, facts)
        self._found[key].rows |= {tuple(row) for row in ids[rows].tolist()}

    def findings(self) -> Iterator[Finding]:
        for (*_, end), one in self._found.items():
            if end not in self._trained and len(one.rows) >= ROWS:
                level, first = "fault" if one.alone else "advice", one.first
                variant = "by id" if one.facts["by_id"] else ""
                yield found(
                    "end_never_a_target", first.where, first.culprits, variant, rows=len(one.rows),
                    change=first.change, level=level, **one.facts,
                )  # fmt: skip
