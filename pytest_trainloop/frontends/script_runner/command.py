"""What ``python -m pytest_trainloop`` does: run, watch, judge, say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.report import files
from pytest_trainloop.frontends.script_runner import options as command_line
from pytest_trainloop.frontends.script_runner.outcome import refuse
from pytest_trainloop.views.htmlreport import missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.declare.selection import Plan
    from pytest_trainloop.frontends.script_runner.options import Options
    from pytest_trainloop.runs.ranks.peers import Peers


def command(args: Sequence[str]) -> int:
    """Run the command; its exit status."""
    try:
        options = command_line.read(args)
        plan = _plan(options)
        _require_places(options)
    except UsageError as error:
        return refuse(str(error))
    from pytest_trainloop.frontends.script_runner.session import Session
    from pytest_trainloop.frontends.script_runner.spawned import Spawning

    return Session(options, plan, spawning=Spawning(options, run_in_rank)).run()


def run_in_rank(options: Options, peers: Peers, script: Callable[[], None]) -> None:
    """Run a script's function in a rank that it spawned, as ``command`` runs a script; raises what it raised."""
    from pytest_trainloop.frontends.script_runner.ranks import OneOfRanks
    from pytest_trainloop.frontends.script_runner.session import Session

    Session(options, _plan(options), ranks=OneOfRanks(peers)).run_in_rank(script)


def _plan(options: Options) -> Plan:
    """Which checks judge. Raises ``UsageError`` for a name that no check has."""
    from pytest_trainloop.core.registry import of
    from pytest_trainloop.declare.selection import Selection, choose

    known = {name: tuple(check.causes) for name, check in of("loop").items()}
    skip: dict[str, str] = {}
    for line in options.skip:
        name, colon, reason = line.partition(": ")
        if not colon or not reason.strip():
            raise UsageError(f"--trainloop-skip={line!r}: 'name: why' is needed, with a blank after the colon")
        skip[name.strip()] = reason.strip()
    selections = (
        Selection(where="--trainloop-only", only=list(options.only) or None),
        Selection(where="--trainloop-skip", skip=skip),
    )
    return choose(known, *selections, strict=options.strict)


def _require_places(options: Options) -> None:
    """Raise ``UsageError`` for a file that is not to be written: it is known before the script runs for long."""
    test = Path(options.write_test)
    for written in (test, test.with_suffix(".pt")) if options.write_test else ():
        if written.exists():
            it = "this file" if written is test else f"{written}, for its data,"
            raise UsageError(f"--write-test={options.write_test}: {it} exists, and is not overwritten; name another")
    if options.write_test and not options.write_test.endswith(".py"):
        raise UsageError(f"--write-test={options.write_test}: a file name that ends in .py is needed")
    if options.write_test and not (Path.cwd() / options.write_test).parent.is_dir():
        folder = Path(options.write_test).parent
        raise UsageError(
            f"--write-test={options.write_test}: there is no folder {folder}; make it first, or name another"
        )
    for option, file in (
        ("--write-test", options.write_test),
        ("--trainloop-json", options.json),
        ("--trainloop-sarif", options.sarif),
        ("--trainloop-report", options.report),
    ):
        if file and (refusal := files.refusal(Path.cwd() / file)):
            raise UsageError(f"{option} is {file!r}, {refusal}")
    if options.report and (packages := missing()):
        raise UsageError(f"--trainloop-report needs {packages}")
