"""Segments along one axis of a batch: graphs behind each other, packed documents.

What says so, by the fields of PyTorch Geometric, DGL, jraph, Pointcept, Hugging Face and T5, none of which is imported:

* a vector with the number of the graph of each node (``batch``), known by its name, or by an ``edge_index`` next to it;
* borders that begin with 0 (``ptr``, ``cu_seqlens``), ends (``offset``) or counts (``batch_num_nodes``, ``n_node``)
  that add up to the length of the axis;
* the number of the document of each token (``seq_idx``, ``document_ids``, ``inputs_segmentation``);
* position ids that count up by 1 and start again at 0, at other places in each row.

Numbers of sentences (0 and 1 in each row) are not such: the two sentences of a pair are to see each other.

Under any other name, and only if they are asked for, values may say so: whole numbers for each token that are constant
within a document and count up by 1 at its end; a mask of pairs of positions that separates blocks of each row; a
sorted vector of numbers from 0, and another tensor with one entry for each of these numbers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.cut import Cut
from pytest_trainloop.instruments.batches.values import count_up, left_out, plain, two_valued

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["graph", "document", "episode"]

VECTORS = frozenset(
    """batch batch_index batch_idx batch_id batch_ids batch_vec graph_id graph_ids graph_idx graph_index node_graph
    node_graph_ids node_batch""".split()
)
"""Names of the number of the graph of each node."""

_BORDERS = frozenset("ptr indptr cu_seqlens cu_seq_lens cu_seqlens_q cu_seq_lens_q cu_seqlens_k borders".split())
_ENDS = frozenset("offset offsets ends".split())
_COUNTS = frozenset(
    "batch_num_nodes num_nodes n_node n_nodes natoms num_atoms num_nodes_per_graph seqlens seq_lens doc_lens".split()
)
_OF_GRAPHS = VECTORS | _COUNTS | _ENDS | {"ptr", "indptr"}
_DOCUMENTS = frozenset(
    """seq_idx document_ids document_id doc_ids doc_id sequence_ids sequence_id segment_ids segment_id segmentation
    inputs_segmentation targets_segmentation decoder_segment_ids encoder_segment_ids document_index""".split()
)
_MAY_BE_SENTENCES = frozenset("segment_ids segment_id".split())
_OTHER_NUMBERS = re.compile(
    "label|target|tag|^y|type|pos|time|date|hour|step|word|sent|turn|line|speaker|frame|phon|level|depth|box|len|count"
)
"""What whole numbers that do not fall may count besides documents."""

_POSITIONS = frozenset("position_ids position_id positions inputs_position pos_ids input_pos decoder_positions".split())


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """``ids``: the number of the segment of each entry, from 0, and -1 where there is none: (entries,), or (rows,
    positions). ``teller``: what says so, as it is written in code. ``edges``: the edges between the entries, (2, edges)
    each, by what they are called."""

    kind: Kind
    ids: torch.Tensor
    count: int
    teller: str
    edges: Mapping[str, torch.Tensor] = field(default_factory=dict)
    by_value: bool = False
    """Whether values alone say so, and no name."""

    @property
    def entry(self) -> str:
        return {"graph": "node", "document": "token", "episode": "step"}[self.kind]

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each segment."""
        return torch.bincount(self.ids[self.ids >= 0], minlength=self.count).tolist()

    def of_entries(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The segment of each entry of a tensor with one for each entry of the batch, by its leading axes; None where
        it has none."""
        ids, shape = self.ids, tensor.shape
        if tensor.is_nested or not tensor.dim():
            return None
        if shape[: ids.dim()] == ids.shape:
            return ids
        if ids.dim() == 1:
            return ids[None] if shape[:2] == (1, len(ids)) else None
        if shape[0] == ids.numel():
            return ids.flatten()
        if ids.shape[0] != ids.shape[1] and shape[:2] == ids.T.shape:
            return ids.T
        return None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same, also of a tensor with one entry for each edge, or for each segment."""
        found = self.of_entries(tensor)
        if found is not None or tensor.is_nested or not tensor.dim():
            return found
        for edges in self.edges.values():
            if len(tensor) == edges.shape[1] and edges.shape[1] not in (self.count, *self.ids.shape):
                return self.ids[edges[0]]
        if len(tensor) == self.count and self.count not in self.ids.shape and self.count > 1:
            return torch.arange(self.count, device=self.ids.device)
        return None


def read(nest: Any, declared: Sequence[str] = (), *, by_value: bool = False) -> Segments | None:
    """The segments of a batch, or of what a model is called with; None where nothing says that there are two or more.
    ``by_value``: where no name says so, values may.

    ``declared``: names of tensors that say so, whatever they are called; none other counts then. None as well where
    nodes are of several kinds, each with a vector of its own.
    """
    found = [s for _, s in _all(nest, declared)]
    vectors = [s.ids for s in found if s.ids.dim() == 1]
    if any(v.shape != vectors[0].shape or not torch.equal(v, vectors[0].to(v.device)) for v in vectors):
        return None
    if not found and by_value:
        return _by_value(nest)
    return next(iter(sorted(found, key=lambda s: s.ids.dim())), None)


def disagreement(nest: Any) -> tuple[Segments, Segments, int, int] | None:
    """Two tellers of one axis of which each has a border that the other has not: the first of each, by its entry."""
    found = _all(nest)
    for (path, one), (other_path, other) in itertools.combinations(found, 2):
        if path[:-1] != other_path[:-1] or one.ids.numel() != other.ids.numel() or _side(path) != _side(other_path):
            continue
        ids, others = (s.ids.flatten().cpu() for s in (one, other))
        inside = (ids >= 0) & (others >= 0)
        mine, theirs = ((v.diff() != 0) & inside[1:] & inside[:-1] for v in (ids, others))
        if bool((mine & ~theirs).any()) and bool((theirs & ~mine).any()):
            first, second = (int(only.nonzero()[0]) + 1 for only in (mine & ~theirs, theirs & ~mine))
            return one, other, first, second
    return None


def _side(path: nested.Path) -> str:
    """Which of two sequences a name speaks of."""
    words = _name(path).split("_")
    return next((w for w in words if w in {"inputs", "targets", "encoder", "decoder", "q", "k", "s", "t"}), "")


def _all(nest: Any, declared: Sequence[str] = ()) -> list[tuple[nested.Path, Segments]]:
    """Whatever says which entries belong together, with its path."""
    given = [
        (path, tensor.detach())
        for path, tensor in nested.paths(nest)
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    ]
    pairs = {nested.shown(p): t for p, t in given if _whole(t) and t.dim() == 2 and len(t) == 2 and t.shape[1] > 0}
    edges = {shown: t for shown, t in pairs.items() if "edge" in shown or "adj" in shown} or pairs
    lengths = {t.shape[1] if t.shape[0] == 1 and t.dim() > 1 else t.shape[0] for _, t in given if t.dim()}
    entries = {len(t) for _, t in given if t.dim() > 1 or (t.dim() and t.is_floating_point())}
    tellers = [(path, t) for path, t in given if not declared or nested.is_named(path, declared)]
    read_ = (
        (path, _one(_read_as(t) if declared else _name(path), nested.shown(path), t, edges, entries, lengths))
        for path, t in tellers
    )
    return [(path, one) for path, one in read_ if one is not None]


def take(nest: Any, segments: Segments, chosen: Sequence[int]) -> Any | None:
    """A fresh batch of the chosen segments, in this order: their entries, the edges within them, borders and numbers of
    their own. None where the segments lie in several rows, or lengths fit several of entries, edges and segments."""
    ids = segments.ids.reshape(-1)
    edges = [t.shape[1] for t in segments.edges.values()]
    lengths = [len(ids), segments.count, *edges]
    if (segments.ids.dim() == 2 and len(segments.ids) > 1) or len(set(lengths)) < len(lengths):
        return None
    kept = torch.cat([(ids == number).nonzero().flatten() for number in chosen])
    place = torch.full_like(ids, -1)
    place[kept] = torch.arange(len(kept), device=ids.device)
    sizes = torch.tensor([segments.sizes[number] for number in chosen], device=ids.device)

    def taken(path: nested.Path, tensor: torch.Tensor) -> torch.Tensor:
        name, length = _name(path), tensor.shape[0] if tensor.dim() else -1
        if tensor.dim() == 1 and name in _BORDERS | _ENDS and length in (segments.count, segments.count + 1):
            return torch.cat([sizes.new_zeros(length - segments.count), sizes.cumsum(0)]).to(tensor)
        if any(tensor.shape == e.shape and torch.equal(tensor, e) for e in segments.edges.values()):
            return place[tensor[:, (place[tensor.long()] >= 0).all(0)].long()].to(tensor)
        if length == len(ids) and tensor.shape == ids.shape and torch.equal(tensor.to(ids), ids):
            return torch.repeat_interleave(torch.arange(len(chosen), device=ids.device), sizes).to(tensor)
        through = tensor if tensor.dim() == 2 else tensor[None]
        if segments.kind == "document" and through.shape == (1, len(ids)) and count_up(through):
            return tensor[..., : len(kept)]  # positions through the row
        if length == len(ids):
            return tensor[kept]
        if length == 1 and tensor.dim() > 2 and tensor.shape[-2:] == (len(ids), len(ids)):
            return tensor[..., kept, :][..., kept]
        if length == 1 and tensor.dim() > 1 and tensor.shape[1] == len(ids):
            return tensor[:, kept]
        for e in segments.edges.values():
            if length == e.shape[1]:
                return tensor[(place[e.long()] >= 0).all(0)]
        return tensor[torch.tensor(list(chosen), device=tensor.device)] if length == segments.count else tensor

    return nested.copy(nested.mapped(nest, taken, lambda value: isinstance(value, torch.Tensor)))


@dataclass(frozen=True, slots=True)
class SegmentCut(Cut):
    """Some segments of a batch, along the axes of its entries, of its edges and of its segments."""

    others: tuple[Cut, ...] = ()

    @classmethod
    def of(cls, segments: Segments, chosen: Sequence[int]) -> SegmentCut:
        ids = segments.ids.reshape(-1)
        kept = torch.cat([(ids == number).nonzero().flatten() for number in chosen]).tolist()
        inside = torch.isin(ids, torch.tensor(list(chosen), device=ids.device))
        edges = (inside[e.long()].all(0) for e in segments.edges.values())
        others = [Cut(len(e), e.nonzero().flatten().tolist()) for e in edges]
        return cls(len(ids), kept, (*others, Cut(segments.count, list(chosen))))

    def places(self, size: int, part: int, *, inner: bool = False) -> torch.Tensor | None:
        exact = (cut for cut in (self, *self.others) if (size, part) == (cut.total, len(cut.kept)))
        cut = next(exact, None)
        return Cut.places(self, size, part, inner=inner) if cut is None else torch.tensor(list(cut.kept))


def may_hold(nest: Any) -> bool:
    """Whether what is made of this batch may have segments that it does not tell itself: graphs in a list, adjacencies,
    a vector that numbers what others hold one entry for, or data that are no tensors yet."""
    given = [t for t in nested.tensors(nest) if t.layout is torch.strided and not t.is_nested and not t.is_meta]
    if not given or any(are_pairs(t) or _adjacency(t) for t in given):
        return True
    lengths = {len(t) for t in given if t.dim()}
    return any(
        _whole(t) and t.dim() == 1 and 1 < int(t.max()) + 1 < len(t) and int(t.max()) + 1 in lengths
        for t in given
        if t.numel()
    )


def are_pairs(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold edges, (2, edges)."""
    return _whole(tensor) and tensor.dim() == 2 and len(tensor) == 2


def _adjacency(tensor: torch.Tensor) -> bool:
    if tensor.dim() != 3 or tensor.shape[1] != tensor.shape[2] or not tensor.numel():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())


def unclear(nest: Any) -> str:
    """A tensor of whole numbers for each token that are the same for several tokens in a row, as numbers of documents
    are, but do not count up; empty without one."""
    given = [(path, t.detach()) for path, t in nested.paths(nest) if plain(t)]
    for path, t in given:
        if not _per_token(path, t, given) or two_valued(t):
            continue
        held = (t != t[:, -1:]).flip(1).cumsum(1).flip(1) > 0  # without what is filled up at the end
        goes_on = (t[:, 1:] == t[:, :-1]) & held[:, :-1]
        most = max(row.unique().numel() for row in t)
        if most > 2 and 2 * int(goes_on.sum()) >= int(held.sum()) and not _same_starts(~goes_on):
            return nested.shown(path)
    return ""


def _per_token(path: nested.Path, tensor: torch.Tensor, given: Sequence[tuple[nested.Path, torch.Tensor]]) -> bool:
    others = any(other is not tensor and other.shape[:2] == tensor.shape for _, other in given)
    return _whole(tensor) and tensor.dim() == 2 and others and not _OTHER_NUMBERS.search(_name(path))


def _by_value(nest: Any) -> Segments | None:
    given = [(path, t.detach()) for path, t in nested.paths(nest) if plain(t)]
    lengths = Counter(len(t) for _, t in given if t.dim())
    for path, t in given:
        if _OTHER_NUMBERS.search(_name(path)):
            continue
        ids = None
        if _per_token(path, t, given):
            ids = _counted(t)
        elif t.dim() > 2 and t.shape[-1] == t.shape[-2] and two_valued(t):
            ids = _blocks(t)
        if ids is not None:
            return Segments("document", ids, int(ids.max()) + 1, nested.shown(path), by_value=True)
        count = int(t.max()) + 1 if _whole(t) and t.dim() == 1 else 0
        if 1 < count < len(t) and lengths[count] and lengths[len(t)] > 1 and not t[0] and _steps(t):
            return Segments("graph", t.long(), count, nested.shown(path), by_value=True)
    return None


def _steps(values: torch.Tensor) -> bool:
    """Whether numbers go on or count up by 1, and are the same for two entries or more in the mean."""
    by = values.diff()
    return bool(((by == 0) | (by == 1)).all()) and 0 < 2 * int(by.sum()) <= values.numel()


def _counted(tensor: torch.Tensor) -> torch.Tensor | None:
    """Each run of one number in a row is a document, if numbers count up by 1; 0 at the end is padding. Rows whose
    documents all end at the same places are grids: windows, sentences of a template."""
    values = tensor.long()
    at_the_end = ((values != 0).flip(1).cumsum(1).flip(1) == 0) & (values > 0).any(1, keepdim=True)
    outside = (values < 0) | at_the_end
    changes = torch.ones_like(values, dtype=torch.bool)
    changes[:, 1:] = values[:, 1:] != values[:, :-1]
    rows = [row[~out] for row, out in zip(values, outside, strict=True) if not bool(out.all())]
    several = [row for row in rows if len(row) > 1 and bool(row[0] != row[-1])]
    if two_valued(values[~outside]) or not several or not all(map(_steps, several)):
        return None
    return None if _same_starts(changes & ~outside) else _numbered(changes, outside)


def _blocks(mask: torch.Tensor) -> torch.Tensor | None:
    """Positions that see the same first one are a document, if all of it sees all of it, or all that comes before."""
    shape = mask.shape
    seen = ~left_out(mask.reshape(shape[0], -1, *shape[-2:])[:, 0])
    if not bool(seen.diagonal(dim1=1, dim2=2).any()):
        seen = ~seen
    first, outside = seen.long().argmax(-1), ~seen.any(-1)
    same = (first[:, :, None] == first[:, None]) & ~outside[:, :, None] & ~outside[:, None]
    if not (torch.equal(seen, same) or torch.equal(seen, same.tril())):
        return None
    starts = (first == torch.arange(shape[-1], device=mask.device)) & ~outside
    several = int(starts.sum(1).max()) > 1 and 2 * int(starts.sum()) <= int((~outside).sum())
    return None if not several or _same_starts(starts) else _numbered(starts, outside)


def _same_starts(starts: torch.Tensor) -> bool:
    """Whether documents begin at the same places in all rows, or in one row at equal distances."""
    if len(starts) > 1:
        return bool((starts == starts[:1]).all())
    return len({*torch.tensor([*starts[0].nonzero().flatten().tolist(), starts.shape[1]]).diff().tolist()}) < 2


def _read_as(tensor: torch.Tensor) -> str:
    """A name under which a declared tensor is known for what its values are."""
    steps = tensor.long().diff() if tensor.dim() == 1 and _whole(tensor) and len(tensor) else None
    if steps is None:
        return "document_ids"
    begins_at_0 = int(tensor[0]) == 0
    if begins_at_0 and bool((steps > 0).all()):
        return "cu_seqlens"
    return "batch" if begins_at_0 and bool(((steps == 0) | (steps == 1)).all()) else "seqlens"


def _one(
    name: str,
    shown: str,
    tensor: torch.Tensor,
    edges: Mapping[str, torch.Tensor],
    entries: set[int],
    lengths: set[int],
) -> Segments | None:
    if not _whole(tensor) or not tensor.numel():
        return None
    if tensor.dim() == 1:
        return _graphs(name, shown, tensor, edges, entries) or _by_sizes(name, shown, tensor, edges, lengths)
    if tensor.dim() == 2 and min(tensor.shape) > 0:
        ids = None
        if name in _DOCUMENTS:
            ids = _by_numbers(tensor, may_be_sentences=name in _MAY_BE_SENTENCES)
        elif name in _POSITIONS:
            ids = _by_positions(tensor)
        if ids is not None and int(ids.max()) > 0:
            return Segments("document", ids, int(ids.max()) + 1, shown)
    return None


def _graphs(
    name: str, shown: str, tensor: torch.Tensor, edges: Mapping[str, torch.Tensor], entries: set[int]
) -> Segments | None:
    """By a vector that numbers the graphs from 0: under a name for it, or next to edges between that many nodes."""
    count = int(tensor.max()) + 1
    if len(tensor) < 3 or not 1 < count < len(tensor) or len(tensor) not in entries:
        return None
    if int(tensor.min()) != 0 or not bool((tensor.bincount() > 0).all()):
        return None
    own = {shown: e for shown, e in edges.items() if _within(e, len(tensor))}
    in_order = bool((tensor.diff() >= 0).all())
    if name in VECTORS or (own and in_order and not name.startswith(("y", "label", "target", "edge"))):
        return Segments("graph", tensor.long(), count, shown, own)
    return None


def _by_sizes(
    name: str, shown: str, tensor: torch.Tensor, edges: Mapping[str, torch.Tensor], lengths: set[int]
) -> Segments | None:
    """By borders, ends or counts."""
    values = tensor.long()
    if name in _BORDERS and int(values[0]) == 0:
        sizes = values.diff()
    elif name in _ENDS:
        sizes = values.diff() if int(values[0]) == 0 else torch.cat([values[:1], values.diff()])
    elif name in _COUNTS:
        sizes = values
    else:
        return None
    sizes = sizes[sizes != 0]
    total = int(sizes.sum())
    if len(sizes) < 2 or bool((sizes < 0).any()) or total not in lengths or total == len(values):
        return None
    ids = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    own = {shown: e for shown, e in edges.items() if _within(e, total)}
    return Segments("graph" if name in _OF_GRAPHS or own else "document", ids, len(sizes), shown, own)


def _by_numbers(tensor: torch.Tensor, *, may_be_sentences: bool) -> torch.Tensor | None:
    """Each run of one number in a row is a document; one of 0 at the end, or of negative numbers, is padding."""
    values = tensor.long()
    if may_be_sentences and bool((values <= 1).all()) and bool((values[:, 0] == 0).all()):
        return None
    changes = torch.zeros_like(values, dtype=torch.bool)
    changes[:, 1:] = values[:, 1:] != values[:, :-1]
    changes[:, 0] = True
    at_the_end = (values != 0).flip(1).cumsum(1).flip(1) == 0
    outside = (values < 0) | (at_the_end & (values > 0).any(1, keepdim=True))
    return _numbered(changes, outside)


def _by_positions(tensor: torch.Tensor) -> torch.Tensor | None:
    """A document begins at each 0; further ones at the end of a row are padding."""
    values = tensor.long()
    starts = values == 0
    if not bool(starts[:, 0].all()):
        return None
    outside = (~starts).flip(1).cumsum(1).flip(1) == 0
    outside = outside & (outside.sum(1, keepdim=True) > 1)
    goes_on = values[:, 1:] == values[:, :-1] + 1
    if not bool((goes_on | starts[:, 1:] | outside[:, 1:]).all()):
        return None
    inner = starts & ~outside
    same_ends = bool((inner == inner[:1]).all()) and len(values) > 1
    return None if same_ends or int(inner.sum(1).max()) < 2 else _numbered(starts, outside)


def _numbered(starts: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 for the runs that begin at ``starts``, through all rows; -1 outside."""
    runs = (starts & ~outside).flatten().cumsum(0).view(starts.shape) - 1
    return torch.where(outside, -1, runs)


def _within(edges: torch.Tensor, nodes: int) -> bool:
    return int(edges.min()) >= 0 and int(edges.max()) < nodes


def _whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _name(path: nested.Path) -> str:
    return str(nested.last_name(path)).lower().lstrip("_")
