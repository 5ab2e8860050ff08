"""Where this package's files are: frames in them are not the user's. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1]) + os.sep
"""The folder of the package, with a separator at its end: a filename that starts so is ours."""

BUILD_CALLER = str(Path(PACKAGE) / "runs" / "build.py")
"""The file that calls the user's function: the same of its frames."""

FIT_CALLER = str(Path(PACKAGE) / "runs" / "guard.py")
"""The file that calls ``fit``: frames below it belong to whoever called the plugin."""
