"""A diagnostic run: operations that take a tensor with a history and return one without, and what happens with some of
them changed."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.instruments.tracing.arguments import floats, in_place
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import apply_of
from pytest_trainloop.recording.torch_names import (
    CLAMPS,
    CONVOLUTIONS,
    NORMALISATIONS,
    PRODUCTS,
    ROUNDINGS,
    SET_GRAD_ENABLED,
    SHAPE_ONLY,
    SOFTMAXES,
    TO_PYTHON,
    TRANSPOSED_CONVOLUTIONS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.watch import Watch

Kind = Literal["detach", "grad_off", "value", "custom", "zero_slope", "constant"]

_DETACHES = frozenset({"detach", "detach_", "data"})
_VALUES = (TO_PYTHON - {"__bool__", "__format__"}) | {"tensor", "as_tensor"}
"""Numbers that a loop may compute with: what is asked or printed is none."""

_NOT_A_TENSOR = TO_PYTHON - {"__bool__", "__format__", "item"}
"""They must not give a tensor; ``item`` may, where its result is computed with."""

_ZERO_SLOPE = ROUNDINGS | CLAMPS | {"clamp_", "hardtanh", "hardtanh_", "hardsigmoid", "hardswish", "relu6", "threshold"}
_MAY_BE_CONSTANT = SOFTMAXES | NORMALISATIONS | {"normalize", "relu", "relu_"}
_LAYERS = (CONVOLUTIONS - TRANSPOSED_CONVOLUTIONS) | {"linear"}
"""The first axis of the weight is that of the outputs; in a transposed convolution it is the second."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One operation at one line; for ``grad_off`` the line that switched gradients off."""

    kind: Kind
    op: str
    place: Place
    site: Site
    module: str
    by_shape: bool = False
    """Whether the shape of a weight makes it so, whatever the batch: an axis that is 1 long is that of the layer's one
    output, or was inserted."""

    @property
    def key(self) -> tuple[str, Site]:
        return self.op, self.site


class Tracer(WatchingMode):
    """Lists candidates, and leaves the ``chosen`` ones out, or (``nudge``) moves their result a little."""

    def __init__(self, chosen: Sequence[Candidate] = (), *, nudge: bool = False) -> None:
        super().__init__()
        self._chosen = {c.key: c for c in chosen}
        self._nudge = nudge
        self._region: tuple[Place, Site] | None = None
        self._inside = 0
        self._detached: list[Any] = []
        self._closed: list[tuple[Candidate, list[bool]]] = []
        self._one_wide: list[torch.Tensor] = []
        self.found: dict[tuple[str, Site], Candidate] = {}
        """Candidates in the order of their first call."""
        self.touched: set[int] = set()
        """Parameters that entered some computation whose result has a history."""

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        try:
            with super().watching(watch), patched(torch.autograd.Function, "apply", self._patched_apply):
                yield
        finally:
            for candidate, passed in self._closed:
                if passed[0] and not all(passed[1:]):
                    self.found[candidate.key] = candidate

    def active(self) -> bool:
        """Not inside an autograd function of the project's: it has its gradient written out."""
        return super().active() and not self._inside

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _name(func)
        if name == SET_GRAD_ENABLED:
            self._region = here() if args and args[0] is False else None
            return passed_on(func, args, kwargs)
        given = list(tensors_in(args, kwargs))
        if self._chosen and name == "__set__" and given and given[0].grad_fn is not None and _sets_requires_grad(func):
            return None  # it has its history now, and torch sets the flag of leaves only
        off = not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        if off and self._left_out("grad_off", self._region_site()):
            with torch.inference_mode(False), torch.enable_grad():
                return passed_on(func, args, kwargs)
        if name in ("data", "detach"):
            self._detached = [*self._detached[-63:], out := passed_on(func, args, kwargs)]
            if not any(t.requires_grad for t in given):
                return out
        if not any(t.requires_grad for t in given):
            return passed_on(func, args, kwargs)
        return self._with_history(name, func, args, kwargs, given)

    def _with_history(
        self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]
    ) -> Any:
        place, site = here()
        kind: Kind | None
        if chosen := self._chosen.get((name, site)):
            return self._changed(chosen, func, args, kwargs, given)
        out = passed_on(func, args, kwargs)
        if any(t.requires_grad for t in tensors_in(out)) and not name.startswith("__get"):
            self._touch(given)  # what is only asked for its device or its gradient is not computed with
        written = args[0] if args and _writes(name) else None
        kind = "value" if any(written is d for d in self._detached) else _kind(name, args, given, out)
        if kind == "constant" and not self.watch.inside_parameters():
            kind = None  # a hinge in the loss that every example meets is no dead unit
        if kind == "grad_off":
            self._note_region(name, place, site)
            if self._nudge and ("grad_off", self._region_site()) in self._chosen:
                return _nudged(out)
        elif kind is not None:
            self._note(Candidate(kind, name, place, site, self.watch.module_path(), self._is_one_wide(given)))
        if isinstance(out, torch.Tensor) and self._makes_one_wide(name, given, out):
            self._one_wide = [*self._one_wide[-15:], out]
        return out

    def _is_one_wide(self, given: list[torch.Tensor]) -> bool:
        return any(tensor is one for tensor in given[:1] for one in self._one_wide)

    def _makes_one_wide(self, name: str, given: list[torch.Tensor], out: torch.Tensor) -> bool:
        """Whether the weight of a layer makes one axis of the result 1 long, and no other is; or the entries are still
        those of such a layer, moved or changed one by one."""
        if name in _LAYERS | PRODUCTS:
            by_weight = len(given) > 1 and (name in _LAYERS or isinstance(given[1], torch.nn.Parameter))
            return by_weight and given[1].shape[0 if name in _LAYERS else -1] == 1 and list(out.shape).count(1) == 1
        return out.numel() == given[0].numel() and self._is_one_wide(given)

    def _note(self, candidate: Candidate) -> None:
        self.found.setdefault(candidate.key, candidate)

    def _note_region(self, name: str, place: Place, site: Site) -> None:
        """The region without gradients that an operation lies in; the operation itself where none was entered."""
        region = self._region[0] if self._region else place
        self._note(Candidate("grad_off", "grad_off", region, self._region_site(), self.watch.module_path()))

    def _region_site(self) -> Site:
        return self._region[1] if self._region else ()

    def _left_out(self, op: str, site: Site) -> bool:
        return not self._nudge and (op, site) in self._chosen

    def _touch(self, given: list[torch.Tensor]) -> None:
        for tensor in given:
            index = self.watch.table.index(tensor)
            if index is not None:
                self.touched.add(index)

    def _changed(self, chosen: Candidate, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        if self._nudge and _writes(chosen.op):
            with torch.no_grad():
                args = (args[0], *(_nudged(a) if isinstance(a, torch.Tensor) else a for a in args[1:]))
            return passed_on(func, args, kwargs)
        if self._nudge:
            with torch.no_grad():
                return _nudged(passed_on(func, args, kwargs))
        if chosen.op in _NOT_A_TENSOR or (_writes(chosen.op) and chosen.kind == "value"):
            return passed_on(func, args, kwargs)
        return _straight_through(given[0], passed_on(func, args, kwargs))

    def _patched_apply(self, original: Callable[..., Any]) -> Any:
        """Watch the project's own autograd functions: a gradient at the output must go on to each input."""

        @functools.wraps(original)
        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1  # autograd switches gradients off in there, which is no cut
            try:
                out = passed_on(apply_of(cls, original), args, kwargs)
            finally:
                self._inside -= 1
            inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            first = next((o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)), None)
            if inputs and first is not None and first.requires_grad and not cls.__module__.startswith("torch."):
                self._watch_passage(cls, inputs, first)
            return out

        return classmethod(apply)

    def _watch_passage(self, cls: type, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        place, site = here()
        passed = [False] * (1 + len(inputs))
        self._closed.append((Candidate("custom", cls.__name__, place, site, self.watch.module_path()), passed))
        on_gradient(output, functools.partial(_mark, passed, 0))
        for i, tensor in enumerate(inputs, start=1):
            on_gradient(tensor, functools.partial(_mark, passed, i))


def _mark(passed: list[bool], which: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        passed[which] = True


def _kind(name: str, args: tuple[Any, ...], given: list[torch.Tensor], out: Any) -> Kind | None:
    """What kind of candidate a call is, if any."""
    if name in SHAPE_ONLY:
        return None
    if name in _DETACHES:
        return "detach"
    if name in _VALUES:
        return "value"
    outputs = list(tensors_in(out))
    if _writes(name) and args and isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
        return "grad_off" if not torch.is_grad_enabled() else "value"
    if name in _ZERO_SLOPE:
        return "zero_slope"
    if name in _MAY_BE_CONSTANT and _constant(name, given, outputs):
        return "constant"
    if outputs and not any(t.requires_grad for t in outputs) and not name.startswith("__get"):
        off = not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        return "grad_off" if off and any(t.is_floating_point() or t.is_complex() for t in outputs) else "value"
    return None


def _writes(name: str) -> bool:
    """Whether an operation changes the values of its first argument."""
    return in_place(name) and name not in ("detach_", "requires_grad_")


def _constant(name: str, given: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an activation or a normalisation returns the same for every input: every unit off, or only one entry to
    normalise."""
    if not floats(outputs[:1]):
        return False
    out = outputs[0].detach()
    if name in ("relu", "relu_"):
        return not bool(out.any())
    if name in SOFTMAXES:
        return bool((out == (1.0 if name == "softmax" else 0.0)).all())
    rows = out.reshape(out.shape[0], -1) if out.dim() > 1 else out.reshape(1, -1)
    return rows.shape[0] > 1 and bool((rows == rows[:1]).all()) and not _same_rows(given[0].detach())


def _same_rows(values: torch.Tensor) -> bool:
    return values.dim() > 1 and bool((values == values[:1]).all())


def _sets_requires_grad(func: Callable[..., Any]) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") == "requires_grad"


def _straight_through(given: torch.Tensor, out: Any) -> Any:
    """The same value with the slope of the identity, so that nothing after it runs differently."""
    if isinstance(out, torch.Tensor) and out.shape == given.shape and out.is_floating_point():
        return out.detach() + (given - given.detach())
    return given


def _nudged(out: Any) -> Any:
    """The value moved by about five per cent, unevenly: an even move would be taken out again by a normalisation."""
    if isinstance(out, torch.Tensor):
        if not (out.is_floating_point() or out.is_complex()):
            return out.roll(1, 0) if out.dim() else out
        ramp = torch.linspace(-1.0, 1.0, max(2, out.numel()), device=out.device)[: out.numel()].reshape(out.shape)
        return out + 0.05 * (out.abs() + 0.1) * (ramp if out.numel() > 1 else 1.0)
    if isinstance(out, (float, complex)):
        return out * 1.05 + 0.005
    if isinstance(out, list):
        return [_nudged(o) if isinstance(o, list) or i % 2 else o for i, o in enumerate(out)]
    if hasattr(out, "astype") and out.dtype.kind == "f":
        return _nudged(torch.from_numpy(out.copy())).numpy().astype(out.dtype)
    return out


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return "data" if getattr(getattr(func, "__self__", None), "__name__", "") == "data" else "__get__"
    return name
