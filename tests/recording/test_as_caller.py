"""Warnings of the loop are booked on the loop's own lines, whatever of ours stands between it and torch."""

from __future__ import annotations

import sys
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.core.errors import UserCodeError
from pytest_trainloop.recording.as_caller import as_caller, is_stand_in
from pytest_trainloop.recording.events import LossCall
from pytest_trainloop.runs.evidence import Evidence

THIS = __name__


def loop(act):
    def make():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

        def fit(batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                act(x, loss, scheduler)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(
            model=model, optimizer=optimizer, batch=(torch.randn(8, 3), torch.randint(0, 2, (8,))), fit=fit
        )

    return make


def deviation_of_one(x, loss, scheduler):
    return torch.ones(1).std()


def softmax_of_no_axis(x, loss, scheduler):
    return F.softmax(x)


def gradient_of_no_leaf(x, loss, scheduler):
    return (loss * 1).grad


def schedule_first(x, loss, scheduler):
    scheduler.step()


def own(x, loss, scheduler):
    warnings.warn("mine", stacklevel=1)


ALL = (deviation_of_one, softmax_of_no_axis, gradient_of_no_leaf, schedule_first, own)


def booked(caught):
    return {(str(w.message)[:30], w.category, w.filename, w.lineno) for w in caught}


def without_the_plugin(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = loop(act)()
        made.fit([made.batch])
    return caught


@pytest.mark.parametrize("act", ALL)
def test_a_warning_is_booked_where_it_is_without_the_plugin(act):
    bare = without_the_plugin(act)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        Evidence(loop(act)).run()
    assert booked(bare)
    assert booked(ours) == booked(bare)


@pytest.mark.parametrize("act", ALL)
def test_filters_by_module_act_as_without_the_plugin(act):
    if {w.filename for w in without_the_plugin(act)} != {__file__}:
        pytest.skip("this torch books the warning in a file of its own")  # torch 2.6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=THIS)
        Evidence(loop(act)).run()
    assert not caught
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=THIS)
        raised = Evidence(loop(act)).run().raised
    assert raised is not None
    assert "Warning" in raised.kind


def test_two_lines_that_warn_alike_are_two_warnings():
    def act(x, loss, scheduler):
        torch.ones(1).std()
        torch.ones(1).std()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        Evidence(loop(act)).run()
    assert len({w.lineno for w in caught}) == 2


@pytest.mark.parametrize("act", ALL)
def test_all_checks_show_a_warning_as_often_as_the_watched_run(act):
    def shown(judge):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            judge()
        return len(caught)

    assert shown(lambda: check_loop(loop(act), raises=False)) == shown(Evidence(loop(act)).run)


def test_a_warning_about_batches_that_a_check_makes_is_not_shown():
    def act(x, loss, scheduler):
        x.std(0)  # one row has no deviation; the loop's own batches have eight

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = check_loop(loop(act), raises=False)
    assert {r.check: r.reason for r in report.results if "degrees of freedom" in r.reason} == {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_loop(loop(act), raises=False)
    assert [str(w.message) for w in caught if "degrees of freedom" in str(w.message)] == []


def test_a_traceback_has_each_line_of_the_user_once():
    def act(x, loss, scheduler):
        F.mse_loss(x, x[:, :2])

    raised = Evidence(loop(act)).run().raised
    assert raised is not None
    assert raised.traceback.count("F.mse_loss(x, x[:, :2])") == 1
    assert "pytest_trainloop" not in raised.traceback


def test_the_place_and_the_site_of_a_call_are_those_of_its_caller():
    record = Evidence(loop(lambda x, loss, scheduler: None)).run()
    call = record.of(LossCall)[0]
    assert "F.cross_entropy(model(x), y)" in call.place.code
    assert len({*call.site}) == len(call.site)


def test_a_recursion_keeps_its_lines():
    def act(x, loss, scheduler, depth=3):
        if depth:
            act(x, loss, scheduler, depth - 1)
        else:
            raise ValueError("deep")

    raised = Evidence(loop(act)).run().raised
    assert raised is not None
    assert raised.traceback.count("act(x, loss, scheduler, depth - 1)") == 3


def test_a_call_is_made_with_the_name_the_line_and_the_globals_of_its_caller():
    def look():
        frame = sys._getframe(1)
        return frame.f_code.co_name, frame.f_lineno, frame.f_globals["__name__"], is_stand_in(frame.f_code)

    line = sys._getframe().f_lineno + 1
    assert as_caller(look, (), {}) == (
        "test_a_call_is_made_with_the_name_the_line_and_the_globals_of_its_caller",
        line,
        THIS,
        True,
    )
    assert not is_stand_in(sys._getframe().f_code)


def test_what_a_call_raises_passes():
    with pytest.raises(ZeroDivisionError) as caught:
        as_caller(lambda: 1 / 0, (), {})
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 4


def test_a_users_own_error_while_building_is_shown_once():
    def make():
        torch.ones(2) + torch.ones(3)

    with pytest.raises(UserCodeError) as caught:
        Evidence(make).run()
    assert caught.value.error.traceback.count("torch.ones(2) + torch.ones(3)") == 1
