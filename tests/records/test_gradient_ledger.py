"""Which step consumed which gradient, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.records.gradient_ledger import consuming_steps, gradient_ledger
from tests.helpers.story import Story, fact


def ledger_of(story: Story):
    return gradient_ledger(story.record())


def plain(story: Story, times: int = 3, *, to_none: bool = True) -> Story:
    for _ in range(times):
        story.zero(to_none=to_none)
        story.backward()
        story.step()
    return story


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_a_plain_loop_consumes_every_gradient_once(to_none):
    ledger = ledger_of(plain(Story([0, 1]), to_none=to_none))
    assert [b.consumed for b in ledger.backwards] == [{0, 1}] * 3
    assert [b.cleared | b.pending for b in ledger.backwards] == [set()] * 3
    assert all(c.fresh and c.stale is None and not c.repeated for c in ledger.consumptions)
    assert len(ledger.consumptions) == 6
    assert ledger.empty == []
    assert ledger.assigned == set()


def test_what_nobody_zeroed_is_stale_in_every_later_step():
    story = Story([0])
    steps = [(story.backward(), story.step())[1] for _ in range(3)]
    found = ledger_of(story).consumptions
    assert [c.stale for c in found] == [None, steps[0], steps[1]]
    assert all(c.fresh and not c.repeated for c in found)


def test_only_the_parameter_that_was_not_zeroed_is_stale():
    story = Story([0, 1])
    for _ in range(3):
        story.zero(0)
        story.backward()
        story.step()
    assert {c.parameter for c in ledger_of(story).consumptions if c.stale} == {1}


def test_momentum_kept_in_the_gradient_is_not_stale():
    story = Story([0])
    for _ in range(3):
        story.backward()
        story.step()
        story.scale(0)
    assert [c.stale for c in ledger_of(story).consumptions] == [None] * 3


def test_gradients_zeroed_between_backward_and_step_are_cleared_and_the_step_is_empty():
    story = Story([0])
    for _ in range(2):
        story.backward()
        story.zero()
        story.step()
    ledger = ledger_of(story)
    assert [b.cleared for b in ledger.backwards] == [{0}, {0}]
    assert ledger.empty == ledger.steps
    assert ledger.consumptions == []


def test_a_step_with_zeros_only_is_empty_too():
    story = Story([0])
    story.backward()
    story.zero(to_none=False)
    story.step()
    assert len(ledger_of(story).empty) == 1


def test_micro_batches_are_consumed_together():
    story = Story([0])
    for _ in range(3):
        story.backward()
    story.step()
    ledger = ledger_of(story)
    assert [b.consumed for b in ledger.backwards] == [{0}] * 3
    assert [c.stale for c in ledger.consumptions] == [None]


def test_a_pass_that_the_next_one_finds_cleared_is_lost():
    story = Story([0])
    story.backward()
    story.zero()
    story.backward()
    story.step()
    ledger = ledger_of(story)
    assert [(b.cleared, b.consumed) for b in ledger.backwards] == [({0}, set()), (set(), {0})]


def test_what_stands_in_the_gradient_at_the_end_is_pending():
    story = plain(Story([0, 1]), 1)
    story.backward(1)
    assert [b.pending for b in ledger_of(story).backwards] == [set(), {1}]


def test_a_gradient_of_zeros_is_neither_consumed_nor_pending():
    story = Story([0])
    story.backward(dead=True)
    ledger = ledger_of(story)
    assert ledger.backwards[0].pending == set()
    story.step()
    assert ledger_of(story).backwards[0].consumed == set()


def test_the_same_gradient_stepped_twice_is_repeated():
    story = Story([0])
    story.backward()
    first, second = story.step(), story.step()
    found = ledger_of(story).consumptions
    assert [(c.step, c.repeated, c.fresh) for c in found] == [(first, False, True), (second, True, False)]
    assert found[1].stale is first


def test_two_optimizers_on_one_parameter_repeat_the_consumption():
    story = Story([0], [0])
    story.backward()
    first = story.step(0)
    story.step(1)
    assert [(c.repeated, c.stale) for c in ledger_of(story).consumptions] == [(False, None), (True, first)]


def test_each_optimizer_consumes_what_it_holds():
    story = Story([0], [1])
    story.backward()
    story.step(1)
    assert ledger_of(story).backwards[0].consumed == {1}
    assert ledger_of(story).backwards[0].pending == {0}


def test_a_clip_between_two_batches_hides_no_staleness_before_it():
    story = Story([0])
    for _ in range(3):
        story.backward()
        story.clip(0)
        story.step()
    assert [c.stale is not None for c in ledger_of(story).consumptions] == [False, True, True]


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
    assert [c.repeated for c in gradient_ledger(record).consumptions] == [False, False]


@pytest.mark.parametrize("how", [{"computed": False}, {"full": False}], ids=["proximal", "light"])
def test_a_step_that_was_not_seen_to_use_gradients_is_left_out(how):
    story = Story([0])
    story.backward()
    story.step(**how)
    ledger = ledger_of(story)
    assert (ledger.steps, ledger.consumptions, ledger.empty) == ([], [], [])


def test_every_call_of_a_closure_is_consumed():
    story = Story([0])

    def closure():
        story.zero()
        story.backward()

    for _ in range(2):
        story.step(closure=[closure] * 3)
    ledger = ledger_of(story)
    assert [b.consumed for b in ledger.backwards] == [{0}] * 6
    assert not any(c.stale or c.repeated for c in ledger.consumptions)


def test_a_closure_is_empty_only_where_its_last_call_leaves_nothing():
    story = Story([0])
    story.step(closure=[story.zero, story.backward])
    assert ledger_of(story).empty == []
    story.step(closure=[story.backward, story.zero], computed=True)
    assert len(ledger_of(story).empty) == 1


def test_gradients_of_autograd_grad_accumulate_nowhere():
    story = Story([0])
    story.backward(kind="grad")
    assert ledger_of(story).backwards == []


def test_gradients_put_there_by_hand_are_ledger_of():
    story = Story([0, 1])
    story.backward(kind="grad")
    story.assign(1)
    story.step()
    ledger = ledger_of(story)
    assert ledger.assigned == {1}
    assert [c.parameter for c in ledger.consumptions] == [1]


def test_a_parameter_without_gradients_takes_no_part():
    story = Story([0, 1])
    for _ in range(2):
        story.zero()
        story.backward(0)
        story.step()
    ledger = ledger_of(story)
    assert {c.parameter for c in ledger.consumptions} == {0}
    assert ledger.empty == []


def test_facts_are_the_same_only_bit_for_bit():
    assert fact(["b1"]).same(fact(["b1"]))
    assert not fact(["b1"]).same(fact(["b2"]))
    assert not fact(["b1"]).same(None)
    assert fact([]).zero
