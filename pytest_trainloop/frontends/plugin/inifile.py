"""Values of our options that pytest took for paths to tests, and with them another ini file or none.

Pytest looks for the ini file before it knows the options of plugins. The value of one that is written with a blank
(``--trainloop-json FILE``) counts as an argument then, and once the file exists, as a path whose folder is searched.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

_INI_FILES = {
    "pytest.toml": "",
    ".pytest.toml": "",
    "pytest.ini": "",
    ".pytest.ini": "",
    "pyproject.toml": "[tool.pytest",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
}
"""Files that configure pytest, in its order, and what they must hold."""


def paths_taken(config: pytest.Config) -> Iterator[str]:
    """A sentence for each value of ours that may have moved the root of the session."""
    expected = _own_ini_file(config.invocation_params.dir)
    if expected is None or config.inipath == expected or any(str(a) in ("-c", "--rootdir") for a in _args(config)):
        return
    args = _args(config)
    for option, value in itertools.pairwise(args):
        if option.startswith("--trainloop-") and "=" not in option and (config.invocation_params.dir / value).exists():
            yield (f"pytest took {value} for a path to tests and did not read {expected.name}; write {option}={value}")


def _args(config: pytest.Config) -> list[str]:
    return [str(arg) for arg in config.invocation_params.args]


def _own_ini_file(folder: Path) -> Path | None:
    """The ini file that the folder of the call has, by itself or above."""
    for place in (folder, *folder.parents):
        for name, section in _INI_FILES.items():
            file = place / name
            if file.is_file() and section in file.read_text(encoding="utf-8", errors="ignore"):
                return file
    return None
