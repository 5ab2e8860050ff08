"""Gradients that arrive and are exactly zero: which operation makes them so, or whether the loss has a slope there.

A loss may depend on a parameter and be flat around its value: a gate at zero in front, an expert that no row is sent
to, the hypothesis that does not win, a unit that another one hides. A gradient of zero is right there. Around a point
with a slope it is not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.causes import found
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cuts import arriving, search
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.left_out_values import leaves_out
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.unused import declared_to_train
from pytest_trainloop.core import members
from pytest_trainloop.instruments.gradients.dependence import (
    Dependences,
    moved_a_little,
    roots_before_first_step,
    until_stepped,
)
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.instruments.tracing.definitions import index
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.torch_internals import has_gradient_hooks
from pytest_trainloop.recording.torch_names import CLAMPS
from pytest_trainloop.runs.weight_origins import pretrained

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Parameter
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_MOVED = 4
"""Parameters that are moved one by one."""

STEP = torch.finfo(torch.float64).eps ** (1 / 3)

AGREE = 1e-3

_CLAMPS = CLAMPS | {"minimum", "maximum", "hardtanh"}


def zero_gradients(evidence: Evidence, zero: Sequence[Parameter]) -> Iterator[Finding]:
    """One finding for each operation that makes gradients zero; then what no operation explains."""
    record = evidence.run()
    if all(root.value == 0.0 for b in record.autograd_passes() for root in b.roots):
        return  # the loss is at its minimum: a hinge that every example meets has nothing left to teach
    # not those of a module that ran on no rows
    left = {p.name: math.prod(p.shape) for p in zero if p.calls_with_grad or not p.calls_empty}
    while left:
        cut, _ = search(evidence, list(left), {"zero_slope", "constant"})
        if cut is None or not cut.reached:
            yield from _unexplained(evidence, list(left))
            return
        names = [n for n in left if n in cut.reached]
        op, constant = cut.candidate.op.rstrip("_"), cut.candidate.kind == "constant"
        facts: dict[str, Any] = {"op": op, "module": cut.module, "gradient": cut.gradient, "first": names[0]}
        form = "passed through"
        if "softmax" in op and not cut.candidate.by_shape and any(record.reached(p.index) for p in record.parameters):
            # attention over the one key that the batch has (odd: one_neighbour_in_the_example_batch)
            form, facts["level"] = "one key", "advice"
        elif op in _CLAMPS and all(left[n] == 1 for n in names):
            learned = evidence.shared(pretrained)  # (odd: scale_of_a_pretrained_model_at_its_bound)
            form, facts["level"] = "bound", "advice" if learned else "fault"
        elif constant and ("softmax" in op or "norm" in op):
            form = "softmax" if "softmax" in op else "norm"
        if form == "bound":
            facts["change"] = evidence.shared(MadeAt.of).attribute(names[0]) or str(cut.candidate.place)
        elif constant and form == "passed through":
            facts["change"] = evidence.shared(MadeAt.of).drawn_outside(names) or str(cut.candidate.place)
        yield found("dead_activation" if constant else "gradient_vanished", cut.candidate, names, form, **facts)
        left = {n: size for n, size in left.items() if n not in cut.reached}


def _unexplained(evidence: Evidence, names: list[str]) -> Iterator[Finding]:
    """Zeros that no operation makes: zero times zero, a slope that the gradient does not show, or a flat loss."""
    if evidence.repeatable:
        zeros = {p.name for p in evidence.run().parameters if p.start.zero}
        record = evidence.rerun(prepare=moved_a_little, enough=until_stepped(evidence, names))
        if saddle := arriving(record, [n for n in names if n in zeros]):
            first, gradient = next(iter(saddle)), max(saddle.values())
            yield found("dead_activation", "", saddle, "saddle", gradient=gradient, first=first)
            return
    depends = evidence.shared(Dependences).of(names)
    if depending := [n for n in names if depends[n].depends]:
        if sloping := local_slopes(evidence, depending):
            slope = max(sloping.values(), key=abs)
            yield found("gradient_vanished", "", sloping, "sloping", slope=slope)
        else:
            several = len(depending) > 1
            yield found("gradient_vanished", "", depending, "flat", several=several, level="advice")
    elif evidence.repeatable and (left_out := leaves_out(evidence, names)) is not None:
        call, mask = left_out
        declared, passes = declared_to_train(evidence), len(evidence.run().autograd_passes())
        facts = {"call": call.named, "passes": passes, "declared": declared}
        facts["change"] = (call.name == "__getitem__" and index(str(call.place))) or str(mask.place)
        facts["level"] = "fault" if declared else "advice"
        yield found("parameter_unused", call.place, names, "left out", **facts)


def local_slopes(evidence: Evidence, names: Sequence[str]) -> dict[str, float]:
    """The slopes of the loss along one direction in each parameter, where there is one, relative to the loss and to the
    parameter's size; none where the loop cannot be run in float64.

    A slope is a central difference in float64, from runs with all else the same. Its truncation error falls with the
    square of the step h and its rounding error is eps / h of the loss; at h = eps^(1/3) of the parameter's size both
    are some 4e-11 of it. Two steps, h and h / 2, must give one slope to 1e-3: at a kink they do not.
    """
    # one that is zeroed by a hook of the project's own is frozen on purpose (odd: prior_held_by_a_hook)
    hooked = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in evidence.fresh_loop().modules.items()
        for name, parameter in members.named_parameters(module)
        if has_gradient_hooks(parameter)
    }
    found_slopes = {name: _slope(evidence, name) for name in names[:MOST_MOVED] if name not in hooked}
    return {name: slope for name, slope in found_slopes.items() if slope}


def _slope(evidence: Evidence, name: str) -> float:
    def loss(step: float) -> list[float]:
        def move(watch: Watch) -> None:
            random = torch.Generator().manual_seed(20_240)
            with torch.no_grad():
                for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                    if entry.name == name and tensor.is_floating_point():
                        size = float(tensor.square().mean().sqrt()) or 1.0
                        noise = torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(tensor)
                        if entry.pad_row is not None and noise.shape == entry.shape:
                            noise[entry.pad_row] = 0.0
                        tensor.add_(noise, alpha=step * size)

        record = evidence.rerun(prepare=move, enough=until_stepped(evidence, [name]), double=True)
        return [] if not record.double or record.raised is not None else roots_before_first_step(record, [name])

    slopes = []
    for step in (STEP, STEP / 2):
        up, down = loss(step), loss(-step)
        if len(up) != len(down) or not up:
            return 0.0
        size = max(max(map(abs, (*up, *down))), 1e-300)
        change = max((a - b for a, b in zip(up, down, strict=True)), key=abs)
        if not abs(change) > ROUNDING * torch.finfo(torch.float64).eps * size:
            return 0.0
        slopes.append(change / (2 * step * size))
    return slopes[1] if abs(slopes[0] - slopes[1]) <= AGREE * abs(slopes[1]) else 0.0
