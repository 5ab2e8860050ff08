"""The batch whose segments are looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop import nested
from pytest_trainloop.runs.batch_stream import first_batch

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence


def example_batch(evidence: Evidence) -> Any:
    """A copy of the declared batch, or of the first one that the loop gets."""
    loop = evidence.fresh_loop()
    return nested.copy(first_batch(loop))
