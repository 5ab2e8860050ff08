"""The pytest plugin. PYTEST_DONT_REWRITE

Only what an unused plugin needs is here; the other modules are loaded for a marked test, or with ``--trainloop``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import pytest

from pytest_trainloop.frontends.plugin import options

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_trainloop.frontends.plugin.fixture import TrainloopFixture

_SWITCHES = ("", "_json", "_sarif", "_report", "_card", "_update", "_update_new", "_benchmark", "_bundle", "_isolate")
"""The ends of the options that load the other modules."""


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    name = config.getoption("trainloop_explain")
    if name is None and not config.getoption("trainloop_list"):
        return None
    from pytest_trainloop.core.errors import UsageError
    from pytest_trainloop.judging import explain

    try:
        sys.stdout.write(explain.table() if name is None else explain.page(name))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    return 0


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "trainloop(only=, skip=, xfail=, knobs=, CHECK={}): the function returns a TrainLoop, which --trainloop checks",
        "trainloop_loss(only=, skip=, xfail=, CHECK={}): the function returns a LossContract, likewise",
        "trainloop_check(name): set by pytest-trainloop on each of its tests",
        "trainloop_cuda: set by pytest-trainloop on its tests that run on CUDA",
    ):
        config.addinivalue_line("markers", marker)
    if any(config.getoption(f"trainloop{name}") not in (None, False) for name in _SWITCHES):
        from pytest_trainloop.frontends.plugin import activate

        activate.configure(config)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Generator[None, object, object]:
    unittest = sys.modules.get("unittest")
    try:
        made = yield
        # type(obj), since a mock claims to be an instance of whatever it replaces
        if unittest is not None and issubclass(type(obj), type) and issubclass(cast("type", obj), unittest.TestCase):
            from pytest_trainloop.frontends.plugin import collect

            collect.refuse_test_case(collector, cast("type", obj))
        return made
    except Exception as error:
        from pytest_trainloop.frontends.plugin import collect

        if not isinstance(error, collect.Refused):
            raise
        return collect.refused_item(collector, name, obj, str(error))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    if not _is_ours(metafunc.definition):
        return (yield)
    from pytest_trainloop.frontends.plugin import collect

    collect.refuse_misuse(metafunc)
    done = yield
    if metafunc.config.getoption("trainloop") or metafunc.config.getoption("trainloop_benchmark"):
        collect.one_item_per_check(metafunc)  # after everybody else, so that the check comes last in the id
    return done


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    except pytest.UsageError as error:
        asked = [] if session.config.getoption("trainloop") else [arg for arg in session.config.args if "[" in arg]
        if not asked:
            raise
        from pytest_trainloop.frontends.plugin import nodeids

        checks = nodeids.checks_in(asked)
        if not checks:
            raise
        hint = f"{checks[0]!r} is a check of pytest-trainloop, whose items are there with --trainloop only"
        raise pytest.UsageError(*error.args, hint) from None


def pytest_itemcollected(item: pytest.Item) -> None:
    if not isinstance(item, pytest.Function) or not _is_ours(item):
        return
    if item.config.getoption("trainloop_benchmark") and item.get_closest_marker("trainloop_check"):
        from pytest_trainloop.frontends.plugin import benchmark

        benchmark.prepare(item)
    elif not item.config.getoption("trainloop"):
        item.add_marker(pytest.mark.skip(reason="needs --trainloop"))


def _is_ours(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("trainloop", "trainloop_loss"))


@pytest.fixture
def trainloop(request: pytest.FixtureRequest) -> TrainloopFixture:
    """Checks called from the test: check(name, make), check_loop(make), check_loss(make), observe()."""
    from pytest_trainloop.frontends.plugin import fixture

    return fixture.start(request)
