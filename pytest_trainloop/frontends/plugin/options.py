"""The command line options and ini keys. PYTEST_DONT_REWRITE"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def add(parser: pytest.Parser) -> None:
    """Declare every option; defaults are plain values, since xdist sends them to its workers."""
    option = parser.getgroup("trainloop", "training loops (pytest-trainloop)").addoption
    option("--trainloop", action="store_true", help="check the training loops; without it their tests are skipped")
    option("--trainloop-list", action="store_true", help="list all checks and exit")
    option("--trainloop-explain", metavar="NAME", help="print the page of a check, or of NAME:CAUSE, and exit")
    option("--trainloop-only", metavar="NAME,...", action="append", help="run only these checks, names or patterns")
    option("--trainloop-seed", metavar="N", type=int, help="seed of every build and run (default: 0)")
    option(
        "--trainloop-timeout",
        metavar="SECONDS",
        type=float,
        help="stop a run of fit after SECONDS, and skip the checks that need it (default: 120)",
    )
    option(
        "--trainloop-budget",
        metavar="SECONDS",
        type=float,
        help="give all checks of one loop SECONDS together (default: the timeout, at least 120; inf: no limit)",
    )
    option(
        "--trainloop-device",
        metavar="DEVICE",
        help="device of the loops: auto, cpu, cuda or cuda:1; a missing device is an error",
    )
    option("--trainloop-strict", action="store_true", help="advice fails the test, too")
    option("--trainloop-preview", action="store_true", help="also report preview causes")
    option(
        "--trainloop-json",
        metavar="FILE",
        help="write all results to FILE as JSON; write the =: pytest takes a separate word for a path of tests",
    )
    option("--trainloop-sarif", metavar="FILE", help="write the findings to FILE for code scanning (SARIF 2.1.0)")
    option("--trainloop-report", metavar="FILE.html", help="write a page with all results to FILE.html")
    option("--trainloop-card", action="store_true", help="show the card of each loop, or its changes if it is stored")
    option(
        "--trainloop-update",
        action="store_true",
        help="record the baselines of the selected loops again; with --trainloop-card also store the cards",
    )
    option(
        "--trainloop-update-new",
        action="store_true",
        help="record only baselines (with --trainloop-card also cards) that are not stored yet",
    )
    option(
        "--trainloop-isolate",
        action="store_true",
        help="run the checks of each loop in its own process: if it dies, only one check is an error",
    )
    option("--trainloop-benchmark", action="store_true", help="time the steps of each loop with pytest-benchmark")
    option("--trainloop-bundle", metavar="DIR", help="write a folder with a script that reproduces each failure")
    ini = parser.addini
    ini("trainloop_only", "checks to run, one name or pattern per line", type="linelist")
    ini(
        "trainloop_skip", "checks or causes to skip, one per line: NAME: reason, or NAME:CAUSE: reason", type="linelist"
    )
    ini("trainloop_xfail", "checks or causes that are known to fail, as for trainloop_skip", type="linelist")
    ini("trainloop_options", "options of checks, one per line: overfit_one_batch: {'steps': 400}", type="linelist")
    ini("trainloop_knobs", "your names of knobs, one per line: use_checkpoint: checkpoint", type="linelist")
    ini("trainloop_strict", "as --trainloop-strict", type="bool", default=False)
    ini("trainloop_preview", "as --trainloop-preview", type="bool", default=False)
    ini("trainloop_seed", "as --trainloop-seed", default="")
    ini("trainloop_timeout", "as --trainloop-timeout", default="")
    ini("trainloop_budget", "as --trainloop-budget", default="")
    ini("trainloop_device", "as --trainloop-device", default="")
