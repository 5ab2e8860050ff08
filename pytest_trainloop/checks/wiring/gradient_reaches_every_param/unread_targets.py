"""Which tensor of the batch has the shape of a target for an unused result, and is read by nothing that trains.

A head whose result no loss uses may belong to a task that is not in the batch. Where the batch holds a tensor that fits
the head's result, bears its name, and makes no difference, bit for bit, to what the loop backpropagates, the task is
there and its loss is missing. Shape alone is not enough: a policy that is cloned from recorded steps has a head for
values, and its batch holds the rewards; an id of a camera fits every head that is wide enough.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.gradients.dependence import until_stepped
from pytest_trainloop.memory_layout import write

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_trainloop.nested import Path
    from pytest_trainloop.runs.evidence import Evidence

Shape = tuple[int, ...]

_ANY = frozenset("weight bias head heads model net module layer batch target targets label labels out output".split())
"""Words that say nothing of a task."""


class UnreadTargets:
    """The search for targets that no loss reads. Finds nothing where the loop cannot be run again."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def fitting(self, names: Sequence[str], results: Collection[Shape]) -> str:
        """Where in the batch a target of one of these shapes of results stands that nothing reads; "" if nowhere.

        ``names`` are the parameters behind the results: a word of theirs must be one of its name, and runs end once an
        optimizer that holds them has stepped.
        """
        if not self._evidence.repeatable or not results:
            return ""
        candidates: list[Path] = []

        def list_candidates(number: int, item: Any) -> None:
            if number == 0:
                named = [(p, t) for p, t in nested.paths(item) if _words(nested.shown(p)) & _words(" ".join(names))]
                candidates.extend(p for p, t in named if any(_fits(t, shape) for shape in results))

        unchanged = self._roots(names, list_candidates)
        for path in candidates:
            if all(self._roots(names, _repeating(path, row)) == unchanged for row in (0, -1)):
                return nested.shown(path)
        return ""

    def _roots(self, names: Sequence[str], before_item: Callable[[int, Any], None]) -> list[list[float]]:
        record = self._evidence.rerun(
            before_item=before_item,
            enough=until_stepped(self._evidence, names),
            varied="with one row in place of all rows of a target",
        )
        return [[root.value for root in b.roots] for b in record.autograd_passes()]


def _words(text: str) -> set[str]:
    """The words of a dotted name, without those that stand in any."""
    return {word for word in re.findall(r"[a-z]{3,}", text.lower()) if word not in _ANY}


def _repeating(path: Path, row: int) -> Callable[[int, Any], None]:
    """One row in place of all rows of a tensor, in every batch."""

    def repeat(_number: int, item: Any) -> None:
        for other, tensor in nested.paths(item):
            if other == path and len(tensor):
                with torch.no_grad():
                    write(tensor, tensor[row].clone().expand_as(tensor))

    return repeat


def _fits(tensor: torch.Tensor, result: Shape) -> bool:
    """Whether a tensor whose rows differ is a target for a result: values of its shape, or classes of it."""
    if tensor.layout is not torch.strided or tensor.dim() == 0 or len(tensor) < 2 or not result:
        return False
    if torch.equal(tensor, tensor[:1].expand_as(tensor)):
        return False
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return [n for n in shape if n > 1] == [n for n in result if n > 1]
    classes = {result[-1]: result[:-1]} | ({result[1]: result[:1] + result[2:]} if len(result) > 1 else {})
    return any(shape == rest and 1 < int(tensor.max()) + 1 <= count for count, rest in classes.items())
