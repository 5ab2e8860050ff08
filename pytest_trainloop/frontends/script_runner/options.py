"""The command line of ``python -m pytest_trainloop``: what is ours, the script, and what is the script's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.script import WATCHED_STEPS
from pytest_trainloop.frontends.script_runner.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = "python -m pytest_trainloop [options] train.py [--] [what the script is given]"

EPILOG = """\
Options of this command come before the script, those of the script after it. Those that pytest has too are spelled as
there. Exit status: 0 no fault was found; 1 a fault was found, or the script failed; 2 nothing trained, no
chosen check could decide, or the command line cannot be read.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, read."""

    target: Target
    steps: int = WATCHED_STEPS
    limit_batches: int = 0
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    strict: bool = False
    json: str = ""
    sarif: str = ""
    report: str = ""
    write_test: str = ""
    torchrun: bool = False
    verbose: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (python -m pytest_trainloop --help)")


def read(args: Sequence[str]) -> Options:
    """Raises ``UsageError`` for what cannot be read, and ``SystemExit`` after ``--help`` and ``--version``."""
    from pytest_trainloop import __version__

    parser = _Parser(
        prog="python -m pytest_trainloop",
        usage=USAGE,
        description="Run a training script unchanged, watch its first optimizer steps, and judge them.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="run a module by its name: -m package.train")
    add(
        "--steps",
        type=int,
        default=WATCHED_STEPS,
        metavar="N",
        help=f"stop after N optimizer steps (default: {WATCHED_STEPS}; 0: run to the end of the script)",
    )
    add(
        "--limit-batches",
        type=int,
        default=0,
        metavar="N",
        help="end each pass over a DataLoader after N batches, so that epochs end within the steps",
    )
    add("--write-test", default="", metavar="FILE", help="write a test that runs all checks on this loop")
    add("--torchrun", action="store_true", help="set what torchrun sets for one process: RANK, WORLD_SIZE, ...")
    add(
        "--trainloop-only",
        action="append",
        default=[],
        metavar="NAME,...",
        help="run these checks only, by name or pattern",
    )
    add(
        "--trainloop-skip", action="append", default=[], metavar="'NAME: why'", help="leave out a check, or check:cause"
    )
    add("--trainloop-strict", action="store_true", help="advice fails the run, too")
    add("--trainloop-json", default="", metavar="FILE", help="write all results to FILE")
    add("--trainloop-sarif", default="", metavar="FILE", help="write the findings to FILE for code scanning (SARIF)")
    add("--trainloop-report", default="", metavar="FILE.html", help="write a page with all results to FILE.html")
    add("-v", "--verbose", action="store_true", help="name the checks that could not decide, with the reasons")
    add("--version", action="version", version=f"pytest-trainloop {__version__}")
    add("script", nargs="?", default="", help="the script, or a folder with __main__.py")
    own, rest = _split(args)
    given = parser.parse_args(own)
    if not given.script:
        raise UsageError(f"no script was given; usage: {USAGE}")
    if given.steps < 0:
        raise UsageError(f"--steps is {given.steps}; a number of optimizer steps is needed, or 0 for no limit")
    if given.limit_batches < 0:
        raise UsageError(f"--limit-batches is {given.limit_batches}; a number of batches is needed, or 0 for no limit")
    return Options(
        target=Target(given.script, given.module, rest),
        steps=given.steps,
        limit_batches=given.limit_batches,
        only=tuple(name.strip() for names in given.trainloop_only for name in names.split(",") if name.strip()),
        skip=tuple(given.trainloop_skip),
        strict=given.trainloop_strict,
        json=given.trainloop_json,
        sarif=given.trainloop_sarif,
        report=given.trainloop_report,
        write_test=given.write_test,
        torchrun=given.torchrun,
        verbose=given.verbose,
    )


_WITH_VALUE = frozenset({"--steps", "--limit-batches", "--write-test"}) | {
    f"--trainloop-{name}" for name in ("only", "skip", "json", "sarif", "report")
}


def _split(args: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our own words up to the script's name, and the script's: a ``--`` between the two is ours."""
    own: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        if word == "--":
            continue
        own.append(word)
        if word in _WITH_VALUE and left:
            own.append(left.pop(0))
        elif not word.startswith("-"):
            break
    return own, tuple(left[1:] if left[:1] == ["--"] else left)
