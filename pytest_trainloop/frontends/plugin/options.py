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
    option("--trainloop-explain", metavar="NAME", help="print the rule page of a check, or of check:cause, and exit")
    option("--trainloop-only", metavar="NAME,...", action="append", help="run these checks only; patterns are allowed")
    option("--trainloop-seed", metavar="N", type=int, help="seed of every build and run (default: 0)")
    option("--trainloop-timeout", metavar="SECONDS", type=float, help="seconds one run of fit may take (default: 120)")
    option(
        "--trainloop-budget",
        metavar="SECONDS",
        type=float,
        help="seconds all checks of one loop may take (default: as the timeout, and at least 120; inf: no limit)",
    )
    option(
        "--trainloop-device",
        metavar="DEVICE",
        help="device of the loops: auto, cpu, cuda, cuda:1; one that is not there is an error",
    )
    option("--trainloop-strict", action="store_true", help="advice fails")
    option("--trainloop-preview", action="store_true", help="report causes too that are a preview")
    option(
        "--trainloop-json",
        metavar="FILE",
        help="write all results to FILE, with the = (pytest takes a separate word for a path)",
    )
    option("--trainloop-sarif", metavar="FILE", help="write the findings to FILE for code scanning (SARIF 2.1.0)")
    option("--trainloop-report", metavar="FILE.html", help="write a page with all results to FILE.html, with the =")
    option("--trainloop-card", action="store_true", help="show the card of each loop, or what changed in it")
    option(
        "--trainloop-update",
        action="store_true",
        help="record the baselines of the selected loops again; with --trainloop-card store the cards too",
    )
    option(
        "--trainloop-update-new",
        action="store_true",
        help="record the baselines (and with --trainloop-card the cards) that are not stored yet",
    )
    option(
        "--trainloop-isolate",
        action="store_true",
        help="run the checks of each loop in a process of its own: one that dies is an error of one check",
    )
    option("--trainloop-benchmark", action="store_true", help="time the steps of each loop, by pytest-benchmark")
    option("--trainloop-bundle", metavar="DIR", help="write a folder for each failure, with a script that shows it")
    ini = parser.addini
    ini("trainloop_only", "checks to run, one name or pattern a line", type="linelist")
    ini(
        "trainloop_skip", "checks or causes to skip, a line each: name: reason, or check:cause: reason", type="linelist"
    )
    ini("trainloop_xfail", "checks or causes that are known to fail, a line each: name: reason", type="linelist")
    ini("trainloop_options", "options of checks, a line each: overfit_one_batch: {'steps': 400}", type="linelist")
    ini("trainloop_knobs", "your names of knobs, a line each: use_checkpoint: checkpoint", type="linelist")
    ini("trainloop_strict", "advice fails", type="bool", default=False)
    ini("trainloop_preview", "as --trainloop-preview", type="bool", default=False)
    ini("trainloop_seed", "as --trainloop-seed", default="")
    ini("trainloop_timeout", "as --trainloop-timeout", default="")
    ini("trainloop_budget", "as --trainloop-budget", default="")
    ini("trainloop_device", "as --trainloop-device", default="")
