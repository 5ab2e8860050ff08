"""Labels that are shifted wrongly against the ids that a causal model reads.

*Of which inputs do outputs depend?* By the gradient of some outputs with respect to what the embedding gave, which is
exactly 0 beyond the last one. A model that sees later inputs is asked nothing. Else the right labels are one position
after the last input; a model that does not see its own position (a masked convolution) has ``by`` 0.

*May labels that agree be chance?* Let the ids of the rows be put in any order. Of the labels compared, n_v hold the
value v, that m_v of all M ids hold. The share of orders in which the ids agree with all n labels is, with falling
factorials,

    prod_v m_v (m_v - 1) ... (m_v - n_v + 1)  /  M (M - 1) ... (M - n + 1)

and it is multiplied over the rows of all calls, each different row once. Only labels that are not the next id as well
are compared: in a run of equal ids every shift agrees. Five shifts in each of 10,000 loops whose labels are something
else are mistaken once in 20,000 such collections where 1e-9 is the limit (``SURE``). Above it, and below one in a
thousand, it is advice. Fewer than four kinds of labels may be tags, and are not judged.

*May it be intended?* Where one operation shifted by two or more positions, where another loss of the same inputs is
compared with the next id (heads that predict several tokens, a reconstruction on the side), and where labels of
the previous id begin with one fixed label (an echo after a blank), nothing is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.loss.loss_contract.causes import found as finding_of
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.core.wording import count as times
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.data_lines import name_in_batch
from pytest_trainloop.instruments.tracing.definitions import compared
from pytest_trainloop.instruments.tracing.tape import Gone
from pytest_trainloop.instruments.tracing.tape_queries import MOVES, again, layout, picks, unmoved
from pytest_trainloop.recording.construction import memory_of
from pytest_trainloop.recording.torch_names import CLASS_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import LossCall
    from pytest_trainloop.core.finding import Finding, Level
    from pytest_trainloop.instruments.tracing.tape import Value
    from pytest_trainloop.instruments.tracing.tape_queries import Layout

SHIFTS = (-1, 0, 1, 2, 3)
SURE, SAID = math.log(1e-9), math.log(1e-3)
"""Logarithms of the chance below which labels that agree are a fault, and advice."""
KINDS = 4
"""Different ids, and different labels, below which nothing is reported."""


class Reading(NamedTuple):
    """The labels of one call that count, with their rows and positions in the ids (rows, positions) of an embedding."""

    ids: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    label: torch.Tensor

    def ahead(self, by: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which labels have an id so many positions ahead, and these ids."""
        at = self.position + by
        inside = (at >= 0) & (at < self.ids.shape[1])
        return inside, self.ids[self.row[inside], at[inside]]


@dataclass(slots=True)
class Compared:
    """The labels of all calls from one line against the ids of one embedding."""

    name: str
    where: str
    readings: list[Reading] = field(default_factory=list)
    paths: tuple[str, str] = "", ""
    """Of the ids and of the labels in the batch."""
    last: int | None = None
    """The last input that outputs depend on, from their own position; above 0 they see later ones."""

    def decide(self) -> tuple[int, float, int] | None:
        """By how many positions all labels are ahead, the logarithm of the chance of that, and the labels compared."""
        right, alive = 1 + (self.last or 0), []
        for by in SHIFTS if (self.last or 0) <= 0 else ():
            wrong, agrees, chance, count = set(), False, 0.0, 0
            kinds, rows_before = set(), set()
            for read in self.readings:
                inside, ahead = read.ahead(by)
                row, position, label = (t[inside] for t in (read.row, read.position, read.label))
                wrong |= {*torch.unique(label[ahead != label]).tolist()}
                agrees |= bool((ahead == label).any())
                rows = [tuple(r) for r in read.ids.tolist()]
                new = torch.tensor([r not in rows_before for r in rows], device=row.device)
                rows_before.update(rows)
                following = (position + right).clamp(0, read.ids.shape[1] - 1)
                same = (position + right == following) & (read.ids[row, following] == label)
                chosen = new[row] & (ahead == label) & (~same | (by == right))
                labels = read.ids.flatten()[torch.unique((row * read.ids.shape[1] + position + by)[chosen])]
                if len(labels):
                    chance += _chance(labels, read.ids[new])
                    count += len(labels)
                    kinds |= {*torch.unique(labels).tolist()}
            if agrees and (not wrong or (by >= 1 and len(wrong) == 1)):  # but for one label: the end of a text
                alive.append((by, chance, count, len(kinds)))
        if len(alive) != 1 or sum(one[3] for one in alive) < KINDS:
            return None
        return alive[0][:3] if alive[0][1] < SAID else None

    @property
    def begins_twice(self) -> tuple[int, int] | None:
        """The id that every row begins with twice, and that is at no other position, and the number of rows."""
        rows = {tuple(row) for read in self.readings for row in read.ids.tolist()}
        one, two = next(iter(rows))[:2]
        if len(rows) < 2 or any(row[:2] != (one, two) for row in rows):
            return None
        # a calendar that counts in steps of two doubles every id (odd: half_days_of_aligned_weeks)
        doubled = one == two and not any(one in row[2:] for row in rows) and any(row[2:3] != row[3:4] for row in rows)
        return (one, len(rows)) if doubled else None

    @property
    def is_echo(self) -> bool:
        """Whether the labels for which there is no previous id are one fixed label."""
        first = torch.cat([read.label[read.position == 0] for read in self.readings])
        return len(first) > 1 and len(torch.unique(first)) == 1


class Shifts:
    """What the calls of a run say of the shift of their labels."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], Compared] = {}

    def compare(self, call: LossCall) -> tuple[Finding, ...]:
        """Collect the labels of a call. They are judged when all calls are known."""
        self._add(call)
        return ()

    def _add(self, call: LossCall) -> None:
        if call.name not in CLASS_LOSSES | {"gather"} or call.error is not None:
            return
        given, name = call.tensor("input"), "index" if call.name == "gather" else "target"
        target, axis = call.tensor(name), -1 if name == "index" else 1
        if target is None or given is None or target.is_floating_point() or _shifted_at_once(call.values[name]):
            return
        if name == "index":
            if call.given.get("dim") != given.dim() - 1 or target.shape != (*given.shape[:-1], 1):
                return
            target = target.squeeze(-1)
        at = layout(call.values["input"]) if call.embedded else None
        if at is None or not at.leading or at.position.dim() != target.dim() + 1:
            return
        flat = at.position.select(axis, 0)
        if flat.shape != target.shape:
            return
        where = (target != call.given.get("ignore_index", -100)) & call.counted(target).reshape(target.shape)
        if not bool(where.any()):
            return
        leading, coordinates = _before_head(at, at.coordinates(flat.to(target.device)[where]))
        seen: set[tuple[str, str]] = set()
        for looked_up in reversed(call.embedded):
            out, table = looked_up.out, looked_up.table
            ids = (looked_up.ids if looked_up.ids.dim() == 2 else looked_up.ids[None]).to(target.device)
            if torch.unique(ids).numel() < KINDS:
                continue
            for way, row, position in () if (table, "") in seen else _ways(leading, ids, coordinates):
                read = Reading(ids.T if way == "turned" else ids, row, position, target[where])
                key = call.name, call.site, call.layer, table, way
                one = self.found.get(key)
                if one is None:
                    labels, of_ids = unmoved(call.values[name]), _path_in(call.step.batch, looked_up.ids)
                    paths = of_ids, "" if labels is None else labels.path
                    one = self.found[key] = Compared(call.name, str(call.place), paths=paths)
                one.readings.append(read)
                if one.last is None:
                    one.last = last_input(read, where, out, call.given["input"], axis, turned=way == "turned")
                seen.add((table, ""))

    @property
    def unseen(self) -> bool:
        """Whether labels look wrong, and no gradient showed what outputs depend on."""
        decided = [one.decide() for one in self.found.values() if one.last is None]
        return any(found is not None and found[0] != 1 for found in decided)

    def findings(self) -> Iterator[Finding]:
        begun = {twice: one for one in self.found.values() if (twice := one.begins_twice) is not None}
        for (token, rows), one in begun.items():
            trained = any(bool(((r.position == 0) & (r.label == token)).any()) for r in one.readings)
            facts = {"token": token, "rows": rows, "trained": trained, "call": one.name}
            names = ("input ids", *_named(one.paths[0]))
            facts |= {"level": "advice", "kinds": ("input",) * len(names)}
            yield finding_of("start_token_twice", one.where, names, **facts)
        decided = [(one, one.decide()) for one in self.found.values()]
        if any(found is not None and found[0] == 1 + (one.last or 0) for one, found in decided):
            return  # another loss may look elsewhere
        for one, found in decided:
            if found is None or (found[0] == -1 and one.is_echo) or (one.last is None and found[0] <= 1):
                continue
            by, chance, count = found
            ahead = by - (one.last or 0)
            unsure = "what outputs depend on could not be seen" if one.last is None else ""
            unsure = "they are too few to be sure" if chance >= SURE else unsure
            far = f"{times(abs(ahead), 'position')} {'ahead' if ahead > 0 else 'before'}"
            facts = {
                "call": one.name,
                "count": count,
                "ahead": ahead,
                "twice": ahead == 2,
                "back": ahead < 0,
                "far": far if ahead else "of the same position",
                "chance": "below 1e-12" if chance < math.log(1e-12) else f"{math.exp(chance):.0e}",
                "unsure": unsure,
            }
            level: Level = "advice" if unsure else "fault"
            names = ("labels", *(() if ahead > 1 else _named(one.paths[1])))
            if names[1:] and one.paths[0] == one.paths[1]:  # the model is given the labels
                facts["change"] = compared(one.where, 0)
            if unsure:
                facts["repair"] = "shift once; to settle it, give batches= with more labelled positions"
            cause = "shifted_twice" if ahead > 1 else "not_shifted"
            facts |= {"level": level, "kinds": ("input",) * len(names)}
            yield finding_of(cause, one.where, names, **facts)


def _named(path: str) -> tuple[str, ...]:
    return (name_in_batch(path),) if path else ()


def _path_in(batch: Any, ids: torch.Tensor) -> str:
    """The path of the tensor of the batch that ids are a part of."""
    at = memory_of(ids)
    return next((nested.shown(path) for path, tensor in nested.paths(batch) if at and memory_of(tensor) == at), "")


def _chance(labels: torch.Tensor, pool: torch.Tensor) -> float:
    """The logarithm of the share of the orders of ``pool`` that put these labels where they are."""

    def falling(of: int, most: int) -> float:
        return math.lgamma(of + 1) - math.lgamma(of - most + 1)

    values, counts = torch.unique(labels, return_counts=True)
    each = sum(falling(int((pool == v).sum()), n) for v, n in zip(values, counts.tolist(), strict=True))
    return each - falling(pool.numel(), len(labels))


def _before_head(at: Layout, coordinates: list[torch.Tensor]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """The axes of what the head is given before it is flattened, or some positions are picked from it, and where the
    entries lie on them."""
    value = given = at.layer.parents[0]
    while value.op in MOVES and value.parents:
        value = value.parents[0]
    if len(at.leading) != 1 or value is given or len(value.shape) != 3:
        return at.leading, coordinates
    flat = torch.arange(value.shape[0] * value.shape[1]).reshape(*value.shape[:2], 1).expand(value.shape)
    try:
        flat = again(given, {value: flat})
    except Gone:
        return at.leading, coordinates
    except (RuntimeError, TypeError) as error:  # a move that numbers cannot make, or an index on another device
        reraise_raised(error)
        return at.leading, coordinates
    if flat.dim() != 2 or flat.shape[0] != at.leading[0]:
        return at.leading, coordinates
    position = flat[:, 0].to(coordinates[0].device)[coordinates[0]].long()
    return tuple(value.shape[:2]), [position // value.shape[1], position % value.shape[1]]


def _ways(
    leading: tuple[int, ...], ids: torch.Tensor, at: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """How the axes of the scores may be those of the ids: the way, and the row and position of each label."""
    rows, length = ids.shape
    if length >= KINDS and len(leading) == 1 and leading[0] == ids.numel():
        yield "flat", at[0] // length, at[0] % length
    elif length >= KINDS and len(leading) == 2 and leading[0] == rows and leading[1] >= length:
        yield "rows first", at[0], at[1] - (leading[1] - length)  # a prefix may come before the ids
    if len(leading) == 2 and leading == (rows, length) and rows >= KINDS:
        yield "turned", at[1], at[0]


def last_input(
    read: Reading, where: torch.Tensor, embedded: torch.Tensor, scores: torch.Tensor, axis: int, *, turned: bool
) -> int | None:
    """The last position whose input an output depends on, relative to the output's own position.

    By the gradient of one output that counts in each row, near the middle. None where it depends on its own position
    only, as where layers start at zero, or where no gradient can be taken.
    """
    length = read.ids.shape[1]
    between = read.position[(read.position >= 1) & (read.position <= length - 2)]
    if not embedded.requires_grad or not len(between):
        return None
    middle = int(between[(between - length // 2).abs().argmin()])
    chosen = torch.zeros_like(where)
    chosen[where] = read.position == middle
    with torch.enable_grad():
        picked = scores.movedim(axis, -1)[chosen].double()
        factors = torch.linspace(0.5, 1.5, picked.shape[-1], dtype=torch.float64, device=picked.device)
        try:
            (slope,) = torch.autograd.grad((picked * factors).sum(), embedded, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a re-entrant checkpoint refuses it
            return None
    if slope is None:
        return None
    reached = (slope != 0).any(-1).reshape(read.ids.T.shape if turned else read.ids.shape)
    reached = reached.any(1 if turned else 0).nonzero().flatten()
    causal = reached.numel() > 1 and int(reached.min()) < middle
    return int(reached.max()) - middle if causal else None


def _shifted_at_once(value: Value | None) -> bool:
    """Whether one operation shifted the labels by two or more positions, which is intended."""
    while value is not None and value.op in MOVES and value.parents:
        parent = value.parents[0]
        if value.op == "__getitem__" and not picks(value) and len(parent.shape) == 2:
            first = again(value, {parent: torch.arange(math.prod(parent.shape)).reshape(parent.shape)}).flatten()[:1]
            if first.numel() and int(first) % parent.shape[1] >= 2:
                return True
        value = parent
    return False
