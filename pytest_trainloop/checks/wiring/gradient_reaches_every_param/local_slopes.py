"""Whether the loss changes in proportion to a parameter whose gradient is exactly zero: then the gradient is wrong.

A loss may depend on a parameter and be flat around its value: a gate at zero in front, an expert that no row is sent
to, the hypothesis that does not win, a unit that another one hides. A gradient of zero is right there. Around a point
with a slope it is not. The slope is a central difference in float64, from runs with all else the same. Its truncation
error falls with the square of the step h and its rounding error is eps / h of the loss; at h = eps^(1/3) of the
parameter's size both are some 4e-11 of it. Two steps, h and h / 2, must give one slope to 1e-3: at a kink they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_trainloop import members
from pytest_trainloop.gradients.dependence import roots_before_first_step, until_stepped
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.torch_internals import has_gradient_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 4
"""Parameters that are moved one by one."""

STEP = torch.finfo(torch.float64).eps ** (1 / 3)

AGREE = 1e-3


class LocalSlopes:
    """Slopes of the loss along one direction in each parameter; none where the loop cannot be run in float64."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def of(self, names: Sequence[str]) -> dict[str, float]:
        """The slope by name, relative to the loss and to the parameter's size, where it is one."""
        hooked = self._hooked() if names else set()
        found = {name: self._slope(name) for name in names[:MOST] if name not in hooked}
        return {name: slope for name, slope in found.items() if slope}

    def _hooked(self) -> set[str]:
        """Parameters with a hook of the project's own on their gradient: one that zeroes it freezes on purpose."""
        loop = self._evidence.fresh_loop()
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in loop.modules.items()
            for name, parameter in members.named_parameters(module)
            if has_gradient_hooks(parameter)
        }

    def _slope(self, name: str) -> float:
        slopes = []
        for step in (STEP, STEP / 2):
            up, down = self._loss(name, step), self._loss(name, -step)
            if up is None or down is None or len(up) != len(down) or not up:
                return 0.0
            size = max(max(map(abs, (*up, *down))), 1e-300)
            change = max((a - b for a, b in zip(up, down, strict=True)), key=abs)
            if not abs(change) > ROUNDING * torch.finfo(torch.float64).eps * size:
                return 0.0
            slopes.append(change / (2 * step * size))
        return slopes[1] if abs(slopes[0] - slopes[1]) <= AGREE * abs(slopes[1]) else 0.0

    def _loss(self, name: str, step: float) -> list[float] | None:
        enough = until_stepped(self._evidence, [name])
        record = self._evidence.rerun(prepare=_moving(name, step), enough=enough, double=True)
        if not record.double or record.raised is not None:
            return None
        return roots_before_first_step(record, [name])


def _moving(name: str, step: float) -> Callable[[Watch], None]:
    def move(watch: Watch) -> None:
        random = torch.Generator().manual_seed(20_240)
        with torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if entry.name == name and tensor.is_floating_point():
                    size = float(tensor.square().mean().sqrt()) or 1.0
                    noise = torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(tensor)
                    tensor.add_(noise, alpha=step * size)

    return move
