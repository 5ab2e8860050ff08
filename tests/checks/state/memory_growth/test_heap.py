import gc
from types import SimpleNamespace

import pytest

from pytest_trainloop.checks.state.memory_growth.heap import Heap


class Thing:
    pass


OLDER = []


@pytest.fixture(autouse=True)
def emptied():
    yield
    OLDER.clear()
    gc.unfreeze()


def holders_of(thing):
    return [holder for holder in gc.get_referrers(thing) if isinstance(holder, list)]


def test_only_what_the_block_made_is_searched():
    thing = Thing()
    with Heap().of_this_block():
        younger = [thing]
        OLDER.append(thing)
        assert holders_of(thing) == [younger]
    assert len(holders_of(thing)) == 2
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("name", "times"), [("losses", 1), ("", 2)])
def test_everything_is_searched_where_something_has_no_name(name, times):
    heap, thing, seen = Heap(), Thing(), []
    with heap.of_this_block():
        OLDER.append(thing)

        def search():
            seen.append(len(holders_of(thing)))
            return [SimpleNamespace(name=name)]

        heap.searched(search)
    assert seen == [0, 1][:times]


def test_objects_that_the_project_has_frozen_stay_so():
    gc.freeze()
    count = gc.get_freeze_count()
    with Heap().of_this_block():
        assert gc.get_freeze_count() == count
    assert gc.get_freeze_count() == count
