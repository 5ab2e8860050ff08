"""Whether what the compiled loop saves is restored by the loop that is not compiled."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.scale.compile_parity.course import tensors_of
from pytest_trainloop.fields import path_parameter
from pytest_trainloop.finding import Finding
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.scale.compile_parity.parity import Parity
    from pytest_trainloop.runs.evidence import Evidence

PREFIX = "_orig_mod."


def of(evidence: Evidence, runs: Parity) -> Iterator[Finding]:
    """Advice, since a project may load with compiling only. Nothing where ``save`` returns no state with such names, or
    the project's ``load`` restores it without compiling."""
    if not {"save", "load"} <= evidence.offers or not any(PREFIX in name for name in runs.compiled.course.names):
        return
    plan = evidence.plan()
    with preserved(), torch.no_grad():
        compiled = build(evidence.make, {**plan.knobs, runs.knob: True}, plan.seed)
        plain = build(evidence.make, {**plan.knobs, runs.knob: False}, plan.seed + 1)
        if compiled.save is None or plain.load is None or path_parameter(compiled.save, plain.load):
            return
        try:
            state = copy.deepcopy(compiled.save())
        except Exception:  # resume_equivalence says so
            return
        names = [name for name in _keys(state) if PREFIX in name]
        if not names:
            return
        refused = ""
        try:
            plain.load(state)
        except Exception as error:
            refused = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        saved, restored = tensors_of(compiled, []), tensors_of(plain, [])
        left = tuple(n for n, t in restored.items() if n in saved and not torch.equal(t, saved[n]))
    if refused or left:
        yield Finding(
            cause="checkpoint_needs_compile",
            level="advice",
            summary="what the compiled loop saves cannot be loaded without compiling"
            if refused
            else f"load() without compiling leaves {some(left)} as they were, and raises nothing",
            measured=f"{len(names)} names in the saved state begin with {PREFIX}",
            shown_by=f"load() raises {refused}" if refused else "their values are not those that were saved",
            culprits=left or tuple(names),
            where=runs.compiled.calls[0].place if runs.compiled.calls else "",
        )


def _keys(state: Any) -> Iterator[str]:
    if isinstance(state, dict):
        for key, value in state.items():
            if isinstance(key, str):
                yield key
            yield from _keys(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _keys(value)
