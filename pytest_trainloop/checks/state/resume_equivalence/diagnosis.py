"""What a resumed run has lost, each fact with its cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.components import Lost, candidates, what_matters
from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.reach.leaves import same_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.state.resume_equivalence.loading import StateDictCall
    from pytest_trainloop.checks.state.resume_equivalence.runs import Renewed, Uninterrupted
    from pytest_trainloop.finding import Level
    from pytest_trainloop.reach.snapshot import Difference
    from pytest_trainloop.recording.events import Raised

_FIRST = (
    *("weight", "buffer", "optimizer_state", "scheduler", "scaler", "group_value", "generator", "gradient", "mode"),
    *("requires_grad", "switch", "hooks", "tensor", "array", "scalar", "length", "reference"),
)
"""Of the kinds in one component the one that names its cause."""

_STATES = ("tensor", "weight", "buffer", "array")


@dataclass(frozen=True, slots=True)
class Fact:
    """One cause, with what shows it."""

    cause: str
    names: tuple[str, ...]
    """As the reader types them."""
    level: Level = "fault"
    component: str = ""
    unequal: tuple[str, ...] = ()
    """Weights and buffers that end elsewhere for it alone; none where an identity shows it."""
    call: StateDictCall | None = None
    differences: tuple[Difference, ...] = ()
    detail: str = ""
    raised: Raised | None = None
    saved_as: str = ""
    """The entry of the checkpoint that holds what was lost."""


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
        found = _named(a, b, lost)
        if undecided is not None and not found and b.ended.raised is not None:
            found = [Fact("load_raises", ("fit()",), raised=b.ended.raised)]
        yield from found
    yield from _schedules(a, b, renewed, found)
    yield from _scalers(a, b, renewed)
    if not apart:
        yield from _averages(a, b, renewed, found)
    yield from _random_states(a, b, renewed)
    yield from _live(a)
    if not apart and undecided is None:
        yield from _drawn(a, b, renewed)
    if undecided is not None and not found:
        raise undecided


def shown(path: str, a: Uninterrupted) -> str:
    """A path; a declared weight or buffer by its plain name."""
    return next((name for name, own in a.paths.items() if own == path), path)


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
    assert a.saved is not None
    trained = {a.paths.get(name) for name in a.ended.made.trained()}
    for name, differences in candidates(b.lost, renewed).items():
        weights = tuple(d for d in differences if d.leaf.kind == "weight" and d.leaf.path in trained)
        moments = tuple(d for d in differences if d.leaf.kind == "optimizer_state" and _is_moment(d.before))
        for certain in (weights, moments):
            if certain:
                yield Lost((name,), certain)


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1 and bool(value.any())


def _named(a: Uninterrupted, b: Resumed, lost: Sequence[Lost]) -> list[Fact]:
    found = [_fact(a, b, one) for one in lost]
    causes = {fact.cause for fact in found}
    if causes & {"optimizer_state_lost", "scheduler_restarts"}:  # what sets the rates is lost, and the rates with it
        found = [fact for fact in found if fact.cause != "rate_lost"]
    return found


def _fact(a: Uninterrupted, b: Resumed, lost: Lost) -> Fact:
    kind = next(kind for kind in _FIRST if kind in lost.kinds)
    differences = tuple(d for d in lost.differences if d.leaf.kind == kind)
    names = tuple(shown(d.leaf.path, a) for d in differences)
    saved_as = _saved_as(a, differences)
    component = " and ".join(lost.names)

    def fact(cause: str, level: Level = "fault", detail: str = "", call: StateDictCall | None = None) -> Fact:
        return Fact(cause, names, level, component, lost.unequal, call, differences, detail, None, saved_as)

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
    if kind == "scalar":
        return fact("counter_lost")
    certain = kind in ("gradient", "mode", "requires_grad", "switch", "hooks")
    certain = certain or (kind == "tensor" and (_in_a_module(a, lost) or _as_weights(a, differences)))
    return fact("state_lost", "fault" if certain else "advice", detail=kind)


def _saved_as(a: Uninterrupted, differences: Sequence[Difference]) -> str:
    """The entry of the checkpoint with the values of one of these tensors; many are alike where they are zero."""
    return next((held for d in differences if _is_moment(d.before) and (held := a.checkpoint.holds(d.before))), "")


def _weights(b: Resumed, fact: Fact) -> Fact:
    """Which call of ``load_state_dict`` it was, and whether the weights were right at its end."""
    assert b.built is not None
    right = [call for call in b.loading.calls if set(fact.names) & call.right]
    as_built = all(
        d.leaf.path in b.built.leaves and same_value(b.built.value(d.leaf.path), d.after) for d in fact.differences
    )
    by_keys = [call for call in b.loading.calls if call.missing or call.unexpected]
    call = right[-1] if right else next(iter(by_keys or b.loading.calls), None)
    cause = "weights_overwritten" if right else "weights_not_loaded"
    detail = "as built" if as_built else ""
    return replace(fact, cause=cause, call=call, detail=detail)


def _swapped(a: Uninterrupted, differences: Sequence[Difference]) -> str:
    """Whose moments one weight has after ``load``, in words; empty where they are none of another's."""
    assert a.saved is not None
    moments = {p: a.saved.value(p) for p, leaf in a.saved.leaves.items() if leaf.kind == "optimizer_state"}
    for difference in differences:
        path, after = difference.leaf.path, difference.after
        if not _is_moment(after):
            continue
        whose = [p for p, value in moments.items() if p != path and _is_moment(value) and same_value(value, after)]
        if whose:
            return f"{path} has the values that {whose[0]} had"
    return ""


def _in_a_module(a: Uninterrupted, lost: Lost) -> bool:
    """Whether it is an attribute of a module."""
    assert a.saved is not None
    for path in lost.paths:
        place = a.saved.places.get(path)
        while place is not None:
            if isinstance(place.value, torch.nn.Module):
                return True
            place = place.within
    return False


def _as_weights(a: Uninterrupted, differences: Sequence[Difference]) -> bool:
    """Whether most of these tensors have the shapes of declared weights."""
    assert a.saved is not None
    shapes = {v.shape for p in a.paths.values() if p in a.saved.leaves and (v := a.saved.value(p)) is not None}
    tensors = [d.before for d in differences if isinstance(d.before, torch.Tensor) and d.before.numel() > 1]
    return bool(tensors) and 2 * sum(t.shape in shapes for t in tensors) > len(tensors)


def _schedules(a: Uninterrupted, b: Resumed, renewed: Renewed, found: Sequence[Fact]) -> Iterator[Fact]:
    """A schedule whose count training moves and which ends elsewhere, whatever the rates are now."""
    if any(fact.cause == "scheduler_restarts" for fact in found):
        return
    end, other = a.ended.half.end, b.ended.half.end
    assert a.saved is not None
    assert b.built is not None
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


def _averages(a: Uninterrupted, b: Resumed, renewed: Renewed, found: Sequence[Fact]) -> Iterator[Fact]:
    """Tensors that training moves, that no weight depends on, and that begin anew: shown by ``evaluate``, or advice."""
    known = {name for fact in found for name in fact.component.split(" and ")}
    left = candidates(b.lost, renewed)
    moving = {n: d for n, d in left.items() if n not in known and _moves(a, b, d)}
    if not moving:
        return
    everything = {d.leaf.path for differences in left.values() for d in differences}
    offers = "evaluate" in a.evidence.offers
    whole = Resumed(a, everything, renewed=renewed, steps=False, evaluate=True).numbers() if offers else []
    for name, differences in moving.items():
        own = [d for d in differences if d.leaf.kind == "buffer" and not d.leaf.persistent]
        names = tuple(shown(d.leaf.path, a) for d in differences)
        saved_as = _saved_as(a, differences)
        if whole:
            without = everything - {d.leaf.path for d in differences}
            other = Resumed(a, without, renewed=renewed, steps=False, evaluate=True).numbers()
            if other and not _same_result(whole, other):
                cause = "buffer_lost" if own else "average_lost"
                detail = f"evaluate() gives {_number(other)} in place of {_number(whole)}"
                yield Fact(cause, names, component=name, differences=differences, detail=detail, saved_as=saved_as)
        elif _as_weights(a, differences) and not own:
            yield Fact("average_lost", names, "advice", name, differences=differences, saved_as=saved_as)


def _moves(a: Uninterrupted, b: Resumed, differences: Sequence[Difference]) -> bool:
    """Whether training made it, goes on moving it, and it is no copy of the weights at some moment."""
    end = a.ended.half.end
    assert b.built is not None
    assert a.saved is not None
    if end is None or not any(d.leaf.kind in _STATES for d in differences):
        return False
    weights = [a.saved.value(p) for p in a.paths.values() if p in a.saved.leaves]
    for d in differences:
        path = d.leaf.path
        if d.leaf.kind not in _STATES or not isinstance(d.before, torch.Tensor) or d.before.numel() <= 1:
            continue
        made = path not in b.built.leaves or not same_value(b.built.value(path), d.before)
        goes_on = path in end.leaves and not same_value(end.value(path), d.before)
        if made and goes_on and not any(same_value(w, d.before) for w in weights if w is not None):
            return True
    return False


def _same_result(one: list[float], other: list[float]) -> bool:
    return same_value(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))


def _number(result: list[float]) -> str:
    return f"{result[0]:.6g}"


def _random_states(a: Uninterrupted, b: Resumed, renewed: Renewed) -> Iterator[Fact]:
    if "rng" in renewed.names:
        return
    drawn, saved = a.ended.half.drawn, a.checkpoint.random_states
    left = sorted((drawn & saved) - b.restored - b.kept_for_later)
    if left:
        yield Fact("rng_not_put_back", tuple(_SETTERS[name] for name in left), detail=" and ".join(left))
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
    assert a.saved is not None
    if other.load_error is not None or other.loaded is None or other.built is None or b.loaded is None:
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
