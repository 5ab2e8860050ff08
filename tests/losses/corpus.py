"""The corpora of losses by name: faulty and repaired ``PAIRS``, odd but correct ``ODD``, torch's own ``MODULES``.

A pair stands in ``faults.py`` of its check's folder, tests/checks/loss_function/<check>/.
"""

from __future__ import annotations

from tests.helpers.discovery import import_all
from tests.losses.modules import MODULES
from tests.losses.pairs import PAIRS, LossPair
from tests.losses.unusual import ODD

FILES = ("tests/checks/loss_function/*/faults.py",)

import_all(*FILES)

__all__ = ["MODULES", "ODD", "PAIRS", "LossPair"]
