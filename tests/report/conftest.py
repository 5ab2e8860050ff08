from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.core.report.alerts import Alert, alerts
from pytest_trainloop.core.report.lines import Places
from tests.helpers.report_data import TEST, TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a loop and its test."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "test_train.py").write_text(TEST, encoding="utf-8")
    return tmp_path


@pytest.fixture
def told(project: Path) -> Callable[[dict[str, Any]], list[Alert]]:
    """The alerts of a report, with the files of the project."""
    proofs = {name: check.proofs for name, check in registry.registered().items()}
    return lambda document: alerts(document, Places(project), proofs)
