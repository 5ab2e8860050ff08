"""Files that are written whole or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write(file: Path, text: str) -> None:
    """Write ``text`` in UTF-8, with the folders that are missing; whoever reads meanwhile sees the old file or the new.

    A lone surrogate, as of a file name that is no UTF-8, is written as its escape.

    Raises ``OSError`` where that is not possible; the old file is then as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.is_file():  # /dev/stdout, a pipe: nothing there can be replaced
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    target = file.resolve()  # of a link, the file that it leads to
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
            stream.write(text)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def refusal(file: Path) -> str:
    """Why nothing can be written there, in the words of a sentence's end; empty where it can."""
    if file.is_dir():
        return "a folder; a file to write is needed"
    above = next((folder for folder in file.parents if folder.exists()), None)
    if above is not None and not above.is_dir():
        return f"inside of {above.name}, which is a file; a folder is needed there"
    if above is not None and not (os.access(file, os.W_OK) if file.exists() else _takes_files(above)):
        return "a place that must not be written to"
    return ""


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made in a folder: permissions alone do not say so, as in /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
