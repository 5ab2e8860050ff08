"""Checks are chosen, gated and run; the evidence is made once and shared."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import CheckFailed, TrainLoop, UsageError, check_loop, observe
from pytest_trainloop.core import registry
from pytest_trainloop.core.errors import CannotDecide, TimeRanOut, Unreliable
from pytest_trainloop.core.finding import Finding, Result
from pytest_trainloop.core.paths import PACKAGE
from pytest_trainloop.core.registry import Cause, Check
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.runs import evidence, guard


class Loops:
    """``make`` for a small loop that counts what is done with it."""

    def __init__(self, train=None, **given):
        self.made = self.fitted = 0
        self.knobs = []
        self._train, self._given = train or plain, given

    def __call__(self, **knobs):
        self.made += 1
        self.knobs.append(knobs)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            self.fitted += 1
            self._train(model, optimizer, batches)

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(5, 4), fit=fit, **self._given)


def loss_of(model, batch):
    return F.mse_loss(model(batch[:, :3]), batch[:, 3:])


def plain(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def never_zeroed(model, optimizer, batches):
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()


def raising(model, optimizer, batches):
    plain(model, optimizer, list(batches)[:3])
    raise ValueError("bad row")


def detached(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).detach().backward()


def a_check(name, decide, **fields):
    data = {"family": "project", "rank": 1, "needs": frozenset({"run"}), "page": name, "module": "mine"}
    return Check(name=name, decide=decide, causes={"odd": Cause("it is odd")}, **{**data, **fields})


@pytest.fixture
def only_these(monkeypatch):
    """Put these functions in place of all checks."""

    def put(*known):
        monkeypatch.setattr(registry, "registered", lambda: {check.name: check for check in known})

    return put


def subject(make, **settings):
    return Subject("test_a.py::test_it", make, settings=Settings(**settings))


def says(*what):
    """A check's function that says this of every loop."""

    def decide(evidence):
        evidence.run()
        for one in what:
            if isinstance(one, Exception):
                raise one
            yield one

    return decide


WATCHING = ["optimizer_holds_every_param", "gradient_reaches_every_param", "step_order"]
"""Checks that need no more than the one watched run."""

FAULT = Finding(cause="odd", summary="it is odd by 3")
ADVICE = Finding(cause="odd", level="advice", summary="it is a little odd")


def test_the_loop_is_run_once_for_all_checks():
    make = Loops()
    report = check_loop(make, only=WATCHING)
    assert report.ok
    assert {r.outcome for r in report.results} == {"passed"}
    assert (make.made, make.fitted) == (3, 1)  # two loops are compared, the third is run
    assert [r.steps for r in report.results] == [12, 0, 0]


def test_an_item_binds_its_own_function(only_these):
    first, second = Loops(), Loops()
    only_these(a_check("one", lambda evidence: evidence.run() and ()), a_check("two", lambda e: e.run() and ()))
    mine = subject(first)
    mine.run_check("one")
    mine.bind(second)
    mine.run_check("two")
    assert (first.fitted, second.fitted) == (1, 0)
    fresh = subject(first)
    fresh.bind(second)
    fresh.run_check("one")
    assert (first.fitted, second.fitted) == (1, 1)


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ("fit", "TrainLoop.fit (or step) is not given"),
        ("evaluate", "TrainLoop.evaluate is not given"),
    ],
)
def test_a_field_that_is_not_given_is_a_skip_that_names_it(only_these, need, reason):
    only_these(a_check("one", says(FAULT), needs=frozenset({need})))

    def make():
        return TrainLoop(model=nn.Linear(3, 1), batch=torch.ones(2, 4), loss=loss_of)

    result = subject(make).run_check("one")
    assert (result.outcome, result.reason) == ("skipped", reason)


@pytest.mark.parametrize("field", ["fit", "step", "loss"])
def test_a_run_can_be_made_of_each(only_these, field):
    only_these(a_check("one", lambda evidence: evidence.run() and ()))

    def make():
        model = nn.Linear(3, 1)
        given = {
            "fit": lambda batches: plain(model, torch.optim.SGD(model.parameters(), lr=0.1), batches),
            "step": lambda batch: loss_of(model, batch).backward(),
            "loss": loss_of,
        }
        return TrainLoop(model=model, batch=torch.ones(2, 4), **{field: given[field]})

    assert subject(make).run_check("one").outcome == "passed"


@pytest.mark.parametrize(
    ("said", "outcome", "reason"),
    [
        ([], "passed", ""),
        ([ADVICE], "passed", ""),
        ([ADVICE, FAULT], "failed", ""),
        ([CannotDecide("too short")], "skipped", "too short"),
        ([Unreliable("two runs differ")], "unreliable", "two runs differ"),
    ],
)
def test_what_comes_of_what_a_check_says(only_these, said, outcome, reason):
    only_these(a_check("one", says(*said)))
    result = subject(Loops()).run_check("one")
    assert (result.outcome, result.reason) == (outcome, reason)
    assert [f.check for f in result.findings] == ["one"] * sum(isinstance(s, Finding) for s in said)


def test_a_cause_that_is_not_declared_is_a_mistake_in_the_check(only_these):
    only_these(a_check("one", says(Finding(cause="even", summary=""))))
    result = subject(Loops()).run_check("one")
    assert result.outcome == "error"
    assert result.error.summary == "ValueError: one named the cause 'even', which it does not declare"


def broken(evidence):
    yield FAULT
    raise IndexError("list index out of range")


def test_a_projects_own_check_that_raises_is_an_error_with_its_traceback_and_the_others_go_on(only_these):
    only_these(a_check("one", broken), a_check("two", says(ADVICE)))
    first, second = check_loop(Loops(), raises=False).results
    assert (first.outcome, first.reason) == ("error", "the check one raised IndexError: list index out of range")
    assert "in broken" in first.error.traceback
    assert second.outcome == "passed"


OURS = {}
exec(compile("def mistaken(*_given): raise IndexError('list index out of range')", f"{PACKAGE}x.py", "exec"), OURS)
mistaken = OURS["mistaken"]
"""A function that stands in a file of the package, by its code's filename."""

STOPPED = (
    "one was stopped by a mistake in pytest-trainloop, not in your code: IndexError: list index out of range "
    "(pytest_trainloop/x.py:1); please report it in the issue tracker of pytest-trainloop"
)


def test_a_mistake_of_ours_is_an_error_that_asks_for_a_report_and_the_others_go_on(only_these):
    only_these(a_check("one", mistaken, module="pytest_trainloop.checks.batch.one.check"), a_check("two", says(ADVICE)))
    first, second = check_loop(Loops(), raises=False).results
    assert (first.outcome, first.reason, first.error) == ("error", STOPPED, None)
    assert first.mistake.startswith("Traceback")
    assert Result.from_json(first.to_json()).mistake == first.mistake
    assert second.outcome == "passed"
    with pytest.raises(CheckFailed, match=f"^{re.escape(STOPPED)}$"):
        check_loop(Loops())


def test_a_mistake_of_ours_in_a_projects_own_check_asks_for_a_report_too(only_these):
    only_these(a_check("one", mistaken))
    (result,) = check_loop(Loops(), raises=False).results
    assert (result.outcome, result.reason) == ("error", STOPPED)


def test_a_mistake_of_ours_that_stops_several_checks_is_one_line(only_these):
    only_these(*(a_check(name, mistaken, module="pytest_trainloop.checks.x") for name in ("one", "two")))
    report = str(check_loop(Loops(), raises=False))
    assert f"error  one, two: {STOPPED.removeprefix('one ')}" in report
    assert report.count("please report it") == 1


def test_who_reads_a_record_with_a_mistake_of_ours_ends_as_an_error(only_these, monkeypatch):
    def run(make, plan):
        record = real(make, plan)
        with pytest.raises(IndexError) as caught:
            mistaken()
        assert record.note_mistake(caught.value)
        return record

    real = evidence.run
    monkeypatch.setattr(evidence, "run", run)
    only_these(a_check("one", lambda evidence: evidence.run() and ()), a_check("two", lambda evidence: ()))
    results = check_loop(Loops(), raises=False).results
    assert [(r.outcome, r.reason) for r in results[:1]] == [("error", STOPPED)]


@pytest.mark.parametrize("where", ["build", "fit", "evaluate"])
def test_a_mistake_of_ours_in_the_projects_code_is_not_taken_for_the_projects(where):
    def train(model, optimizer, batches):
        plain(model, optimizer, batches)
        if where == "fit":
            mistaken()

    def make():
        if where == "build":
            mistaken()
        return Loops(train, evaluate=mistaken if where == "evaluate" else None)()

    report = check_loop(make, only=["evaluation_is_pure"], raises=False)
    assert [r.outcome for r in report.results] == ["error"]
    assert "evaluation_is_pure was stopped by a mistake in pytest-trainloop" in report.results[0].reason


def test_a_check_sees_its_options(only_these):
    seen = []
    only_these(a_check("one", lambda evidence, *, steps=300: seen.append(steps) or (), options=("steps",)))
    check_loop(Loops(), options={"one": {"steps": 400}})
    assert seen == [400]


def test_an_option_that_a_check_does_not_have_is_refused(only_these):
    only_these(a_check("one", says(), options=("steps",)))
    with pytest.raises(UsageError, match=r"^one has no option 'step'; the nearest name is 'steps'$"):
        check_loop(Loops(), options={"one": {"step": 400}})
    only_these(a_check("one", says()))
    with pytest.raises(UsageError, match=r"^one has no option 'step'; it has none$"):
        check_loop(Loops(), options={"one": {"step": 400}})


def test_a_verdict_is_kept_for_the_options_that_it_was_made_with(only_these):
    only_these(a_check("one", lambda evidence, *, steps=300: seen.append(steps) or (), options=("steps",)))
    seen = []
    subject = Subject("loop", Loops(), settings=Settings())
    for options in ({}, {"steps": 400}, {"steps": 400}, None):
        subject.run_check("one", options=options)
    assert seen == [300, 400]


def test_what_the_function_raised_is_reported_once():
    def make():
        raise OSError("no data here")

    first, *others = check_loop(make, raises=False).results
    assert (first.outcome, first.reason) == ("error", "building the loop raised OSError: no data here")
    assert 'raise OSError("no data here")' in first.error.traceback
    assert {(r.outcome, r.reason) for r in others} == {
        ("skipped", f"building the loop raised OSError: no data here (see make[{first.check}])")
    }


def test_what_fit_raised_is_reported_once():
    first, *others = check_loop(Loops(raising), raises=False).results
    assert (first.outcome, first.reason) == ("error", "fit raised ValueError: bad row")
    assert first.error.traceback.startswith("Traceback (most recent call last):\n")
    assert first.error.traceback.endswith("ValueError: bad row")
    assert {r.outcome for r in others} == {"skipped"}


def test_what_fit_raised_is_not_reported_beside_the_fault_behind_it():
    results = {r.check: r for r in check_loop(Loops(detached), only=WATCHING, raises=False).results}
    assert {r.outcome for r in results.values()} == {"skipped", "failed"}
    assert [c for c, r in results.items() if r.outcome == "failed"] == ["gradient_reaches_every_param"]
    assert "fit raised after 0 optimizer steps, and what would follow was not seen" in results["step_order"].reason


def test_a_fault_outweighs_what_fit_raised(only_these):
    only_these(a_check("one", says()), a_check("two", says(FAULT)), a_check("three", says(CannotDecide("too short"))))
    mine = subject(Loops(raising))
    assert [mine.run_check(n).outcome for n in ("one", "two", "three")] == ["skipped", "failed", "skipped"]


def test_the_verdict_does_not_depend_on_the_order():
    for order in (WATCHING, WATCHING[::-1]):
        mine = subject(Loops(detached))
        results = {name: mine.run_check(name) for name in order}
        assert results["gradient_reaches_every_param"].findings[0].cause == "graph_cut"
        assert [results[n].outcome for n in WATCHING] == ["skipped", "failed", "skipped"]


def test_the_time_is_up(monkeypatch):
    def spin(model, optimizer, batches):
        while True:
            pass

    monkeypatch.setattr(guard, "GRACE", 0.1)
    (result,) = check_loop(Loops(spin), timeout=0.1, only=["step_order"]).results
    assert result.outcome == "skipped"
    assert result.reason.startswith("time ran out after 0 steps: give --trainloop-timeout=0.2 or more")


def test_a_root_cause_that_was_not_looked_for_in_time_leaves_its_consequences_undecided(only_these):
    def consequence(evidence):
        if not evidence.root_causes("later"):
            yield FAULT

    late = says(TimeRanOut(9, 2.0))
    only_these(a_check("earlier", late, family="wiring"), a_check("later", consequence, family="learning"))
    result = subject(Loops()).run_check("later")
    assert result.outcome == "skipped"
    assert result.reason == (
        "time ran out after 9 steps of earlier, which may know the cause: give --trainloop-timeout=4 or more (it is "
        "2 s), or a smaller model"
    )


def test_what_was_found_before_time_ran_out_is_given_up(only_these):
    only_these(a_check("one", says(FAULT, TimeRanOut(9, 2.0))))
    result = subject(Loops()).run_check("one")
    assert (result.outcome, result.findings) == ("skipped", ())


def test_an_exception_of_fit_is_not_reported_while_its_cause_may_be_found(only_these):
    only_these(a_check("one", says()), a_check("two", says(TimeRanOut(9, 2.0))))
    result = subject(Loops(raising)).run_check("one")
    assert result.outcome == "skipped"
    assert "of two, which may know the cause" in result.reason


def test_a_report_is_the_same_every_time():
    def told():
        report = check_loop(Loops(never_zeroed), raises=False)
        return [{**r.to_json(), "seconds": 0} for r in report.results]

    assert told() == told()


def test_a_fault_is_raised_with_its_text_and_the_results():
    with pytest.raises(CheckFailed) as failed:
        check_loop(Loops(never_zeroed), only=WATCHING)
    assert [r.outcome for r in failed.value.results] == ["passed", "passed", "failed"]
    assert "cause      not_zeroed" in str(failed.value)
    assert "more       pytest --trainloop-explain step_order" in str(failed.value)
    assert isinstance(failed.value, AssertionError)


def test_the_report_is_the_closing_section():
    def my_loop():
        return Loops(never_zeroed)()

    text = str(check_loop(my_loop, only=WATCHING, raises=False))
    assert text.startswith("my_loop  1 failed")
    assert "[not_zeroed]" in text


def test_some_checks_only():
    make = Loops(never_zeroed)
    assert [r.check for r in check_loop(make, only=["*s_every_param"]).results] == [
        "optimizer_holds_every_param",
        "gradient_reaches_every_param",
    ]


def test_a_check_left_out_is_skipped_with_the_reason():
    report = check_loop(Loops(never_zeroed), only=WATCHING, skip={"step_order": "adds up on purpose"})
    assert [(r.outcome, r.reason) for r in report.results][-1] == ("skipped", "adds up on purpose")


def test_a_fault_that_is_known():
    report = check_loop(Loops(never_zeroed), only=WATCHING, xfail={"step_order:not_zeroed": "to be repaired"})
    assert [(r.outcome, r.reason) for r in report.results][-1] == ("xfailed", "to be repaired")


def test_advice_fails_only_where_that_is_asked_for(only_these):
    only_these(a_check("one", says(ADVICE)))
    assert check_loop(Loops()).results[0].advice
    with pytest.raises(CheckFailed, match="it is a little odd"):
        check_loop(Loops(), strict=True)


def test_advice_ends_with_how_to_settle_it(only_these):
    only_these(a_check("one", says(replace(ADVICE, repair="give batches="))))
    (advice,) = check_loop(Loops()).results[0].advice
    assert advice.repair == 'give batches=; if it is intended: @pytest.mark.trainloop(skip={"one:odd": "why"})'


def test_a_note_never_fails(only_these):
    only_these(a_check("one", says(replace(ADVICE, level="note"))))
    report = check_loop(Loops(), strict=True)
    assert report.results[0].notes
    assert not report.results[0].advice


def test_a_name_that_nothing_has_is_refused():
    with pytest.raises(UsageError, match="'step_ordre', which matches no check; the nearest name is 'step_order'"):
        check_loop(Loops(), only=["step_ordre"])


def test_the_knob_is_varied_by_the_users_own_name():
    seen = []

    def make(every=1):
        seen.append(every)
        return Loops()()

    check_loop(make, only=WATCHING, knobs={"every": "accumulate"})
    assert seen == [1, 1, 1, 4]


def test_the_device_goes_to_its_knob():
    make = Loops()
    mine = Subject("it", make, settings=Settings(device="cpu"), knobs={"device": "where"})
    mine.run_check("step_order")
    assert make.knobs == [{"where": "cpu"}] * 3


def test_seeds_are_given():
    drawn = []

    def make():
        loop = Loops()()
        drawn.append(float(loop.batch[0, 0]))
        return loop

    def under(seed):
        drawn.clear()
        check_loop(make, seed=seed, only=WATCHING)
        return list(drawn)

    first, again, other = under(1), under(1), under(2)
    assert first == again
    assert len({first[0], *first[2:]}) == 1  # the second is built to be compared with: under the next seed
    assert first[0] != first[1]
    assert first[0] != other[0]


def trained(train, count=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with observe() as record:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(count, 5, 4))
    return record


def test_watching_by_hand_judges_what_was_seen():
    assert trained(plain).check().ok
    with pytest.raises(CheckFailed, match="not_zeroed"):
        trained(never_zeroed).check()


def test_the_steps_of_an_observed_block_count_once():
    assert sum(result.steps for result in trained(plain).check().results) == 4


def test_watching_by_hand_judges_the_named_checks_only():
    report = trained(never_zeroed).check("optimizer_holds_every_param")
    assert [r.check for r in report.results] == ["optimizer_holds_every_param"]
    with pytest.raises(UsageError, match="no check named 'step'; the nearest name is 'step_order'"):
        trained(plain).check("step")


def test_watching_by_hand_offers_no_second_look(only_these):
    only_these(a_check("one", says(), needs=frozenset({"evaluate"})), a_check("two", says(CannotDecide("why"))))
    results = trained(plain).check().results
    assert [(r.outcome, r.reason) for r in results] == [
        ("skipped", "watching once does not offer evaluate: return a TrainLoop from a marked test"),
        ("skipped", "why"),
    ]


@pytest.mark.parametrize("declared", [False, True])
def test_watching_by_hand_finds_or_is_told_the_model(declared):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(model, optimizer) if declared else observe() as record:
        plain(model, optimizer, torch.randn(4, 5, 4))
    assert record.check().ok
