"""Who consumed which gradient, on records made by hand."""

from __future__ import annotations

import pytest

from pytest_trainloop.records.gradient_ledger import consuming_steps, keep
from tests.helpers.story import Story, fact


def told(story: Story):
    return keep(story.record())


def plain(story: Story, times: int = 3, *, to_none: bool = True) -> Story:
    for _ in range(times):
        story.zero(to_none=to_none)
        story.backward()
        story.step()
    return story


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_a_plain_loop_has_clean_accounts(to_none):
    ledger = told(plain(Story([0, 1]), to_none=to_none))
    assert [a.consumed for a in ledger.accounts] == [{0, 1}] * 3
    assert [a.wiped | a.pending for a in ledger.accounts] == [set()] * 3
    assert all(meal.fresh and meal.stale is None and not meal.repeated for meal in ledger.meals)
    assert len(ledger.meals) == 6
    assert ledger.empty == []
    assert ledger.by_hand == set()


def test_what_nobody_zeroed_is_stale_in_every_later_step():
    story = Story([0])
    steps = [(story.backward(), story.step())[1] for _ in range(3)]
    meals = told(story).meals
    assert [m.stale for m in meals] == [None, steps[0], steps[1]]
    assert all(m.fresh and not m.repeated for m in meals)


def test_only_the_parameter_that_was_not_zeroed_is_stale():
    story = Story([0, 1])
    for _ in range(3):
        story.zero(0)
        story.backward()
        story.step()
    assert {m.parameter for m in told(story).meals if m.stale} == {1}


def test_momentum_kept_in_the_gradient_is_not_stale():
    story = Story([0])
    for _ in range(3):
        story.backward()
        story.step()
        story.scale(0)
    assert [m.stale for m in told(story).meals] == [None] * 3


def test_gradients_zeroed_between_backward_and_step_are_wiped_and_the_step_is_empty():
    story = Story([0])
    for _ in range(2):
        story.backward()
        story.zero()
        story.step()
    ledger = told(story)
    assert [a.wiped for a in ledger.accounts] == [{0}, {0}]
    assert ledger.empty == ledger.steps
    assert ledger.meals == []


def test_a_step_with_zeros_only_is_empty_too():
    story = Story([0])
    story.backward()
    story.zero(to_none=False)
    story.step()
    assert len(told(story).empty) == 1


def test_micro_batches_are_consumed_together():
    story = Story([0])
    for _ in range(3):
        story.backward()
    story.step()
    ledger = told(story)
    assert [a.consumed for a in ledger.accounts] == [{0}] * 3
    assert [m.stale for m in ledger.meals] == [None]


def test_a_pass_that_the_next_one_finds_wiped_is_lost():
    story = Story([0])
    story.backward()
    story.zero()
    story.backward()
    story.step()
    ledger = told(story)
    assert [(a.wiped, a.consumed) for a in ledger.accounts] == [({0}, set()), (set(), {0})]


def test_what_stands_in_the_gradient_at_the_end_is_pending():
    story = plain(Story([0, 1]), 1)
    story.backward(1)
    assert [a.pending for a in told(story).accounts] == [set(), {1}]


def test_a_gradient_of_zeros_is_neither_consumed_nor_pending():
    story = Story([0])
    story.backward(dead=True)
    ledger = told(story)
    assert ledger.accounts[0].pending == set()
    story.step()
    assert told(story).accounts[0].consumed == set()


def test_the_same_gradient_stepped_twice_is_repeated():
    story = Story([0])
    story.backward()
    first, second = story.step(), story.step()
    meals = told(story).meals
    assert [(m.step, m.repeated, m.fresh) for m in meals] == [(first, False, True), (second, True, False)]
    assert meals[1].stale is first


def test_two_optimizers_on_one_parameter_repeat_the_meal():
    story = Story([0], [0])
    story.backward()
    first = story.step(0)
    story.step(1)
    assert [(m.repeated, m.stale) for m in told(story).meals] == [(False, None), (True, first)]


def test_each_optimizer_consumes_what_it_holds():
    story = Story([0], [1])
    story.backward()
    story.step(1)
    assert told(story).accounts[0].consumed == {1}
    assert told(story).accounts[0].pending == {0}


def test_a_clip_between_two_batches_hides_no_staleness_before_it():
    story = Story([0])
    for _ in range(3):
        story.backward()
        story.clip(0)
        story.step()
    assert [m.stale is not None for m in told(story).meals] == [False, True, True]


def test_of_nested_steps_only_the_innermost_consumes():
    story = Story([0], [0])
    for _ in range(2):
        story.zero()
        story.backward()
        outer = story.step(0, nested=True)
        inner = story.step(1)
    record = story.record()
    assert inner in consuming_steps(record)
    assert outer not in consuming_steps(record)
    assert [m.repeated for m in keep(record).meals] == [False, False]


@pytest.mark.parametrize("how", [{"computed": False}, {"full": False}], ids=["proximal", "light"])
def test_a_step_that_was_not_seen_to_use_gradients_is_left_out(how):
    story = Story([0])
    story.backward()
    story.step(**how)
    ledger = told(story)
    assert (ledger.steps, ledger.meals, ledger.empty) == ([], [], [])


def test_every_call_of_a_closure_is_consumed():
    story = Story([0])

    def closure():
        story.zero()
        story.backward()

    for _ in range(2):
        story.step(closure=[closure] * 3)
    ledger = told(story)
    assert [a.consumed for a in ledger.accounts] == [{0}] * 6
    assert not any(m.stale or m.repeated for m in ledger.meals)


def test_a_closure_is_empty_only_where_its_last_call_leaves_nothing():
    story = Story([0])
    story.step(closure=[story.zero, story.backward])
    assert told(story).empty == []
    story.step(closure=[story.backward, story.zero], computed=True)
    assert len(told(story).empty) == 1


def test_gradients_of_autograd_grad_accumulate_nowhere():
    story = Story([0])
    story.backward(kind="grad")
    assert told(story).accounts == []


def test_gradients_put_there_by_hand_are_told():
    story = Story([0, 1])
    story.backward(kind="grad")
    story.assign(1)
    story.step()
    ledger = told(story)
    assert ledger.by_hand == {1}
    assert [m.parameter for m in ledger.meals] == [1]


def test_a_parameter_without_gradients_takes_no_part():
    story = Story([0, 1])
    for _ in range(2):
        story.zero()
        story.backward(0)
        story.step()
    ledger = told(story)
    assert {m.parameter for m in ledger.meals} == {0}
    assert ledger.empty == []


def test_facts_are_the_same_only_bit_for_bit():
    assert fact(["b1"]).same(fact(["b1"]))
    assert not fact(["b1"]).same(fact(["b2"]))
    assert not fact(["b1"]).same(None)
    assert fact([]).zero
