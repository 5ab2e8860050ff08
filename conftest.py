"""Options of this repository's own tests, and pytester, which pytest takes from the topmost conftest only."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="of the selected tests every Nth from the Ith on, counted from 0: to spread -m corpus over machines",
    )
    parser.addoption("--note-slow", action="store_true", help="time the tests, and rewrite tests/slow.txt")
    parser.addoption(
        "--all-checks",
        action="store_true",
        help="judge the correct loops of -m integration by every check, not by those that a framework leads astray",
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(text)
    return int(index), int(count)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other shards: by node id, so that every process and every order leave out the same."""
    shard = config.getoption("--shard")
    if shard is None:
        return
    index, count = shard
    mine = {item.nodeid for item in sorted(items, key=lambda item: item.nodeid)[index::count]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]
