"""Whether what the compiled loop saves is restored, by itself and by the loop that is not compiled."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.checks.scale.compile_parity.course import tensors_of
from pytest_trainloop.checks.scale.compile_parity.names import PREFIX, Loads
from pytest_trainloop.fields import path_parameter
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.whose import reraise_ours
from pytest_trainloop.wording import count, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.scale.compile_parity.parity import Parity
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence


def of(evidence: Evidence, runs: Parity) -> Iterator[Finding]:
    """A fault where the compiled loop does not restore what it has saved and the other does; else advice where the
    loop that is not compiled does not restore it."""
    if not {"save", "load"} <= evidence.offers or not runs.compiled.calls:
        return
    lost = list(_not_restored(evidence, runs))
    yield from lost or _without_compiling(evidence, runs)


def _not_restored(evidence: Evidence, runs: Parity) -> Iterator[Finding]:
    loads, elsewhere = Loads(), Loads()
    left = _left(evidence, runs.knob, True, loads)
    if left:
        without = _left(evidence, runs.knob, False, elsewhere)
        left = () if without is None else tuple(name for name in left if name not in without)
    if left:
        yield Finding(
            cause="checkpoint_not_restored",
            summary=f"with {runs.knob}=True load() leaves {some(left)} as {'they were' if len(left) > 1 else 'it was'}"
            ", and raises nothing",
            measured=f"{count(len(left), 'parameter')} with other values than those that save() was called with",
            shown_by=f"with {runs.knob}=False load() restores what save() gives",
            culprits=left,
            where=loads.not_loaded[0].place if loads.not_loaded else "",
        )


def _left(evidence: Evidence, knob: str, value: bool, loads: Loads) -> tuple[str, ...] | None:
    """The parameters of a fresh loop that ``load`` does not bring to the values that another was saved with; None
    where it cannot be tried."""
    plan = evidence.plan()
    knobs = {**plan.knobs, knob: value}
    with preserved(), torch.no_grad():
        first, second = build(evidence.make, knobs, plan.seed), build(evidence.make, knobs, plan.seed + 1)
        for name, tensor in tensors_of(first, []).items():
            if tensor.requires_grad and name in tensors_of(second, []):
                tensor.mul_(0.5).add_(0.25)  # no loop begins with these
        try:
            with patched(nn.Module, "load_state_dict", loads.around):
                _handed_over(first, second)
        except Exception as error:  # of the project's save and load: resume_equivalence says so
            reraise_ours(error)
            return None
        saved, restored = tensors_of(first, []), tensors_of(second, [])
        return tuple(n for n, t in restored.items() if t.requires_grad and n in saved and not torch.equal(t, saved[n]))


def _handed_over(first: TrainLoop, second: TrainLoop) -> None:
    """What one saves the other loads, by a file where that is how they do."""
    if first.save is None or second.load is None:
        return
    if not path_parameter(first.save, second.load):
        second.load(copy.deepcopy(first.save()))
        return
    with tempfile.TemporaryDirectory(prefix="trainloop-") as folder:
        path: Path | str = Path(folder) / "checkpoint.pt"
        try:
            first.save(path)
        except (TypeError, AttributeError):
            path = str(path)
            first.save(path)
        second.load(path)


def _without_compiling(evidence: Evidence, runs: Parity) -> Iterator[Finding]:
    """Advice, since a project may load with compiling only. Nothing where ``save`` returns no state with such names, or
    the project's ``load`` restores it without compiling."""
    if not any(PREFIX in name for name in runs.compiled.course.names):
        return
    plan = evidence.plan()
    with preserved(), torch.no_grad():
        compiled = build(evidence.make, {**plan.knobs, runs.knob: True}, plan.seed)
        plain = build(evidence.make, {**plan.knobs, runs.knob: False}, plan.seed + 1)
        if compiled.save is None or plain.load is None or path_parameter(compiled.save, plain.load):
            return
        try:
            state = copy.deepcopy(compiled.save())
        except Exception as error:  # of the project's save and load: resume_equivalence says so
            reraise_ours(error)
            return
        names = [name for name in _keys(state) if PREFIX in name]
        if not names:
            return
        refused = ""
        try:
            plain.load(state)
        except Exception as error:  # of the project's load
            reraise_ours(error)
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
