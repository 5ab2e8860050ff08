"""Where the tensors of a batch arrive: what is first computed with them, and which of them are compared with what is
predicted."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import Lineage, name_of, watched
from pytest_trainloop.instruments.tracing.provenance_queries import ancestors
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import JOINS, LOSSES, SIGN_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pytest_trainloop.instruments.tracing.provenance import Node
    from pytest_trainloop.runs.evidence import Evidence

MOST_NODES = 20_000
"""Calls before a comparison in which inputs are looked for."""

COMPARED_STEPS = 2
"""Optimizer steps in which a leaf may be compared."""

WITH_TARGETS = LOSSES - SIGN_LOSSES - {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
"""Losses with a target for each row: others compare rows that are paired at random."""

Leaf: TypeAlias = tuple[str, int]
"""The path of a tensor, and the number of its batch."""

_KEEPING = JOINS | {"pad", "constant_pad_nd", "rot90", "masked_fill", "setitem", "one_hot"}
"""Operations that keep values, besides the moves that lineage knows: others give some entries another value."""


class Arrivals(WatchingMode):
    """Follows the leaves of batches to where something is computed with them that does not only move entries.

    A leaf is compared where it meets what has a history in a function of ``comparing``.
    """

    comparing = WITH_TARGETS

    def __init__(self) -> None:
        super().__init__()
        self._made_of: dict[str, dict[str, None]] = defaultdict(dict)
        """The leaves that predictions were made of which were compared with this one."""
        self._lineage = Lineage()
        self._roots: dict[int, tuple[Node, Leaf]] = {}

    def take(self, number: int, item: Any) -> None:
        """Have the leaves of a batch followed: for ``RunPlan.before_item``."""
        for path, tensor in nested.paths(item):
            self.adopt((nested.shown(path), number), tensor)

    def adopt(self, leaf: Leaf, tensor: torch.Tensor) -> None:
        self._lineage.adopt(tensor)
        node = self._lineage.of(tensor)
        self._roots[id(node)] = node, leaf

    def note_move(self, leaf: Leaf) -> None:
        """Called where entries of a leaf are moved."""

    def note_arrival(self, leaf: Leaf, value: torch.Tensor) -> None:
        """Called with what arrives, as it was before the call."""

    def note_comparison(self, leaf: Leaf, value: torch.Tensor) -> None:
        """Called with what is compared."""

    def is_target(self, path: str) -> bool:
        """Whether a leaf is compared with a prediction that is not made of it."""
        return path in self._made_of and path not in self._made_of[path]

    @property
    def met(self) -> Iterator[tuple[str, str]]:
        """Inputs, and targets that meet what is predicted of them."""
        for target, inputs in self._made_of.items():
            yield from ((path, target) for path in inputs if self.is_target(target))

    def _origin(self, node: Node) -> Leaf | None:
        """The leaf whose entries these are, moved at most; None where they are of none or of several."""
        while id(node) not in self._roots:
            if not (node.moves or node.op in _KEEPING) or not node.parents:
                return None
            if node.op in JOINS and len({self._origin(parent) for parent in node.parents}) > 1:
                return None
            node = node.parents[0]
        return self._roots[id(node)][1]

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        full = name_of(func)
        if not watched(full):
            return super().call(name, func, args, kwargs)
        parents = self._lineage.before(full, args, kwargs)
        origins = [self._origin(node) for node in parents]
        given = [t.detach().clone() if leaf else t for leaf, t in zip(origins, tensors_in(args, kwargs), strict=False)]
        out = super().call(name, func, args, kwargs)
        with self.watch.suspended():
            self._lineage.note(self.watch, func, full, args, kwargs, parents, out)
            results = list(tensors_in(out))
            moved = any(self._origin(self._lineage.of(result)) for result in results)
            for leaf, value in zip(origins, given, strict=False) if results else ():
                if leaf and moved:
                    self.note_move(leaf)
                elif leaf:
                    self.note_arrival(leaf, value)
                    self._compare(full, leaf, value, parents)
        return out

    def _compare(self, name: str, leaf: Leaf, value: torch.Tensor, parents: Sequence[Node]) -> None:
        for node in parents if name in self.comparing else ():
            if node.history and not node.parameter and (name in LOSSES or node.shape[-1:] == value.shape[-1:]):
                self.note_comparison(leaf, value)
                made_of = (self._roots.get(id(ancestor)) for ancestor in ancestors(node, MOST_NODES))
                self._made_of[leaf[0]].update(dict.fromkeys(root[1][0] for root in made_of if root))


def is_target(evidence: Evidence, path: str) -> bool:
    """Whether a leaf is given to a loss function as its target, as it is or cast, moved, cut or padded, and no
    prediction that such a loss gets is made of it: what a model is conditioned on is no target."""
    seen = Arrivals()
    how: dict[str, Any] = {"enough": lambda record: record.rounds >= COMPARED_STEPS, "may_raise": True}
    evidence.rerun(before_item=seen.take, contexts=seen.contexts, **how)
    return seen.is_target(path)
