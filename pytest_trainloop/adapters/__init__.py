"""From a trainer of another library to a ``TrainLoop``. Those libraries are imported only when a function is called."""

from __future__ import annotations

from pytest_trainloop.adapters.accelerate import fresh_accelerator
from pytest_trainloop.adapters.lightning import from_lightning
from pytest_trainloop.adapters.transformers import from_trainer

__all__ = ["fresh_accelerator", "from_lightning", "from_trainer"]
