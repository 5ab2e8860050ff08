"""Checkpointed functions run in another way for the length of a run: without the checkpoint, or within a context."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from pytest_trainloop.recording.checkpoints import bound, needs_grad
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import apply_of, checkpoint_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


@dataclass(frozen=True, slots=True)
class Asked:
    """How the loop calls a checkpoint."""

    reentrant: bool
    preserves: bool
    needs_grad: bool


class Piece:
    """How one checkpointed function is run: in the context ``first``, and recomputed in the context ``again``."""

    plain = False
    """Whether it runs without the checkpoint."""
    modern = False
    """Whether it runs under a checkpoint that is not re-entrant."""
    preserves = False
    """Whether the state of torch's generator is restored for the recomputation."""

    def first(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def again(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Plain(Piece):
    plain = True


class Modern(Piece):
    modern = True


def without(_asked: Asked) -> Piece:
    """Every checkpoint as a plain call."""
    return Plain()


def without_cut_off(asked: Asked) -> Piece | None:
    """Checkpoints that no gradient can pass as plain calls: re-entrant ones whose inputs require none."""
    return Plain() if asked.reentrant and not asked.needs_grad else None


def not_reentrant(asked: Asked) -> Piece | None:
    """Every re-entrant checkpoint as one that is not."""
    return Modern() if asked.reentrant else None


@contextlib.contextmanager
def switched(how: Callable[[Asked], Piece | None]) -> Iterator[None]:
    """Run every checkpoint in this block as ``how`` says; None leaves one as it is."""
    with Patches() as patches:
        patches.put(CheckpointFunction, "apply", functools.partial(_reentrant, how))
        for owner, name in checkpoint_generators():
            patches.put(owner, name, functools.partial(_generator, how))
        yield


def _reentrant(how: Callable[[Asked], Piece | None], original: Callable[..., Any]) -> Any:
    def apply(cls: type, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        piece = how(Asked(True, bool(preserves), needs_grad(args))) if cls is CheckpointFunction else None
        if piece is None:
            return passed_on(apply_of(cls, original), (function, preserves, *args), {})
        if piece.plain:
            return function(*args)
        if piece.modern:
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=bool(preserves))
        times = 0

        def around(*given: Any) -> Any:
            nonlocal times
            times += 1
            with piece.first() if times == 1 else piece.again():
                return function(*given)

        return passed_on(apply_of(cls, original), (around, preserves or piece.preserves, *args), {})

    return classmethod(apply)


def _generator(how: Callable[[Asked], Piece | None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def opened(*args: Any, **kwargs: Any) -> Any:
        call = bound(original, args, kwargs)
        given = call.arguments
        piece = how(Asked(False, bool(given["preserve_rng_state"]), needs_grad(given["args"])))
        if piece is None:
            return original(*args, **kwargs)
        if piece.plain:
            return _once(given["context_fn"])
        function = given["fn"]

        @functools.wraps(function, updated=())
        def around(*inputs: Any, **options: Any) -> Any:
            with piece.again():
                return function(*inputs, **options)

        given["fn"], given["preserve_rng_state"] = around, given["preserve_rng_state"] or piece.preserves
        return _within(piece, original(*call.args, **call.kwargs))

    return opened


def _once(context_fn: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
    """In place of torch's generator, whose caller runs the function between its two halves."""
    if not torch.is_grad_enabled():
        yield
        return
    with context_fn()[0]:
        yield


def _within(piece: Piece, generator: Generator[None, None, None]) -> Iterator[None]:
    """Both halves of torch's generator, with the piece's context around the function between them."""
    next(generator)
    try:
        with piece.first():
            yield
    except BaseException as error:
        generator.throw(error)
        raise
    next(generator, None)
