"""What a resumed run has lost, each fact with its cause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.averages import averages, steered
from pytest_trainloop.checks.state.resume_equivalence.components import OTHER_INPUTS, Lost, candidates, what_matters
from pytest_trainloop.checks.state.resume_equivalence.facts import Fact, as_weights, is_moment, saved_as, shown
from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.reach.leaves import same_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.state.resume_equivalence.loading import StateDictCall
    from pytest_trainloop.checks.state.resume_equivalence.runs import Renewed, Uninterrupted
    from pytest_trainloop.finding import Level
    from pytest_trainloop.reach.snapshot import Difference

_FIRST = (
    *("weight", "buffer", "optimizer_state", "scheduler", "scaler", "group_value", "generator", "gradient", "mode"),
    *("requires_grad", "switch", "hooks", "tensor", "array", "scalar", "length", "reference"),
)
"""Of the kinds in one component the one that names its cause."""


def facts(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Fact]:
    """Everything that the two runs show. Raises ``CannotDecide`` or ``Unreliable`` at the end where the resumed run
    ends elsewhere for no known reason."""
    apart = list(_identities(a, b))
    yield from apart
    undecided: CannotDecide | Unreliable | None = None
    found: list[Fact] = []
    if b.unequal() and not apart:
        try:
            lost = what_matters(a, b, renewed)
        except (CannotDecide, Unreliable) as reason:
            undecided = reason
            lost = list(_certain(a, b, renewed))
        streams = [one for one in lost if _is_stream(a, one)]
        if streams and len(streams) == len(lost):
            undecided = CannotDecide(OTHER_INPUTS)
        found = _named(a, b, [one for one in lost if one not in streams])
        if undecided is not None and not found and b.ended.raised is not None:
            found = [Fact("load_raises", ("fit()",), raised=b.ended.raised)]
        yield from found
    yield from _schedules(a, b, renewed, found)
    yield from _scalers(a, b, renewed)
    if not apart and undecided is None:
        yield from averages(a, b, renewed, found)
        if not b.unequal():
            yield from steered(a, b, renewed)
    yield from _random_states(a, b, renewed)
    yield from _live(a)
    if not apart and undecided is None:
        yield from _drawn(a, b, renewed)
    if undecided is not None and not found:
        raise undecided


def _identities(a: Uninterrupted, b: Resumed) -> Iterator[Fact]:
    """Weights that the optimizer no longer holds, and those that are no longer one tensor."""
    held, now = a.ended.half, b.ended.half
    left = tuple(sorted(held.held - now.held))
    assigned = next((call for call in b.loading.calls if call.assign), None)
    if left and now.foreign > held.foreign:
        names = tuple(n for n in a.paths if n in left)
        yield Fact("optimizer_detached", names, call=assigned, detail=f"{now.foreign} tensors")
    yield from untied(a, b)


def untied(a: Uninterrupted, b: Resumed) -> Iterator[Fact]:
    """Names that shared a weight when it was saved, and no longer do."""
    assigned = next((call for call in b.loading.calls if call.assign), None)
    for group in a.ties:
        if not any(set(group) <= set(other) for other in b.ties):
            yield Fact("untied", group, call=assigned)


def _certain(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Lost]:
    """What is lost for sure in a run that cannot be compared: weights that training goes on with, and moments."""
    trained = {a.paths.get(name) for name in a.ended.made.trained()}
    for name, differences in candidates(b, renewed).items():
        weights = tuple(d for d in differences if d.leaf.kind == "weight" and d.leaf.path in trained)
        moments = tuple(d for d in differences if d.leaf.kind == "optimizer_state" and is_moment(d.before))
        for certain in (weights, moments):
            if certain:
                yield Lost((name,), certain)


def _is_stream(a: Uninterrupted, lost: Lost) -> bool:
    """Whether it is an iterator of the loop's own: how far the data have come is not judged."""
    held = [a.saved.object(path) for path in lost.paths if path in a.saved.places]
    return bool(held) and all(isinstance(value, Iterator) for value in held)


def _named(a: Uninterrupted, b: Resumed, lost: Sequence[Lost]) -> list[Fact]:
    found = [_fact(a, b, one) for one in lost]
    causes = {fact.cause for fact in found}
    if causes & {"optimizer_state_lost", "scheduler_restarts"}:  # what sets the rates is lost, and the rates with it
        found = [fact for fact in found if fact.cause != "rate_lost"]
    calls = [fact.call for fact in found if fact.cause == "weights_not_loaded" and fact.call is not None]
    return [fact for fact in found if not any(_left_out_with(fact, call) for call in calls)]


def _left_out_with(fact: Fact, call: StateDictCall) -> bool:
    """Whether these are buffers that the same call left out, under the keys that weights were left out by."""
    if fact.cause != "buffer_lost" or not call.missing:
        return False
    keys = {*call.missing, *call.unexpected}
    return all(any(f".{key}".endswith(f".{name}") for key in keys) for name in fact.names)


def _fact(a: Uninterrupted, b: Resumed, lost: Lost) -> Fact:
    kind = next(kind for kind in _FIRST if kind in lost.kinds)
    differences = tuple(d for d in lost.differences if d.leaf.kind == kind)
    names = tuple(shown(d.leaf.path, a) for d in differences)
    held = saved_as(a, differences)
    component = " and ".join(lost.names)

    def fact(cause: str, level: Level = "fault", detail: str = "", call: StateDictCall | None = None) -> Fact:
        return Fact(cause, names, level, component, lost.unequal, call, differences, detail, None, held)

    if any("['params']" in d.leaf.path and isinstance(d.before, torch.Tensor) for d in differences):
        return fact("state_lost", detail="stepped")
    if kind == "weight":
        return _weights(b, fact("weights_not_loaded"))
    if kind == "buffer":
        lasting = all(d.leaf.persistent for d in differences)
        return fact("buffer_lost", detail="" if lasting else "persistent=False")
    if kind == "optimizer_state":
        swapped = _swapped(a, differences)
        return fact("optimizer_state_swapped", detail=swapped) if swapped else fact("optimizer_state_lost")
    if kind in ("scheduler", "scaler", "group_value"):
        cause = {"scheduler": "scheduler_restarts", "scaler": "scaler_lost", "group_value": "rate_lost"}[kind]
        return fact(cause)
    if kind == "generator":
        return fact("own_generator", "advice")
    if kind == "scalar" and "length" in lost.kinds:
        return fact("state_lost", "advice", detail="length")  # a window or a history, which fills again
    if kind == "scalar" or (kind in ("tensor", "array") and all(_is_number(d.before) for d in differences)):
        forgotten = any(_as_built(b, d) for d in differences)
        return fact("counter_lost", "fault" if forgotten else "advice")
    certain = kind in ("gradient", "mode", "requires_grad", "switch", "hooks")
    certain = certain or (kind == "tensor" and (_in_a_module(a, lost) or as_weights(a, differences)))
    return fact("state_lost", "fault" if certain else "advice", detail=kind)


def _is_number(value: Any) -> bool:
    """Whether a tensor or an array has one entry: a running baseline is a number, however it is kept."""
    return math.prod(getattr(value, "shape", (0,))) == 1


def _weights(b: Resumed, fact: Fact) -> Fact:
    """Which call of ``load_state_dict`` it was, and whether the weights were right at its end."""
    right = [call for call in b.loading.calls if set(fact.names) & call.right]
    as_built = all(_as_built(b, d) for d in fact.differences)
    own = [call for call in b.loading.calls if not call.elsewhere or b.loading.replaced] or b.loading.calls
    by_keys = [call for call in own if call.missing or call.unexpected]
    call = right[-1] if right else next(iter(by_keys or own), None)
    if call is not None and b.loading.replaced:
        call = replace(call, elsewhere="")
    cause = "weights_overwritten" if right else "weights_not_loaded"
    detail = "as built" if as_built else ""
    return replace(fact, cause=cause, call=call, detail=detail)


def _as_built(b: Resumed, difference: Difference) -> bool:
    """Whether ``load`` has left a value as the fresh loop had it."""
    path = difference.leaf.path
    if path not in b.built.leaves:
        return difference.how == "vanished"
    return difference.how != "vanished" and same_value(b.built.value(path), difference.after)


def _swapped(a: Uninterrupted, differences: Sequence[Difference]) -> str:
    """Whose moments one weight has after ``load``, in words; empty where they are none of another's."""
    moments = {p: a.saved.value(p) for p, leaf in a.saved.leaves.items() if leaf.kind == "optimizer_state"}
    for difference in differences:
        path, after = difference.leaf.path, difference.after
        if not is_moment(after):
            continue
        whose = [p for p, value in moments.items() if p != path and is_moment(value) and same_value(value, after)]
        if whose:
            return f"{path} has the values that {whose[0]} had"
    return ""


def _in_a_module(a: Uninterrupted, lost: Lost) -> bool:
    """Whether it is an attribute of a module."""
    for path in lost.paths:
        place = a.saved.places.get(path)
        while place is not None:
            if isinstance(place.value, torch.nn.Module):
                return True
            place = place.within
    return False


def _schedules(a: Uninterrupted, b: Resumed, renewed: Renewed, found: Sequence[Fact]) -> Iterator[Fact]:
    """A schedule whose count training moves and which ends elsewhere, whatever the rates are now."""
    if any(fact.cause == "scheduler_restarts" for fact in found):
        return
    end, other = a.ended.half.end, b.ended.half.end
    if end is None or other is None:
        return
    for path, leaf in a.saved.leaves.items():
        if not path.endswith(".last_epoch") or leaf.kind != "scheduler" or renewed.covers(path, leaf.kind):
            continue
        if path not in end.leaves or path not in other.leaves or path not in b.built.leaves:
            continue
        built, last, now = b.built.value(path), end.value(path), other.value(path)
        if built != a.saved.value(path) and last != now:
            yield Fact("scheduler_restarts", (path,), component=leaf.component, detail=f"{now} in place of {last}")
            return


def _scalers(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Fact]:
    if "scaler" in renewed.names:
        return
    for path, scale in a.scales.items():
        now = b.scales.get(path)
        if now is not None and now != scale:
            yield Fact("scaler_lost", (path,), component=path, detail=f"{now:g} in place of {scale:g}")


def _random_states(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Fact]:
    if "rng" in renewed.names:
        return
    drawn, saved = a.ended.half.drawn, a.checkpoint.random_states.keys()
    left = sorted((drawn & saved) - b.restored - b.kept_for_later)
    if left:
        yield Fact(
            "rng_not_put_back",
            tuple(_SETTERS[name] for name in left),
            detail=" and ".join(left),
            saved_as=", ".join(a.checkpoint.random_states[name] for name in left),
        )
    absent = sorted(drawn - saved)
    if absent and a.checkpoint.seen and not saved:
        yield Fact("rng_not_saved", tuple(_GETTERS[name] for name in absent), "advice", detail=" and ".join(absent))


_SETTERS = {"torch": "torch.set_rng_state()", "numpy": "np.random.set_state()", "python": "random.setstate()"}
_GETTERS = {"torch": "torch.get_rng_state()", "numpy": "np.random.get_state()", "python": "random.getstate()"}


def _live(a: Uninterrupted) -> Iterator[Fact]:
    """Weights in the checkpoint that the project keeps uncopied. Those that nobody else holds are written out at once,
    or copied, as here."""
    kept = {entry: holder for entry, holder in a.drifting.items() if holder}
    if kept:
        yield Fact("live_references", tuple(kept.values()), detail=next(iter(kept)))


def _drawn(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Fact]:
    """Weights and buffers that are as another seed built them: neither saved nor made by training."""
    other = Resumed(a, renewed=renewed, other_seed=1, steps=False)
    if other.load_error is not None or other.loaded is None or b.loaded is None:
        return
    names = []
    for name, path in a.paths.items():
        snapshots = (a.saved, b.loaded, other.loaded, other.built)
        if any(path not in s.leaves for s in snapshots) or renewed.covers(path, a.saved.leaves[path].kind):
            continue
        saved, loaded, now, built = (s.value(path) for s in snapshots)
        if same_value(saved, loaded) and not same_value(saved, now) and same_value(now, built):
            names.append(name)
    if names:
        yield Fact("drawn_from_seed", tuple(names), "advice")
