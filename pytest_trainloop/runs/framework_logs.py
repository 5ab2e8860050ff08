"""What frameworks log each time that a trainer is built and has ended: a check does that dozens of times."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHATTY = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
"""Loggers that tell at level INFO which accelerators there are, and tips."""


@contextlib.contextmanager
def frameworks_quiet() -> Iterator[None]:
    """Hold back the INFO of Lightning's loggers, where it is in use; warnings and the user's own loggers stay."""
    loggers = [logging.getLogger(name) for name in CHATTY if name in sys.modules]
    before = [(logger, logger.level) for logger in loggers if logger.level < logging.WARNING]
    for logger, _ in before:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
