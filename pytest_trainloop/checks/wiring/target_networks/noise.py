"""Targets that networks compute with dropout active."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.target_networks.causes import found
from pytest_trainloop.checks.wiring.target_networks.target_forwards import (
    LEAST_CHANGE,
    BuildingPasses,
    TargetPasses,
    change_without_dropout,
    first_losses,
)
from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.gradients.dependence import difference
from pytest_trainloop.recording.source import layer
from pytest_trainloop.runs.further_runs import longer_run
from pytest_trainloop.runs.reachable_state.copies import same_bits
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.wiring.target_networks.target_forwards import TargetNetwork
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

_WRITES = frozenset(
    """load_state_dict copy_ lerp_ mul_ set_ _foreach_lerp_ _foreach_copy_ update_parameters vector_to_parameters
    deepcopy""".split()
)
"""By what code brings a copy up to date."""


def noise_in_targets(evidence: Evidence) -> Iterator[Finding]:
    """Of fixed networks whose passes make targets inside ``fit``."""
    record = evidence.run()
    passes = evidence.shared(TargetPasses.of)
    if passes.record is None:
        return
    noise = difference(first_losses(record), first_losses(passes.record))
    for network in passes.found.values():
        if network.switched_on or network.samples or network.feature or not network.meets:
            continue
        if _is_copy(record, network) and _writes_weights(fit_of(evidence.fresh_loop())):
            continue  # a target that follows seldom, in training mode as its online network is
        change = change_without_dropout(evidence, network) if _stays(evidence, network) else 0.0
        if change > max(LEAST_CHANGE, 10 * noise):
            yield found("dropout_in_targets", network.place, (network.name,), passes=network.passes, moved=change)


def _stays(evidence: Evidence, network: TargetNetwork) -> bool:
    """Whether the network keeps its values in more steps too: targets are brought up to date seldom."""
    longer = evidence.shared(longer_run)
    return not network.parameters & {longer.name(i) for i in longer.changed()}


def _is_copy(record: Record, network: TargetNetwork) -> bool:
    """Whether it has, or had, the weights of what trains: a reference, or a target that follows seldom."""
    return any(set(p.equals) & record.held.keys() for p in record.parameters if p.name in network.parameters)


def _writes_weights(function: Any) -> bool:
    """Whether code that the loop can reach names a function that brings copies up to date. What made an object has made
    the copy."""
    todo, met = [function], set[int]()
    while todo and len(met) < 512:
        value = todo.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if isinstance(value, types.MethodType):
            todo += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType) and layer(value.__code__.co_filename) == 2:
            names = set(_names(value.__code__))
            if names & _WRITES:
                return True
            cells = (c.cell_contents for c in value.__closure__ or () if c != types.CellType())
            todo += [*cells, *(value.__globals__[n] for n in names if n in value.__globals__)]
        elif not isinstance(value, (type, types.ModuleType)) and layer(_file_of(value)) == 2:
            methods = (item for kind in type(value).__mro__ for item in vars(kind).items())
            todo += [f for name, f in methods if isinstance(f, types.FunctionType) and name != "__init__"]
            todo += [v for v in vars(value).values() if hasattr(v, "__dict__")] if hasattr(value, "__dict__") else []
    return False


def _file_of(value: Any) -> str:
    return getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<frozen>"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def noise_while_building(evidence: Evidence) -> Iterator[Finding]:
    """Of passes that are made before ``fit``, whose results are data."""
    seen = BuildingPasses(quiet=False)
    with seen.watching():
        loop = evidence.fresh_loop()
    if seen.root is None or seen.intended or "" in seen.given or len(set(seen.given)) < len(seen.given):
        return
    record, quiet = evidence.run(), BuildingPasses(quiet=True)
    again = evidence.rerun(enough=lambda r: r.rounds >= 1)
    other = evidence.rerun(around=quiet.watching, contexts=quiet.ended, enough=lambda r: r.rounds >= 1)
    count = len(first_losses(again))
    noise = difference(first_losses(record)[:count], first_losses(again))
    change = difference(first_losses(record)[:count], first_losses(other))
    if not change > max(LEAST_CHANGE, 10 * noise) or not _same_start(again, other):
        return
    plain = BuildingPasses(quiet=True)
    with plain.watching():
        names = _other_tensors(loop, evidence.fresh_loop())
    trained = {id(p) for module in loop.modules.values() for p in members.parameters(module)}
    own = any(id(p) in trained for p in members.parameters(seen.root))
    yield found(
        "dropout_in_targets",
        seen.place,
        names or (seen.name,),
        "before fit",
        level="fault" if own else "advice",
        network=seen.name,
        passes=len(seen.given),
        moved=change,
        change=str(seen.place),
        kinds=("input",) * len(names) or ("module",),
    )


def _same_start(one: Record, other: Record) -> bool:
    """Whether two runs begin with the same weights: the passes have not made these (LSUV, statistics)."""
    return all(p.start.same(q.start) for p, q in zip(one.parameters, other.parameters, strict=False))


def _other_tensors(loop: TrainLoop, other: TrainLoop) -> tuple[str, ...]:
    """The tensors of the batch that have other values."""
    pairs = zip(nested.paths(loop.batch), nested.paths(other.batch), strict=False)
    return tuple(nested.shown(path) for (path, one), (_, two) in pairs if not same_bits(one, two))
