"""What is padded in the first padded batch of a loop, and edits of that batch: cut to fewer positions, or filled with
other values. No value is made up."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.checks.batch.padding_invariance.compared_ids import ComparedIds
from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply, UsageError
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.cut import Cut
from pytest_trainloop.instruments.batches.episodes import read_episodes
from pytest_trainloop.instruments.batches.grids import Grid, Leaf, leaves, time_axes
from pytest_trainloop.instruments.batches.groups import in_step, padded_groups, together
from pytest_trainloop.instruments.batches.own_data import require_given_data
from pytest_trainloop.instruments.batches.padding import PaddingMask, padding_ids
from pytest_trainloop.instruments.batches.padding_hints import is_label
from pytest_trainloop.instruments.batches.segments import read as read_segments
from pytest_trainloop.instruments.batches.values import binary, constant, plain, whole
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.process_state import preserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.runs.evidence import Evidence

LOOKED_AT = 4
"""Batches of the loop that are looked at for their lengths."""

MOST_ROWS = 4
"""Rows of a slice, at most."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows with equally many real positions, and their positions from ``start`` to ``stop``, of which those from
    ``first`` to ``last`` are real. ``uneven``: some of the rows are shorter."""

    rows: tuple[int, ...]
    start: int
    stop: int
    first: int
    last: int
    uneven: bool = False

    @property
    def total(self) -> int:
        return self.stop - self.start

    @property
    def real(self) -> int:
        return self.last - self.first

    @property
    def padding(self) -> int:
        return self.total - self.real

    def kept(self, padded: int) -> Slice:
        """With so many padded positions left on their side."""
        left = self.first > self.start
        return replace(self, start=self.first - (padded if left else 0), stop=self.last + (0 if left else padded))

    def narrowed(self, real: int, padded: int, *, left: bool) -> Slice:
        """So many real positions next to the padding, and so many padded ones."""
        first, last = (self.first, self.first + real) if left else (self.last - real, self.last)
        start, stop = (first - padded, last) if left else (first, last + padded)
        return replace(self, start=start, stop=stop, first=first, last=last)

    def cut_to(self, part: Slice) -> Cut:
        return Cut(self.total, range(part.start - self.start, part.stop - self.start))


@dataclass(slots=True, eq=False)
class Padded:
    """One group of tensors that are padded in the same places."""

    batch: Any
    mask: PaddingMask
    near: tuple[PaddingMask, ...]
    """Other groups whose outputs can be as wide."""
    declared: bool
    """Whether ``padding=`` is about this padding."""
    configured: bool
    """Whether the configuration of a model names the id of the padding."""
    lengths: frozenset[int]
    """Those of the batches that were looked at; none where a single one is given."""
    pad_ids: tuple[int, ...]
    """Those that models take for padding."""
    count: int | None = None
    """The number of rows that the loop takes, where it takes no other."""
    instead: Padded | None = None
    """All groups of this width, or of near ones, as one, for a loop that takes them only so."""
    in_step: bool = False
    """Whether the groups near by lose as many positions as this one."""
    slices: list[Slice] = field(init=False)
    same_width: list[PaddingMask] = field(init=False)
    """Other groups of this width."""

    def __post_init__(self) -> None:
        self.slices = _slices(self.mask, self.near)
        self.same_width = [group for group in self.near if group.grid == self.mask.grid]

    @property
    def left(self) -> bool:
        return self.mask.side == "left"

    @property
    def varying(self) -> bool:
        return len(self.lengths) > 1

    @property
    def sure(self) -> bool:
        """Whether the project itself marks this as padding; a mask next to features may be of observations."""
        by_batch = self.mask.source == "lengths" or (self.mask.source == "mask" and self.mask.of_ids)
        return self.declared or self.varying or self.configured or by_batch

    def cut(self, chosen: Slice) -> Any:
        """The slice, its rows repeated where the loop takes ``count``. Of groups near by as many positions are cut off
        (``in_step``), or what is padding in all of the rows, so that they are of another width."""
        axis, rows = self.mask.grid.batch_dim, nested.rows(self.batch, self.mask.grid.batch_dim)
        groups = [(self.mask, chosen)]
        for other in self.near:
            if self.in_step:
                kept = other.grid.length - self.mask.grid.length + chosen.total
                groups.append(
                    (other, replace(_slice(other, dict.fromkeys(chosen.rows, kept), kept).kept(0), uneven=True))
                )
                continue
            longest = max(other.lengths[row] for row in chosen.rows)
            groups.append((other, _slice(other, dict.fromkeys(chosen.rows, longest), longest).kept(0)))
        memo = {}
        for path, tensor in nested.paths(self.batch):
            for mask, part in groups if plain(tensor) else ():
                if (made := _narrowed(path, tensor, mask, part, rows)) is not tensor:
                    memo[id(tensor)] = made
        wanted = [chosen.rows[i % len(chosen.rows)] for i in range(self.count or len(chosen.rows))]
        try:
            return nested.take(copy.deepcopy(self.batch, memo), wanted, axis)
        except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:
            reraise_raised(error)
            raise CannotDecide(
                f"rows cannot be taken from {nested.describe(self.batch)} ({type(error).__name__})"
            ) from error

    @property
    def fill(self) -> float | None:
        """The one value in the padding of ids."""
        found = [
            leaf.under(self.mask.grid) for leaf in leaves(self.batch) if leaf.path in self.mask.of and _is_ids(leaf)
        ]
        values = {constant(leaf.at(self.mask.mask)) for leaf in found if leaf.time is not None}
        return values.pop() if len(values) == 1 else None

    def with_id(self, chosen: Slice, pad_id: int) -> Any:
        """The slice with this id in its padding."""
        ids = {leaf.path for leaf in leaves(self.batch) if leaf.path in self.mask.of and _is_ids(leaf)}
        first, last = chosen.first - chosen.start, chosen.last - chosen.start

        def filled(path: Path, value: torch.Tensor) -> torch.Tensor:
            if path not in ids or chosen.total not in value.shape:
                return value
            out = value.detach().clone()
            cells = out if self.mask.grid.batch_dim == 0 else out.mT
            cells[:, :first], cells[:, last:] = pad_id, pad_id
            return out

        return nested.mapped(self.cut(chosen), filled, lambda v: isinstance(v, torch.Tensor) and plain(v))

    @property
    def masks(self) -> list[Leaf]:
        """The masks of zeros and ones that say so."""
        known = (leaf.under(self.mask.grid) for leaf in leaves(self.batch) if leaf.path in self.mask.by)
        return [leaf for leaf in known if leaf.tensor.dim() == 2 and binary(leaf.tensor)]

    @property
    def inverted(self) -> list[Leaf]:
        """Those that are 1 where ids hold the padding id: one that is named after the padding is so on purpose."""
        known = self.masks if self.declared or self.fill in self.pad_ids else []
        return [m for m in known if "pad" not in m.name and constant(m.at(self.mask.mask)) == 1.0]

    def with_inverted(self, chosen: Slice, masks: Sequence[Leaf]) -> Any:
        """The slice with the other value in every entry of these masks."""
        paths = {leaf.path for leaf in masks}
        return nested.mapped(
            self.cut(chosen),
            lambda path, value: value.logical_not().to(value.dtype) if path in paths else value,
            lambda v: isinstance(v, torch.Tensor) and plain(v),
        )

    def other_values(self, cells: torch.Tensor) -> Any:
        """The batch with the row's own real values in these cells (rows, positions) of the group's inputs."""
        lengths = torch.tensor(self.mask.lengths)[:, None]
        first = self.mask.grid.length - lengths if self.left else torch.zeros_like(lengths)
        source = (first + torch.arange(self.mask.grid.length)[None] % lengths.clamp(min=1)).clamp(
            max=self.mask.grid.length - 1
        )

        def filled(path: Path, value: torch.Tensor) -> torch.Tensor:
            leaf = Leaf(path, value).under(self.mask.grid)
            if path not in self.mask.of or leaf.two_valued or is_label(leaf, None):
                return value
            out = value.detach().clone()
            made = Leaf(path, out, leaf.row, leaf.time).cells
            made[cells] = made[torch.arange(len(source))[:, None].expand(source.shape), source][cells]
            return out

        return nested.mapped(nested.copy(self.batch), filled, lambda v: isinstance(v, torch.Tensor) and plain(v))


def _is_ids(leaf: Leaf) -> bool:
    return leaf.whole and leaf.tensor.dim() == 2 and not leaf.two_valued and not is_label(leaf, None)


def _slices(mask: PaddingMask, others: Sequence[PaddingMask] = ()) -> list[Slice]:
    """The rows with the fewest real positions, and the padded rows with the most: at most four of each, equally long.
    Rows with two real and two padded positions are preferred: a model of the next position has a target in them, and
    the first padded position may end a text. So are rows in which the ``others`` are shorter too."""
    total = mask.grid.length
    for rows in (
        [r for r in range(mask.grid.rows) if all(g.lengths[r] <= total - 2 for g in others)],
        range(mask.grid.rows),
    ):
        lengths = {r: mask.lengths[r] for r in rows}
        for least, most in ((2, total - 2), (1, total - 1)):
            sizes = sorted(n for n in lengths.values() if least <= n <= most)
            if sizes:
                return [_slice(mask, lengths, n) for n in dict.fromkeys((sizes[0], sizes[-1]))]
    return []


def uneven(mask: PaddingMask) -> list[Slice]:
    """All rows that are padded by two positions or more, cut to the longest of them: where one row alone, or several
    equal ones, give no gradient, as in a loss that contrasts rows."""
    rows = tuple(r for r, n in enumerate(mask.lengths) if 1 <= n <= mask.grid.length - 2)
    longest = max((mask.lengths[r] for r in rows), default=0)
    found = _slice(mask, dict.fromkeys(rows, longest), longest)
    return [replace(found, rows=rows, uneven=True)] if len(rows) > 1 else []


def _slice(mask: PaddingMask, lengths: dict[int, int], n: int) -> Slice:
    rows, total = tuple(r for r, length in lengths.items() if length == n)[:MOST_ROWS], mask.grid.length
    left = mask.side == "left"
    return Slice(rows, 0, total, total - n if left else 0, total if left else n)


def _narrowed(path: Path, tensor: torch.Tensor, mask: PaddingMask, chosen: Slice, rows: int) -> torch.Tensor:
    """A tensor of the batch cut along its positions: those of the group, masks between positions, lengths, and ids with
    one position more or less that hold nothing where they are cut."""
    total, grid = mask.grid.length, mask.grid
    if path in mask.others or (tensor.dim() > 1 and not mask.alone and path not in mask.of):
        return tensor
    numbers = tensor.shape == (rows,) and not tensor.is_floating_point() and not (mask.joint or chosen.uneven)
    if numbers and tuple(tensor.tolist()) == mask.lengths:
        return tensor - (mask.lengths[chosen.rows[0]] - chosen.real)
    for longer in (0, 1, -1):
        axes = time_axes(tensor, grid.batch_dim, rows, total + longer, grid.time_dim)
        if axes and (longer == 0 or _is_shifted(tensor, mask, chosen)):
            for axis in axes:
                tensor = tensor.narrow(axis, chosen.start, chosen.total + longer)
            return tensor.clone()
    square = total != rows and tensor.shape[:1] == (total,) and set(tensor.shape) == {total}
    of_one = tensor.dim() > 1 and tensor.shape[0] == 1 != rows and total in tensor.shape
    if mask.alone and (square or of_one):  # without rows: what a shorter batch would have from the first on
        for axis in (a for a in range(tensor.dim()) if tensor.shape[a] == total):
            tensor = tensor.narrow(axis, 0, chosen.total)
        return tensor.clone()
    return tensor


def _is_shifted(tensor: torch.Tensor, mask: PaddingMask, chosen: Slice) -> bool:
    if tensor.dim() != 2 or tensor.is_floating_point() or mask.grid.batch_dim != 0:
        return False
    own, off = tensor[list(chosen.rows)], mask.grid.length - chosen.stop
    off_cut = own[:, : chosen.start] if chosen.start else own[:, own.shape[1] - off :]
    return bool((off_cut == off_cut[:1, :1]).all())


def padded(evidence: Evidence) -> list[Padded]:
    """One for each length to which something in the first padded batch is padded. Raises ``CannotDecide`` where no
    padding is known, before the loop is run."""
    loop = evidence.fresh_loop()
    with preserved():
        try:
            return _padded(evidence, loop)
        except UsageError:
            evidence.run()  # which is refused in the same words for every check
            raise


def _padded(evidence: Evidence, loop: TrainLoop) -> list[Padded]:
    given = first_batches(loop, LOOKED_AT)
    for names in [] if loop.padding is None else loop.padding.names:
        nested.require_names(given, names, "TrainLoop.padding")
    tables, more = padding_ids(loop.modules.values()), tuple[int, ...]()
    known = [(batch, [p for p in _read(loop, batch, tables) if _slices(p)]) for batch in given]
    if loop.padding is None and not any(groups for _, groups in known) and any(_may_hold_ids(b) for b in given):
        more = evidence.shared(ComparedIds.of)
        known = [(batch, [p for p in _read(loop, batch, more) if _slices(p)]) for batch in given] if more else known
    batch, groups = next(((b, groups) for b, groups in known if groups), (None, []))
    nothing = None if groups else _nothing_padded(loop, given)
    looks_up = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in _modules(loop))
    if nothing is None or loop.padding is not None or (isinstance(nothing, DoesNotApply) and looks_up):
        require_given_data(evidence, "none with more or less padding can be composed")
    if nothing is not None:
        raise nothing
    configured = [
        i for m in _modules(loop) if isinstance(i := getattr(getattr(m, "config", None), "pad_token_id", None), int)
    ]
    pad_ids = tuple(dict.fromkeys((*tables, *more, *configured)))
    batch = nested.copy(batch)

    def made(mask: PaddingMask, near: Sequence[PaddingMask]) -> Padded:
        lengths = frozenset() if loop.batches is None else _lengths(given, batch, mask)
        by_config = any(_is_padded_with(i, batch, mask) for i in configured)
        return Padded(batch, mask, tuple(near), _is_declared(loop, batch, mask), by_config, lengths, pad_ids)

    found = [made(g, [o for o in groups if o is not g and g.grid.is_near(o.grid)]) for g in groups]
    for grid in dict.fromkeys(g.grid for g in groups if not g.alone):
        joint = together([g for g in groups if g.grid == grid])
        if joint is not None and _slices(joint):
            instead = made(joint, ())
            for single in (one for one in found if one.mask.grid == grid):
                single.instead = instead
    for single in found:
        mask = in_step(single.mask, [g for g in single.near if g.grid != single.mask.grid])
        if single.instead is None and mask is not None and _slices(mask):
            single.instead = made(mask, [g for g in single.near if g.grid != mask.grid])
            single.instead.in_step = True
    return found


def _modules(loop: TrainLoop) -> list[nn.Module]:
    return [m for module in loop.modules.values() for m in members.modules(module)]


def _may_hold_ids(batch: Any) -> bool:
    return any(t.dim() > 1 and whole(t) for t in nested.tensors(batch) if plain(t))


def _read(loop: TrainLoop, batch: Any, pad_ids: Sequence[int]) -> list[PaddingMask]:
    declared, time_first = loop.padding, loop.padding is not None and loop.padding.dim == 0
    axis = loop.batch_dim if isinstance(loop.batch_dim, int) else int(time_first)
    found = padded_groups(batch, batch_dim=axis, declared=declared, pad_ids=pad_ids)
    if found or loop.batch_dim is not None or declared is not None:
        return found
    columns = padded_groups(batch, batch_dim=1, pad_ids=pad_ids)
    return [p for p in columns if p.source == "lengths" or _rows_lie_second(batch, p.grid)]


def _rows_lie_second(batch: Any, grid: Grid) -> bool:
    """Whether another tensor shows that ids (positions, rows) have their rows second: labels with as many rows first,
    or ids of as many rows and another length. Of two rows that hold the padding id anywhere (odd: id_of_padding_drawn)
    the ids alone may look as if their positions came first."""
    shapes = [tuple(t.shape) for t in nested.tensors(batch) if plain(t) and t.dim()]
    ids = [tuple(t.shape) for t in nested.tensors(batch) if plain(t) and t.dim() == 2 and whole(t)]
    labels = any(shape[0] == grid.rows != grid.length for shape in shapes)
    return labels or any(n not in (1, grid.length) and rows == grid.rows for n, rows in ids)


def _is_declared(loop: TrainLoop, batch: Any, mask: PaddingMask) -> bool:
    """Where ids of the batch are padded with the declared id, the padding of anything else is not."""
    declared = () if loop.padding is None else loop.padding.all
    if any(p.of or p.pad_id is None for p in declared):
        return True
    groups = _read(loop, batch, padding_ids(loop.modules.values())) if declared else []
    about = [p.of for p in groups if any(_is_padded_with(d.pad_id, batch, p) for d in declared)]
    return bool(declared) and (not about or any(mask.of & of for of in about))


def _is_padded_with(pad_id: int | None, batch: Any, mask: PaddingMask) -> bool:
    """Whether ids of the batch are padded with this one."""
    found = (leaf.under(mask.grid) for leaf in leaves(batch) if leaf.path in mask.of)
    ids = (leaf for leaf in found if leaf.time is not None and leaf.whole and not leaf.two_valued)
    return pad_id is not None and any(bool((leaf.at(mask.mask) == pad_id).all()) for leaf in ids)


def _lengths(given: list[Any], batch: Any, mask: PaddingMask) -> frozenset[int]:
    """How long batches are where this one is padded."""
    grid = mask.grid
    every = [[t for t in nested.tensors(one) if plain(t)] for one in (batch, *given)]
    for number, tensor in enumerate(every[0]):
        axes = time_axes(tensor, grid.batch_dim, grid.rows, grid.length, grid.time_dim)
        if axes:
            same = [t for other in every[1:] for t in other[number : number + 1] if t.dim() == tensor.dim()]
            return frozenset(t.shape[axes[0]] for t in same)
    return frozenset()


def _nothing_padded(loop: TrainLoop, batches: Sequence[Any]) -> CannotDecide:
    if loop.padding is not None and loop.padding.pad_id is not None:
        return CannotDecide(
            f"no row of the batch ends or begins with the declared pad_id {loop.padding.pad_id} and no other "
            "value: give a batch with rows of unequal lengths",
            needs="a batch with rows of unequal lengths",
        )
    looks_up = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in _modules(loop))
    if loop.padding is None and not looks_up and any(read_segments(b) or read_episodes(b) for b in batches):
        return DoesNotApply(
            "no padding is known in the batch, whose segments lie behind each other, and no ids are read"
        )
    if loop.padding is None and not any(
        t.dim() > 1 and not t.is_floating_point() for batch in batches for t in nested.tensors(batch)
    ):
        return DoesNotApply("no padding is known in the batch, and it holds no ids, masks or labels by position")
    return CannotDecide(
        "no padding is known in the batch: give one with rows of unequal lengths and pass padding=Padding(pad_id=...)",
        needs="padding=",
    )
