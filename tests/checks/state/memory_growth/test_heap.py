import gc

import pytest

from pytest_trainloop.checks.state.memory_growth.holders import Heap


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


def test_objects_that_the_project_has_frozen_stay_so():
    gc.freeze()
    count = gc.get_freeze_count()
    with Heap().of_this_block():
        assert gc.get_freeze_count() == count
    assert gc.get_freeze_count() == count
