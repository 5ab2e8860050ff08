"""What ``--trainloop`` and the options that write files switch on."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.frontends.plugin import github, outputs, pictures
from pytest_trainloop.frontends.plugin.baselines import Baselines, Collected, mode_of
from pytest_trainloop.frontends.plugin.expected import Expected
from pytest_trainloop.frontends.plugin.settings import read_selections, read_settings
from pytest_trainloop.frontends.plugin.summary import Ledger
from pytest_trainloop.views.outputs.github import is_runner

if TYPE_CHECKING:
    from pytest_trainloop.frontends.plugin.cards import Cards

ISOLATED = "PYTEST_TRAINLOOP_ISOLATED"
"""In the process of one loop, the file for its reports."""


def configure(config: pytest.Config) -> None:
    """Check the options and register the hooks that they need."""
    settings = read_settings(config)
    try:
        read_selections(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    inside = os.environ.pop(ISOLATED, None)
    worker = hasattr(config, "workerinput") or inside is not None
    timed = config.getoption("trainloop_benchmark")
    if timed:
        _require_benchmark(config)
    if config.getoption("trainloop") or timed:
        from pytest_trainloop.frontends.plugin import outcomes, runtest

        if settings.device.startswith("cuda"):
            _require_cuda(config, settings.device, worker=worker)
        if hasattr(config.option, "dist"):
            from pytest_trainloop.frontends.plugin import xdist

            config.pluginmanager.register(xdist.Workers())
        for module in (outcomes, runtest):
            config.pluginmanager.register(module)
    if config.getoption("trainloop_isolate") or inside is not None:
        _isolate(config, inside)
    cards = _cards(config)
    _baselines(config, worker=worker)
    expected = Expected(config)
    config.pluginmanager.register(expected)
    if not worker:
        config.pluginmanager.register(Ledger(config, settings, tuple(outputs.asked_for(config)), expected, cards))
        if config.getoption("trainloop") and is_runner() and config.pluginmanager.hasplugin(github.ANNOTATOR):
            config.pluginmanager.register(github.AtTheLine(config))


def _isolate(config: pytest.Config, inside: str | None) -> None:
    """Register what runs each loop in a process of its own, or in that process what writes its reports."""
    from pytest_trainloop.frontends.plugin.isolate import Inside, Isolated

    if inside is not None:
        config.pluginmanager.register(Inside(config, inside))
        return
    if not config.getoption("trainloop"):
        raise pytest.UsageError("--trainloop-isolate is about loops that are run: it is needed with --trainloop")
    others = {
        "-n": config.getoption("dist", "no") != "no",
        "--pdb": config.getoption("usepdb"),
        "--trainloop-benchmark": config.getoption("trainloop_benchmark"),
    }
    for other in (option for option, given in others.items() if given):
        raise pytest.UsageError(f"--trainloop-isolate and {other} are given; one of them is needed")
    config.pluginmanager.register(Isolated(config, ISOLATED))


def _cards(config: pytest.Config) -> Cards | None:
    """The cards of the session, where they are asked for."""
    shown = config.getoption("trainloop_card")
    if shown and not config.getoption("trainloop"):
        raise pytest.UsageError("--trainloop-card takes the cards of loops that are run: it is needed with --trainloop")
    if not shown and not pictures.wanted(config):
        return None
    from pytest_trainloop.frontends.plugin import cards

    for module in (cards, pictures):
        config.pluginmanager.register(module)
    return cards.Cards(config.rootpath, mode=mode_of(config), shown=shown)


def _baselines(config: pytest.Config, *, worker: bool) -> None:
    """Register what records baselines, looks for stored files without a test, and writes."""
    for option in ("--trainloop-update", "--trainloop-update-new"):
        if config.getoption(option.lstrip("-").replace("-", "_")) and not config.getoption("trainloop"):
            raise pytest.UsageError(
                f"{option} records the baselines of loops that are run: it is needed with --trainloop"
            )
    if config.getoption("trainloop_update") and config.getoption("trainloop_update_new"):
        raise pytest.UsageError(
            "--trainloop-update and --trainloop-update-new are given: the first records every selected loop again, the "
            "second those that are not recorded yet; one of them is needed"
        )
    if not config.getoption("trainloop"):
        return
    collected = Collected()
    config.pluginmanager.register(collected)
    if not worker:
        config.pluginmanager.register(Baselines(config, collected))


def _require_benchmark(config: pytest.Config) -> None:
    """Raise a usage error where pytest-benchmark is not at work."""
    if not config.pluginmanager.hasplugin("benchmark"):
        blocked = config.pluginmanager.is_blocked("benchmark")
        how = "take '-p no:benchmark' out" if blocked else "pip install 'pytest-trainloop[benchmark]'"
        raise pytest.UsageError(f"--trainloop-benchmark needs pytest-benchmark, which is not loaded; {how}")


def _require_cuda(config: pytest.Config, device: str, *, worker: bool) -> None:
    """Raise a usage error where the device is not there."""
    index, found = int(device.partition(":")[2] or 0), _cuda_devices(config, worker=worker)
    if found <= index:
        finds = f"finds only cuda:0 to cuda:{found - 1}" if found > 1 else "finds only cuda:0"
        finds = finds if found else "finds no CUDA device"
        raise pytest.UsageError(
            f"the device of the loops is {device}, but torch {finds} here; run where there is one, "
            "or leave --trainloop-device out"
        )


def _cuda_devices(config: pytest.Config, *, worker: bool) -> int:
    if not worker and config.getoption("dist", "no") != "no":
        # The controller of xdist runs no test and shall not load torch.
        question = "import sys, torch; sys.exit(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
        return subprocess.run([sys.executable, "-c", question], check=False).returncode
    import torch

    return max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else 0
