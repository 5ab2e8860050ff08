"""What is said of rows that meet outside of the model: labels of other rows, an operation along the rows, entries that
lost their rows, or a loss that changes with the order of rows."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.checks.batch.batch_independence.causes import found
from pytest_trainloop.checks.batch.batch_independence.other_values import OtherOrder, OtherValues, has_rows
from pytest_trainloop.checks.batch.batch_independence.row_fixes import COPIES, LAYOUTS, summed_only
from pytest_trainloop.checks.batch.batch_independence.row_influence import AS_IT_IS, MOST_ROWS, RowInfluence
from pytest_trainloop.core.errors import CannotDecide, Unreliable
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import whole
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.search import of_rows, smallest
from pytest_trainloop.instruments.tracing.definitions import compared, returned_sorted
from pytest_trainloop.instruments.tracing.row_tape import changed, changed_rows, leads_to
from pytest_trainloop.runs.batch_stream import first_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.batch.batch_independence.row_fixes import Crossing, RowFix
    from pytest_trainloop.checks.batch.batch_independence.row_influence import Shift
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.tracing.row_tape import Tape, TapedCall
    from pytest_trainloop.runs.evidence import Evidence

FEWEST_SHRUNK, MOST_SHRUNK = 2, 3
"""Rows of the smallest batch that shows a fault."""

_CAUSES = {
    "softmax": ("softmax_over_rows", "in the loss", "with it along another axis"),
    "normalised": ("normalised_over_rows", "in the loss", "with each row normalised alone"),
    "similarity": ("similarity_over_rows", "", "with it along another axis"),
    "cumulated": ("cumulated_over_rows", "", "with it along another axis"),
    "views": ("view_mixes_rows", "in the loss", "with the axes swapped by a transpose"),
    "repeated": ("copies_in_two_orders", "repeated", "with repeat_interleave in its place"),
    "interleaved": ("copies_in_two_orders", "interleaved", "with repeat in its place"),
    "strided": ("copies_in_two_orders", "strided", "with one batch after the other in its place"),
    "halved": ("copies_in_two_orders", "halved", "with a slice with a step in its place"),
}
"""By the kind of operation: the cause and its variant, and what makes rows independent."""

_NAMES = {"__getitem__": "an index", "sub": "a difference", "mul": "a product", "add": "a sum", "div": "a quotient"}

_RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})
"""Over what the batch says of the rows, these need them sorted, as risk sets do."""

_SORTING = frozenset({"sort", "argsort"})

_WEIGHTS = re.compile(r"weight|importance", re.IGNORECASE)
_AVERAGED = re.compile(
    r"\w*(weight|importance)\w*\.(mean|sum)\(|\b(mean|sum)\(\w*(weight|importance)\w*\)", re.IGNORECASE
)


@dataclass(slots=True)
class Meeting:
    """Rows whose shares depend on other rows."""

    why: Literal["every", "permuted", "layout", "operation", "unknown"]
    """"every": each output is compared with the targets of all rows; "permuted": with those of another one, in no fixed
    order; "layout", "operation": ``fix`` makes all rows independent."""
    finding: Finding
    call: TapedCall | None = None
    """Where rows meet."""
    fix: RowFix | None = None
    path: Path = ()
    """Where in the batch the targets are."""

    def holds(self, shares: RowInfluence) -> bool:
        """Whether these rows meet in the same way."""
        labels = self.why in ("every", "permuted")
        shift = shares.independence(among=frozenset({self.path}) if labels else None)
        if shift is None or (shift.equal if self.why == "every" else shift.independent):
            return False
        if self.why == "every":
            moved = shares.at_other_places(self.path)
            return moved is not None and moved.equal
        fix = next((f for f in shares.fixes if self.fix is not None and f.kind == self.fix.kind), None)
        without = None if fix is None else shares.independence((fix.kind, fix.replacements))
        return self.fix is None or (without is not None and without.independent)


def meeting(evidence: Evidence) -> Meeting | None:
    """How rows meet in one step of the loop; None where all are independent, or where it cannot be seen."""
    shares = evidence.shared(RowInfluence.of)
    shift = shares.independence() if shares.taken else None
    if shift is not None and shift.independent and evidence.declared("rows_interact") is False:
        shares.all_but_two = True  # an extreme is taken of one row: that of the rows that were not changed
        shift = shares.independence()
    if shift is None:
        return None
    if shift.equal:
        return _at_masks(shares)
    paths = [path for path in shares.targets() if _meets(shares, path, shift)]
    labels = next((every for path in paths if (every := _of_all_rows(shares, path))), None)
    if labels is not None or shift.independent:
        return labels
    return (
        _by_operation(shares, shift, layout=False)
        or next((permuted for path in paths if (permuted := _of_other_rows(shares, path))), None)
        or _by_operation(shares, shift, layout=True)
        or _unknown(shares, shift)
    )


def _at_masks(shares: RowInfluence) -> Meeting | None:
    """Rows that meet the masks of other rows, by copies in another order."""
    if any(fix.kind in LAYOUTS for fix in shares.fixes) and shares.has_masks():
        shares.with_masks = True
        shift = shares.independence()
        met = None if shift is None or shift.independent else _by_operation(shares, shift, layout=True)
        if met is not None:
            return met
        shares.with_masks = False
    return None


def _meets(shares: RowInfluence, path: Path, shift: Shift) -> bool:
    """Whether targets of some rows change the shares of others, if only by a factor where all together do."""
    alone = shares.independence(among=frozenset({path}))
    return alone is not None and not (alone.equal if shift.independent else alone.independent)


def _of_all_rows(shares: RowInfluence, path: Path) -> Meeting | None:
    """Where the loss is a sum over all pairs of an output and a target: it stays the same where the targets of all rows
    change places, each target adds its part to the share of each row, and no input does. Where shares are scaled only,
    both must meet in a table of rows by rows: a product of two means is no such sum."""
    moved = shares.at_other_places(path)
    by_inputs = shares.independence(among=shares.inputs()) if moved is not None and moved.equal else None
    call = _first_compared(shares, path)
    if by_inputs is None or not by_inputs.equal or call is None:
        return None
    if not any(list(shape).count(shares.rows) > 1 for shape in call.shapes) or not _adds_up(shares, path):
        return None
    text, repair = _broadcast(call)
    facts: dict[str, Any] = {"repair": repair, "target": nested.shown(path), "by": _words(call), "rows": shares.rows}
    facts["shapes"] = text or f"it makes {' and '.join(map(str, call.shapes))}"
    return Meeting("every", found("labels_of_all_rows", call, (call.named,), **facts), call, path=path)


def _adds_up(shares: RowInfluence, path: Path) -> bool:
    """Whether two targets changed together change the shares of others by as much as one by one."""
    both, own, targets = shares.some, shares.rows_of(shares.some), frozenset({path})
    tapes = [shares.both(shares.change(targets, rows)) for rows in (both, both[:1], both[1:])]
    for number, excluded in (own or {}).items():
        moved = [t[1].shares[number].gradient - t[0].shares[number].gradient for t in tapes if t is not None]
        if len(moved) < 3:
            return False
        base = next(t[0] for t in tapes if t is not None)
        others = [at for at in range(len(moved[0])) if at not in excluded]
        rest = (moved[0] - moved[1] - moved[2])[others]
        size = max(float(base.shares[number].gradient.abs().max()), float(moved[0].abs().max()))
        if float(rest.abs().max()) > shares.bound(base) * size:
            return False
    return bool(own)


def _of_other_rows(shares: RowInfluence, path: Path) -> Meeting | None:
    """Where targets change the shares of rows that they do not belong to, in no fixed order: copies of the batch may
    each be shifted by a number of rows of their own. Rows that are mixed have several targets. Nothing is said where
    all meet their own row in one of the shares: other shares are then other rows on purpose, as negatives are."""
    places, rows = shares.places(), shares.rows
    entries = dict(nested.paths(shares.few.batch))[path].numel() // rows
    owners: dict[tuple[int, int], dict[int, int]] = {}
    for row, number, at in ((row, n, at) for row, own in enumerate(places) for n, at in own.items()):
        for copy, position in enumerate(sorted(at)):
            owners.setdefault((number, position), {})[row] = copy
    if not owners or not entries or rows > MOST_ROWS:
        return None
    most = max(map(len, owners.values()))
    pairs: list[tuple[int, int]] = []
    hits: Counter[tuple[int, int]] = Counter()
    shifts: dict[tuple[int, int], set[int]] = {}
    free = {row: shares.entries_that_change(path, row) for row in range(rows)}
    able = [row for row in free if free[row]] or list(free)
    chosen = list(free) if entries == 1 else dict.fromkeys((able[0], able[len(able) // 2], able[-1]))
    for label in chosen:
        seen, some = False, free[label]
        for entry in (*dict.fromkeys([*some[:2], *some[len(some) // 2 :][:1]]), None):
            if entry is None and seen:
                break  # single entries of a one-hot target may stay as they are: the whole row
            moved = shares.touched(OtherValues((label,), frozenset({path}), entry))
            if moved is None:
                return None
            seen = seen or any(moved.values())
            met = [(number, at) for number, positions in moved.items() for at in positions if (number, at) in owners]
            copies = [(number, owners[number, at]) for number, at in met]
            keys = [(number, next(iter(own.values())) if most == 1 else -1) for number, own in copies]
            if max(Counter(keys).values(), default=0) > most:
                return None  # one target changes several rows
            hits.update(met)
            for key, (number, own) in zip(keys, copies, strict=True):
                if most > 1 and sum(n == number for n, _ in met) > len(places[label].get(number, ())):
                    continue  # what is mixed in may be as it was: a border of the image
                pairs.append((label, label if label in own else min(own)))
                shifts.setdefault(key, set()).update({0} if label in own else {(label - row) % rows for row in own})
    if entries == 1 and max(hits.values(), default=0) > most:
        return None  # a position that several targets change
    own_row = {number for number, _ in shifts} - {number for (number, _), by in shifts.items() if by != {0}}
    wrong = [(label, row) for label, row in pairs if label != row]
    labels = {label for label, _ in pairs}
    if not wrong or own_row or max(map(len, shifts.values())) < 2 or len(labels) < 2:
        return None
    elsewhere = any(shares.entered_at(row) != places[row] for row in {label for label, _ in wrong})
    if elsewhere or len({copy for _, copy in shifts}) >= rows:
        return None
    call = _first_compared(shares, path)
    facts: dict[str, Any] = {"target": nested.shown(path), "by": _words(call), "label": wrong[0][0], "row": wrong[0][1]}
    facts |= {"wrong": len(wrong), "checked": len(pairs)}
    variant = "mixed" if most > 1 else "several" if len(set(pairs)) > len(labels) else ""
    names = (call.named if call is not None else "the loss",)
    if variant == "several" and call is not None:  # outputs of another layout
        turned = shares.turned(call)
        facts["change"] = compared(str(call.place), 0) if turned is None else str(turned.place)
    return Meeting("permuted", found("labels_of_other_rows", call, names, variant, **facts), call, path=path)


def _by_operation(shares: RowInfluence, shift: Shift, *, layout: bool) -> Meeting | None:
    """The operation of which another axis, or another order of copies, makes all shares independent. Copies must be of
    two tensors: rows of one may be compared with others of the same on purpose."""
    for fix in (fix for fix in shares.fixes if (fix.kind in LAYOUTS) is layout):
        without = shares.independence((fix.kind, fix.replacements))
        if without is None or not without.independent:
            continue
        others = frozenset(path for path, _ in nested.paths(shares.few.batch) if path not in fix.sources)
        sides = (fix.sources, others) if fix.kind in COPIES else ()
        if any(shares.meet_among_themselves(side) for side in sides):
            continue
        cause, variant, words = _CAUSES[fix.kind]
        if fix.dims is not None:
            words = "with dim={1} in place of dim={0}".format(*fix.dims)
        facts = {"fix": words, "change": "\n".join(map(str, fix.places)), **_of_shares(shares, shift)}
        return Meeting("layout" if layout else "operation", found(cause, fix, (fix.named,), variant, **facts), fix=fix)
    return None


def _unknown(shares: RowInfluence, shift: Shift) -> Meeting:
    """A fault where rows_interact=False is declared."""
    tapes = shares.both(shares.change())
    call = None if tapes is None else first_meeting(*tapes, shares.rows)
    names = () if call is None else (call.named,)
    facts = {"through": call.named if call is not None else "an unknown operation", **_of_shares(shares, shift)}
    return Meeting("unknown", found("rows_interact", call, names, "in the loss", **facts), call)


def _of_shares(shares: RowInfluence, shift: Shift) -> dict[str, Any]:
    """A row whose share changes, and the rows that it changes with."""
    *others, last = map(str, shares.some)
    rows = f"rows {', '.join(others)} and {last}" if others else f"row {last}"
    return {"share": next(iter(shift.rows), 0), "others": rows}


def _first_compared(shares: RowInfluence, path: Path) -> TapedCall | None:
    """The first call that carries a gradient and depends on the targets."""
    base, other = shares.tape(AS_IT_IS), shares.tape(shares.change(frozenset({path})))
    if base is None or other is None:
        return None
    reached = leads_to(base, base.roots)
    for at, (one, two) in enumerate(zip(base.calls, other.calls, strict=True)):
        if one.carries_gradient and changed(one, two) and (not reached or at in reached):
            return one
    return None


def first_meeting(base: Tape, other: Tape, rows: int) -> TapedCall | None:
    """The first call on the way to the root whose result changes at other rows than what it was given; where that was
    given a statistic, the call that took it."""
    reached = leads_to(base, base.roots)
    moved: dict[int, set[int]] = {}
    single: set[int] = set()
    for at, (one, two) in enumerate(zip(base.calls, other.calls, strict=True)):
        if not changed(one, two):
            continue
        axes = [d for sums in one.sums for d in sums if d >= 0 and len(sums[d]) == rows]
        rows_found = set[int]().union(*(changed_rows(one, two, axis) for axis in axes))
        given = [before for before in one.inputs if before in moved or before in single]
        own = set[int]().union(*(moved[before] for before in given if before in moved))
        if not axes:
            single.add(at)
            continue
        moved[at] = rows_found
        if at not in reached or rows_found <= own:
            continue
        statistics = [before for before in given if before in single]
        if statistics or own:
            return base.calls[statistics[0]] if statistics else one
    return None


def _broadcast(call: TapedCall) -> tuple[str, str]:
    """What a row of numbers and a column make of each other, and the repair; empty for other shapes."""
    if len(call.given) != 2 or sorted(map(len, call.given)) != [1, 2] or not call.shapes:
        return "", ""
    column = next(at for at, shape in enumerate(call.given) if len(shape) == 2)
    if call.given[column][1] != 1:
        return "", ""
    written = re.findall(r"(?<![\w.)\]])([A-Za-z_]\w*) - ([A-Za-z_]\w*)(?![\w.(\[])", code_of(str(call.place)))
    subtracts = call.name in ("sub", "__sub__") and len(written) == 1
    left, right = written[0] if subtracts else ("the first side", "the second side")
    what = f"{left} - {right} broadcasts" if subtracts else "they broadcast"
    text = f"{left} has shape {call.given[0]} and {right} {call.given[1]}, so that {what} to {call.shapes[0]}"
    side = (left, right)[column]
    return text, f"give {side} the shape {call.given[1 - column]}: {side if subtracts else 'it'}.squeeze(1)"


def _words(call: TapedCall | None) -> str:
    """A call in words: operators by what they give."""
    return "the loss" if call is None else _NAMES.get(call.name, call.named)


def of_operation(evidence: Evidence, met: Meeting) -> Iterator[Finding]:
    """An operation along the rows, or any meeting where rows are declared not to interact."""
    declared, shares = evidence.declared("rows_interact"), evidence.shared(RowInfluence.of)
    if met.why == "operation" and shares.few.rows_known:
        yield shrunk(evidence, met.finding, met.holds)
    elif met.why == "operation" and declared is None and met.fix is not None:
        raise CannotDecide(
            f"entries of the batch's first axis meet in {met.fix.named} ({met.fix.place}), and whether these are rows "
            "or positions is not known: give batch_dim=0 if they are rows, batch_dim=1 if the second axis holds them",
            needs="batch_dim=",
        )
    elif declared is False:
        if not shares.repeats():
            raise Unreliable(
                "two identical steps of the loop differ, so that what rows do is not known: see determinism"
            )
        shift = shares.independence()
        finding = met.finding if met.fix is None or shift is None else _unknown(shares, shift).finding
        yield shrunk(evidence, finding, met.holds)


def averaged_weights(evidence: Evidence) -> Iterator[Finding]:
    """Weights of which the step reads the sum alone, while rows are independent otherwise: in any order they give the
    same shares, and other ones scale all shares by the quotient of the sums."""
    shares = evidence.shared(RowInfluence.of)
    for path, weights in nested.paths(shares.few.batch) if shares.taken and shares.few.axis == 0 else ():
        if path not in shares.targets() or not weights.is_floating_point() or weights.numel() != shares.rows:
            continue
        if not float(weights.max()) > float(weights.min()) >= 0.0:
            continue
        change = shares.change(frozenset({path}))
        alone, base, other = shares.independence(among=change.paths), shares.tape(AS_IT_IS), shares.tape(change)
        if base is None or other is None or alone is None or alone.equal or not alone.independent:
            continue
        readers = []
        for one, two in zip(base.calls, other.calls, strict=True):
            if changed(one, two):
                readers.append(one)
                if one.carries_gradient:
                    break
        name = nested.last_name(path)
        # the return of a team or of one episode is such a sum too (odd: return_of_the_episode)
        if not (_WEIGHTS.search(name) or any(_AVERAGED.search(call.place.code) for call in readers)):
            continue
        moved, by_inputs = shares.at_other_places(path), shares.independence(among=shares.inputs())
        if moved is None or by_inputs is None or not (moved.equal and by_inputs.equal):
            continue
        # they multiply and do not divide (odd: divided_by_the_sum_of_weights)
        changed_batch = change.apply(shares.few.batch, shares.rows, 0)
        others = next(tensor for at, tensor in nested.paths(changed_batch) if at == path)
        quotient = float(others.double().sum() / weights.double().sum())
        if abs(alone.factor - quotient) <= shares.bound(base, other) * abs(alone.factor):
            reader = readers[-1] if readers else None
            names = (reader.named if reader is not None else "the loss",)
            finding = found("weights_averaged", reader, names, target=nested.shown(path), rows=shares.rows)
            yield replace(finding, smallest=f"{shares.rows} rows")


def all_pairs(evidence: Evidence) -> Iterator[Finding]:
    """Tables of all pairs that are only summed: whichever row one side's entries belong to, no share changes."""
    shares = evidence.shared(RowInfluence.of)
    tapes = shares.both(shares.change()) if shares.taken and shares.few.axis == 0 else None
    for table in shares.crossings.values() if tapes is not None else ():
        if tapes is None or not summed_only(tapes[0], table.at, shares.rows) or not _of_rows(shares, tapes, table):
            continue
        for number, rolled in enumerate(table.rolled):
            moved = shares.tape(AS_IT_IS, (f"rolled {table.at} {number}", rolled))
            shift = shares.of_all(tapes[0], moved) if moved is not None and tapes[0].comparable(moved) else None
            if shift is not None and shift.equal:
                call = tapes[0].calls[table.at]
                finding = found("all_pairs_of_rows", call, (call.named,), rows=shares.rows, by=_words(call))
                yield shrunk(evidence, finding, None)
                break


def _of_rows(shares: RowInfluence, tapes: tuple[Tape, Tape], table: Crossing) -> bool:
    """Whether both sides have entries for rows: other values in some rows change those of one side and nothing else of
    it, and the other side too, or no other axis has the length of the rows (masks are not changed)."""
    some = set(shares.some)
    moved = [some if at < 0 else changed_rows(tapes[0].calls[at], tapes[1].calls[at], 0) for at in table.operands]
    plain = (t for t in nested.tensors(shares.few.batch) if not t.is_nested)
    sizes = {n for t in plain for d, n in enumerate(t.shape) if d != shares.few.axis}
    sizes |= {n for p in shares.evidence.run().parameters for n in p.shape}
    return any(rows and rows <= some for rows in moved) and (all(moved) or shares.rows not in sizes)


def order_of_rows(evidence: Evidence, met: Meeting | None) -> Iterator[Finding]:
    """A loss that changes where all rows change places together: two neighbours, or else a shuffle; whole groups where
    rows are declared to interact.

    Draws are the same for each row. Not comparable are batches with a tensor that has no entry for each row (graphs,
    packed sequences), and steps that compute in a low precision."""
    declared, shares = evidence.declared("ordered"), evidence.shared(RowInfluence.of)
    call = met.call if met is not None and met.call is not None else None
    running = call is not None and call.carries_gradient and call.name in _RUNNING
    tensors = list(nested.tensors(shares.few.batch)) if shares.taken and not declared else []
    if not tensors or any(t.dim() and not has_rows(t, shares.rows, shares.few.axis) for t in tensors):
        return
    rows = range(shares.rows)
    orders = [("", (1, 0, *rows[2:])), ("", (*rows[1::2], *rows[::2]))] if running or declared is False else []
    more: dict[str, Any] = {}
    if evidence.declared("rows_interact"):
        orders += _whole_groups(shares)
    tape = shares.tape(AS_IT_IS) if met is not None or evidence.declared("rows_interact") else None
    sorting = next((call for call in tape.calls if call.name in _SORTING), None) if tape is not None else None
    if sorting is not None and _sorted_inside(shares, back := tuple(reversed(rows))):
        call, orders = sorting, [("sorted", back)]
        more["change"] = returned_sorted(str(sorting.place)) or str(sorting.place)
    for target, order in orders:
        tapes = shares.both(OtherOrder(order), shared_draws=True)
        if tapes is None or not tapes[0].double:
            return
        for before, after in _differing(shares, tapes):
            change = abs(after - before) / max(abs(before), abs(after))
            facts = {"before": before, "after": after, "order": str(list(order)), "change_of_loss": change, **more}
            facts |= {"target": target, "declared": declared is False}
            facts["level"] = "advice" if declared is None and not target else "fault"
            names = () if call is None else (call.named,)
            finding = found("order_matters", call, names, "sorted" if more else "groups" if target else "", **facts)
            few = replace(finding, smallest=f"{shares.rows} rows")
            yield few if target else shrunk(evidence, finding, _reversed)
            return


def _sorted_inside(shares: RowInfluence, order: tuple[int, ...]) -> bool:
    """Whether rows enter a model in one order, whichever the batch has: the loop sorts them. Equal lengths may move."""
    tapes = shares.both(OtherOrder(order))
    for one, other in zip(tapes[0].shares, tapes[1].shares, strict=True) if tapes is not None else ():
        same = sum(map(torch.equal, one.value, other.value)) if len(one.value) == shares.rows else 0
        if 2 * same > shares.rows and not all(torch.equal(one.value[0], row) for row in one.value):
            return True
    return False


def _whole_groups(shares: RowInfluence) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What in the batch says which rows belong together, and the rows with whole groups in another order. The batch has
    groups of several sizes: of one size they may be cut by their number (odd: samples_of_each_class)."""
    every = dict(nested.paths(first_batch(shares.evidence.fresh_loop())))
    for path, ids in nested.paths(shares.few.batch):
        given = every.get(path)
        if given is None or ids.shape != (shares.rows,) or given.dim() != 1 or not whole(ids):
            continue
        sizes = [len(list(group)) for _, group in itertools.groupby(given.tolist())]
        groups = [list(group) for _, group in itertools.groupby(range(shares.rows), key=ids.tolist().__getitem__)]
        if len(set(sizes)) > 1 and len(sizes) == len(set(given.tolist())) and len(groups) > 1:
            yield nested.shown(path), tuple(itertools.chain(*groups[1:], groups[0]))


def _differing(shares: RowInfluence, tapes: tuple[Tape, Tape]) -> Iterator[tuple[float, float]]:
    """What was backpropagated of each, where it differs; NaN differs from nothing."""
    for before, after in zip(tapes[0].values, tapes[1].values, strict=True):
        if abs(before - after) > shares.bound(*tapes) * max(abs(before), abs(after), 1.0):
            yield before, after


def _reversed(shares: RowInfluence) -> bool:
    tapes = shares.both(OtherOrder(tuple(reversed(range(shares.rows)))), shared_draws=True)
    return tapes is not None and any(_differing(shares, tapes))


def shrunk(evidence: Evidence, finding: Finding, holds: Callable[[RowInfluence], bool] | None) -> Finding:
    """The finding with the fewest rows of the example batch that show it; None: whose shares depend on each other in
    any way."""
    shares = evidence.shared(RowInfluence.of)

    def any_way(few: RowInfluence) -> bool:
        shift = few.independence()
        return shift is not None and not shift.independent

    if not shares.taken:
        return finding
    shows, first = holds or any_way, Composition(tuple(range(FEWEST_SHRUNK)))
    least: Composition | None = first  # none is smaller
    if not shows(shares.over(first.rows)):
        strategy = of_rows(range(shares.rows), least=FEWEST_SHRUNK, most=MOST_SHRUNK)
        least = smallest(strategy, lambda composition: shows(shares.over(composition.rows)), evidence=evidence)
    if least is None:
        return finding if holds is None else replace(finding, smallest=f"{shares.rows} rows")
    return replace(finding, smallest=f"{least}, as a batch of their own", composition=least.as_data())
