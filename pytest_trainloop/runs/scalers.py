"""Gradient scalers built with other arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from torch.amp import GradScaler

from pytest_trainloop.recording.patches import patched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def scalers_built_with(*, nth: int | None = None, **given: Any) -> Iterator[None]:
    """Build gradient scalers in this block with these arguments in place of the user's own; with ``nth``, from 0 on,
    only the scaler that is built as that one."""
    built = itertools.count()

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)  # another block inside reads the signature
        def init(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(scaler, *args, **kwargs)
            if next(built) == nth or nth is None:
                bound.arguments.update(given)
            original(*bound.args, **bound.kwargs)

        return init

    with patched(GradScaler, "__init__", wrap):
        yield
