"""The user's own line: which frame outside torch and this package made a call."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.ours import is_our_file
from pytest_trainloop.core.paths import FIT_CALLER
from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.events import Place, Site

if TYPE_CHECKING:
    from types import FrameType

NOWHERE = Place("", 0)

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = tuple(sorted({sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}, reverse=True))
"""A folder behind those inside it: a path is shortened against the nearest."""
_SITE_DEPTH = 4


@functools.cache
def layer(filename: str) -> int:
    """0 for torch, this package and frames without a file; 1 for other installed code; 2 for the user's."""
    if filename.startswith((_TORCH, "<frozen")) or is_our_file(filename):
        return 0
    if filename.startswith(_LIBRARY):
        return 1 if "site-packages" in filename else 0
    return 2


def here(start: FrameType | None = None) -> tuple[Place, Site]:
    """The user's nearest line and the call site, from the caller on or from another frame.

    The place is the nearest line of the user's own; where there is none, the nearest of any library but torch.
    """
    frame: FrameType | None = start or sys._getframe(1)
    site: list[tuple[str, int]] = []
    place: tuple[str, int] | None = None
    while frame is not None and (place is None or len(site) < _SITE_DEPTH):
        filename = frame.f_code.co_filename
        if filename == FIT_CALLER:
            break  # whoever called fit is no part of the loop
        rank = layer(filename)
        if rank and not is_stand_in(frame.f_code):
            if len(site) < _SITE_DEPTH:
                site.append((filename, frame.f_lineno))
            if rank == 2 and place is None:
                place = (filename, frame.f_lineno)
        frame = frame.f_back
    at = place or (site[0] if site else None)
    return (place_of(*at) if at else NOWHERE), tuple(site)


def user_frames(most: int) -> list[FrameType]:
    """The nearest frames of the user's own, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found: list[FrameType] = []
    while frame is not None and len(found) < most and frame.f_code.co_filename != FIT_CALLER:
        if layer(frame.f_code.co_filename) == 2 and not is_stand_in(frame.f_code):
            found.append(frame)
        frame = frame.f_back
    return found


@functools.lru_cache(maxsize=4096)
def place_of(filename: str, line: int) -> Place:
    """The place with its source line, the path shortened against the working directory."""
    return Place(_short(filename), line, linecache.getline(filename, line).strip())


def _short(filename: str) -> str:
    path = Path(filename)
    for base in (Path.cwd(), *(Path(p) for p in _LIBRARY)):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return path.name


def is_in_a_library(line: str) -> bool:
    """Whether a ``file:line   source`` is one of an installed library."""
    file = line.partition("   ")[0].rpartition(":")[0]
    return not (Path.cwd() / file).is_file() and any((Path(base) / file).is_file() for base in _LIBRARY)


def frame_in(filename: str, limit: int = 60) -> FrameType | None:
    """The outermost frame within ``limit`` whose file ends so."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    for _ in range(limit):
        if frame is None:
            break
        if frame.f_code.co_filename.endswith(filename):
            found = frame
        frame = frame.f_back
    return found


def frames_called(substring: str, limit: int = 12) -> FrameType | None:
    """The nearest frame whose function name contains the text, within ``limit`` frames that are not this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and limit > 0:
        if substring in frame.f_code.co_name:
            return frame
        limit -= not is_our_file(frame.f_code.co_filename)
        frame = frame.f_back
    return None
