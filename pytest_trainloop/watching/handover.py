"""What is known of a script's loop, for the test that hands it over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.watching.target import Target


class Handover:
    """Looks at the script while it runs."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the run of the script."""
        yield

    def write(self, file: Path, target: Target) -> list[str]:
        """Write the test; what is missing in it."""
        return ["everything"]
