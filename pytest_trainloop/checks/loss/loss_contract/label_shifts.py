"""By how many positions labels are ahead of the ids that a causal model is given.

The labels of all calls from one line are collected before anything is said. They are ``by`` positions ahead where every
label that counts is the id so many positions after its output's own (but for one label: the end of a text). Three
questions are asked of such labels:

*Of which inputs do outputs depend?* By the gradient of some outputs with respect to what the embedding gave, which is
exactly 0 beyond the last one. A model that sees later inputs is asked nothing. Else the right labels are one position
after the last input; a model that does not see its own position (a masked convolution) has ``by`` 0.

*May it be chance?* Let the ids of the rows be put in any order. Of the labels compared, n_v hold the value v, that m_v
of all M ids hold. The share of orders in which the ids agree with all n labels is, with falling factorials,

    prod_v m_v (m_v - 1) ... (m_v - n_v + 1)  /  M (M - 1) ... (M - n + 1)

and it is multiplied over the rows of all calls, each different row once. Only labels that are not the next id as well
are compared: in a run of equal ids every shift agrees. Five shifts in each of 10,000 loops whose labels are something
else are mistaken once in 20,000 such collections where 1e-9 is the limit (``SURE``). Above it, and below one in a
thousand, it is advice. Fewer than four kinds of labels may be tags, and are not judged.

*May it be meant?* Where one operation shifted by two or more positions, where another loss of the same inputs is
compared with the next id (heads that predict several tokens, a reconstruction on the side), and where labels of
the previous id begin with one fixed label (an echo after a blank), nothing is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from pytest_trainloop.finding import Finding
from pytest_trainloop.tracing.provenance_queries import layout
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import Call
    from pytest_trainloop.checks.loss.loss_contract.tokens import Embedded
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.tracing.provenance import Node
    from pytest_trainloop.tracing.provenance_queries import Layout

SHIFTS = (-1, 0, 1, 2, 3)

SURE, SAID = math.log(1e-9), math.log(1e-3)
"""Logarithms of the chance below which labels that agree are a fault, and advice."""

KINDS = 4
"""Different ids, and different labels, below which nothing is said."""

_SUMMARY = {
    0: "labels are not shifted: a causal model is asked for the token that it is given",
    -1: "labels are shifted the wrong way: a causal model is asked for the previous token",
    2: "labels are shifted twice: the output of a causal model is compared with the token two positions ahead",
}

GATHER = "gather"
"""The entries of log-softmaxes at the labels: a cross entropy that is written out."""

Way = Literal["rows first", "positions first", "flat"]


class Reading(NamedTuple):
    """The labels of one call that count, next to the ids of one embedding."""

    ids: torch.Tensor
    """(rows, positions)."""
    out: torch.Tensor
    """What the embedding gave."""
    turned: bool
    """Whether rows stand along its second axis."""
    where: torch.Tensor
    """Which entries of the targets count."""
    row: torch.Tensor
    position: torch.Tensor
    label: torch.Tensor
    """Of each that counts: where it is, and the label."""


@dataclass(slots=True)
class ComparedLabels:
    """The labels of all calls from one line against the ids of one embedding."""

    name: str
    where: str
    alive: set[int] = field(default_factory=lambda: set(SHIFTS))
    """Shifts by which no label so far disagrees."""
    seen: set[int] = field(default_factory=set)
    """Shifts by which some label agrees: there may be no id so far ahead."""
    excused: dict[int, float] = field(default_factory=dict)
    """The one label for each shift that need not agree."""
    last: int | None = None
    """The last input that outputs depend on, from their own position."""
    chance: dict[int, float] = field(default_factory=lambda: dict.fromkeys(SHIFTS, 0.0))
    """The logarithm of the chance that labels agree so often."""
    compared: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SHIFTS, 0))
    kinds: set[float] = field(default_factory=set)
    """The labels that were compared."""
    first: list[float] = field(default_factory=list)
    """The label of each row for which there is no previous id."""
    rows: set[tuple[int, ...]] = field(default_factory=set)
    """Rows that were compared before."""

    def add(self, read: Reading, call: Call) -> None:
        rows = [tuple(row) for row in read.ids.tolist()]
        new = torch.tensor([row not in self.rows for row in rows], device=read.row.device)
        self.rows.update(rows)
        for by in list(self.alive):
            self._narrow(read, by)
        if self.last is None and self.alive:
            self._look(read, call)
        for by in self.alive if bool(new.any()) else ():
            self._count(read, by, new)
        self.first += read.label[(read.position == 0) & new[read.row]].tolist()

    def _narrow(self, read: Reading, by: int) -> None:
        """Whether all labels agree with the ids so many positions ahead, but for one label (the end of a text)."""
        inside, ahead = _ahead(read, by)
        if bool((ahead == read.label[inside]).any()):
            self.seen.add(by)
        wrong = torch.unique(read.label[inside][ahead != read.label[inside]]).tolist()
        excused = self.excused.get(by)
        if not wrong or wrong == [excused]:
            return
        if by >= 1 and len(wrong) == 1 and excused is None:
            self.excused[by] = wrong[0]
        else:
            self.alive.discard(by)

    def _look(self, read: Reading, call: Call) -> None:
        reached = last_input(read, call)
        if reached is not None and reached > 0:
            self.alive.clear()  # later inputs are seen: no shift is expected
        else:
            self.last = reached

    def _count(self, read: Reading, by: int, new: torch.Tensor) -> None:
        inside, ahead = _ahead(read, by)
        right = 1 + (self.last or 0)
        row, position, label = (t[inside] for t in (read.row, read.position, read.label))
        following = (position + right).clamp(0, read.ids.shape[1] - 1)
        same = (position + right == following) & (read.ids[row, following] == label)
        chosen = new[row] & (ahead == label) & (~same | (by == right))
        at = torch.unique((row * read.ids.shape[1] + position + by)[chosen])
        labels = read.ids.flatten()[at]
        self.chance[by] += chance(labels, read.ids[new])
        self.compared[by] += len(labels)
        self.kinds.update(torch.unique(labels).tolist())

    @property
    def by(self) -> int | None:
        """By how many positions the labels are ahead of the ids, where one way to see them is left."""
        agree = self.alive & self.seen
        return next(iter(agree)) if len(agree) == 1 and len(self.kinds) >= KINDS else None

    @property
    def is_right(self) -> bool:
        right = 1 + (self.last or 0)
        return self.by == right and self.chance[right] < SAID

    @property
    def is_unseen(self) -> bool:
        """Whether labels look wrong, and no gradient told what outputs depend on."""
        return self.last is None and self.by not in (None, 1) and self.chance[self.by or 0] < SAID

    @property
    def is_echo(self) -> bool:
        """Whether labels of the previous id begin with one fixed label."""
        return self.by == -1 and len(self.first) > 1 and len(set(self.first)) == 1


class LabelShifts:
    """What the calls of a run say of the shift of their labels."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, Site, str | None, str, Way], ComparedLabels] = {}

    def compare(self, call: Call) -> None:
        target = labels_of(call)
        name = "index" if call.name == GATHER else "target"
        if target is None or target.is_floating_point() or _shifted_at_once(call.node(name)):
            return
        for table in dict.fromkeys(one.table for one in call.embedded):
            for way, read in readings(call, target, [one for one in call.embedded if one.table == table]):
                key = call.name, call.site, call.layer, table, way
                self.found.setdefault(key, ComparedLabels(call.name, str(call.place))).add(read, call)

    @property
    def unseen(self) -> bool:
        """Whether labels look wrong, and it is not known what outputs depend on."""
        return any(one.is_unseen for one in self.found.values())

    def findings(self) -> Iterator[Finding]:
        if any(one.is_right for one in self.found.values()):
            return  # another loss may look elsewhere
        for one in self.found.values():
            if one.by is None or one.is_right or one.is_echo or one.chance[one.by] >= SAID:
                continue
            if one.is_unseen and one.by > 1:
                yield _finding(one, one.by, one.by, "what outputs depend on could not be seen")
            elif one.last is not None:
                yield _finding(one, one.by, one.by - one.last)


def _finding(one: ComparedLabels, by: int, ahead: int, unsure: str = "") -> Finding:
    if one.chance[by] >= SURE:
        unsure = "they are too few to be sure"
    count, far = one.compared[by], f"{abs(ahead)} position{'s' if abs(ahead) != 1 else ''}"
    summary = _SUMMARY.get(
        ahead, f"labels are shifted by {ahead}: the output of a causal model is compared with the token there"
    )
    where = f"the id {far} {'ahead' if ahead > 0 else 'before'}" if ahead else "the id of the same position"
    return Finding(
        cause="shifted_twice" if ahead > 1 else "not_shifted",
        level="advice" if unsure else "fault",
        summary=f"{'it seems that ' if unsure else ''}{summary} ({one.name})",
        measured=f"{count} labels are {where} and not the next one, and none is otherwise; the probability of that "
        f"in ids of random order is {_probability(one.chance[by])}",
        shown_by="the labels against the ids that the embedding looked up; "
        + (unsure or "no output depends on later inputs"),
        culprits=("labels",),
        where=one.where,
        repair="shift once, in the data or in the loss; to settle it, give batches= with more labelled positions"
        if unsure
        else "",
    )


def _probability(logarithm: float) -> str:
    """In words that a reader can weigh: what is below one in 10^12 is not told apart."""
    return "below 1e-12" if logarithm < math.log(1e-12) else f"{math.exp(logarithm):.0e}"


def chance(labels: torch.Tensor, pool: torch.Tensor) -> float:
    """The logarithm of the share of the orders of ``pool`` that put these labels where they are."""
    values, counts = torch.unique(labels, return_counts=True)
    total, among = pool.numel(), [int((pool == v).sum()) for v in values]
    each = sum(_falling(m, n) for m, n in zip(among, counts.tolist(), strict=True))
    return each - _falling(total, len(labels))


def _falling(of: int, most: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(of - most + 1)


def _ahead(read: Reading, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels have an id so many positions ahead, and these ids."""
    at = read.position + by
    inside = (at >= 0) & (at < read.ids.shape[1])
    return inside, read.ids[read.row[inside], at[inside]]


def labels_of(call: Call) -> torch.Tensor | None:
    """The labels of a call: one for each row of scores."""
    if call.name != GATHER:
        return call.tensor("target")
    index, given = call.tensor("index"), call.tensor("input")
    if index is None or given is None or call.given.get("dim") != given.dim() - 1:
        return None
    return index.squeeze(-1) if index.shape == (*given.shape[:-1], 1) else None


def _class_axis(call: Call) -> int:
    return -1 if call.name == GATHER else 1


def readings(call: Call, target: torch.Tensor, embedded: list[Embedded]) -> Iterator[tuple[Way, Reading]]:
    """The labels that count next to the latest ids of one embedding, for each way to read the axes of the scores."""
    found = layout(call.node("input"))
    if found is None or not found.leading or found.position.dim() != target.dim() + 1:
        return
    flat = found.position.select(_class_axis(call), 0)
    if flat.shape != target.shape:
        return
    where = target != call.given.get("ignore_index", -100)
    counted = call.counted()
    if counted is not None and counted.numel() == where.numel():
        where = where & counted.reshape(where.shape)
    if not bool(where.any()):
        return
    leading, at = _before_head(found, found.coordinates(flat.to(target.device)[where]))
    for one in reversed(embedded):
        ids = one.ids.ids if one.ids.ids.dim() == 2 else one.ids.ids[None]
        if torch.unique(ids).numel() < KINDS:
            continue
        ids = ids.to(target.device)
        read = list(_ways(leading, ids, at))
        for way, row, position in read:
            turned = way == "positions first"
            yield (
                way,
                Reading(ids.T if turned else ids, one.out, turned, where, row, position, target[where]),
            )
        if read:
            return


def _before_head(found: Layout, at: list[torch.Tensor]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """The axes of what the head is given before it is flattened, or some positions are picked from it, and where the
    entries lie on them."""
    node, moves = found.layer.parents[0], []
    while node.moves and node.parents:
        moves += [] if node.replay is None else [node.replay]
        node = node.parents[0]
    if len(found.leading) != 1 or not moves or len(node.shape) != 3:
        return found.leading, at
    flat = torch.arange(node.shape[0] * node.shape[1]).reshape(*node.shape[:2], 1).expand(node.shape)
    try:
        for replay in reversed(moves):
            flat = replay(flat)
    except (RuntimeError, TypeError) as error:  # a move that numbers cannot make, or an index on another device
        reraise_raised(error)
        return found.leading, at
    if flat.dim() != 2 or flat.shape[0] != found.leading[0]:
        return found.leading, at
    position = flat[:, 0].to(at[0].device)[at[0]]
    return node.shape[:2], [position // node.shape[1], position % node.shape[1]]


def _ways(
    leading: tuple[int, ...], ids: torch.Tensor, at: list[torch.Tensor]
) -> Iterator[tuple[Way, torch.Tensor, torch.Tensor]]:
    """How the axes of the scores may be those of the ids: the way, and the row and position of each label."""
    rows, length = ids.shape
    if length < KINDS:
        pass
    elif len(leading) == 1 and leading[0] == ids.numel():
        yield "flat", at[0] // length, at[0] % length
    elif len(leading) == 2 and leading[0] == rows and leading[1] >= length:
        yield "rows first", at[0], at[1] - (leading[1] - length)  # a prefix may stand before the ids
    if len(leading) == 2 and leading == (rows, length) and rows >= KINDS:
        yield "positions first", at[1], at[0]


def last_input(read: Reading, call: Call) -> int | None:
    """The last position whose input an output depends on, relative to the output's own position.

    By the gradient of one output that counts in each row, near the middle. None where it depends on its own position
    only, as where layers start at zero, or where no gradient can be taken.
    """
    given = call.given.get("input")
    length = read.ids.shape[1]
    between = read.position[(read.position >= 1) & (read.position <= length - 2)]
    if not isinstance(given, torch.Tensor) or given.dim() < 2 or not read.out.requires_grad or not len(between):
        return None
    middle = int(between[(between - length // 2).abs().argmin()])
    chosen = torch.zeros_like(read.where)
    chosen[read.where] = read.position == middle
    with torch.enable_grad():
        scores = given.movedim(_class_axis(call), -1)[chosen].double()
        total = (scores * torch.linspace(0.5, 1.5, scores.shape[-1], dtype=torch.float64, device=scores.device)).sum()
        try:
            (slope,) = torch.autograd.grad(total, read.out, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a re-entrant checkpoint refuses it
            return None
    if slope is None:
        return None
    reached = (slope != 0).any(-1).reshape(read.ids.T.shape if read.turned else read.ids.shape)
    reached = reached.any(1 if read.turned else 0).nonzero().flatten()
    causal = reached.numel() > 1 and int(reached.min()) < middle
    return int(reached.max()) - middle if causal else None


def _shifted_at_once(node: Node | None) -> bool:
    """Whether one operation shifted the labels by two or more positions, which is meant."""
    for _ in range(12):
        if node is None or not node.moves or not node.parents:
            return False
        parent = node.parents[0]
        if node.op == "__getitem__" and node.replay is not None and not node.picks and len(parent.shape) == 2:
            first = node.replay(torch.arange(math.prod(parent.shape)).reshape(parent.shape)).flatten()[:1]
            if first.numel() and int(first) % parent.shape[1] >= 2:
                return True
        node = parent
    return False
