"""Gradient scalers built with other arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch.amp import GradScaler

from pytest_trainloop.recording.patches import patched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def scalers_built_with(**given: Any) -> Iterator[None]:
    """Build gradient scalers in this block with these arguments in place of the user's own."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)  # another block inside reads the signature
        def init(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(scaler, *args, **kwargs)
            bound.arguments.update(given)
            original(*bound.args, **bound.kwargs)

        return init

    with patched(GradScaler, "__init__", wrap):
        yield
