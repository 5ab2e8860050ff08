"""The file of a baseline: a trajectory as JSON, in a fixed order, one fact or one tensor a line where it fits.

What a reviewer reads comes first: options of groups, schedulers, calls, shapes. The numbers of two courses follow,
which change in nearly every line with any of these. What all steps share is written once. A course in float64 has the
facts of the one in the loop's own precision.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.instruments.baselines.trajectory import (
    FORMAT,
    Call,
    Course,
    Digest,
    Environment,
    Event,
    Group,
    Leaf,
    Made,
    Optimizer,
    Scheduler,
    Step,
    Tensor,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ABOUT = "The trajectory of a training loop, recorded by pytest --trainloop --trainloop-update (pytest-trainloop)"

_WIDTH, _ROW = 160, 320
"""Characters of a line; of one that is a row of a table: a tensor, a call, a step."""


def text_of(trajectory: Trajectory) -> str:
    """The text of the file, with a line break at its end."""
    facts = trajectory.own
    layers: dict[str, list[str]] = {}  # by what they were built with, which most layers of a model share
    for path, text in facts.layers.items():
        layers.setdefault(text, []).append(path)
    optimizers = [
        {"kind": o.kind, "groups": [{"options": g.options, "parameters": g.parameters} for g in o.groups]}
        for o in facts.optimizers
    ]
    data = {
        "about": ABOUT,
        "format": FORMAT,
        "made": asdict(trajectory.made),
        "optimizers": optimizers,
        "schedulers": [asdict(scheduler) for scheduler in facts.schedulers],
        "layers": layers,
        "events": _events(facts.steps),
        "tensors": {name: _facts(tensor) for name, tensor in facts.tensors.items()},
        "environment": asdict(trajectory.environment),
        "float64": trajectory.why if trajectory.double is None else _course(trajectory.double),
        "own": _course(facts),
    }
    return f"{_laid_out(_plain(data))}\n"


def _facts(tensor: Tensor) -> dict[str, Any]:
    facts = asdict(tensor)
    del facts["start"]
    return {name: value for name, value in facts.items() if name in ("shape", "dtype") or value not in ("", (), False)}


def _events(steps: Iterable[Step]) -> dict[str, list[str] | None]:
    """By the first of the steps in which they happen; null from the step on in which they were not watched."""
    found: dict[str, list[str] | None] = {}
    last: object = ()
    for step in steps:
        texts = None if step.events is None else [event.what for event in step.events]
        if texts != last:
            found[str(step.number)] = last = texts
    return found


def _course(course: Course) -> dict[str, Any]:
    start, steps = {name: tensor.start for name, tensor in course.tensors.items()}, course.steps
    # steps with all numbers of the weights; others have their norms only
    whole = [s.number for s in steps if any(digest.total is not None for digest in s.weights.values())]

    def row(call: Call) -> list[Any]:
        modes = f"{'train' if call.training else 'eval'}{'' if call.grad else ', no grad'}"
        return [call.path, call.kind, modes, call.dtype, _numbers(call.given), _numbers(call.gave)]

    def moved(step: Step) -> dict[str, Digest]:
        return {n: d for n, d in step.weights.items() if d not in (start[n], Digest(start[n].squares))}

    return {
        "lower": course.lower,
        "asked": course.asked,
        "repeatable": course.repeatable,
        "start": {name: _numbers(digest) for name, digest in start.items()},
        "batches": _batches(course.batches),
        "steps": [
            {
                "optimizer": step.optimizer,
                "batches": step.batches,
                "losses": step.losses,
                "learning_rates": step.lrs,
                **({"clips": step.clips} if step.clips else {}),
            }
            for step in steps
        ],
        "gradients": _by_tensor((step.number, step.gradients) for step in steps),
        "updates": _by_tensor((step.number, step.updates) for step in steps),
        "whole": whole,
        "norms": [step.number for step in steps if step.weights and step.number not in whole],
        "weights": _by_tensor((step.number, moved(step)) for step in steps),
        "calls": {str(step.number): [row(call) for call in step.calls] for step in steps if step.calls},
    }


def _numbers(value: Digest | float) -> list[float | None] | float:
    if isinstance(value, Digest):
        return value.squares if value.total is None else [value.squares, value.total, value.ordered, value.by_row]
    return value


def _by_tensor(steps: Iterable[tuple[int, Mapping[str, Digest | float]]]) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for number, values in steps:
        for name, value in values.items():
            table.setdefault(name, {})[str(number)] = _numbers(value)
    return table


def _batches(batches: Iterable[tuple[Leaf, ...]]) -> list[dict[str, Any]]:
    """Batches of one layout together; a batch that comes several times in a row is written once."""
    groups = []
    for leaves, group in itertools.groupby(batches, key=lambda batch: [[b.path, b.shape, b.dtype] for b in batch]):
        values = [[_numbers(leaf.values) for leaf in batch] for batch in group]
        several = len(values) > 1 and all(value == values[0] for value in values)
        groups.append({"leaves": leaves, "times": len(values), "values": values[:1] if several else values})
    return groups


def _plain(value: Any) -> Any:
    """The value with numbers that are not finite as text, which JSON has no other form for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _laid_out(value: Any, indent: str = "") -> str:
    """Plain data as JSON, on one line where that is short or holds values only."""
    line = json.dumps(value, ensure_ascii=False)
    inside = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    nests = [one for one in inside if isinstance(one, (dict, list))]
    is_row = len(nests) < len(inside) and not any(isinstance(one, (dict, list)) for nest in nests for one in nest)
    if not nests or len(line) + len(indent) <= (_ROW if is_row else _WIDTH):
        return line
    keys = (
        [f"{json.dumps(key, ensure_ascii=False)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    )
    parts = [f"{indent} {key}{_laid_out(one, f'{indent} ')}" for key, one in zip(keys, inside, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join((opening, ",\n".join(parts), f"{indent}{closing}"))


def trajectory_of(text: str, file: str, repair: str) -> Trajectory:
    """The trajectory in the text of a file; ``file`` is its name, ``repair`` what to do if it is none.

    Raises ``UsageError`` for a text that is no baseline, or one of a newer version.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the baseline {file} is damaged: it is no JSON ({error}); {repair}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise UsageError(
            f"the baseline {file} has format {version}, and this pytest-trainloop reads up to {FORMAT}: update "
            f"pytest-trainloop, or {repair.partition(', or ')[2]}"
        )
    try:
        return _trajectory(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else "a part of it is not as it was written"
        raise UsageError(f"the baseline {file} is damaged: {what}; {repair}") from None


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    if data["format"] != FORMAT:
        raise ValueError("format")
    facts = {name: Tensor(start=Digest(0.0), **_tuples(given)) for name, given in data["tensors"].items()}
    groups = [tuple(Group(**_tuples(group)) for group in o["groups"]) for o in data["optimizers"]]
    own = replace(
        _read_course(data["own"], facts, data["events"]),
        optimizers=tuple(Optimizer(kind=o["kind"], groups=g) for o, g in zip(data["optimizers"], groups, strict=True)),
        schedulers=tuple(Scheduler(**given) for given in data["schedulers"]),
        layers={str(path): str(text) for text, paths in data.get("layers", {}).items() for path in paths},
    )
    given, double = data["float64"], None
    if not isinstance(given, str):
        double = replace(_read_course(given, facts, data["events"]), precision="float64").with_facts_of(own)
    place, made, why = Environment(**data["environment"]), Made(**data["made"]), "" if double else str(given)
    return Trajectory(environment=place, made=made, double=double, why=why, own=own)


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _read_course(data: Mapping[str, Any], facts: Mapping[str, Tensor], events: Mapping[str, Any]) -> Course:
    tensors = {name: replace(facts[name], start=_digest(given)) for name, given in data["start"].items()}
    gradients, updates, weights = data["gradients"], data["updates"], data["weights"]
    norms = {name: Digest(tensor.start.squares) for name, tensor in tensors.items()}
    whole = {name: tensor.start for name, tensor in tensors.items()}
    unmoved = dict.fromkeys(map(int, data["norms"]), norms) | dict.fromkeys(map(int, data["whole"]), whole)
    steps = []
    happened: tuple[Event, ...] | None = None
    for number, given in enumerate(data["steps"], 1):
        key = str(number)
        if key in events:
            happened = None if events[key] is None else tuple(Event(what=str(what)) for what in events[key])
        calls = data["calls"].get(key)
        steps.append(
            Step(
                number=number,
                optimizer=int(given["optimizer"]),
                batches=int(given["batches"]),
                losses=tuple(map(float, given["losses"])),
                lrs=tuple(map(float, given["learning_rates"])),
                clips=tuple(map(float, given.get("clips", ()))),
                gradients={name: _digest(values[key]) for name, values in gradients.items() if key in values},
                updates={name: float(values[key]) for name, values in updates.items() if key in values},
                weights={
                    name: _digest(weights[name][key]) if key in weights.get(name, ()) else start
                    for name, start in unmoved.get(number, {}).items()
                },
                calls=None if calls is None else tuple(map(_read_call, calls)),
                events=happened,
            )
        )
    return Course(
        precision="own",
        lower=tuple(data["lower"]),
        asked=tuple(data.get("asked", ())),
        repeatable=bool(data["repeatable"]),
        tensors=tensors,
        optimizers=(),
        schedulers=(),
        batches=tuple(batch for group in data["batches"] for batch in _read_batches(group)),
        steps=tuple(steps),
    )


def _digest(value: Any) -> Digest:
    return Digest(*map(float, value)) if isinstance(value, list) else Digest(float(value))


def _read_batches(group: Mapping[str, Any]) -> Iterator[tuple[Leaf, ...]]:
    for batch in group["values"] * (group["times"] if len(group["values"]) == 1 else 1):
        yield tuple(
            Leaf(path=path, shape=tuple(shape), dtype=dtype, values=_digest(value))
            for (path, shape, dtype), value in zip(group["leaves"], batch, strict=True)
        )


def _read_call(given: list[Any]) -> Call:
    path, kind, modes, dtype, taken, gave = given
    training, grad = modes.startswith("train"), not modes.endswith("no grad")
    numbers = {"given": _digest(taken), "gave": _digest(gave)}
    return Call(path=path, kind=kind, training=training, grad=grad, dtype=dtype, **numbers)
