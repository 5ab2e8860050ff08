"""Scores of tensors that the batch names positive and negative (chosen and rejected), and which of them are raised.

Both have to be scores, of which more is better: products of what two tensors of the batch gave, cosines, or the
log-probabilities of texts. Distances, squares and what one learned layer gives are none. Where such scores first meet,
the gradients at them say which side is raised.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import ADDITIONS, DIVISIONS, MULTIPLICATIONS, NEGATIONS, SUBTRACTIONS
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched
from pytest_trainloop.tracing.provenance_queries import ancestors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.tracing.provenance import Node

_OPPOSITE = {"pos": "neg", "positive": "negative", "positives": "negatives", "chosen": "rejected", "winner": "loser"}
_GOOD, _BAD, _OTHER = 1, 2, 4
_MOST = 32
_NEAR = 12
_SUMS = frozenset({"sum", "mean"})
_PRODUCTS = frozenset("matmul __matmul__ mm bmm einsum inner dot".split())
_DISTANCES = (
    SUBTRACTIONS
    | NEGATIONS
    | frozenset("cdist pairwise_distance norm linalg_norm linalg_vector_norm linalg_solve cholesky_solve abs".split())
)


@dataclass(slots=True)
class Meeting:
    """A call that two scores first meet in: the gradients that arrived at them, "" for none yet."""

    place: Place
    good: torch.Tensor | None = None
    bad: torch.Tensor | None = None

    @property
    def way(self) -> str:
        """Which side is raised in all rows."""
        if self.good is None or self.bad is None:
            return ""
        if not bool(self.good.any()) or not bool(self.bad.any()):
            return ""
        if bool((self.good >= 0).all()) and bool((self.bad <= 0).all()):
            return "turned"
        return "right" if bool((self.good <= 0).all()) and bool((self.bad >= 0).all()) else "mixed"


class NamedSides(WatchingMode):
    """Looks at a run that is made in its ``contexts``, where ``take`` gets every batch; nothing is followed in batches
    without such names."""

    def __init__(self) -> None:
        super().__init__()
        self._lineage = Lineage()
        self._maximised = False
        self._marks: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.names: tuple[str, str] | None = None
        self.meetings: list[Meeting] = []

    def take(self, item: Any) -> None:
        """Mark the tensors of a batch by their names."""
        leaves = [(nested.shown(path), str(path[-1]), tensor) for path, tensor in nested.paths(item) if path]
        sides = dict(_sides([name for _, name, _ in leaves]))
        for shown, name, tensor in leaves:
            self._mark(tensor, sides.get(name, _OTHER))
            if sides.get(name) == _GOOD and self.names is None:
                self.names = shown, next(s for s, n, _ in leaves if sides.get(n) == _BAD)
        if not sides:
            self._marks.clear()

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                self._maximised = any(o.maximizes for o in watch.record.optimizers)
                self._marks.clear()
                self._lineage.forget()

    def active(self) -> bool:
        return bool(self._marks) and self.watch.full and len(self.meetings) < _MOST and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if not watched(name):
            return passed_on(func, args, kwargs)
        with self.watch.suspended():
            given = list(tensors_in(args, kwargs))
            marks = [self._of(t) for t in given]
            parents = self._lineage.before(name, args, kwargs)
            self._meet(given, marks, parents)
        out = passed_on(func, args, kwargs)
        with self.watch.suspended():
            self._lineage.note(self.watch, func, name, args, kwargs, parents, out)
            mark = 0
            for one in marks:
                mark |= one
            for result in tensors_in(out) if mark else ():
                self._mark(result, mark)
        return out

    def _mark(self, tensor: torch.Tensor, mark: int) -> None:
        self._marks[id(tensor)] = (weakref.ref(tensor), mark)

    def _of(self, tensor: torch.Tensor) -> int:
        known = self._marks.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else 0

    def _meet(self, given: list[torch.Tensor], marks: list[int], parents: tuple[Node, ...]) -> None:
        sides = {}
        for tensor, mark, node in zip(given, marks, parents, strict=False):
            side = mark & (_GOOD | _BAD)
            if side in (_GOOD, _BAD) and tensor.requires_grad and _is_score(node, anchored=bool(mark & _OTHER)):
                sides[side] = tensor
        if len(sides) < 2 or any(m & _GOOD and m & _BAD for m in marks):
            return
        meeting = Meeting(here()[0])
        self.meetings.append(meeting)
        for side, tensor in sides.items():
            on_gradient(tensor, functools.partial(self._arrived, meeting, side))

    def _arrived(self, meeting: Meeting, side: int, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            setattr(meeting, "good" if side == _GOOD else "bad", gradient.detach().clone())

    def findings(self) -> Iterator[Finding]:
        """One finding, where the negative side is raised in all rows of all meetings."""
        ways = [m.way for m in self.meetings if m.way]
        if not ways or self._maximised or self.names is None or set(ways) != {"turned"}:
            return
        good, bad = self.names
        yield Finding(
            cause="sides_turned",
            summary=f"scores of {bad} are raised and those of {good} lowered: the names say the reverse",
            measured=f"in all rows of {len(ways)} calls that the two meet in",
            shown_by="the gradients of what is backpropagated with respect to the two scores, which are products or "
            "log-probabilities: no distances",
            culprits=(good, bad),
            where=str(next(m.place for m in self.meetings if m.way)),
        )


def _sides(names: list[str]) -> Iterator[tuple[str, int]]:
    """Names of which the counterpart is there too, with their side."""
    for name in names:
        words = re.findall(r"[A-Za-z][a-z]*|\d+", name)
        for at, word in enumerate(words):
            other = _OPPOSITE.get(word.lower())
            if other is None:
                continue
            wanted = [w.lower() for w in (*words[:at], other, *words[at + 1 :])]
            for counterpart in names:
                if [w.lower() for w in re.findall(r"[A-Za-z][a-z]*|\d+", counterpart)] == wanted:
                    yield name, _GOOD
                    yield counterpart, _BAD


def _is_score(node: Node | None, *, anchored: bool) -> bool:
    """Whether more of it means that two things belong together, or that a text is likely. ``anchored``: another tensor
    of the batch is behind it."""
    summed = False
    for _ in range(50):
        if node is None:
            return False
        trained = [p for p in node.parents if p.history and p.floating]
        if node.op in _PRODUCTS or (node.op in MULTIPLICATIONS and summed and len(trained) == 2):
            return anchored and len({id(p) for p in trained}) == 2 and not any(map(_weighs_or_differs, trained))
        if node.op == "cosine_similarity":
            return anchored and not any(map(_weighs_or_differs, trained))
        if node.op == "gather":
            return bool(node.parents) and node.parents[0].op == "log_softmax"
        if node.op in ADDITIONS and len(trained) == 2:  # a learned bias of the item
            plain = not any(n < 0 for n in node.numbers)
            return plain and any(_is_score(p, anchored=anchored) for p in trained)
        if len(trained) != 1:
            return False
        numbers = [*node.numbers, *(p.value for p in node.parents if p is not trained[0] and not p.shape)]
        if node.op in _SUMS:
            summed = True
        elif node.op in SUBTRACTIONS:
            if node.op.strip("_").startswith("r") or node.parents[0] is not trained[0]:
                return False
        elif node.op in MULTIPLICATIONS | DIVISIONS:
            masks = [p for p in node.parents if p is not trained[0] and p.shape]
            if node.parents[0] is not trained[0] or any(not n > 0 for n in numbers) or (masks and not _of_logs(node)):
                return False
        elif not (node.moves or node.op in ADDITIONS):
            return False
        node = trained[0]
    return False


def _of_logs(node: Node) -> bool:
    """Whether log-probabilities are masked here."""
    return any(n.op == "log_softmax" for n in ancestors(node, _NEAR))


def _weighs_or_differs(node: Node) -> bool:
    """Whether a factor is a weight, which may turn the sign, or a difference, of which products are distances."""
    return node.parameter or any(n.op in _DISTANCES for n in ancestors(node, _NEAR))
