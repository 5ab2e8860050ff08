"""Declared modules that no batch comes to: a target network that the goal is not computed with, a forgotten teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.gradients.dependence import Dependences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence


def uncalled_modules(evidence: Evidence, record: Record) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """The name of each declared module that was never called and that no loss depends on, its parameters, and whether
    the loop writes them.

    What an optimizer holds is left to the parameters. A module that the loop writes and never calls is an average of
    weights, for evaluation, unless it is named a target.
    """
    if not evidence.repeatable or record.raised is not None or not record.ended:
        return
    first = dict.fromkeys(p.name.partition(".")[0] for p in record.parameters if p.declared)
    idle = {name: own for name in first if (own := _parameters_of(record, name)) and not _takes_part(record, own)}
    if not idle or len(named := evidence.fresh_loop().modules) < 2:
        return
    for name, own in idle.items():
        if name not in named:
            continue
        moved = any(p.index in record.end and not p.start.same(record.end[p.index]) for p in own)
        if moved and "target" not in name.lower():
            continue
        names = tuple(p.name for p in own)
        depends = evidence.shared(Dependences).of(list(names))
        if not any(d.depends or d.alive for d in depends.values()):
            yield name, names, moved


def _parameters_of(record: Record, name: str) -> list[Parameter]:
    return [p for p in record.parameters if p.declared and p.name.startswith(f"{name}.")]


def _takes_part(record: Record, parameters: list[Parameter]) -> bool:
    """Whether one of them was called, is held by an optimizer or got a gradient."""
    return any(
        p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint + p.calls_empty
        or p.index in record.held
        or record.reached(p.index)
        for p in parameters
    )
