"""Activation checkpointing: which functions run under it, called from where."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.events import CheckpointCall
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import apply_of, checkpoint_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.patches import Patches
    from pytest_trainloop.recording.protocol import Observed


class Checkpoints:
    """Patches of the two functions that every checkpoint of torch calls, whoever imported ``checkpoint`` before."""

    def __init__(self, watch: Observed, patches: Patches) -> None:
        self._watch = watch
        patches.put(CheckpointFunction, "apply", self._reentrant)
        for owner, name in checkpoint_generators():
            patches.put(owner, name, self._generator)

    def _reentrant(self, original: Callable[..., Any]) -> Any:
        def apply(cls: type, function: Any, preserves: bool, *args: Any) -> Any:
            self._note(args, reentrant=True, preserves=preserves)
            return passed_on(apply_of(cls, original), (function, preserves, *args), {})

        return classmethod(apply)

    def _generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def opened(*args: Any, **kwargs: Any) -> Any:
            given = bound(original, args, kwargs).arguments
            self._note(given["args"], reentrant=False, preserves=given["preserve_rng_state"])
            return as_caller(original, args, kwargs)

        return opened

    def _note(self, args: Sequence[Any], *, reentrant: bool, preserves: bool) -> None:
        watch = self._watch
        if not watch.full or watch.is_suspended or watch.backward is not None:
            return
        with watch.suspended():
            place, site = here()
            watch.record.checkpoints.append(
                CheckpointCall(
                    at=watch.tick(),
                    place=place,
                    site=site,
                    reentrant=reentrant,
                    preserves=bool(preserves),
                    needs_grad=needs_grad(args),
                    grad_enabled=torch.is_grad_enabled(),
                )
            )


def bound(generator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of torch's generator by name, with their defaults: the function is ``fn``, its own arguments are
    ``args`` and ``kwargs``."""
    given = inspect.signature(generator).bind(*args, **kwargs)
    given.apply_defaults()
    return given


def needs_grad(args: Sequence[Any]) -> bool:
    """Whether one of a function's tensor arguments requires grad."""
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
