"""The line that shows how far a long check is."""

from __future__ import annotations

import types

import pytest

from pytest_trainloop.frontends.plugin import progress


class Terminal:
    isatty = True
    currentfspath: object = "test_a.py::test_it[overfit_one_batch] "

    def __init__(self):
        self.lines = []

    def rewrite(self, line, **markup):
        assert markup == {"erase": True}
        self.lines.append(line)

    def flush(self):
        pass


def config(terminal, *, verbosity=1, **fields):
    plugins = {"terminalreporter": terminal}
    return types.SimpleNamespace(
        pluginmanager=types.SimpleNamespace(getplugin=plugins.get), get_verbosity=lambda: verbosity, **fields
    )


@pytest.fixture
def hurried(monkeypatch):
    """Every check is a long one, and every step an update."""
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(progress, "OFTEN", 0.0)


def told(config):
    with progress.shown(config) as tell:
        tell(4, 300, 2.34567)
        tell(8, 300, 1.0)


@pytest.mark.usefixtures("hurried")
def test_step_budget_and_loss_stand_behind_the_test():
    terminal = Terminal()
    told(config(terminal))
    start = Terminal.currentfspath
    assert terminal.lines == [f"{start}step 4 of 300, loss 2.346", f"{start}step 8 of 300, loss 1", start]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("fields", [{"verbosity": 0}, {"workerinput": {}}], ids=["not verbose", "a worker"])
def test_nothing_is_written(fields):
    terminal = Terminal()
    told(config(terminal, **fields))
    assert terminal.lines == []


@pytest.mark.usefixtures("hurried")
def test_nothing_is_written_where_there_is_no_terminal():
    terminal = Terminal()
    terminal.isatty = False
    told(config(terminal))
    assert terminal.lines == []
    told(config(None))


def test_a_short_check_leaves_the_line_alone():
    terminal = Terminal()
    told(config(terminal))
    assert terminal.lines == []


@pytest.mark.usefixtures("hurried")
def test_the_time_left_stands_behind_the_step():
    terminal = Terminal()
    with progress.shown(config(terminal), lambda: 312.0) as tell:
        tell(3, 0, 0.0)
        tell(4, 300, 2.0)
    start = Terminal.currentfspath
    assert terminal.lines == [
        f"{start}step 3, about 5 min left for this loop",
        f"{start}step 4 of 300, loss 2, about 5 min left for this loop",
        start,
    ]
    assert [progress.duration(seconds) for seconds in (42.3, 312.0, 7000.0)] == ["42 s", "5 min", "1.9 h"]
