"""Every file that a process writes, told as it is opened."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.paths import PACKAGE
from pytest_trainloop.ranks.facts import NOWHERE, Written
from pytest_trainloop.recording import opened_files
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import around_zip_files

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_SYSTEM = ("/dev/", "/proc/", "/sys/")
_OF_PYTHON = (f"{os.sep}__pycache__{os.sep}", f"{os.sep}torchinductor_", f"{os.sep}triton{os.sep}")


class Files:
    """Tells of each file once, ``tell("wrote", Written)``."""

    def __init__(self, steps: Callable[[], int], tell: Callable[[str, Any], None]) -> None:
        self._steps, self._tell = steps, tell
        self._pid = os.getpid()
        self._known: set[str] = set()

    def begin(self) -> None:
        """Until ``close``: Python's audit events, and the libraries that open files in C++ or Rust."""
        opened_files.listen(self._note)
        around_zip_files(self._note)
        safetensors: Any = sys.modules.get("safetensors.torch")
        if safetensors is not None:
            save = safetensors.serialize_file

            def told(data: Any, path: Any, *more: Any, **named: Any) -> Any:
                self._note(path)
                return save(data, path, *more, **named)

            safetensors.serialize_file = told

    def close(self) -> None:
        """Tell of no further files."""
        opened_files.stop(self._note)
        self._pid = 0

    def _note(self, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or os.getpid() != self._pid:
            return
        full = str(Path(os.fsdecode(path)).resolve())
        if full in self._known or full.startswith((*_OF_SYSTEM, PACKAGE)):
            return
        if any(part in full for part in _OF_PYTHON):
            return
        self._known.add(full)
        place = here()[0]
        if place != NOWHERE:
            self._tell("wrote", Written(full, place, self._steps()))
