"""Whether the initial weights are pretrained (the same under every seed) or randomly initialised."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.shards import local
from pytest_trainloop.runs.process_state import seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

Origin = Literal["pretrained", "random"]


def weight_origins(evidence: Evidence) -> dict[str, Origin]:
    """The origin of each weight matrix that trains, by name: pretrained if loops of two seeds have the same values.

    Constant matrices (zeros, ones) are left out: they are neither.
    """
    found: dict[str, Origin] = {}
    for name, p, other in _under_two_seeds(evidence):
        if p.requires_grad and p.dim() > 1:
            with torch.no_grad():
                own, others_own = local(p), local(other)  # of a shard, what is here
                if own.numel() > 1 and not bool((own == own.flatten()[0]).all()):
                    found[name] = "pretrained" if torch.equal(own, others_own) else "random"
    return found


def drawn(evidence: Evidence) -> frozenset[str]:
    """The parameters that have other values under another seed, by name; seeds that the function sets are ignored."""
    with _seeds_ignored():
        return frozenset(
            name for name, p, other in _under_two_seeds(evidence) if not torch.equal(local(p), local(other))
        )


def drawn_rows(evidence: Evidence) -> dict[str, torch.Tensor]:
    """Of each matrix, which of its rows have other values under another seed; seeds that the function sets are
    ignored."""
    with _seeds_ignored():
        return {n: (local(p) != local(q)).any(1) for n, p, q in _under_two_seeds(evidence) if p.dim() == 2}


def _under_two_seeds(evidence: Evidence) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Each parameter with its name, in two fresh loops."""
    first, second = evidence.fresh_loop(), evidence.fresh_loop(other_seed=1)
    named = [
        (f"{prefix}.{name}" if prefix else name, p)
        for prefix, module in first.modules.items()
        for name, p in members.named_parameters(module)
    ]
    others = [p for module in second.modules.values() for p in members.parameters(module)]
    for (name, p), other in zip(named, others, strict=False):
        if not nn.parameter.is_lazy(p) and not nn.parameter.is_lazy(other):
            yield name, p, other


def pretrained(evidence: Evidence) -> bool:
    """Whether the weight matrices that train are the same under every seed.

    Seeds that the function itself sets are ignored, or random weights would look the same too. A single run does not
    show this: True, so that no pretrained weights are called a fault.
    """
    if not evidence.repeatable:
        return True
    with _seeds_ignored():
        first, second = evidence.fresh_loop(), evidence.fresh_loop(other_seed=1)
    pairs = list(zip(_matrices(first), _matrices(second), strict=False))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


def _matrices(loop: TrainLoop) -> list[torch.Tensor]:
    found = [p for module in loop.modules.values() for p in members.parameters(module)]
    return [p for p in found if p.requires_grad and p.dim() > 1 and not nn.parameter.is_lazy(p)]


@contextlib.contextmanager
def _seeds_ignored() -> Iterator[None]:
    def ignoring(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(value: Any) -> Any:
            ours = sys._getframe(2).f_code is seed_all.__code__
            return original(value) if ours else torch.default_generator

        return seed

    with patched(torch, "manual_seed", ignoring):
        yield
