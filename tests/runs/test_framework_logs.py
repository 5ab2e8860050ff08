"""Lightning's INFO is held back in our runs only; its warnings, and what the user set, stay."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

from pytest_trainloop.runs.framework_logs import frameworks_quiet


@pytest.mark.parametrize(("level", "inside"), [(logging.INFO, logging.WARNING), (logging.ERROR, logging.ERROR)])
def test_info_is_held_back_and_the_level_comes_back(monkeypatch, level, inside):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    try:
        logger.setLevel(level)
        with frameworks_quiet():
            assert logger.level == inside
        assert logger.level == level
    finally:
        logger.setLevel(before)
