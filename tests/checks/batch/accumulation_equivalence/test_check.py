"""What ``accumulation_equivalence`` says of windows and weights that are given to it."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest

from pytest_trainloop.checks.batch.accumulation_equivalence import fewest_rows, terms
from pytest_trainloop.checks.batch.accumulation_equivalence.check import CAUSES, accumulation_equivalence
from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
from pytest_trainloop.checks.batch.accumulation_equivalence.split import Split
from pytest_trainloop.checks.batch.accumulation_equivalence.weights import Weighing
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import Agreement
from pytest_trainloop.gradients.vectors import Combination
from pytest_trainloop.runs.progress import Length, Progress
from pytest_trainloop.tracing.rate_writes import RateWrites
from tests.helpers.records import ONE, FakeEvidence, parameter, record

SAME = Agreement(1.0, 1.0, 1e-16)


def split(k=2, *, first=SAME, second=SAME, **fields):
    given = {
        "composition": Composition.evenly(range(12), k),
        "loop_splits": False,
        "optimizer": 0,
        "steps": 2,
        "steps_expected": 2,
        "first_window": k,
        "backwards": k,
        "windows": (first, second),
        "updates": 0.0 if first is second is SAME else 0.1,
        "lr_differs": False,
        "bound": 2e-13,
        "parameters": 4,
        "precision": "float64",
        "place": "train.py:7   loss.backward()",
        "library": "",
        "step_place": "train.py:9   optimizer.step()",
        "step_library": "",
    }
    return Split(**{**given, **fields})


class Windows:
    """Comparisons made beforehand: ``weights`` are those of the whole batch and of the window."""

    rows = 24

    def __init__(
        self, made, weights=(), *, outside=0.0, by_counts=False, carried=None, grows=False, noise=1e-16, **more
    ):
        self._by_a_constant = more.get("by_a_constant", False)
        self._kind, self._without = more.get("without", ("", None))
        self._made, self._weights, self._outside, self._by_counts = made, weights, outside, by_counts
        self._carried, self._grows, self._noise = carried, grows, noise

    def compare(self):
        return self, [self._made]

    def weigh(self, _split):
        whole, got = self._weights
        return Weighing(Combination(whole, 0.0), Combination(got, self._outside), self._by_counts)

    def divides_by_a_constant(self, _split):
        return self._by_a_constant

    def difference_when_reversed(self, _split):
        return self._noise

    def excess_of_second_window(self, _split):
        return self._carried and Combination(*self._carried)

    def one(self, _split):
        return self.many(_split)

    def many(self, _split):
        return record([parameter(0, "w")], held=[0], gradients={0: ONE})

    def agrees_without(self, _split, kind):
        return self._without if kind == self._kind else None

    def grows_with_windows(self, _split):
        return self._grows


NOT_FINITE = Agreement(math.nan, math.nan, 0.0)


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    monkeypatch.setattr(terms, "terms_apart", lambda evidence: None)
    monkeypatch.setattr(fewest_rows, "fewest_rows", lambda evidence, made, split, **how: (split, "12 rows"))


def given(windows, lengths=(), *, second_axis=None):
    seen = record([parameter(0, "w")], held=[0], gradients={0: ONE})
    progress = Progress(lengths={0: tuple(Length(horizon=h, calls=c) for h, c in lengths)} if lengths else {})
    shared = {Accumulation.of: windows, Accumulation.along_other_axis: second_axis, Progress.of: progress}
    shared[RateWrites.of] = SimpleNamespace(line=lambda key: "")
    return FakeEvidence(seen, accumulated=seen, shared=shared)


def found(*made, lengths=(), **how):
    return [(f.cause, f.level) for f in accumulation_equivalence(given(Windows(*made, **how), lengths))]


def apart(ratio=1.1):
    return split(first=Agreement(ratio, 0.9, 0.3), second=Agreement(ratio, 0.9, 0.3))


HALVES = (0.5, 0.5)
UNEVEN = (0.3, 0.7)


def test_windows_that_agree_pass():
    assert found(split()) == []


def test_gradients_that_are_not_finite_agree_in_nothing():
    with pytest.raises(CannotDecide, match="not finite"):
        found(split(first=NOT_FINITE, second=NOT_FINITE))


def test_a_divisor_that_is_a_constant_is_not_judged():
    with pytest.raises(CannotDecide, match="divided by a constant"):
        found(apart(0.5), (HALVES, (0.25, 0.25)), by_a_constant=True)


@pytest.mark.parametrize(
    ("whole", "got", "cause"),
    [
        (HALVES, (1.0, 1.0), "loss_not_divided"),
        (HALVES, (2.0, 2.0), "loss_not_divided"),
        (UNEVEN, (0.6, 1.4), "loss_not_divided"),
        (HALVES, (0.25, 0.25), "divided_twice"),
        (UNEVEN, (0.15, 0.35), "divided_twice"),
        (HALVES, (0.0, 0.5), "only_last_counts"),
        (HALVES, (0.0, 1.0), "only_last_counts"),
        (HALVES, (0.5, 0.0), "stepped_inside_window"),
        (UNEVEN, (1.0, 1.0), "loss_not_divided"),
        (UNEVEN, (0.25, 0.25), "divided_twice"),
        (HALVES, (0.25, 0.5), "divided_twice"),
    ],
)
def test_the_weights_are_the_diagnosis(whole, got, cause):
    assert found(apart(), (whole, got)) == [(cause, "fault")]


def test_the_repair_is_that_of_the_framework():
    for library, words in (("", "divide once only"), ("lightning", "training_step"), ("accelerate", "accelerator")):
        made = split(first=Agreement(0.5, 1.0, 0.5), second=Agreement(0.5, 1.0, 0.5), library=library)
        (finding,) = accumulation_equivalence(given(Windows(made, (HALVES, (0.25, 0.25)))))
        assert words in (finding.repair or CAUSES[finding.cause].repair)


def test_a_mean_of_means_is_a_fault_only_by_valid_targets():
    assert found(apart(), (UNEVEN, HALVES), by_counts=True) == [("mean_of_means", "fault")]
    assert found(apart(), (UNEVEN, HALVES)) == [("mean_of_means", "advice")]


class Halves:
    """Weights of two halves of a batch in a declared loss."""

    def __init__(self, *weights):
        self._weights = weights

    def weights_of_halves(self):
        return self._weights


@pytest.mark.parametrize(("weights", "expected"), [(HALVES, []), (UNEVEN, [("mean_of_means", "note")])])
def test_without_a_knob_a_mean_of_means_is_a_note(weights, expected):
    evidence = FakeEvidence(None, shared={Accumulation.of_loss: Halves(*weights)})
    evidence.knobs, evidence.offers = {}, {"loss"}
    assert [(f.cause, f.level) for f in accumulation_equivalence(evidence)] == expected


def test_weights_of_no_known_pattern_are_advice():
    assert found(apart(), (HALVES, (0.2, 0.9))) == [("update_differs", "advice")]


def test_what_lies_outside_is_a_part_of_the_loss_or_unknown():
    assert found(apart(), (HALVES, HALVES), outside=1e-3, grows=True) == [("loss_not_divided", "fault")]
    assert found(apart(), (HALVES, HALVES), outside=1e-3) == [("update_differs", "advice")]


@pytest.mark.parametrize(("difference", "words"), [(0.0, "give batch_dim=1"), (0.3, None)])
def test_windows_that_agree_along_another_axis_accuse_nobody(difference, words):
    agreed = Agreement(1.0, 1.0, difference)
    second_axis = Windows(split(first=agreed, second=agreed))
    evidence = given(Windows(apart(), (HALVES, (1.0, 1.0))), second_axis=second_axis)
    with pytest.raises(CannotDecide, match=words) if words else contextlib.nullcontext():
        assert [f.cause for f in accumulation_equivalence(evidence)] == ["loss_not_divided"]


def test_equal_weights_in_the_end_excuse_other_gradients():
    made = split(first=Agreement(2.0, 1.0, 0.5), second=Agreement(2.0, 1.0, 0.5), updates=1e-16)
    assert found(made, (HALVES, (1.0, 1.0))) == []


def test_too_many_steps_came_inside_a_window():
    made = split(first=Agreement(0.5, 0.9, 0.6), second=Agreement(0.5, 0.9, 0.6), steps=4, updates=math.inf)
    assert found(made) == [("stepped_inside_window", "fault")]


def test_a_step_after_fewer_micro_batches():
    made = split(first=Agreement(0.5, 0.9, 0.6), second=Agreement(0.5, 0.9, 0.6), first_window=1)
    assert found(made) == [("stepped_inside_window", "fault")]


def test_a_second_window_that_holds_the_first():
    made = split(second=Agreement(1.4, 0.9, 0.4))
    assert found(made, carried=((0.5, 0.5), 1e-15)) == [("carried_over", "fault")]


def test_a_second_window_that_differs_by_the_rate():
    made = split(second=Agreement(1.0, 0.99, 0.01), lr_differs=True)
    assert found(made) == [("update_differs", "advice")]


@pytest.mark.parametrize(("by_loop", "expected"), [(True, [("statistic_inside_window", "fault")]), (False, [])])
def test_a_statistic_is_a_fault_where_the_loop_updates_it_itself(by_loop, expected):
    left = SimpleNamespace(by_loop=by_loop, place=None)
    assert found(apart(), (HALVES, (0.2, 0.9)), without=("statistic", left)) == expected
    assert found(split(second=Agreement(1.0, 0.99, 0.01)), without=("statistic", left)) == expected


@pytest.mark.parametrize("inside", [True, False])
def test_rates_that_no_scheduler_moves_inside_a_window_are_advice(inside):
    left = SimpleNamespace(by_loop=inside, place=None)
    made = split(second=Agreement(1.0, 0.99, 0.01), lr_differs=True)
    expected = ("scheduled_inside_window", "advice") if inside else ("update_differs", "advice")
    assert found(made, without=("rates", left)) == [expected]


@pytest.mark.parametrize(("after", "expected"), [((24, 24), []), ((6, 24), [("scheduled_inside_window", "advice")])])
def test_a_schedule_that_is_as_far_on_with_accumulation_as_without(after, expected):
    left = SimpleNamespace(by_loop=True, place=None)
    made = split(second=Agreement(1.0, 0.99, 0.01), lr_differs=True)
    assert found(made, without=("rates", left), lengths=((6, 6), after)) == expected


def test_hooks_that_every_micro_batch_passes():
    left = SimpleNamespace(by_loop=False, place=None)
    assert found(apart(), (HALVES, (0.2, 0.9)), without=("hooks", left)) == [("changed_inside_window", "fault")]


def test_a_second_window_that_differs_by_nothing_known_is_skipped():
    with pytest.raises(CannotDecide, match="lives on from window to window"):
        found(split(second=Agreement(1.0, 0.99, 0.01)))


def test_rounding_decides_nothing():
    with pytest.raises(CannotDecide, match="no equality is due"):
        found(apart(), (HALVES, (1.0, 1.0)), noise=0.01)
