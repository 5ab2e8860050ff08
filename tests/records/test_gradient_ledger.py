"""Which step used which gradient, where no whole loop shows it: on hand-written records."""

from __future__ import annotations

from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.recording.events import Step
from tests.helpers.record_builder import RecordBuilder, sample


def ledger_of(build: RecordBuilder) -> Ledger:
    return Ledger(build.record())


def empty(ledger: Ledger) -> list[Step]:
    return [window.step for window in ledger.windows if window.empty]


def test_a_step_with_zeros_only_is_empty_too():
    build = RecordBuilder([0])
    build.backward()
    build.zero(to_none=False)
    build.step()
    assert len(empty(ledger_of(build))) == 1


def test_a_gradient_of_zeros_is_neither_consumed_nor_pending():
    build = RecordBuilder([0])
    build.backward(zero=True)
    ledger = ledger_of(build)
    assert ledger.passes[0].pending == set()
    build.step()
    assert ledger_of(build).passes[0].used == set()


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
        build.step(0, nested=True)
        inner = build.step(1)
    ledger = ledger_of(build)
    assert [window.step for window in ledger.windows][1:] == [inner]
    assert [c.repeated for c in ledger.uses] == [False, False]


def test_a_closure_is_empty_only_where_its_last_call_leaves_nothing():
    build = RecordBuilder([0])
    build.step(closure=[build.zero, build.backward])
    assert empty(ledger_of(build)) == []
    build.step(closure=[build.backward, build.zero], computed=True)
    assert len(empty(ledger_of(build))) == 1


def test_samples_are_the_same_only_bit_for_bit():
    assert sample(["b1"]).same(sample(["b1"]))
    assert not sample(["b1"]).same(sample(["b2"]))
    assert not sample(["b1"]).same(None)
    assert sample([]).zero
