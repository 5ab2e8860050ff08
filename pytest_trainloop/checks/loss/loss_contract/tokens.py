"""Positions and sides: padding that counts, labels that are shifted wrongly, and sides that are turned.

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

*May it be meant?* Where one operation shifted by two or more positions, where another loss of the same inputs is
compared with the next id (heads that predict several tokens, a reconstruction on the side), and where labels of
the previous id begin with one fixed label (an echo after a blank), nothing is said.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from pytest_trainloop.batches.padding import Ids, Proof, read_padding
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CLASS_LOSSES,
    DIVISIONS,
    MULTIPLICATIONS,
    NEGATIONS,
    SUBTRACTIONS,
)
from pytest_trainloop.tracing.tape_queries import MOVES, Gone, again, layout, made_of, picks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.checks.loss.loss_contract.calls import LossCall
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.tracing.tape import Call, Tape, Value
    from pytest_trainloop.tracing.tape_queries import Layout

SHIFTS = (-1, 0, 1, 2, 3)
SURE, SAID = math.log(1e-9), math.log(1e-3)
"""Logarithms of the chance below which labels that agree are a fault, and advice."""
KINDS = 4
"""Different ids, and different labels, below which nothing is said."""


# Padding


def padded_positions(call: LossCall, shape: tuple[int, ...]) -> PaddingMask | None:
    """Which of (rows, positions) are padding. Labels are no proof: those of padded positions are what is judged. Nor
    are boxes of which some are filled up: slots that no input of the scores has may all be asked for a class."""
    inputs = [Ids(ids, pad) for ids, pad, _, _ in call.step.embedded if tuple(ids.shape) == shape]
    sources = {tuple(v.shape) for v in made_of(call.values["input"], 20_000) if not v.parents and not v.parameter}
    declared = call.step.declared
    return read_padding(
        call.step.batch, at_least=Proof.INPUTS, shape=shape, declared=declared, inputs=inputs, read=sources
    )


def padding(call: LossCall) -> Iterator[Finding]:
    """Padded positions that count: in a loss over classes, or in one that compares (rows, positions[, features])."""
    given, target, at = call.tensor("input"), call.tensor("target"), layout(call.values.get("input"))
    if given is None or target is None:
        return
    ignored = call.given.get("ignore_index", -100)
    if call.name in CLASS_LOSSES:
        if at is None or target.is_floating_point() or len(at.leading) != 2 or len(at.layer.shape) != 3:
            return
        if at.position.dim() != target.dim() + 1 or at.position.select(1, 0).shape != target.shape:
            return
        row, position = at.coordinates(at.position.select(1, 0).to(target.device))
        shape, counted = at.leading, target != ignored
    elif given.shape != target.shape or given.dim() not in (2, 3) or not _in_order(at):
        return
    else:
        shape, counted = tuple(given.shape[:2]), torch.ones_like(target).bool()
    found = padded_positions(call, shape)
    if found is None:
        return
    mask = found.mask.to(target.device)
    # the last position of padding on the left may be asked for the first token
    inside = mask & torch.cat([mask[:, 1:], mask[:, -1:]], 1)
    if call.name in CLASS_LOSSES:
        inside, real = inside[row, position], ~mask[row, position] & (target == ignored)
    else:
        inside, real = (inside[..., None].expand(given.shape) if given.dim() == 3 else inside), inside.new_zeros(())
    counted = counted & call.counted(counted)
    wrong, others = inside & counted, counted & ~inside
    if bool(wrong.any()) and bool(others.any()):
        values = torch.unique(target[wrong])
        if len(values) == 1 or call.step.declared is not None:  # labels that differ may be meant
            yield _counted(call, found, float(values[0]) if len(values) == 1 else None, ignored, wrong, counted)
    elif bool(others.any()) and call.one_each and call.weights is not None:
        each = call.weights.detach()[counted].double()
        if bool(((each * counted.numel() - 1).abs() <= 1e-4).all()):
            share = 1 - float(counted.double().mean())
            facts: dict[str, Any] = {"count": int(counted.sum()), "all": counted.numel(), "share": share}
            yield call.finds("padding_counted/mean", **facts, level="advice")
    if ignored >= 0 and bool(real.any()):
        shared = ": padding and a real class share it" if bool((target[inside] == ignored).any()) else ""
        facts: dict[str, Any] = {"count": int(real.sum()), "ignored": ignored, "share": float(real.double().mean())}
        culprit = f"ignore_index={ignored}"
        yield call.finds("real_class_ignored", **facts, shared=shared, culprit=culprit, level="advice")


def _in_order(at: Layout | None) -> bool:
    """Whether rows and positions are in the order of the layer's output."""
    if at is None or len(at.leading) != 2:
        return True
    rows, positions = at.coordinates(at.position)
    return bool((rows.diff(dim=0) >= 0).all()) and bool((positions.diff(dim=1) >= 0).all())


def _counted(
    call: LossCall, found: PaddingMask, label: float | None, ignored: int, wrong: torch.Tensor, counted: torch.Tensor
) -> Finding:
    """``label`` is that of all padded positions; None where these have several, and the padding is declared."""
    target, given = call.given["target"], call.given["input"]
    over_classes = "ignore_index" in call.given
    mismatch = label is not None and ignored != -100
    alike = int((target[counted & ~wrong] == label).sum()) if label is not None else 0
    filled = f"labels.masked_fill({_in_code(found)}, {ignored})"
    repair = "loss = (each * mask).sum() / mask.sum(), with mask 0 at padded positions"
    if mismatch:
        repair = f"label padded positions {ignored}: {filled}"
        repair = repair if alike else f"ignore_index={label:g}, or {repair}"
    elif over_classes:
        repair = f"labels = {filled}\nlabel {ignored} also what else the model is not to write: the prompt"
    losses = ""
    if call.name == "cross_entropy":
        none = -100 if int(target.min()) < 0 else -1
        each = F.cross_entropy(given.detach().double(), target, ignore_index=none, reduction="none")
        without = float(each[counted & ~wrong].mean())
        losses = f"; loss {float(each[counted].mean()):.4g} with them, {without:.4g} without"
    return call.finds(
        "ignore_index_mismatch" if mismatch else "padding_counted", share=float(wrong.sum()) / float(counted.sum()),
        count=int(wrong.sum()), all=int(counted.sum()), losses=losses, ignored=ignored, label=label,
        labels="labels of several values" if label is None else f"{label:g} as label",
        culprit=f"ignore_index={ignored}" if over_classes else "", repair=repair,
        do_not=f"set ignore_index={label:g}: {alike} real positions have label {label:g} as well"
        if mismatch and alike else "",
    )  # fmt: skip


def _in_code(found: PaddingMask) -> str:
    """What says which positions are padding, in the batch's own names: ``attention_mask == 0``."""
    if found.source != "mask":
        return "is_padding"
    name, _, value = found.reason.removesuffix(" there").rpartition(" is ")
    written = {"False": f"~{name}", "True": name}.get(value)
    return written or (f"{name} == {float(value):g}" if float(value) in (0, 1) else "is_padding")


# Shifts


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
    def is_echo(self) -> bool:
        """Whether the labels for which there is no previous id are one fixed label."""
        first = torch.cat([read.label[read.position == 0] for read in self.readings])
        return len(first) > 1 and len(torch.unique(first)) == 1


class Shifts:
    """What the calls of a run say of the shift of their labels."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], Compared] = {}

    def add(self, call: LossCall) -> None:
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
        for ids, _, out, table in reversed(call.embedded):
            ids = (ids if ids.dim() == 2 else ids[None]).to(target.device)
            if torch.unique(ids).numel() < KINDS:
                continue
            for way, row, position in () if (table, "") in seen else _ways(leading, ids, coordinates):
                read = Reading(ids.T if way == "turned" else ids, row, position, target[where])
                key = call.name, call.site, call.layer, table, way
                one = self.found.setdefault(key, Compared(call.name, str(call.place)))
                one.readings.append(read)
                if one.last is None:
                    one.last = last_input(read, where, out, call.given["input"], axis, turned=way == "turned")
                seen.add((table, ""))

    @property
    def unseen(self) -> bool:
        """Whether labels look wrong, and no gradient told what outputs depend on."""
        decided = [one.decide() for one in self.found.values() if one.last is None]
        return any(found is not None and found[0] != 1 for found in decided)

    def findings(self) -> Iterator[Finding]:
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
            far = f"{abs(ahead)} position{'s' if abs(ahead) != 1 else ''} {'ahead' if ahead > 0 else 'before'}"
            summary = {
                0: "labels are not shifted: a causal model is asked for the token that it is given",
                -1: "labels are shifted the wrong way: a causal model is asked for the previous token",
                2: "labels are shifted twice: the output of a causal model is compared with the token two positions "
                "ahead",
            }.get(ahead, f"labels are shifted by {ahead}: the output of a causal model is compared with that token")
            probability = "below 1e-12" if chance < math.log(1e-12) else f"{math.exp(chance):.0e}"
            yield Finding(
                cause="shifted_twice" if ahead > 1 else "not_shifted",
                level="advice" if unsure else "fault",
                summary=f"{'it seems that ' if unsure else ''}{summary} ({one.name})",
                measured=f"{count} labels are the id {far if ahead else 'of the same position'} and not the next one, "
                f"and none is otherwise; the probability of that in ids of random order is {probability}",
                shown_by="the labels against the ids that the embedding looked up; "
                + (unsure or "no output depends on later inputs"),
                culprits=("labels",),
                where=one.where,
                repair="shift once; to settle it, give batches= with more labelled positions" if unsure else "",
            )


def _chance(labels: torch.Tensor, pool: torch.Tensor) -> float:
    """The logarithm of the share of the orders of ``pool`` that put these labels where they are."""
    falling = lambda of, most: math.lgamma(of + 1) - math.lgamma(of - most + 1)  # noqa: E731
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
    except (RuntimeError, TypeError, Gone):  # a move that numbers cannot make, or an index on another device
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
        yield "rows first", at[0], at[1] - (leading[1] - length)  # a prefix may stand before the ids
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
    """Whether one operation shifted the labels by two or more positions, which is meant."""
    while value is not None and value.op in MOVES and value.parents:
        parent = value.parents[0]
        if value.op == "__getitem__" and not picks(value) and len(parent.shape) == 2:
            first = again(value, {parent: torch.arange(math.prod(parent.shape)).reshape(parent.shape)}).flatten()[:1]
            if first.numel() and int(first) % parent.shape[1] >= 2:
                return True
        value = parent
    return False


# Sides


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
                assert value.tensor is not None
                on_gradient(value.tensor, functools.partial(arrived.__setitem__, side))

    def findings(self, record: Any) -> Iterator[Finding]:
        """One finding, where the negative side is raised in all rows of all meetings."""
        seen = [(place, one["good"], one["bad"]) for place, one in self.meetings if len(one) == 2]
        seen = [one for one in seen if bool(one[1].any()) and bool(one[2].any())]
        turned = all(bool((good >= 0).all()) and bool((bad <= 0).all()) for _, good, bad in seen)
        if not seen or not turned or self.names is None or any(o.maximizes for o in record.optimizers):
            return
        good, bad = self.names
        yield Finding(
            cause="sides_turned",
            summary=f"scores of {bad} are raised and those of {good} lowered: the names say the reverse",
            measured=f"in all rows of {len(seen)} calls that the two meet in",
            shown_by="the gradients of what is backpropagated with respect to the two scores, which are products or "
            "log-probabilities: no distances",
            culprits=(good, bad),
            where=str(seen[0][0]),
        )


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
