"""The corpora of training loops by name: ``PAIRS`` of a faulty and a repaired loop, and the odd but correct ``ODD``.

A loop stands in ``faults*.py`` or ``unusual*.py`` of its check's folder (tests/checks/<family>/<check>/), or in
``tests/loops/unusual/`` where it belongs to no check. Importing this module imports all of these files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pytest_trainloop.frontends.api import check_loop
from tests.helpers.discovery import import_all
from tests.loops.from_threads import FAULTS, Fault
from tests.loops.odd import ODD, OddLoop
from tests.loops.pairs import PAIRS, Pair

FILES = (
    "tests/checks/*/*/faults*.py",
    "tests/checks/*/*/unusual*.py",
    "tests/loops/unusual/*.py",
    "tests/loops/threads/*.py",
)

import_all(*FILES)

__all__ = ["FAULTS", "ODD", "PAIRS", "Fault", "OddLoop", "Pair", "judged"]


def judged(pair, make, **chosen):
    """The report on one loop of a pair; where the check compares with a baseline, with that of the repaired loop."""
    if pair.check != "baseline":
        return check_loop(make, raises=False, **chosen)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "loop.json")
        check_loop(pair.fixed, only=["baseline"], baseline=file, update=True)
        return check_loop(make, raises=False, baseline=file, **chosen)
