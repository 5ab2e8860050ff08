"""Terms that go into an ``autograd.Function`` of the project, which gives them their gradient, and whose result is
thrown away: no backward pass comes by it."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.dead_values import never_read, statement_at
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import apply_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.instruments.tracing.root_terms import RootTerms
    from pytest_trainloop.instruments.tracing.terms import Scalar
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.record import Record


@dataclass(frozen=True, slots=True)
class Thrown:
    """One call. ``why``: how its result is lost, in words."""

    scalar: Scalar
    place: str
    site: Site
    function: str
    why: str

    @property
    def repair(self) -> str:
        """The line that keeps the result in the place of the first argument."""
        located = statement_at(*self.site[0])
        call = getattr(located[0], "value", None) if located is not None else None
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], (ast.Name, ast.Attribute)):
            return f"{ast.unparse(call.args[0])} = {ast.unparse(call)}"
        return ""


class ThrownResults:
    """The calls of a run; ``around`` takes the place of ``autograd.Function.apply``."""

    def __init__(self, terms: RootTerms) -> None:
        self._terms = terms
        self._why: dict[Site, str] = {}
        self._gives: dict[Site, bool] = {}
        self.calls: list[Thrown] = []

    def around(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            out = passed_on(apply_of(cls, original), args, kwargs)
            if self._terms.active():
                with self._terms.watch.suspended():
                    self._note(cls, args, out)
            return out

        return classmethod(apply)

    def _note(self, cls: type, args: tuple[Any, ...], out: Any) -> None:
        results = [t for t in tensors_in(out) if t.requires_grad]
        given = [t for t in tensors_in(args) if results and t.requires_grad and t.numel() == 1]
        terms = [(t, scalar) for t in given if (scalar := self._terms.scalar_of(t)) is not None]
        place, site = here()
        if not terms or not site:
            return
        if site not in self._why:
            self._why[site] = _thrown(site)
            if self._why[site]:
                ones, before = [torch.ones_like(t) for t in results], [len(s.weights) for _, s in terms]
                slopes = torch.autograd.grad(results, [t for t, _ in terms], ones, retain_graph=True, allow_unused=True)
                self._gives[site] = any(slope is not None and bool(slope.any()) for slope in slopes)
                for (_, scalar), count in zip(terms, before, strict=True):
                    del scalar.weights[count:]  # this backward pass is ours
        if self._gives.get(site):
            self.calls += [Thrown(scalar, str(place), site, cls.__name__, self._why[site]) for _, scalar in terms]


def _thrown(site: Site) -> str:
    located = statement_at(*site[0])
    call = located[0].value if located is not None and isinstance(located[0], ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "apply":
        return "its value is thrown away"
    return never_read(site)


def untrained_calls(record: Record, calls: Sequence[Thrown]) -> Iterator[list[Thrown]]:
    """By line, those whose terms no backward pass of the run goes through, although an optimizer steps weights that
    they were computed of."""
    by_site: dict[Site, list[Thrown]] = defaultdict(list)
    for call in calls:
        by_site[call.site].append(call)
    stepped = {i for i, holders in record.held.items() if any(record.optimizers[o].steps for o in holders)}
    for found in by_site.values():
        if not any(call.scalar.used for call in found) and stepped & found[0].scalar.parameters:
            yield found
