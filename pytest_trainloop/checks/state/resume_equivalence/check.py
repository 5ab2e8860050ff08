"""A run that stops, saves, loads and goes on is the run that never stopped.

What it does
    It trains for three steps, calls ``save``, and trains for three more. Then it builds the loop again under the same
    seed, calls ``load`` with a copy of what was saved, and makes the second three steps again.

Why is this bad?
    What a checkpoint forgets is lost whenever a job is restarted: moments, the count of a schedule, an average of the
    weights, or the weights themselves where keys do not match and ``strict=False`` says nothing. The loss jumps, or
    training goes on a little worse and nobody knows why.

How it decides
    1. Weights and buffers at the end of both runs must agree up to rounding in float64; with a gradient scaler in the
       loop's own precision. Both second halves get the same batches and random state
       (docs/how-it-decides.md#a-resumed-run).
    2. If they differ, everything that differs after ``load`` is carried over from the first run, which must heal it.
       Then all but one component is carried over. What makes the run end elsewhere is lost. Histories and clocks matter
       to no step. A number that training leaves as built and ``load`` sets is set equally in both runs.
    3. Compared directly are schedule counts, the scaler's scale (halved before saving), weights that the optimizer
       holds, tied tensors, rounded weights, and a random state in the checkpoint.
    4. An average that only ``evaluate`` reads is judged by what ``evaluate`` returns without it.
    5. A loop under another seed shows what is neither saved nor made by training: attributes that modules draw when
       built. If its batches have the same rows, also what ``fit`` and ``loss`` hold.
    6. A loop that draws other orders when built must not train, after ``load``, on rows that ``evaluate`` reads in the
       first loop alone. Names must not be numbered in the order of a set.
    7. Where ``load`` sets what ``batches(n)`` draws from, the data must go on in the second epoch as in the first.
       Later epochs must skip no batches.
    8. ``renews=("optimizer", "scheduler", "scaler", "rng")``, or a path (``"model.bank"``), names what begins again on
       purpose.

    | lost or seen | cause | advice if |
    |---|---|---|
    | weights | ``weights_not_loaded``, ``weights_overwritten``, ``weights_rounded`` |  |
    | what the optimizer holds; shared tensors | ``optimizer_detached``, ``untied`` |  |
    | state of optimizer, schedule, scaler, learning rate, buffer | ``optimizer_state_lost``,
      ``optimizer_state_swapped``, ``scheduler_restarts``, ``scaler_lost``, ``lr_lost``, ``buffer_lost`` |  |
    | a number; other state | ``counter_lost``, ``state_lost`` | a different value; outside a module |
    | an average | ``average_lost`` | ``evaluate`` does not read it, and no file holds it |
    | the checkpoint's tensors change with training | ``live_references`` |  |
    | a random state in the checkpoint | ``rng_not_put_back`` |  |
    | no random state is saved; a generator of the loop's own | ``rng_not_saved``, ``own_generator`` | always |
    | a different seed gives different values | ``drawn_from_seed`` | no permutation of a module |
    | a different seed trains on what was held out; numbers of names follow a set | ``split_drawn_again``,
      ``numbered_by_a_set`` | always |
    | epochs after the resumed one miss batches | ``later_epochs_cut_short`` |  |
    | ``save`` changes training; ``save`` or ``load`` raises | ``save_changes``, ``save_raises``, ``load_raises`` |  |

When it is skipped
    It skips a difference that nothing heals, and files that are missing.

Faulty
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> def save():
    ...     return {"model": model.state_dict()}
    >>> def load(state):
    ...     model.load_state_dict(state["model"])

Fixed
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> def save():
    ...     return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    >>> def load(state):
    ...     model.load_state_dict(state["model"])
    ...     optimizer.load_state_dict(state["optimizer"])

Known limits
    Both runs are given the same batches: an epoch that begins again after a resume is no fault. State that the walk
    cannot reach (at module level of a library, outside of the process) makes the check skip where it matters. What
    changes nothing within three steps and has no count of its own is not seen: a threshold that is reached later.
    A split of data that are drawn for the test is seen if an order splits it. What is drawn outside of modules is not
    judged if it may be data in a test: one entry for each example, rows that a module is given.

    A green check makes 9 optimizer steps of the loop. One that fails makes 3 more, and 3 for each component that
    differs. Where ``load`` sets a number that training leaves alone: 2 for each batch of an epoch.

References
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    https://docs.pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.resume_equivalence.causes import CAUSES, found
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check
from pytest_trainloop.core.whose import present
from pytest_trainloop.core.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.runs.evidence import Evidence

COPIES, STORED = 6, 16
"""Times the weights in float64 that are held at the peak, and that lie in temporary files, with an optimizer that keeps
two moments."""

_SETTERS = {"torch": "torch.set_rng_state()", "numpy": "np.random.set_state()", "python": "random.setstate()"}
_GETTERS = {"torch": "torch.get_rng_state()", "numpy": "np.random.get_state()", "python": "random.getstate()"}
_OF_SAVE = ("save_changes", "live_references", "rng_not_saved", "weights_rounded")
"""Causes whose line is that of ``save``."""


@check(needs={"fit", "save", "load"}, causes=CAUSES, rank=30, names="attribute", steps=50)
def resume_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.resume_equivalence.checkpoint import rounded
    from pytest_trainloop.checks.state.resume_equivalence.runs import Reported, both, changed_by_save
    from pytest_trainloop.checks.state.resume_equivalence.state_calls import SAVES
    from pytest_trainloop.checks.state.resume_equivalence.statements import last_call
    from pytest_trainloop.checks.state.two_runs import compare_runs
    from pytest_trainloop.runs.memory_budget import require_room

    require_room(evidence, COPIES, "it keeps copies of the whole training state", stored=STORED)
    a, b = both(evidence)
    try:
        if a.unreadable:
            raise CannotDecide(a.unreadable)
        if a.save_error is not None:
            yield _refused("save_raises", "save", a.save_error)
            return
        a.require_two_halves()
        b = present(b, "the resumed run")
        if names := changed_by_save(a):
            yield _seen("save_changes", a, names)
        elif b.load_error is not None:
            raises = _load_raises(a, b, b.load_error)
            # an optimizer over one weight more does not take the state of one over less
            yield from list(_untied(a, b)) or [raises]
        else:
            for finding in _compared(a, b):
                evidence.shared(Reported).courses = compare_runs(b.made, a.made, both_begin=False)
                yield finding
            dtype, lower = rounded(evidence)
            if lower:
                yield _seen("weights_rounded", a, lower, dtype=dtype, change=last_call(a.statements, SAVES))
    finally:
        a.checkpoint.remove()


def _compared(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    """What two runs that came to their end show. Raises ``CannotDecide`` or ``Unreliable`` where the resumed run ends
    elsewhere for no known reason."""
    from pytest_trainloop.checks.state.resume_equivalence.drawn import drawn_attributes, split_drawn_again
    from pytest_trainloop.checks.state.resume_equivalence.lost import averages, losses, steered
    from pytest_trainloop.checks.state.resume_equivalence.positions import data_go_on
    from pytest_trainloop.checks.state.resume_equivalence.set_order import numbered_by_a_set
    from pytest_trainloop.checks.state.resume_equivalence.statements import kept_at

    if separated := [*_detached(a, b), *_untied(a, b)]:
        lost, known, undecided = separated, set[str](), None
    else:
        lost, known, undecided = losses(a, b)
    yield from lost
    known_causes = {finding.cause for finding in lost}
    yield from _schedules(a, b) if "scheduler_restarts" not in known_causes else ()
    yield from _scalers(a, b) if "scaler_lost" not in known_causes else ()
    if not separated and undecided is None:
        yield from averages(a, b, known)
        if not b.unequal():
            yield from steered(a, b)
            yield from data_go_on(a, b)
    yield from _random_states(a, b)
    if a.drifting:
        entry, kept = next(iter(a.drifting.items()))
        attribute = kept.split("[")[0].rpartition(".")[2]
        line = kept_at(a, a.saved.leaves[kept], attribute)
        facts = {"kept": kept, "entry": entry, "attribute": attribute, "change": line}
        yield _seen("live_references", a, a.drifting.values(), "kept", **facts)
    if not separated and undecided is None:
        other = b.again(other_seed=1, steps=False)
        if names := _drawn_from_seed(a, b, other):
            yield _seen("drawn_from_seed", a, names, level="advice")
        if other.loaded is not None and not b.unequal():
            yield from drawn_attributes(a, b, other)
            yield from split_drawn_again(a, b, other)
            yield from numbered_by_a_set(a)
    if undecided is not None and not lost:
        raise undecided


def _seen(cause: str, a: Uninterrupted, names: Iterable[str], variant: str = "", **facts: Any) -> Finding:
    """The finding of something that is compared as it is."""
    names = tuple(names)
    where = facts.pop("where", "")
    seen = where or a.lines["save" if cause in _OF_SAVE else "load"]
    return found(cause, seen, names, variant, **({"lost": len(names), "change": where} | facts))


def _load_raises(a: Uninterrupted, b: Resumed, error: Raised) -> Finding:
    """Raises ``CannotDecide`` where ``load`` finds nothing since ``save`` wrote elsewhere, or under a longer name."""
    given, files = a.checkpoint.given, a.checkpoint.files()
    if given is not None and error.kind in ("OSError", "FileNotFoundError"):
        if not files:
            raise CannotDecide(
                f"save wrote nothing into the folder that it is given, and load raised {error.summary}; let save write "
                "to the path that it is given, and load read it"
            )
        if b.unopened == given.name and all(name.startswith(f"{given.name}.") for name in files):
            raise CannotDecide(
                f"save wrote {some(files)} where it was given {given.name}, and load raised {error.summary}; declare a "
                "load that is given the same path and puts the same ending there"
            )
    if b.unopened:
        where = error.place if error.place.file else ""
        facts = {"kind": error.kind, "files": some(files), "opened": b.unopened}
        return found("load_raises", where, ("load()",), "unopened", **facts)
    return _refused("load_raises", "load", error)


def _refused(cause: str, function: str, error: Raised) -> Finding:
    """Raises ``CannotDecide`` for what is not in the project's hands here."""
    absent = ("OSError", "FileNotFoundError", "PermissionError", "ConnectionError")
    if error.kind in (*absent, "ImportError", "ModuleNotFoundError"):
        raise CannotDecide(
            f"{function} raised {error.summary}; let {function} use the path that it is given: save(path) and "
            "load(path)"
        )
    where = error.place if error.place.file else ""
    return found(cause, where, (f"{function}()",), raised=error.summary, kind=error.kind, change=str(where))


def _detached(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    """Weights that the optimizer no longer holds, while it steps others."""
    if (left := a.held - b.held) and b.foreign > a.foreign:
        where = next((call.where for call in b.calls if call.assign), "")
        yield _seen("optimizer_detached", a, (n for n in a.paths if n in left), foreign=b.foreign, where=where)


def _untied(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    """Names that shared a weight when it was saved, and no longer do."""
    where = next((call.where for call in b.calls if call.assign), "")
    for group in a.ties:
        if not any(set(group) <= set(other) for other in b.ties):
            yield _seen("untied", a, group, tied=" and ".join(group), where=where)


def _schedules(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    """A schedule whose count training moves and which ends elsewhere, whatever the learning rate is now."""
    from pytest_trainloop.checks.state.resume_equivalence.statements import behind, line_to_change

    if a.at_end is None or b.at_end is None:
        return
    for path, leaf in a.saved.leaves.items():
        if not path.endswith(".last_epoch") or leaf.kind != "scheduler" or b.renewed.covers(leaf):
            continue
        if path in a.at_end.leaves and path in b.at_end.leaves and path in b.built.leaves:
            before, now = a.at_end.value(path), b.at_end.value(path)
            if b.built.value(path) != a.saved.value(path) and before != now:
                line = line_to_change(a, b, leaf, held=False)
                facts = {"now": now, "before": before, **behind(b, "scheduler_restarts", line)}
                yield _seen("scheduler_restarts", a, (path,), "counted", change=line, **facts)
                return


def _scalers(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.resume_equivalence.state_calls import SAVES
    from pytest_trainloop.checks.state.resume_equivalence.statements import behind, last_call

    for path, before in a.scales.items() if "scaler" not in b.renewed.names else ():
        if (now := b.scales.get(path, before)) != before:
            saved = path in a.saved.places and id(a.saved.object(path)) in {call.on for call in a.statements}
            line = last_call(b.statements) if saved else last_call(a.statements, SAVES)
            facts = {"now": now, "before": before, **behind(b, "scaler_lost", line)}
            yield _seen("scaler_lost", a, (path,), "scale", change=line, **facts)


def _random_states(a: Uninterrupted, b: Resumed) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.resume_equivalence.state_calls import SAVES
    from pytest_trainloop.checks.state.resume_equivalence.statements import last_call

    if "rng" in b.renewed.names:
        return
    saved = a.checkpoint.random_states
    if left := sorted((a.drawn & saved.keys()) - b.restored - b.kept_for_later):
        names = [_SETTERS[name] for name in left]
        facts = {"setters": " and ".join(names), "entries": ", ".join(saved[name] for name in left)}
        facts |= {"generators": " and ".join(left), "change": last_call(b.statements)}
        yield _seen("rng_not_put_back", a, names, "held", **facts)
    if a.drawn and a.checkpoint.seen and not saved:
        drawn = sorted(a.drawn)
        names = [_GETTERS[name] for name in drawn]
        facts = {"generators": " and ".join(drawn), "change": last_call(a.statements, SAVES)}
        yield _seen("rng_not_saved", a, names, level="advice", **facts)


def _drawn_from_seed(a: Uninterrupted, b: Resumed, other: Resumed) -> list[str]:
    """Weights and buffers that are as another seed built them: neither saved nor made by training."""
    from pytest_trainloop.runs.reachable_state.leaves import same_value

    if other.load_error is not None or other.loaded is None or b.loaded is None:
        return []
    names = []
    for name, path in a.paths.items():
        snapshots = (a.saved, b.loaded, other.loaded, other.built)
        if all(path in s.leaves for s in snapshots) and not b.renewed.covers(a.saved.leaves[path]):
            saved, loaded, now, built = (s.value(path) for s in snapshots)
            if same_value(saved, loaded) and not same_value(saved, now) and same_value(now, built):
                names.append(name)
    return names
