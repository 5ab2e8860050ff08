"""Backward passes: their roots, and the gradient that each brings to each parameter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.autocast import autocast
from pytest_trainloop.recording.events import Arrival, Backward, Root
from pytest_trainloop.recording.function_mode import is_aside
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.mistakes import PASSING_OVER
from pytest_trainloop.recording.shards import GradientsByHand
from pytest_trainloop.recording.source import NOWHERE, here
from pytest_trainloop.recording.torch_internals import has_values, is_functorch, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

    from pytest_trainloop.recording.patches import Patches
    from pytest_trainloop.recording.protocol import Observed


class Gradients:
    """Tensor hooks on every watched parameter, and patches of ``torch.autograd.backward`` and ``grad``."""

    def __init__(self, watch: Observed, patches: Patches) -> None:
        self._watch = watch
        self._handles: dict[int, RemovableHandle] = {}
        self.originals: dict[Any, str] = {torch.autograd.backward: "backward", torch.autograd.grad: "grad"}
        for name in ("backward", "grad"):
            patches.put(torch.autograd, name, functools.partial(self._patched, name))

    def hook(self, indices: Iterable[int]) -> None:
        """Observe the gradients that arrive at these parameters; those that require none are left for a later call."""
        elsewhere = self._watch.trained.elsewhere()  # whose engine may be reading their hooks
        for index in indices:
            tensor = self._watch.table.tensors[index]
            if index in elsewhere:
                continue
            if index not in self._handles and not is_lazy(tensor) and tensor.requires_grad and tensor.is_leaf:
                handle = on_gradient(tensor, self._arrival_hook(index))
                if handle is not None:
                    self._handles[index] = handle

    def hooked(self, index: int) -> bool:
        return index in self._handles

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _patched(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.during(kind, original, args, kwargs)

        return watched

    def during(self, kind: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``backward`` or ``grad`` of autograd, and record the pass."""
        watch = self._watch
        if watch.backward is not None or is_aside() or is_traced():
            return as_caller(function, args, kwargs)
        args, kwargs = tuple(map(_listed, args)), {name: _listed(value) for name, value in kwargs.items()}
        event = by_hand = None
        with PASSING_OVER, watch.suspended():
            roots = _roots(args, kwargs)
            if not roots or any(has_values(t) or is_functorch(t) for t in roots):  # else nothing trains on them
                event = self._open(kind, args, kwargs)
                by_hand = (
                    GradientsByHand(watch.table.tensors, watch.trained.elsewhere())
                    if watch.full and event.kind == "backward"
                    else None
                )
        if event is None:
            watch.backward = None
            return as_caller(function, args, kwargs)
        try:
            out = as_caller(function, args, kwargs)
            if by_hand is not None:
                self._note_by_hand(event, by_hand)
            return out
        except RuntimeError as error:
            watch.graphs.refused(event, error)
            raise
        finally:
            event.until = watch.tick()
            watch.backward = None

    def _open(self, kind: str, args: Any, kwargs: Any) -> Backward:
        watch = self._watch
        watch.optimizers.drop_aborted()
        watch.weight_changes.look()
        place, site = here()
        watch.backward_opened()
        event = Backward(at=watch.tick(), place=place, site=site, kind="grad" if kind == "grad" else "backward")
        event.item, event.autocast = watch.items(), autocast()
        event.roots += [self._root(tensor) for tensor in _roots(args, kwargs)]
        watch.add(event)
        watch.backward = event
        if watch.full:
            given = _arguments(kind, args, kwargs)
            watch.graphs.mark(
                _roots(args, kwargs),
                _tensors(given.get("inputs")),
                retained=bool(given.get("create_graph") if (kept := given.get("retain_graph")) is None else kept),
            )
        return event

    def _root(self, tensor: torch.Tensor) -> Root:
        root = Root(requires_grad=tensor.requires_grad, shape=tuple(tensor.shape), history=tensor.grad_fn is not None)
        if tensor.is_floating_point() and tensor.numel():
            self._watch.reader.scalar(
                tensor if tensor.numel() == 1 else tensor.detach().sum(), functools.partial(setattr, root, "value")
            )
        return root

    def _arrival_hook(self, index: int) -> Callable[[torch.Tensor | None], None]:
        watch = self._watch

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return  # a custom function returned none
            with watch.suspended(), torch.no_grad():
                event = watch.backward or self._unseen_backward()
                watch.trained.claim([index], event)
                residual = watch.table.tensors[index].grad if event.kind == "backward" else None
                event.arrivals.setdefault(index, []).append(self._arrival(index, gradient, residual))

        return arrived

    def _note_by_hand(self, event: Backward, by_hand: GradientsByHand) -> None:
        watch = self._watch
        with watch.suspended(), torch.no_grad():
            for index, incoming, residual in by_hand.arrived(watch.table.tensors):
                if index not in event.arrivals:
                    event.arrivals[index] = [self._arrival(index, incoming, residual)]

    def _arrival(self, index: int, incoming: torch.Tensor, residual: torch.Tensor | None) -> Arrival:
        watch = self._watch
        return Arrival(
            at=watch.tick(),
            incoming=watch.reader.sample(incoming),
            residual=None if residual is None else watch.reader.sample(residual),
            # popped: a loss made by another method than forward() has no call of its own to compare with
            steps_since_forward=watch.steps_on[index] - watch.steps_at_forward.pop(index, watch.steps_on[index]),
        )

    def _unseen_backward(self) -> Backward:
        """The event of a pass started from C++, past both patches; such passes share one until another event."""
        watch = self._watch
        last = watch.record.events[-1] if watch.record.events else None
        if isinstance(last, Backward) and not last.roots:
            return last
        event = Backward(at=watch.tick(), place=NOWHERE, site=(), kind="backward")
        watch.add(event)
        return event


_POSITIONS = {
    "backward": ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs"),
    "grad": ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
}


def _arguments(kind: str, args: Any, kwargs: Any) -> dict[str, Any]:
    given: dict[str, Any] = dict(zip(_POSITIONS[kind], args, strict=False)) | kwargs
    return given


def _roots(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call of ``backward`` or ``grad`` begins at."""
    return _tensors(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))


def _tensors(given: Any) -> list[torch.Tensor]:
    given = [given] if isinstance(given, torch.Tensor) else given or ()
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


def _listed(given: Any) -> Any:
    """An iterator as a tuple, so that looking at it does not use it up."""
    return tuple(given) if isinstance(given, Iterator) else given
