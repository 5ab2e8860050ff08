"""The user's own traceback, without this package's frames."""

from __future__ import annotations

import functools
import os
import re
import traceback
from pathlib import Path

import torch

from pytest_trainloop.core.finding import UserError
from pytest_trainloop.core.ours import is_our_file
from pytest_trainloop.recording.events import Place, Raised
from pytest_trainloop.recording.source import NOWHERE, layer, place_of


def user_error(error: BaseException, stage: str) -> UserError:
    """The exception as text, with the user's frames only; files are relative to the working directory."""
    return UserError(stage=stage, summary=_summary(error), traceback=_text(error))


def raised(error: BaseException) -> Raised:
    """What ended ``fit``, with the user's line."""
    return Raised(
        kind=type(error).__name__,
        summary=_summary(error),
        traceback=_text(error),
        place=_place(error),
        message=str(error),
    )


def _summary(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    if "'Batches'" in first:  # fit=trainer.fit, which takes a number of epochs
        first += "; fit is called with the batches as its only argument"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _text(error: BaseException) -> str:
    shown = traceback.TracebackException.from_exception(error, capture_locals=False)
    _strip(shown)
    here = re.escape(str(Path.cwd()) + os.sep)
    return re.sub(rf'^([ |]*File "){here}', r"\1", "".join(shown.format()).rstrip(), flags=re.MULTILINE)


def _strip(shown: traceback.TracebackException) -> None:
    kept: list[traceback.FrameSummary] = []
    after_ours = False
    for frame in shown.stack:
        if _ours(frame.filename):
            after_ours = True
            continue
        known = [tuple(before)[:3] for before in kept[-2:]]  # the line, and the function of torch that it calls
        if after_ours and (same := tuple(frame)[:3]) in known:  # such a frame is reported as its caller (as_caller)
            del kept[len(kept) - len(known) + known.index(same) + 1 :]
        else:
            kept.append(frame)
        after_ours = False
    shown.stack = traceback.StackSummary.from_list(kept)
    for linked in (shown.__cause__, shown.__context__):
        if linked is not None:
            _strip(linked)


@functools.cache
def _ours(filename: str) -> bool:
    return is_our_file(filename) or (
        filename.startswith(str(Path(torch.__file__).parent)) and filename.endswith("overrides.py")
    )


def _place(error: BaseException) -> Place:
    place = NOWHERE
    for frame, line in traceback.walk_tb(error.__traceback__):
        if layer(frame.f_code.co_filename) == 2:
            place = place_of(frame.f_code.co_filename, line)
    return place
