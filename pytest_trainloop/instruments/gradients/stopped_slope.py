"""How much of the slope of the loss does not reach the weights, and which lines stop it.

See docs/how-it-decides.md#a-stop-on-one-of-several-paths.

The slope of the first root along three random directions, in the weights that it has a gradient on, is taken twice: by
central differences, which know nothing of ``detach()``, and from its gradient. Seven runs of one step in float64. What
the gradient lacks is then looked for among the operations that cut a graph: each is passed through in a run of its own,
and the gradient gains what it had stopped.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.tracing.cut_candidates import Tracer
from pytest_trainloop.recording.function_mode import aside, is_aside
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs import checkpoint_bypass
from pytest_trainloop.runs.no_randomness import NoRandomness

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.events import Site as Site_
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

DIRECTIONS = 3
STEP = 1e-5
"""Of the root mean square of each weight: the error of a central difference in float64 is then about 1e-10 of the
slope, by the third derivative, and 1e-11 by rounding."""

LEAST_SHARE = 1e-4
"""Share of the slope below which a difference is one of a kink between the two points, or of lower precision."""

SAME = 1e-6
"""Share of the loss by which the mean of two values may miss the one between them; the second derivative gives
1e-10."""

MOST_LINES = 5
"""Lines that are given, at most."""

TRIED = 12
"""Operations that are passed through one by one, at most."""

_KINDS = ("detach", "grad_off", "value", "zero_slope")


@dataclass(frozen=True, slots=True)
class Site:
    """A line that stops a part of the slope."""

    place: str
    what: str
    share: float
    """Of the whole slope."""


@dataclass(frozen=True, slots=True)
class StoppedSlope:
    share: float
    """Of the slope of the first root, what is missing from its gradient; 0 where all of it arrives."""
    sites: tuple[Site, ...]
    """The lines that stop most of it, the largest share first."""

    @classmethod
    def of(cls, evidence: Evidence) -> StoppedSlope:
        """To be asked for by ``evidence.shared(StoppedSlope.of)``. Raises ``CannotDecide`` where the slope cannot be
        taken."""
        if not evidence.repeatable or "run" not in evidence.offers:
            raise CannotDecide("the slope of the loss takes runs of their own")
        base = _run(evidence)
        slopes = [_difference(evidence, base, which) for which in range(DIRECTIONS)]
        size = math.hypot(*slopes)
        lacking = [slope - own for slope, own in zip(slopes, base.slopes, strict=True)]
        share = math.hypot(*lacking) / size if size else 0.0
        if share <= LEAST_SHARE:
            return cls(0.0, ())
        return cls(share, _sites(evidence, base, lacking, size))


class _FirstRoot:
    """The first root of a run, and its slopes along the directions."""

    def __init__(
        self,
        traced: Tracer | None,
        *,
        moved: tuple[int, float] | None,
        only: frozenset[int] | None,
        through: Site_ | None,
    ) -> None:
        self.traced, self._moved, self._only, self._through = traced, moved, only, through
        self.reached: frozenset[int] = frozenset()
        """Weights that the root has a gradient on. Those that it has none on are cut off on all paths, or trained by
        another loss."""
        self.derived: dict[Site_, Place] = {}
        """The calls of ``autograd.grad`` whose result has no history."""
        self.value = math.nan
        self.slopes: list[float] = []
        self._watch: Watch | None = None
        self._directions: dict[int, list[torch.Tensor]] = {}

    def forget(self) -> None:
        """Let go of the loop."""
        self._watch, self.traced = None, None
        self._directions.clear()

    def prepare(self, watch: Watch) -> None:
        """Stir the weights, as every run, and move them along one direction."""
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for number, tensor in _trained(watch):
                tensor.add_(_noise(tensor, random), alpha=0.1 * _size(tensor) or 0.02)
                size = _size(tensor)  # drawn here: the run itself is without randomness
                self._directions[number] = [size * _noise(tensor, random) for _ in range(DIRECTIONS)]
                if self._moved is not None and (self._only is None or number in self._only):
                    tensor.add_(self._directions[number][self._moved[0]], alpha=self._moved[1])

    def contexts(self, watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        self._watch = watch
        yield checkpoint_bypass.switched(checkpoint_bypass.without)
        yield NoRandomness()
        if self.traced is not None:
            yield from self.traced.contexts(watch)
        yield patched(torch.autograd, "backward", self._before)
        yield patched(torch.autograd, "grad", self._derive)

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            root = args[0] if args else kwargs.get("tensors")
            roots = [root] if isinstance(root, torch.Tensor) else root if isinstance(root, (list, tuple)) else []
            if math.isnan(self.value) and self._watch is not None and not is_aside() and len(roots) == 1:
                self._read(roots[0])
            return original(*args, **kwargs)

        return backward

    def _read(self, root: torch.Tensor) -> None:
        if root.numel() != 1 or not root.requires_grad or root.is_complex():
            return
        self.value = float(root.detach())
        if self._moved is not None or self._watch is None:
            return
        known = [(n, t) for n, t in _trained(self._watch) if n in self._directions]
        if self._only is not None:
            known = [(n, t) for n, t in known if n in self._only]
        tensors = [t for _, t in known]
        with aside():
            found = torch.autograd.grad(root, tensors, retain_graph=True, allow_unused=True)
        gradients = {n: _dense(g) for (n, _), g in zip(known, found, strict=True) if g is not None}
        self.reached = frozenset(n for n, g in gradients.items() if bool(g.any()))
        for which in range(DIRECTIONS):
            along = ((g.conj() * self._directions[n][which]).sum() for n, g in gradients.items())
            self.slopes.append(sum(float(slope.real) for slope in along))

    def _derive(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note calls of ``autograd.grad`` without a graph, and give the chosen one a graph."""

        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            if is_aside() or kwargs.get("create_graph") or len(args) > 4:
                return original(*args, **kwargs)
            place, site = here()
            self.derived.setdefault(site, place)
            return original(*args, **(kwargs | {"create_graph": True} if site == self._through else kwargs))

        return grad


def _trained(watch: Watch) -> Iterator[tuple[int, torch.Tensor]]:
    for number, tensor in enumerate(watch.table.tensors):
        plain = not torch.nn.parameter.is_lazy(tensor) and (tensor.is_floating_point() or tensor.is_complex())
        if plain and tensor.requires_grad and tensor.is_leaf and tensor.numel():
            yield number, tensor


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.detach()
    return values if values.layout is torch.strided else values.to_dense()


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().square().mean().sqrt())


def _noise(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=random, dtype=torch.float64).to(tensor)


def _run(
    evidence: Evidence,
    traced: Tracer | None = None,
    *,
    moved: tuple[int, float] | None = None,
    only: frozenset[int] | None = None,
    through: Site_ | None = None,
) -> _FirstRoot:
    first = _FirstRoot(traced, moved=moved, only=only, through=through)
    record: Record = evidence.rerun(
        prepare=first.prepare,
        contexts=first.contexts,
        enough=lambda record: not math.isnan(first.value) or record.rounds >= 1,
        double=True,
        may_raise=True,
        own_steps=False,
    )
    first.forget()
    if math.isnan(first.value):
        raise CannotDecide("no single loss is backpropagated, or it cannot be taken in float64")
    if not record.double:
        raise CannotDecide("the loop computes in low precision, where a slope cannot be taken by differences")
    return first


def _difference(evidence: Evidence, base: _FirstRoot, which: int) -> float:
    """The slope along one direction. Raises ``CannotDecide`` where the three values do not lie on a line."""
    above, below = (_run(evidence, moved=(which, step), only=base.reached).value for step in (STEP, -STEP))
    if not all(map(math.isfinite, (above, below, base.value))):
        raise CannotDecide("the first loss is not finite")
    if abs((above + below) / 2 - base.value) > SAME * max(abs(base.value), abs(above - below)):
        raise CannotDecide("the first loss is another one in each run")
    return (above - below) / (2 * STEP)


def _sites(evidence: Evidence, base: _FirstRoot, lacking: Sequence[float], size: float) -> tuple[Site, ...]:
    """The operations that stop most, by what the gradient gains along what it lacks when one is passed through."""
    tracer = Tracer()
    derived = _run(evidence, tracer, only=base.reached).derived
    cuts = [c for c in tracer.found.values() if c.kind in _KINDS][:TRIED]
    found = [Site(str(c.place), c.op, _gained(evidence, base, lacking, traced=Tracer([c]))) for c in cuts]
    found += [
        Site(str(place), "grad", _gained(evidence, base, lacking, through=site)) for site, place in derived.items()
    ]
    shares = [replace(site, share=site.share / size) for site in found]
    return tuple(sorted((s for s in shares if s.share > LEAST_SHARE), key=lambda s: -s.share)[:MOST_LINES])


def _gained(
    evidence: Evidence,
    base: _FirstRoot,
    lacking: Sequence[float],
    *,
    traced: Tracer | None = None,
    through: Site_ | None = None,
) -> float:
    """What the gradient gains along what it lacks; 0 where the run cannot be made."""
    try:
        made = _run(evidence, traced, only=base.reached, through=through)
    except CannotDecide:
        return 0.0
    gained = [after - before for after, before in zip(made.slopes, base.slopes, strict=True)]
    return sum(g * lack for g, lack in zip(gained, lacking, strict=True)) / max(math.hypot(*lacking), 1e-300)
