"""Which step used which gradient, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.recording.events import Step
from tests.helpers.record_builder import RecordBuilder, sample


def ledger_of(build: RecordBuilder) -> Ledger:
    return Ledger(build.record())


def empty(ledger: Ledger) -> list[Step]:
    return [window.step for window in ledger.windows if window.empty]


def plain(build: RecordBuilder, times: int = 3, *, to_none: bool = True) -> RecordBuilder:
    for _ in range(times):
        build.zero(to_none=to_none)
        build.backward()
        build.step()
    return build


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_a_plain_loop_consumes_every_gradient_once(to_none):
    ledger = ledger_of(plain(RecordBuilder([0, 1]), to_none=to_none))
    assert [b.used for b in ledger.passes] == [{0, 1}] * 3
    assert [b.cleared | b.pending for b in ledger.passes] == [set()] * 3
    assert all(c.again is None and not c.repeated for c in ledger.uses)
    assert len(ledger.uses) == 6
    assert empty(ledger) == []
    assert ledger.assigned == set()


def test_what_nobody_zeroed_is_stale_in_every_later_step():
    build = RecordBuilder([0])
    steps = [(build.backward(), build.step())[1] for _ in range(3)]
    found = ledger_of(build).uses
    assert [c.again for c in found] == [None, steps[0], steps[1]]
    assert not any(c.repeated for c in found)


def test_only_the_parameter_that_was_not_zeroed_is_stale():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero(0)
        build.backward()
        build.step()
    assert {c.tensor for c in ledger_of(build).uses if c.again} == {1}


def test_momentum_kept_in_the_gradient_is_not_stale():
    build = RecordBuilder([0])
    for _ in range(3):
        build.backward()
        build.step()
        build.scale(0)
    assert [c.again for c in ledger_of(build).uses] == [None] * 3


def test_gradients_zeroed_between_backward_and_step_are_cleared_and_the_step_is_empty():
    build = RecordBuilder([0])
    for _ in range(2):
        build.backward()
        build.zero()
        build.step()
    ledger = ledger_of(build)
    assert [b.cleared for b in ledger.passes] == [{0}, {0}]
    assert empty(ledger) == [window.step for window in ledger.windows]
    assert ledger.uses == []


def test_a_step_with_zeros_only_is_empty_too():
    build = RecordBuilder([0])
    build.backward()
    build.zero(to_none=False)
    build.step()
    assert len(empty(ledger_of(build))) == 1


def test_micro_batches_are_consumed_together():
    build = RecordBuilder([0])
    for _ in range(3):
        build.backward()
    build.step()
    ledger = ledger_of(build)
    assert [b.used for b in ledger.passes] == [{0}] * 3
    assert [c.again for c in ledger.uses] == [None]


def test_a_pass_that_the_next_one_finds_cleared_is_lost():
    build = RecordBuilder([0])
    build.backward()
    build.zero()
    build.backward()
    build.step()
    ledger = ledger_of(build)
    assert [(b.cleared, b.used) for b in ledger.passes] == [({0}, set()), (set(), {0})]


def test_what_stands_in_the_gradient_at_the_end_is_pending():
    build = plain(RecordBuilder([0, 1]), 1)
    build.backward(1)
    assert [b.pending for b in ledger_of(build).passes] == [set(), {1}]


def test_a_gradient_of_zeros_is_neither_consumed_nor_pending():
    build = RecordBuilder([0])
    build.backward(zero=True)
    ledger = ledger_of(build)
    assert ledger.passes[0].pending == set()
    build.step()
    assert ledger_of(build).passes[0].used == set()


def test_the_same_gradient_stepped_twice_is_repeated():
    build = RecordBuilder([0])
    build.backward()
    first, second = build.step(), build.step()
    found = ledger_of(build).uses
    assert [(c.step, c.repeated) for c in found] == [(first, False), (second, True)]
    assert found[1].again is first


def test_two_optimizers_on_one_parameter_repeat_the_consumption():
    build = RecordBuilder([0], [0])
    build.backward()
    first = build.step(0)
    build.step(1)
    assert [(c.repeated, c.again) for c in ledger_of(build).uses] == [(False, None), (True, first)]


def test_each_optimizer_consumes_what_it_holds():
    build = RecordBuilder([0], [1])
    build.backward()
    build.step(1)
    assert ledger_of(build).passes[0].used == {1}
    assert ledger_of(build).passes[0].pending == {0}


def test_a_clip_between_two_batches_hides_no_staleness_before_it():
    build = RecordBuilder([0])
    for _ in range(3):
        build.backward()
        build.clip(0)
        build.step()
    assert [c.again is not None for c in ledger_of(build).uses] == [False, True, True]


def test_of_nested_steps_only_the_innermost_consumes():
    build = RecordBuilder([0], [0])
    for _ in range(2):
        build.zero()
        build.backward()
        outer = build.step(0, nested=True)
        inner = build.step(1)
    ledger = ledger_of(build)
    assert [window.step for window in ledger.windows[-1:]] == [inner]
    assert outer not in [window.step for window in ledger.windows]
    assert [c.repeated for c in ledger.uses] == [False, False]


@pytest.mark.parametrize("how", [{"computed": False}, {"full": False}], ids=["proximal", "light"])
def test_a_step_that_was_not_seen_to_use_gradients_is_left_out(how):
    build = RecordBuilder([0])
    build.backward()
    build.step(**how)
    ledger = ledger_of(build)
    assert (ledger.windows, ledger.uses) == ([], [])


def test_every_call_of_a_closure_is_consumed():
    build = RecordBuilder([0])

    def closure():
        build.zero()
        build.backward()

    for _ in range(2):
        build.step(closure=[closure] * 3)
    ledger = ledger_of(build)
    assert [b.used for b in ledger.passes] == [{0}] * 6
    assert not any(c.again or c.repeated for c in ledger.uses)


def test_a_closure_is_empty_only_where_its_last_call_leaves_nothing():
    build = RecordBuilder([0])
    build.step(closure=[build.zero, build.backward])
    assert empty(ledger_of(build)) == []
    build.step(closure=[build.backward, build.zero], computed=True)
    assert len(empty(ledger_of(build))) == 1


def test_gradients_of_autograd_grad_accumulate_nowhere():
    build = RecordBuilder([0])
    build.backward(kind="grad")
    assert ledger_of(build).passes == []


def test_gradients_put_there_by_hand_are_ledger_of():
    build = RecordBuilder([0, 1])
    build.backward(kind="grad")
    build.assign(1)
    build.step()
    ledger = ledger_of(build)
    assert ledger.assigned == {1}
    assert [c.tensor for c in ledger.uses] == [1]


def test_a_parameter_without_gradients_takes_no_part():
    build = RecordBuilder([0, 1])
    for _ in range(2):
        build.zero()
        build.backward(0)
        build.step()
    ledger = ledger_of(build)
    assert {c.tensor for c in ledger.uses} == {0}
    assert empty(ledger) == []


def test_samples_are_the_same_only_bit_for_bit():
    assert sample(["b1"]).same(sample(["b1"]))
    assert not sample(["b1"]).same(sample(["b2"]))
    assert not sample(["b1"]).same(None)
    assert sample([]).zero
