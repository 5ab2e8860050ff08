"""``Script``: a training script that a marked function names, to be run once, as the command line runs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

WATCHED_STEPS = 30
"""Optimizer steps that are watched by default: 12 in full, and 18 more in which graphs and states that grow
show (docs/zero-code.md#how-many-steps)."""

WRITE_A_TEST = "--write-test=FILE writes the test that can"
"""Ends the reason of a check that would decide in a test, where a script was watched."""


@dataclass(frozen=True, slots=True)
class Script:
    """A training script, unchanged: returned by a marked function in place of a ``TrainLoop``.

    >>> @pytest.mark.trainloop
    ... def test_train():
    ...     return Script("train.py", ["--epochs", "2"], cwd=Path(__file__).parent)

    It is run once, in a process of its own, as by ``python -m pytest_trainloop train.py --epochs 2``. Checks that one
    run decides pass or fail; the others are skipped, since they run a function again with one thing changed.

    Parameters
    ----------
    name
        the path of the script, or the name of a module
    args
        what it is given on the command line
    cwd
        the working directory, from which the path is read; default: that of pytest
    module
        whether ``name`` is the name of a module, as after ``python -m``
    steps
        stop after so many optimizer steps; 0: run to the script's own end
    limit_batches
        end each pass over a DataLoader after so many batches, so that epochs end within the steps; 0: no limit
    torchrun
        set what ``torchrun --nproc-per-node=1`` sets: ``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``, ...

    Raises
    ------
    UsageError
        there is no such script, or what was given cannot be a command line
    """

    name: str | os.PathLike[str]
    args: Sequence[str] = ()
    cwd: str | os.PathLike[str] = "."
    module: bool = False
    steps: int = WATCHED_STEPS
    limit_batches: int = 0
    torchrun: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.args, str) or not all(isinstance(word, str) for word in self.args):
            shown = repr(self.args) if isinstance(self.args, str) else f"{list(self.args)!r}"
            raise _refused(f'args is {shown}; a list of words is needed, as in ["--epochs", "2"]')
        for name, what in (("steps", "optimizer steps"), ("limit_batches", "batches")):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 0:
                raise _refused(f"{name} is {given!r}; a number of {what} is needed, or 0 for no limit")
        if not Path(self.cwd).is_dir():
            raise _refused(f"cwd is {os.fspath(self.cwd)!r}; a folder that exists is needed")
        path = Path(self.cwd, self.name)
        if not self.module and not path.exists():
            raise _refused(f"there is no file {path}; the path of a Python script is needed, from cwd on")

    def command(self, *options: str) -> list[str]:
        """The words behind ``python -m pytest_trainloop``, with these options of its own."""
        own = [*options, f"--steps={self.steps}", *(["--torchrun"] if self.torchrun else [])]
        own += [f"--limit-batches={self.limit_batches}"] if self.limit_batches else []
        return [*own, *(["-m"] if self.module else []), os.fspath(self.name), "--", *self.args]


class OnlyAScript(UsageError):
    """Raised for a ``Script`` by what needs a loop that can be run again."""

    def __init__(self, script: Script) -> None:
        super().__init__("a script runs once; this needs a TrainLoop, whose fit is a function that takes batches")
        self.script = script


def _refused(sentence: str) -> UsageError:
    return UsageError(f"Script: {sentence}", place=places.shown(*places.caller()))
