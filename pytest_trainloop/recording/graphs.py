"""Which autograd graphs live on after their backward pass.

A sentinel in ``node.metadata`` dies with its node: the dict belongs to the node in C++, so it keeps nothing alive, and
no hook runs in the backward pass. The nodes that accumulate gradients live with their parameters and get none.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import get_gradient_edge

from pytest_trainloop.recording.record import KeptGraphs, RefusedBackward
from pytest_trainloop.recording.torch_internals import is_functorch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from pytest_trainloop.recording.events import Backward
    from pytest_trainloop.recording.protocol import Observed

LOOKS = (6, 9)
"""Steps of one optimizer after which a run is looked at."""

SETTLED = 3
"""Steps after which a graph that was backpropagated must be gone: what one step leaves to the next is gone by then."""

MOST_NODES = 50_000
"""Nodes of one graph that are marked."""

_KEY = "pytest_trainloop"
_REFUSALS = ("backward through the graph a second time", "modified by an inplace operation")


class Sentinel:
    """Lives as long as a node of the graphs that one backward pass went through."""

    __slots__ = ("__weakref__", "item", "reaches", "retained", "run", "window")

    def __init__(self, run: object, window: int, item: int, *, retained: bool) -> None:
        self.run = run
        """What the sentinels of one run have in common: graphs of other runs may be alive."""
        self.window = window
        """The number of the optimizer step that follows, from 1 on."""
        self.item = item
        """The number of batches that the loop had taken."""
        self.retained = retained
        """Whether the graph may be used again: ``retain_graph`` or ``create_graph`` was set each time."""
        self.reaches: frozenset[int] = frozenset()
        """Earlier windows whose graphs the pass went through."""


class Graphs:
    """Marks the graphs of every backward pass while a run is watched in full, and looks which of them are alive."""

    def __init__(self, watch: Observed) -> None:
        self._watch = watch
        self._run = object()
        self._marked: list[weakref.ref[Sentinel]] = []
        self._again = False
        self.reaches: dict[int, frozenset[int]] = {}
        """By window, the earlier windows whose graphs its backward passes went through."""
        self.keeps_roots = False
        """Whether the nodes that a pass begins at are kept until the next pass."""
        self.roots: list[Any] = []
        """Those of the last pass."""
        self.when_refused: Callable[[], None] = lambda: None
        """Called where a pass raises that goes through an earlier graph."""

    def mark(self, roots: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor], *, retained: bool) -> None:
        """Put a sentinel into every node that the pass goes through and that has none.

        Graphs inside a transform of functorch are none of the loop's, and end with it.
        """
        roots = list(roots)
        if any(map(is_functorch, (*roots, *inputs))):
            return
        watch = self._watch
        window = watch.record.rounds + 1
        sentinel = Sentinel(self._run, window, watch.items(), retained=retained)
        reached: set[int] = set()
        self._again = False
        nodes = [node for t in roots if (node := t.grad_fn) is not None]
        self.roots = nodes if self.keeps_roots else []
        for known in _visited(nodes, inputs, sentinel):
            if known.run is not self._run:
                continue
            known.retained = known.retained and retained
            if known.window < window or known.item < sentinel.item:
                self._again = True
                reached |= known.reaches | {known.window}
        sentinel.reaches = frozenset(reached - {window})
        self.reaches[window] = self.reaches.get(window, frozenset()) | sentinel.reaches
        self._marked.append(weakref.ref(sentinel))

    def refused(self, event: Backward, error: RuntimeError) -> None:
        """Note a pass that raised and went through the graph of an earlier iteration: this line has made a pass before.

        Where it has not, the graph is of the present iteration, and another optimizer's step or pass came between (a
        generator's loss that is backpropagated after the discriminator's step).
        """
        ran_before = any(e.site == event.site for e in self._watch.record.autograd_passes() if e is not event)
        if self._again and ran_before and any(words in str(error) for words in _REFUSALS):
            self._watch.record.refused = RefusedBackward(at=event.at, place=event.place, message=str(error))
            self.when_refused()

    def look(self, rounds: int) -> None:
        """Note which graphs are alive after so many steps; what only a cycle of references holds is collected first."""
        if rounds not in LOOKS or not self._marked:
            return
        old = set(range(1, rounds - SETTLED + 1))
        self.are_kept(old)
        self._watch.record.graphs = KeptGraphs(rounds=rounds, kept=tuple(sorted(old & self.alive())))

    def are_kept(self, windows: Iterable[int]) -> bool:
        """Whether a graph of each of these windows is alive, and no cycle of references alone holds it."""
        asked = set(windows)
        if not asked <= self.alive():
            return False
        gc.collect()
        return asked <= self.alive()

    def window_of(self, node: Any) -> int | None:
        """The window whose backward pass went through a node first; None for one that was not marked in this run."""
        metadata = metadata_of(node)
        known = None if metadata is None else metadata.get(_KEY)
        return known.window if isinstance(known, Sentinel) and known.run is self._run else None

    def alive(self) -> set[int]:
        """The windows with a graph that is alive."""
        return {s.window for ref in self._marked if (s := ref()) is not None}

    def retained(self) -> set[int]:
        """Those of them whose graphs may all be used again."""
        alive = [s for ref in self._marked if (s := ref()) is not None]
        return {s.window for s in alive} - {s.window for s in alive if not s.retained}


def metadata_of(node: Any) -> dict[str, Any] | None:
    """None where the node accumulates gradients, and where a custom function's context alone is left of it."""
    if type(node).__name__ == "AccumulateGrad":
        return None
    try:
        metadata: dict[str, Any] = node.metadata
    except RuntimeError:
        return None
    return metadata


def _visited(roots: list[Any], inputs: Sequence[torch.Tensor], sentinel: Sentinel) -> list[Sentinel]:
    """Mark the nodes below these; the sentinels that the pass meets, below which it looks no further."""
    on_the_way = _leading_to(roots, inputs) if inputs else None
    nodes, left = list(roots), MOST_NODES
    met: list[Sentinel] = []
    while nodes and left:
        node = nodes.pop()
        if on_the_way is not None and node not in on_the_way:
            continue
        metadata = metadata_of(node)
        if metadata is None:
            continue
        known = metadata.get(_KEY)
        if known is None:
            metadata[_KEY] = sentinel
            left -= 1
            nodes += [following for following, _ in node.next_functions if following is not None]
        elif known is not sentinel:
            met.append(known)
    return met


def _leading_to(roots: list[Any], inputs: Sequence[torch.Tensor]) -> set[Any]:
    """The nodes that a pass for the gradients of these tensors alone goes through."""
    ends = {get_gradient_edge(t).node for t in inputs if t.requires_grad}
    order: list[Any] = []
    seen: set[Any] = set()
    nodes = list(roots)
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            order.append(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
    above: dict[Any, list[Any]] = {}
    for node in order:
        for following, _ in node.next_functions:
            if following is not None:
                above.setdefault(following, []).append(node)
    found: set[Any] = set()
    nodes = [node for end in ends for node in above.get(end, ())]
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes += above.get(node, ())
    return found
