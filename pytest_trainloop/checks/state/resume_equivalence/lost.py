"""What a resumed run has lost, shown by further runs.

Everything that differs after ``load`` is carried over into the resumed run: it must end as the uninterrupted one then.
Then everything but one component is carried over: where it ends elsewhere, that component is lost and matters. What no
weight depends on is shown by ``evaluate``, or by where an average ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.state.resume_equivalence.causes import MOST_NAMES, found
from pytest_trainloop.checks.state.resume_equivalence.statements import (
    behind,
    holders_of,
    last_call,
    line_to_change,
    owner_of,
)
from pytest_trainloop.core.errors import CannotDecide, Unreliable
from pytest_trainloop.core.wording import be, count, some
from pytest_trainloop.instruments.tracing import statements
from pytest_trainloop.instruments.tracing.made_at import assigned_at
from pytest_trainloop.runs.reachable_state.leaves import same_value
from pytest_trainloop.runs.split_run import same_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_trainloop.checks.state.resume_equivalence.checkpoint import StateDictCall
    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.core.finding import Finding, Level
    from pytest_trainloop.runs.reachable_state.snapshot import Difference

OTHER_INPUTS = (
    "the resumed run got other inputs from a data stream of the loop's own; let fit take its data from the "
    "batches that it is given"
)

ONE_BY_ONE = 6
"""So many components are left out one by one; of more, halves of them at once."""

_FIRST = (
    *("weight", "buffer", "optimizer_state", "scheduler", "scaler", "group_value", "generator", "gradient", "mode"),
    *("requires_grad", "switch", "hooks", "tensor", "array", "scalar", "length", "reference"),
)
"""Of the kinds in one component the one that names its cause."""

_STATES = ("tensor", "weight", "buffer", "array")


class Lost(NamedTuple):
    """A component that is not what it was, or several of which any one would do."""

    names: tuple[str, ...]
    differences: tuple[Difference, ...]
    unequal: tuple[str, ...] = ()
    """Weights and buffers that end elsewhere for it alone."""

    @property
    def kind(self) -> str:
        kinds = {d.leaf.kind for d in self.differences}
        return next(kind for kind in _FIRST if kind in kinds)

    @property
    def first(self) -> tuple[Difference, ...]:
        """What gives the loss its cause."""
        return tuple(d for d in self.differences if d.leaf.kind == self.kind)


def losses(a: Uninterrupted, b: Resumed) -> tuple[list[Finding], set[str], CannotDecide | Unreliable | None]:
    """What makes the resumed run end elsewhere; the components of that; and the reason where this cannot be decided."""
    if not b.unequal():
        return [], set(), None
    undecided: CannotDecide | Unreliable | None = None
    try:
        lost = _what_matters(a, b)
    except (CannotDecide, Unreliable) as reason:
        undecided = reason
        lost = list(_certain(a, b))
    own = [one for one in lost if not _is_stream(a, one)]
    if lost and not own:
        undecided = CannotDecide(OTHER_INPUTS)
    made = [(one, _finding(a, b, one)) for one in own]
    causes = {finding.cause for _, finding in made}
    if causes & {"optimizer_state_lost", "scheduler_restarts"}:  # what sets the rates is lost, and the rates with it
        made = [(one, finding) for one, finding in made if finding.cause != "lr_lost"]
    calls = [_call_of(b, one) for one, finding in made if finding.cause == "weights_not_loaded"]
    keys = [{*call.missing, *call.unexpected} for call in calls if call is not None and call.missing]
    models = tuple(n.removeprefix("weights of ") for o, f in made if f.cause == "weights_not_loaded" for n in o.names)
    made = [
        (one, finding)
        for one, finding in made
        if finding.cause != "buffer_lost"
        or not (any(_under(a, one, left) for left in keys) or _buffers_of(one, models))
    ]
    if undecided is not None and not made and b.raised is not None:
        facts = {"raised": b.raised.summary, "kind": b.raised.kind}
        where = b.raised.place if b.raised.place.file else ""
        return [found("load_raises", where, ("fit()",), "later", **facts)], set(), undecided
    findings = list(_of_one_owner(made))
    if len(findings) == 1 and undecided is None and findings[0].level == "fault":
        findings[0] = replace(findings[0], tried="with this set in load the resumed run ends as the uninterrupted one")
    return findings, {name for one, _ in made for name in one.names}, undecided


def _of_one_owner(made: Sequence[tuple[Lost, Finding]]) -> Iterator[Finding]:
    """The findings, one for all attributes of an object that are lost."""
    owners: dict[str, list[Finding]] = {}
    for one, finding in made:
        alone = finding.cause not in ("state_lost", "counter_lost") or len(one.names) > 1 or "." not in one.names[0]
        key = f"{len(owners)}" if alone else f"of {one.names[0].rpartition('.')[0]}"
        owners.setdefault(key, []).append(finding)
    for several in owners.values():
        first = next((f for f in several if f.level == "fault"), several[0])
        names = tuple(dict.fromkeys(name for finding in several for name in finding.culprits))
        if len(several) > 1:
            lost = some(names)
            summary, repair = f"a resumed run loses {lost}", f"save {lost} and set them in load"
            first = replace(first, culprits=names[:MOST_NAMES], summary=summary, repair=repair)
        yield first


def _buffers_of(lost: Lost, models: tuple[str, ...]) -> bool:
    """Whether these are buffers that the state of one of these models has."""
    owners = [name.removeprefix("buffers of ") for name in lost.names]
    return all(d.leaf.persistent for d in lost.first) and all(
        f"{o}.".startswith(tuple(f"{m}." for m in models)) for o in owners
    )


def _is_stream(a: Uninterrupted, lost: Lost) -> bool:
    """Whether it is an iterator of the loop's own: how far the data have come is not judged."""
    held = [a.saved.object(d.leaf.path) for d in lost.differences if d.leaf.path in a.saved.places]
    return bool(held) and all(isinstance(value, Iterator) for value in held)


def _under(a: Uninterrupted, buffers: Lost, keys: Collection[str]) -> bool:
    """Whether these are buffers that a call left out, under the keys that weights were left out by."""
    names = [a.name_of(d.leaf.path) for d in buffers.first]
    return all(any(f".{key}".endswith(f".{name}") for key in keys) for name in names)


def _what_matters(a: Uninterrupted, b: Resumed) -> list[Lost]:
    """The components whose loss makes the resumed run end elsewhere, each shown by a run of its own.

    Raises ``CannotDecide`` where the run ends elsewhere although all of them are carried over, and ``Unreliable`` where
    it does not repeat.
    """
    candidates = b.candidates()
    everything = _paths(candidates)
    whole = b.again(everything)
    if whole.unequal():
        raise _undecided(a, b, whole)

    def among(names: tuple[str, ...], unequal: list[str]) -> list[Lost]:
        """The components of a group whose loss matters; all together where none does alone."""
        inside: list[Lost] = []
        if len(names) > 1:
            size = 1 if len(names) <= ONE_BY_ONE else -(-len(names) // 2)
            for part in (names[i : i + size] for i in range(0, len(names), size)):
                left_out = _paths({name: candidates[name] for name in part})
                if ended := b.again(everything - left_out).unequal():
                    inside += among(part, ended)
        return inside or [Lost(names, tuple(d for name in names for d in candidates[name]), tuple(unequal))]

    return among(tuple(candidates), b.unequal())


def _paths(components: dict[str, tuple[Difference, ...]]) -> set[str]:
    return {d.leaf.path for differences in components.values() for d in differences}


def _undecided(a: Uninterrupted, b: Resumed, whole: Resumed) -> CannotDecide | Unreliable:
    again = b.again()
    first, second = b.made.end, again.made.end
    if b.unequal() != ["fit"] and any(not same_tensor(first[n], second.get(n)) for n in first):
        return Unreliable("two runs resumed from one checkpoint under one seed differ: determinism= tells what does")
    mine, other = a.inputs, whole.inputs
    if mine is not None and other is not None and not (len(mine) == len(other) and all(map(same_tensor, mine, other))):
        return CannotDecide(OTHER_INPUTS)
    names = whole.unequal()
    what = "it raises" if names == ["fit"] else f"{names[0]} is the first to differ"
    cut = f" ({a.saved.cut})" if a.saved.cut else ""
    return CannotDecide(
        f"the resumed run differs although everything that could be reached was carried over{cut}: {what}; is "
        "there state at module level, in a closure of a library, or outside of the process?"
    )


def _certain(a: Uninterrupted, b: Resumed) -> Iterator[Lost]:
    """What is lost for sure in a run that cannot be compared: weights that training goes on with, and moments."""
    trained = {a.paths.get(name) for name in a.made.trained()}
    for name, differences in b.candidates().items():
        weights = tuple(d for d in differences if d.leaf.kind == "weight" and d.leaf.path in trained)
        moments = tuple(d for d in differences if d.leaf.kind == "optimizer_state" and _is_moment(d.before))
        yield from (Lost((name,), certain) for certain in (weights, moments) if certain)


def _finding(a: Uninterrupted, b: Resumed, lost: Lost) -> Finding:
    """The cause of one loss: by what was lost, and by what ``load`` did to it."""
    kind, differences = lost.kind, lost.first
    what = " and ".join(lost.names)

    def lose(cause: str, variant: str = "", *, level: Level = "fault", **facts: Any) -> Finding:
        return loss_finding(a, b, cause, differences, variant, what=what, unequal=lost.unequal, level=level, **facts)

    if any("['params']" in d.leaf.path and isinstance(d.before, torch.Tensor) for d in differences):
        return lose("state_lost", "stepped")
    if kind == "weight":
        call = _call_of(b, lost)
        if call is not None and call.right & {a.name_of(d.leaf.path) for d in differences}:
            return lose("weights_overwritten", call=call)
        as_built = all(b.left_as_built(d) for d in differences)
        variant, facts = _repair_of_keys(a, differences, call)
        return lose("weights_not_loaded", variant, call=call, as_built=as_built, **facts)
    if kind == "buffer":
        return lose("buffer_lost", "not loaded" if all(d.leaf.persistent for d in differences) else "not persistent")
    if kind == "optimizer_state":
        if swapped := _swapped(a, differences):
            return lose("optimizer_state_swapped", path=swapped[0], whose=swapped[1])
        variant = "one of several" if what.startswith("optimizer[") else ""
        return lose("optimizer_state_lost", variant, which=what.partition(".")[0])
    if kind in ("scheduler", "scaler", "group_value"):
        return lose({"scheduler": "scheduler_restarts", "scaler": "scaler_lost", "group_value": "lr_lost"}[kind])
    if kind == "scalar" and all(map(b.is_decayed_lr, differences)):
        return lose("lr_lost", "taken", change=last_call(b.statements, optimizer=True))
    if kind == "generator":
        return lose("own_generator", level="advice")
    # a window or a history fills again
    window = kind == "scalar" and any(d.leaf.kind == "length" for d in lost.differences)
    # a running baseline is a number, however it is kept
    number = kind in ("tensor", "array") and all(math.prod(getattr(d.before, "shape", (0,))) == 1 for d in differences)
    if number or (kind == "scalar" and not window):
        if any(b.left_as_built(d) for d in differences):
            return lose("counter_lost")
        return lose("counter_lost", "changed", level="advice")
    if kind == "mode":
        mode = "training" if differences[0].after else "evaluation"
        return lose(
            "state_lost", "mode", mode=mode, modules=some([d.leaf.path[: -len(".training")] for d in differences])
        )
    if kind in ("gradient", "requires_grad", "switch", "hooks"):
        return lose("state_lost", {"gradient": "gradient", "requires_grad": "requires_grad"}.get(kind, ""))
    certain = kind == "tensor" and (in_a_module(a, lost.differences) or _as_weights(a, differences))
    variant = "attribute" if "." in what else "value"
    variant = variant if kind in ("tensor", "array", "length") or window else ""
    return lose("state_lost", variant, level="fault" if certain else "advice", attribute=what.rpartition(".")[2])


def loss_finding(
    a: Uninterrupted,
    b: Resumed,
    cause: str,
    differences: Sequence[Difference],
    variant: str = "",
    *,
    what: str,
    unequal: tuple[str, ...] = (),
    call: StateDictCall | None = None,
    **facts: Any,
) -> Finding:
    """The finding of something lost, with what is known of it: by which keys it was left out, whether the checkpoint
    holds the values, what ends elsewhere for it."""
    names = tuple(a.name_of(d.leaf.path) for d in differences)
    parts = []
    for kind, keys in (("missing", call.missing), ("unexpected", call.unexpected)) if call is not None else ():
        parts += [f"{count(len(keys), f'{kind} key')} ({some(keys)})"] if keys else []
    # in float64 master weights are those of the model
    held, entry = "", "" if variant == "stepped" else _held_as(a, differences)
    if entry:
        held = f"the checkpoint holds the values, as {entry}"
    elif a.checkpoint.seen and any(isinstance(d.before, torch.Tensor) and d.before.numel() > 1 for d in differences):
        held = "the checkpoint does not hold the values"
    parts += [held] if held else []
    if unequal == ("fit",):
        parts.append("fit raises in the resumed run")
    elif unequal:
        ended, steps = count(len(unequal), "tensor"), count(a.made.steps[-1], "step")
        parts.append(f"{ended} {be(unequal)} different after {steps} ({some(unequal)})")
    facts |= {"what": what, "lost": len(names), "unequal": unequal, "changed": _changed(differences) or some(names)}
    facts |= {"known": "; ".join(parts) or f"{count(len(names), 'value')} differ after load"}
    facts |= {"held": f"; {held}" if held else ""}
    where = call.where if call is not None and call.where else a.lines["load"]
    leaf = differences[0].leaf
    if cause == "counter_lost":
        facts["repair"] = f"save {what} and set it in load"
        numbers = a.checkpoint.numbers.get(leaf.path.rpartition(".")[2], ())
        entry = next(("the number of this name" for n in numbers if n == _plain(differences[0].before)), "")
    in_load = call is not None and bool(entry or variant in ("prefixed", "prefix missing", "renamed", "another model"))
    if cause == "drawn_from_seed":
        change = str(assigned_at(owner_of(a, leaf), leaf.path.rpartition(".")[2]) or "")
        change = line_to_change(a, b, leaf, held=False) if variant == "outside" and not change else change
    elif cause == "weights_overwritten" or in_load:
        overwritten = cause == "weights_overwritten" and call is not None and statements.after(call.where)
        change = overwritten or (call.where if call is not None else "")
    elif cause == "optimizer_state_swapped":  # load is right: the order that the optimizer was given is not
        change = statements.only_call_in(a.lines["load"], type(holders_of(a, leaf)[-1]).__name__)
    else:
        held_so = variant == "position" or (bool(entry) and variant != "stepped")
        change = line_to_change(a, b, leaf, held=held_so)
    repair = {} if variant else behind(b, cause, change)
    return found(cause, where, names, variant, **({"change": change} | repair | facts))


def _changed(differences: Sequence[Difference]) -> str:
    """The first plain value that is another one, with its path."""
    for d in differences:
        pair, path = [_plain(d.before), _plain(d.after)], d.leaf.path
        if d.how != "changed" or path.endswith(("_step_count", "_last_lr[0]")):
            continue
        if any(isinstance(value, (bool, int, float, str)) for value in pair):
            before, after = (f"{value:.6g}" if isinstance(value, float) else repr(value) for value in pair)
            return f"{path} is {after} in place of {before}"
    return ""


def _plain(value: Any) -> Any:
    """The entry of a tensor that has one; anything else as it is."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return value.detach().item() if one else value


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1 and bool(value.any())


def _held_as(a: Uninterrupted, differences: Sequence[Difference]) -> str:
    """The entry of the checkpoint with the values of one of these tensors; several match where the values are zero."""
    return next((e for d in differences if _is_moment(d.before) and (e := a.checkpoint.holds(d.before))), "")


def _as_weights(a: Uninterrupted, differences: Sequence[Difference]) -> bool:
    """Whether most of these tensors have the shapes of declared weights."""
    shapes = {copy.shape for copy in a.values().copies.values()}
    lost = [t.shape for d in differences if isinstance(t := d.before, torch.Tensor) and t.numel() > 1]
    return bool(lost) and 2 * sum(shape in shapes for shape in lost) > len(lost)


def in_a_module(a: Uninterrupted, differences: Sequence[Difference]) -> bool:
    """Whether one of these is an attribute of a module."""
    return any(isinstance(holder, torch.nn.Module) for d in differences for holder in holders_of(a, d.leaf))


def _swapped(a: Uninterrupted, differences: Sequence[Difference]) -> tuple[str, str] | None:
    """A weight that has the moments of another one after ``load``, and that one."""
    moments = [path for path, leaf in a.saved.leaves.items() if leaf.kind == "optimizer_state"]
    for path, after in ((d.leaf.path, d.after) for d in differences if _is_moment(d.after)):
        for other in moments:
            if other != path and _is_moment(value := a.saved.value(other)) and same_value(value, after):
                return path, other
    return None


def _call_of(b: Resumed, weights: Lost) -> StateDictCall | None:
    """The call of ``load_state_dict`` that had these weights right at its end; else one that left them out."""
    names = {b.a.name_of(d.leaf.path) for d in weights.first}
    if right := [call for call in b.calls if names & call.right]:
        return right[-1]
    own = [call for call in b.calls if not call.elsewhere] or b.calls
    return next(iter([call for call in own if call.missing or call.unexpected] or own), None)


def _repair_of_keys(
    a: Uninterrupted, differences: Sequence[Difference], call: StateDictCall | None
) -> tuple[str, dict[str, Any]]:
    """What the keys of the checkpoint make of the repair: the variant and its facts."""
    if call is None:
        return "no call", {}
    if call.elsewhere:
        return "another model", {"elsewhere": call.elsewhere}
    # weights that the checkpoint holds under a key that the model does not have
    held = [(a.name_of(d.leaf.path), a.checkpoint.holds(d.before)) for d in differences if _is_moment(d.before)]
    ends = [(name, key, entry, f"[{key!r}]") for name, entry in held for key in call.unexpected]
    renamed = [(name, key, entry.removesuffix(end)) for name, key, entry, end in ends if entry.endswith(end)]
    state = next((entry for _, _, entry in renamed if "(" not in entry), "state")
    for missing in call.missing:
        for key in call.unexpected:
            if key.endswith(f".{missing}"):
                return "prefixed", {"prefix": key[: -len(missing)], "state": state}
            if missing.endswith(f".{key}"):
                return "prefix missing", {"prefix": missing[: -len(key)], "state": state}
    if renamed:
        return "renamed", {"name": renamed[0][0], "key": renamed[0][1], "more": len(renamed) - 1}
    return ("left out", {}) if call.missing and not _held_as(a, differences) else ("", {})


def averages(a: Uninterrupted, b: Resumed, known: Collection[str]) -> Iterator[Finding]:
    """Tensors that training moves, that no weight depends on, and that ``load`` does not restore: shown by
    ``evaluate``, or advice.

    That ``evaluate`` returns the same shows nothing: an accuracy over few rows is often equal.
    """
    left = b.candidates()
    moving = {name: d for name, d in left.items() if name not in known and _moves(a, b, d)}
    everything = _paths(left)
    evaluates = {"steps": False, "evaluate": True}
    offers = bool(moving) and "evaluate" in a.evidence.offers
    whole = b.again(everything, **evaluates).numbers if offers else []
    for name, differences in moving.items():
        own = any(d.leaf.kind == "buffer" and not d.leaf.persistent for d in differences)
        other = b.again(everything - _paths({name: differences}), **evaluates).numbers if whole else []
        repair = f"save and restore {name.removeprefix('weights of ')} as well"
        if other and not same_value(*(torch.tensor(n, dtype=torch.float64) for n in (whole, other))):
            evaluated = _other_numbers(whole, other)
            if own:
                yield loss_finding(a, b, "buffer_lost", differences, "evaluated", what=name, evaluated=evaluated)
            else:
                yield loss_finding(a, b, "average_lost", differences, what=name, evaluated=evaluated, repair=repair)
        elif _as_weights(a, differences) and not own:
            saved = _held_as(a, differences)  # what was saved is to be there again, whoever reads it
            repair = f"put back what the file holds, after whatever makes {name} in load" if saved else repair
            facts: dict[str, Any] = {"what": name, "level": "fault" if saved else "advice", "repair": repair}
            facts |= {"evaluated": f"evaluate() gives {other[0]:.6g} with and without it" if other else ""}
            yield loss_finding(a, b, "average_lost", differences, "equal" if other else "likely", **facts)


def _moves(a: Uninterrupted, b: Resumed, differences: Sequence[Difference]) -> bool:
    """Whether training made it, goes on moving it, and it is no copy of the weights at some moment."""
    end, other = a.at_end, b.at_end
    if end is None or other is None:
        return False
    weights = a.values()
    for d in differences:
        path = d.leaf.path
        if d.leaf.kind not in _STATES or not isinstance(d.before, torch.Tensor) or d.before.numel() <= 1:
            continue
        made = path not in b.built.leaves or not same_value(b.built.value(path), d.before)
        goes_on = path in end.leaves and not same_value(end.value(path), d.before)
        differing = path in other.leaves and goes_on and not same_value(other.value(path), end.value(path))
        if made and differing and not any(same_value(weight, d.before) for weight in weights.values()):
            return True
    return False


def _other_numbers(whole: list[float], other: list[float]) -> str:
    """The number of ``evaluate`` that changes most, relative to its size."""
    if len(whole) != len(other):
        return f"evaluate() gives {len(other)} numbers in place of {len(whole)}"
    at = max(range(len(whole)), key=lambda i: abs(whole[i] - other[i]) / max(abs(whole[i]), abs(other[i]), 1e-300))
    which = f" (number {at + 1} of the {len(whole)} that it returns)" if len(whole) > 1 else ""
    return f"evaluate() gives {other[at]:.6g} in place of {whole[at]:.6g}{which}"


def steered(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    """Values that no weight depends on, and without which an average that was restored goes elsewhere: the number of
    its updates, from which its decay is computed."""
    left = b.candidates()
    everything = _paths(left)
    differing = _differing_averages(a, b, everything)
    scalars = {
        name: differences
        for name, differences in left.items()
        if any(d.leaf.kind in ("scalar", "buffer") and b.left_as_built(d) for d in differences)
    }
    if not differing or not scalars or differing & _differing_averages(a, b.again(everything), set()):
        return
    read = any("evaluate" in a.saved.leaves[path].reached_from for path in differing)
    level = "fault" if read else "advice"
    for name, differences in scalars.items():
        without = b.again(everything - _paths({name: differences}))
        if ends := differing & _differing_averages(a, without, set()):
            buffer = any(d.leaf.kind == "buffer" for d in differences)
            cause, variant = ("buffer_lost", "not loaded") if buffer else ("counter_lost", "" if read else "changed")
            yield loss_finding(a, b, cause, differences, variant, what=name, unequal=tuple(sorted(ends)), level=level)


def _differing_averages(a: Uninterrupted, b: Resumed, lost: set[str]) -> set[str]:
    """Paths of what looks like an average, is as it was saved after ``load``, and ends elsewhere."""
    mine, other = a.at_end, b.at_end
    if mine is None or other is None:
        return set()
    shapes = {copy.shape for copy in a.values().copies.values() if math.prod(copy.shape) > 1}
    declared = set(a.paths.values())
    return {
        path
        for path, leaf in mine.leaves.items()
        if leaf.kind in ("weight", "buffer", "tensor") and path not in declared and path not in lost
        and path in other.leaves and path in a.saved.leaves
        and isinstance(before := mine.value(path), torch.Tensor) and before.shape in shapes
        and not same_value(before, other.value(path))
    }  # fmt: skip
