"""Numbers of nodes and documents that do not belong together, by the data alone: borders, edges, and what a model looks
up or adds up. Graphs that follow each other in one axis never share a number, so that whole numbers prove it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.segment_independence.causes import found
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.segments import are_pairs
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.batches.segments import Segments

_ADDED = frozenset("index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split())


def sizes_of(segments: Segments) -> str:
    sizes = [str(n) for n in segments.sizes[:4]]
    return ", ".join(sizes) + (", ..." if segments.count > 4 else "")


def borders_disagree(one: Segments, other: Segments, first: int, second: int) -> Finding:
    tellers = one.teller, other.teller
    facts: dict[str, Any] = {"one": one.teller, "other": other.teller, "kind": one.kind, "entry": one.entry}
    facts |= {"first": first, "second": second, "kinds": ("input", "input")}
    made = found("borders_disagree", "", tellers, **facts)
    return replace(made, smallest=f"{one.entry}s 0 to {max(first, second)}")


def edges_join_graphs(segments: Segments) -> Iterator[Finding]:
    """Of the only edges of a batch; several kinds of them are not judged."""
    if len(segments.edges) != 1 or segments.ids.dim() != 1:
        return
    (name, pairs), *_ = segments.edges.items()
    ids, (source, target) = segments.ids, pairs.long()
    across = ids[source] != ids[target]
    sizes = torch.tensor(segments.sizes, device=ids.device)
    touched = torch.zeros(segments.count, dtype=torch.bool, device=ids.device)
    touched[ids[source]] = touched[ids[target]] = True
    without = ((sizes > 1) & ~touched).nonzero().flatten().tolist()
    among_the_first = int(torch.maximum(source, target).max()) < int(sizes.max())
    twice = len(torch.unique(pairs, dim=1).T) < len(source)
    facts: dict[str, Any] = {"name": name, "teller": segments.teller, "edges": len(source), "kinds": ("input",)}
    facts |= {"sizes": sizes_of(segments), "nodes": sum(segments.sizes), "largest": max(segments.sizes)}
    if among_the_first and without and bool(twice or across.any()):
        *others, last = map(str, without)
        facts["without"] = f"graphs {', '.join(others)} and {last} have" if others else f"graph {last} has"
        made = found("edges_not_offset", "", (name,), **facts)
        yield replace(made, smallest=f"graphs {min(without[0], 1)} and {max(without[0], 1)}")
    elif bool(across.any()):
        at = int(across.nonzero()[0])
        ends = int(source[at]), int(target[at])
        one, other = (int(ids[end]) for end in ends)
        facts |= {"across": int(across.sum()), "source": ends[0], "target": ends[1], "one": one, "other": other}
        made = found("edges_across_graphs", "", (name,), **facts)
        yield replace(made, smallest=f"graphs {min(one, other)} and {max(one, other)}")


class Lookups:
    """What is looked up and added up in one pass over a batch."""

    def __init__(self, batch: Any, edges: Sequence[torch.Tensor]) -> None:
        """``edges``: those that a model holds itself, (2, edges) each."""
        self.finding: Finding | None = None
        given = [(p, t.detach()) for p, t in nested.paths(batch) if t.layout is torch.strided and not t.is_nested]
        self._given = [(nested.shown(path), t) for path, t in given]
        self._graphs = _listed_graphs(given)
        self._pairs: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self._edges = [*edges, *(t for _, t in self._given if are_pairs(t))]
        self._read = set[tuple[int, int]]()

    def look(self, segments: Segments | None, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Judge one call."""
        if self.finding is not None:
            return
        if name in ("nonzero", "argwhere", "where") and len(args) == 1 and isinstance(args[0], torch.Tensor):
            self._pairs.append((_columns(out), tuple(args[0].shape)))
        looked_up = _numbers(name, args)
        if looked_up is None:
            return
        entries, numbers, added = looked_up
        rules = [self._of_one_graph(entries, numbers, added)]
        if added:
            rules.insert(0, self._of_documents(entries, numbers, segments))
        else:
            own = [self._one_for_each_graph, self._one_for_each_entry]
            rules = [self._of_a_list(entries, numbers), self._of_a_matrix(entries, numbers), *rules]
            rules += [rule(entries, numbers, segments) for rule in own]
        self.finding = next(itertools.chain.from_iterable(rules), None)

    def _of_a_list(self, entries: torch.Tensor, numbers: torch.Tensor) -> Iterator[Finding]:
        """Edges of graphs that are given as a list: by how much each graph's own numbers are moved."""
        sizes = [nodes for nodes, _ in self._graphs]
        lengths = [edges.shape[1] for _, edges in self._graphs]
        if len(sizes) < 2 or len(entries) != sum(sizes) or len(numbers) != sum(lengths):
            return
        parts = torch.split(numbers, lengths)
        for end in (0, 1):
            moved = [(part - edges[end]).unique() for part, (_, edges) in zip(parts, self._graphs, strict=True)]  # type: ignore[no-untyped-call]
            if any(len(by) > 1 for by in moved):
                continue
            # a graph of one node has no edges
            starts = sorted((int(by), sizes[graph], graph) for graph, by in enumerate(moved) if len(by))
            for (start, nodes, one), (next_, _, other) in itertools.pairwise(starts):
                if start + nodes > next_:
                    (one, start), (other, next_) = sorted([(one, start), (other, next_)])
                    facts = {"one": one, "other": other, "moved": next_, "start": start}
                    facts |= {"nodes": sizes[one], "entries": len(entries)}
                    yield _shared("edge_index", "list", f"graphs {one} and {other}", **facts)

    def _of_a_matrix(self, entries: torch.Tensor, numbers: torch.Tensor) -> Iterator[Finding]:
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
                    yield _shared("__getitem__", "matrix", "graphs 0 and 1", step=step, rows=rows, nodes=nodes)

    def _one_for_each_graph(
        self, entries: torch.Tensor, numbers: torch.Tensor, segments: Segments | None
    ) -> Iterator[Finding]:
        """A node for each graph, counted within its graph."""
        if segments is None or segments.kind != "graph" or segments.ids.dim() != 1 or segments.count < 3:
            return
        ids, sizes = segments.ids, torch.tensor(segments.sizes, device=numbers.device)
        if len(entries) != len(ids) or numbers.shape != (segments.count,) or bool((ids.diff() < 0).any()):
            return
        if not entries.requires_grad or isinstance(entries, torch.nn.Parameter) or not bool((numbers < sizes).all()):
            return
        name = next((shown for shown, t in self._given if t.shape == numbers.shape and _equal(t, numbers)), "")
        wrong = (ids[numbers] != torch.arange(segments.count, device=ids.device)).nonzero().flatten().tolist()
        if name and wrong and bool((numbers > 0).any()):
            graph, node = wrong[-1], int(numbers[wrong[-1]])
            other = int(ids[node])
            facts = {"name": name, "graphs": segments.count, "graph": graph, "node": node, "other": other}
            smallest = f"graphs {min(other, graph)} and {max(other, graph)}"
            yield _shared(name, "one for each graph", smallest, wrong=len(wrong), **facts)

    def _one_for_each_entry(
        self, entries: torch.Tensor, numbers: torch.Tensor, segments: Segments | None
    ) -> Iterator[Finding]:
        """For each edge an edge, or for each node a node, counted within its graph or from the nodes before it."""
        if segments is None or segments.kind != "graph" or segments.count < 3:
            return
        of = segments.of(entries)
        if of is None or of.dim() != 1 or len(of) != len(numbers):
            return
        wrong, own = of[numbers] != of, torch.bincount(of, minlength=segments.count)
        sizes = torch.tensor(segments.sizes, device=of.device)
        name = next((shown for shown, t in self._given if t.shape == numbers.shape and _equal(t, numbers)), "")
        for shift in (torch.zeros_like(own), sizes.cumsum(0) - sizes):
            within = numbers - shift[of]
            if name and bool(wrong.any()) and bool(((within >= 0) & (within < own[of])).all()):
                at = int(wrong.nonzero()[0])
                facts = {"name": name, "graphs": segments.count, "place": at, "number": int(numbers[at])}
                facts |= {"graph": int(of[at]), "other": int(of[numbers[at]]), "wrong": int(wrong.sum())}
                facts |= {"entry": "node" if len(of) == len(segments.ids) else "edge", "nodes": bool(shift.any())}
                yield _shared(name, "one for each entry", f"graphs {facts['other']} and {facts['graph']}", **facts)
                return

    def _of_documents(
        self, entries: torch.Tensor, numbers: torch.Tensor, segments: Segments | None
    ) -> Iterator[Finding]:
        """Sums by the number of the document, which begins again in each row, into places for those of all rows."""
        if segments is None or segments.kind != "document" or segments.ids.dim() != 2 or len(segments.ids) < 2:
            return
        rows, borders = len(segments.ids), segments.ids.diff() != 0
        places = len(entries) // rows
        for name, leaf in self._given:
            if leaf.shape != segments.ids.shape or not _equal(leaf.flatten(), numbers):
                continue
            same = torch.equal((leaf.diff() != 0).to(borders), borders)
            if same and len(entries) == rows * places and 0 < int(leaf.max()) < places and bool((leaf >= 0).all()):
                for number in sorted(set(leaf[0].tolist()) & set(leaf[1].tolist())):
                    facts = {"name": name, "rows": rows, "places": places, "most": int(leaf.max()), "number": number}
                    yield _shared(name, "documents", "rows 0 and 1", next=int(leaf.max()) + 1, **facts)

    def _of_one_graph(self, entries: torch.Tensor, numbers: torch.Tensor, added: bool) -> Iterator[Finding]:
        """The edges of one graph on the nodes of several."""
        for which, edges in enumerate(self._edges):
            ends = [end for end in (0, 1) if _equal(edges[end], numbers)]
            if not ends or not _of_the_first(edges, len(entries), [t.shape for _, t in self._given]):
                continue
            if not added:
                self._read |= {(which, end) for end in ends}
            elif any((which, 1 - end) in self._read for end in ends):
                nodes = int(edges.max()) + 1
                facts = {"graphs": len(entries) // nodes, "last": nodes - 1, "nodes": nodes}
                yield _shared("edge_index", "one graph", "graphs 0 and 1", **facts)


def _shared(culprit: str, variant: str, smallest: str, **facts: Any) -> Finding:
    return replace(found("numbers_shared", here()[0], (culprit,), variant, **facts), smallest=smallest)


def _of_the_first(edges: torch.Tensor, entries: int, shapes: Sequence[torch.Size]) -> bool:
    """Whether edges join all nodes of one graph, and the entries are those of several that the batch has rows for."""
    nodes = int(edges.max()) + 1
    graphs = entries // nodes
    if graphs < 2 or graphs * nodes != entries or nodes < 2 or graphs == nodes:
        return False
    return (graphs, nodes) in [tuple(shape[:2]) for shape in shapes] and len(edges.unique()) == nodes  # type: ignore[no-untyped-call]


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
    made = list(tensors_in(out))
    return made[0] if len(made) == 1 and made[0].dim() == 2 else torch.stack(made, 1)


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


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not one.is_floating_point() and one.shape == other.shape and torch.equal(one.to(other), other)
