"""Edges that join nodes of different graphs, by the data alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_trainloop.batches.segments import Segments


@dataclass(frozen=True, slots=True)
class Edges:
    """``name``: what they are called. ``across``: how many of ``count`` join two graphs, the first as (source, target,
    graph, graph). ``restarts``: whether all lie among as many nodes as the largest graph has, and some come twice or
    join two graphs: each graph's nodes are counted from 0. ``without``: the graphs of several nodes that none touches.
    """

    name: str
    count: int
    across: int
    first: tuple[int, int, int, int] | None
    restarts: bool
    without: tuple[int, ...]


def edges_of(segments: Segments) -> Edges | None:
    """What the only edges of a batch join; None without edges, or with several kinds of them."""
    if len(segments.edges) != 1 or segments.ids.dim() != 1:
        return None
    (name, pairs), *_ = segments.edges.items()
    source, target = pairs.long()
    ids = segments.ids
    across = ids[source] != ids[target]
    sizes = torch.tensor(segments.sizes, device=ids.device)
    touched = torch.zeros(segments.count, dtype=torch.bool, device=ids.device)
    touched[ids[source]] = touched[ids[target]] = True
    without = ((sizes > 1) & ~touched).nonzero().flatten().tolist()
    among_the_first = int(torch.maximum(source, target).max()) < int(sizes.max())
    twice = len(torch.unique(pairs, dim=1).T) < len(source)
    restarts = among_the_first and bool(without) and bool(twice or across.any())
    first = None
    if bool(across.any()):
        at = int(across.nonzero()[0])
        s, t = int(source[at]), int(target[at])
        first = (s, t, int(ids[s]), int(ids[t]))
    return Edges(name, len(source), int(across.sum()), first, restarts, tuple(without))
