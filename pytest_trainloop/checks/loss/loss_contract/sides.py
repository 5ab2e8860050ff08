"""Sides that the batch names positive and negative, and that the loss pulls the other way."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.loss.loss_contract.causes import found
from pytest_trainloop.instruments.tracing.tape_queries import MOVES, made_of
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.torch_names import ADDITIONS, DIVISIONS, MULTIPLICATIONS, NEGATIONS, SUBTRACTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.tape import Call, Tape, Value
    from pytest_trainloop.recording.events import Place

_OPPOSITE = {"pos": "neg", "positive": "negative", "positives": "negatives", "chosen": "rejected", "winner": "loser"}
_PRODUCTS = frozenset("matmul __matmul__ mm bmm einsum inner dot".split())
_DISTANCES = (
    SUBTRACTIONS
    | NEGATIONS
    | frozenset("cdist pairwise_distance norm linalg_norm linalg_vector_norm linalg_solve cholesky_solve abs".split())
)


class NamedSides:
    """Scores of tensors that the batch names positive and negative: which of them are raised, where they first meet.

    Both have to be scores, of which more is better: products of what two tensors of the batch gave, cosines, or the
    log-probabilities of texts. Distances, squares and what one learned layer gives are none.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._good = self._bad = 0
        self.names: tuple[str, str] | None = None
        self.meetings: list[tuple[Place, dict[str, torch.Tensor]]] = []

    def take(self) -> None:
        """Which tensors of the batch are the good and the bad side, as bits of the tape's."""
        words = {path: re.findall(r"[A-Za-z][a-z]*|\d+", path.lower()) for path in self._tape.batch}
        self._good = self._bad = 0
        for good, own in words.items():
            for at, word in enumerate(own):
                wanted = [*own[:at], _OPPOSITE[word], *own[at + 1 :]] if word in _OPPOSITE else None
                for bad in (path for path, theirs in words.items() if theirs == wanted):
                    self._good |= self._tape.batch[good].batch
                    self._bad |= self._tape.batch[bad].batch
                    self.names = self.names or (good, bad)
        self._tape.every = self.meet if self._good and len(self.meetings) < 32 else None

    def meet(self, call: Call) -> None:
        sides: dict[str, Value] = {}
        for value in call.inputs:
            good, bad = value.batch & self._good, value.batch & self._bad
            if good and bad:
                return
            if (good or bad) and value.history and _is_score(value, anchored=value.batch not in (good, bad)):
                sides["good" if good else "bad"] = value
        if len(sides) == 2:
            arrived: dict[str, torch.Tensor] = {}
            self.meetings.append((call.place, arrived))
            for side, value in sides.items():
                if value.tensor is not None:
                    on_gradient(value.tensor, functools.partial(arrived.__setitem__, side))

    def findings(self, record: Any) -> Iterator[Finding]:
        """One finding, where the negative side is raised in all rows of all meetings."""
        seen = [(place, one["good"], one["bad"]) for place, one in self.meetings if len(one) == 2]
        seen = [one for one in seen if bool(one[1].any()) and bool(one[2].any())]
        turned = all(bool((good >= 0).all()) and bool((bad <= 0).all()) for _, good, bad in seen)
        if not seen or not turned or self.names is None or any(o.maximizes for o in record.optimizers):
            return
        good, bad = self.names
        yield found("sides_turned", seen[0][0], (good, bad), good=good, bad=bad, calls=len(seen))


def _is_score(value: Value, *, anchored: bool) -> bool:
    """Whether more of it means that two things belong together, or that a text is likely. ``anchored``: another tensor
    of the batch is behind it."""

    def turns(one: Value) -> bool:
        """Whether a factor is a weight, which may turn the sign, or a difference, of which products are distances."""
        return one.parameter or any(v.op in _DISTANCES for v in made_of(one, 12))

    summed = False
    for _ in range(50):
        trained = [p for p in value.parents if p.history and p.floating]
        if value.op in _PRODUCTS or (value.op in MULTIPLICATIONS and summed and len(trained) == 2):
            return anchored and len({*map(id, trained)}) == 2 and not any(map(turns, trained))
        if value.op == "cosine_similarity":
            return anchored and not any(map(turns, trained))
        if value.op == "gather":
            return bool(value.parents) and value.parents[0].op == "log_softmax"
        numbers = value.call.numbers if value.call is not None else ()
        if value.op in ADDITIONS and len(trained) == 2:  # a learned bias of the item
            return not any(n < 0 for n in numbers) and any(_is_score(p, anchored=anchored) for p in trained)
        if len(trained) != 1:
            return False
        first, rest = value.parents[0] is trained[0], [p for p in value.parents if p is not trained[0]]
        if value.op in ("sum", "mean"):
            summed = True
        elif value.op in SUBTRACTIONS:
            if not first or value.op.strip("_").startswith("r"):
                return False
        elif value.op in MULTIPLICATIONS | DIVISIONS:
            positive = all(n > 0 for n in (*numbers, *(p.number for p in rest if not p.shape)))
            of_logs = any(v.op == "log_softmax" for v in made_of(value, 12))  # masked log-probabilities
            if not first or not positive or (any(p.shape for p in rest) and not of_logs):
                return False
        elif value.op not in MOVES | ADDITIONS:
            return False
        value = trained[0]
    return False
