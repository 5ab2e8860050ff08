"""Numbers by which a model looks up nodes or adds them up, and that graphs or packs share by mistake.

They are judged as whole numbers, without a gradient: each graph's own nodes take places of their own where graphs stand
behind each other, so that the ranges of two graphs never overlap.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.segments import are_pairs
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.batches.segments import Segments

_ADDED = frozenset("index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split())


@dataclass(frozen=True, slots=True)
class SharedNumbers:
    """Numbers that mean entries of several graphs or rows. ``shown_by``: why these cannot be their own."""

    summary: str
    measured: str
    shown_by: str
    culprit: str
    where: str
    smallest: str


class Lookups:
    """What is looked up and added up in one pass over a batch."""

    def __init__(self, batch: Any, edges: Sequence[torch.Tensor]) -> None:
        """``edges``: those that a model holds itself, (2, edges) each."""
        self.found: SharedNumbers | None = None
        given = [(p, t.detach()) for p, t in nested.paths(batch) if t.layout is torch.strided and not t.is_nested]
        self._given = [(nested.shown(path), t) for path, t in given]
        self._graphs = _listed_graphs(given)
        self._pairs: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self._edges = [*edges, *(t for _, t in self._given if are_pairs(t))]
        self._read = set[tuple[int, int]]()

    def look(self, segments: Segments | None, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Judge one call."""
        if self.found is not None:
            return
        if name in ("nonzero", "argwhere", "where") and len(args) == 1 and isinstance(args[0], torch.Tensor):
            self._pairs.append((_columns(out), tuple(args[0].shape)))
        looked_up = _numbers(name, args)
        if looked_up is None:
            return
        entries, numbers, added = looked_up
        if not added:
            self.found = self._of_a_list(entries, numbers) or self._of_a_matrix(entries, numbers)
            self.found = self.found or self._one_for_each_graph(entries, numbers, segments)
        else:
            self.found = self._of_documents(entries, numbers, segments)
        if self.found is None:
            self.found = self._of_one_graph(entries, numbers, added)

    def _of_a_list(self, entries: torch.Tensor, numbers: torch.Tensor) -> SharedNumbers | None:
        """Edges of graphs that come in a list: each graph's own numbers, moved by what."""
        sizes = [nodes for nodes, _ in self._graphs]
        lengths = [edges.shape[1] for _, edges in self._graphs]
        if len(sizes) < 2 or len(entries) != sum(sizes) or len(numbers) != sum(lengths):
            return None
        for end in (0, 1):
            places: dict[int, tuple[int, int]] = {}
            for graph, (part, (nodes, edges)) in enumerate(
                zip(torch.split(numbers, lengths), self._graphs, strict=True)
            ):
                moved = (part - edges[end]).unique()  # type: ignore[no-untyped-call]
                if len(moved) > 1:
                    break
                if len(moved):  # a graph of one node has no edges
                    places[graph] = int(moved), nodes
            else:
                pair = _overlapping(places)
                if pair is not None:
                    one, other = pair
                    return SharedNumbers(
                        f"nodes of graphs {one} and {other} of the list are looked up by the same numbers",
                        f"the edges of graph {other} are moved by {places[other][0]}, and those of graph {one}, of "
                        f"{places[one][1]} nodes, by {places[one][0]}",
                        f"the graphs have {len(entries)} nodes in all, which stand behind each other",
                        "edge_index",
                        str(here()[0]),
                        f"graphs {one} and {other}",
                    )
        return None

    def _of_a_matrix(self, entries: torch.Tensor, numbers: torch.Tensor) -> SharedNumbers | None:
        """Places in flattened nodes, made of the indices of an adjacency: row * (something) + node."""
        for pairs, (rows, *sides) in self._pairs:
            nodes = sides[0] if len(sides) == 2 and sides[0] == sides[1] else 0
            if rows < 2 or len(entries) != rows * nodes or len(numbers) != len(pairs) or not len(pairs):
                continue
            row = pairs[:, 0].to(numbers)
            for node in (pairs[:, end].to(numbers) for end in (1, 2)):
                last = int(row.max())
                step = int((numbers - node)[row == last][0]) // max(last, 1)
                if 0 < step < nodes and int(node.max()) >= step and torch.equal(numbers - node, step * row):
                    return SharedNumbers(
                        f"nodes of graphs 0 and 1 are looked up by the same numbers: {step} for each graph of {nodes}",
                        f"the number of a node is {step} times its graph and its place in it, among {rows} graphs of "
                        f"{nodes} nodes each",
                        f"number {step} is node {step} of graph 0 and node 0 of graph 1",
                        "__getitem__",
                        str(here()[0]),
                        "graphs 0 and 1",
                    )
        return None

    def _one_for_each_graph(
        self, entries: torch.Tensor, numbers: torch.Tensor, segments: Segments | None
    ) -> SharedNumbers | None:
        """A node for each graph, counted within its graph."""
        if segments is None or segments.kind != "graph" or segments.ids.dim() != 1 or segments.count < 3:
            return None
        ids, sizes = segments.ids, torch.tensor(segments.sizes, device=numbers.device)
        if len(entries) != len(ids) or numbers.shape != (segments.count,) or bool((ids.diff() < 0).any()):
            return None
        if not entries.requires_grad or isinstance(entries, torch.nn.Parameter) or not bool((numbers < sizes).all()):
            return None
        name = next((shown for shown, t in self._given if t.shape == numbers.shape and _equal(t, numbers)), "")
        wrong = (ids[numbers] != torch.arange(segments.count, device=ids.device)).nonzero().flatten().tolist()
        if not name or not wrong or not bool((numbers > 0).any()):
            return None
        graph = wrong[-1]
        node = int(numbers[graph])
        return SharedNumbers(
            f"{name} counts nodes within each graph, and looks them up among those of all {segments.count}",
            f"for graph {graph} it is {node}: a node of graph {int(ids[node])}",
            f"each of its {segments.count} numbers is smaller than its graph has nodes, and {len(wrong)} lie in others",
            name,
            str(here()[0]),
            f"graphs {min(int(ids[node]), graph)} and {max(int(ids[node]), graph)}",
        )

    def _of_documents(
        self, entries: torch.Tensor, numbers: torch.Tensor, segments: Segments | None
    ) -> SharedNumbers | None:
        """Sums by the number of the document, which begins again in each row, into places for those of all rows."""
        if segments is None or segments.kind != "document" or segments.ids.dim() != 2 or len(segments.ids) < 2:
            return None
        rows, borders = len(segments.ids), segments.ids.diff() != 0
        for name, leaf in self._given:
            if leaf.shape != segments.ids.shape or not _equal(leaf.flatten(), numbers):
                continue
            places = len(entries) // rows
            alike = torch.equal((leaf.diff() != 0).to(borders), borders)
            if alike and len(entries) == rows * places and 0 < int(leaf.max()) < places and bool((leaf >= 0).all()):
                shared = set(leaf[0].tolist()) & set(leaf[1].tolist())
                if shared:
                    return SharedNumbers(
                        f"documents of the same number in all {rows} rows are added up",
                        f"sums go to {rows} x {places} places by {name}, which is {int(leaf.max())} at most",
                        f"number {min(shared)} is a document of row 0 and another of row 1, and the places from "
                        f"{int(leaf.max()) + 1} stay empty",
                        name,
                        str(here()[0]),
                        "rows 0 and 1",
                    )
        return None

    def _of_one_graph(self, entries: torch.Tensor, numbers: torch.Tensor, added: bool) -> SharedNumbers | None:
        """The edges of one graph on the nodes of several that stand behind each other."""
        for which, edges in enumerate(self._edges):
            ends = [end for end in (0, 1) if _equal(edges[end], numbers)]
            if not ends or not _of_the_first(edges, len(entries), [t.shape for _, t in self._given]):
                continue
            if not added:
                self._read |= {(which, end) for end in ends}
            elif any((which, 1 - end) in self._read for end in ends):
                return _one_graph_of_many(int(edges.max()) + 1, len(entries))
        return None


def _of_the_first(edges: torch.Tensor, entries: int, shapes: Sequence[torch.Size]) -> bool:
    """Whether edges join all nodes of one graph, and the entries are those of several that the batch has rows for."""
    nodes = int(edges.max()) + 1
    graphs = entries // nodes
    if graphs < 2 or graphs * nodes != entries or nodes < 2 or graphs == nodes:
        return False
    return (graphs, nodes) in [tuple(shape[:2]) for shape in shapes] and len(edges.unique()) == nodes  # type: ignore[no-untyped-call]


def _one_graph_of_many(nodes: int, entries: int) -> SharedNumbers:
    graphs = entries // nodes
    return SharedNumbers(
        f"the edges of one graph are used for the nodes of {graphs}: only those of the first get messages",
        f"the edges join nodes 0 to {nodes - 1}, and {graphs} x {nodes} nodes stand behind each other",
        f"no edge touches a node from {nodes} on",
        "edge_index",
        str(here()[0]),
        "graphs 0 and 1",
    )


def _numbers(name: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
    """What is looked up or written to along its first axis, by which numbers, and whether it is added to."""
    if name == "__getitem__" and len(args) == 2:
        numbers, added = args[1], False
    elif name == "index_select" and len(args) == 3 and args[1] == 0:
        numbers, added = args[2], False
    elif name in _ADDED and len(args) > 2 and args[1] == 0:
        numbers, added = args[2], True
    else:
        return None
    if not isinstance(numbers, torch.Tensor) or numbers.dtype not in (torch.int64, torch.int32):
        return None
    if added and name.startswith("scatter") and numbers.dim() == 2:
        numbers = numbers[:, 0]
    if numbers.dim() != 1 or not len(numbers) or not isinstance(args[0], torch.Tensor) or not args[0].dim():
        return None
    return args[0], numbers.detach(), added


def _columns(out: Any) -> torch.Tensor:
    found = list(tensors_in(out))
    return found[0] if len(found) == 1 and found[0].dim() == 2 else torch.stack(found, 1)


def _listed_graphs(given: Sequence[tuple[nested.Path, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """The number of nodes and the edges of each graph of a list."""
    held: dict[nested.Path, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for path, tensor in given:
        held[path[:-1]].append((str(path[-1]) if path else "", tensor))
    graphs = []
    for where, fields in held.items():
        edges = [t for name, t in fields if "edge" in name and t.dtype == torch.int64 and t.dim() == 2 and len(t) == 2]
        nodes = [len(t) for name, t in fields if name == "x" or name.startswith(("node", "feat"))]
        if not where or isinstance(where[-1], str) or len(edges) != 1 or len(nodes) != 1:
            return []
        graphs.append((nodes[0], edges[0]))
    return graphs


def _overlapping(places: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
    """Two graphs whose nodes share numbers, by where each begins and how many nodes it has."""
    order = sorted(places, key=lambda number: places[number])
    for one, other in itertools.pairwise(order):
        if sum(places[one]) > places[other][0]:
            return min(one, other), max(one, other)
    return None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not one.is_floating_point() and one.shape == other.shape and torch.equal(one.to(other), other)
