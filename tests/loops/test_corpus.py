"""The corpora of loops: every fault is named, every repaired loop passes, every odd but correct loop is silent.

By default a faulty loop is judged by the check that names its fault, for one pair a cause and every eighth of the
others; the repaired one by the same check for one pair of every second cause; every twelfth odd loop by the check that
it looks wrong to, or by one check in twenty-four, in turn, where it belongs to none. ``-m corpus`` judges every loop by
the whole battery.
"""

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.frontends.api import check_loop
from tests.helpers.every_pair import number, parametrized_eighth, parametrized_in_corpus, parametrized_quick
from tests.helpers.findings import assert_complete, assert_survives_json, described, named
from tests.helpers.texts import FOLDER, assert_stored, stored
from tests.loops.corpus import FAULTS, ODD, PAIRS, judged
from tests.losses.corpus import PAIRS as LOSS_PAIRS

SEEDS = 3
"""Seeds over which the odd loops are spread, each under one of them (scripts/seeds.py runs more)."""

SHARE = 24
"""Every how manieth check judges an odd loop by default that belongs to no check."""

LONG = dict.fromkeys(("overfit_one_batch", "update_ratio"), "takes long, and is explained by the fault")


eighth_of_the_pairs = parametrized_eighth(PAIRS)
quick_pairs = parametrized_quick(PAIRS, every=2)
every_pair_in_corpus = parametrized_in_corpus(PAIRS)


def own_check(name):
    """The check that an odd loop looks wrong to: the folder that it is in."""
    return ODD[name].make.__module__.rpartition(".")[0].rpartition(".")[2]


def odd_loops(every):
    """The odd loops by check and name; all but every so manieth have the marker ``corpus``."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, id=f"{own_check(name)}-{name}", marks=[pytest.mark.corpus] * bool(number(name) % every))
            for name in sorted(ODD)
        ],
    )


def assert_named(pair, report):
    """The fault is named with its culprits, its line and its text."""
    findings = named(report, pair.check, pair.cause, pair.level)
    assert_complete(findings)
    assert_survives_json(report)
    assert set(pair.culprits) <= {c for f in findings for c in f.culprits}
    assert pair.where is None or any(pair.where in f.where for f in findings)
    assert pair.change is None or any(pair.change in f.change for f in findings)
    text = " ".join((findings[0].summary, findings[0].measured, findings[0].shown_by, findings[0].repair))
    assert [words for words in pair.mentions if words not in text] == []
    others = [
        (f.check, f.cause)
        for r in report.results
        for f in r.faults
        if f.cause != pair.cause and not any(root.accounts_for(f.check, f.cause) for root in findings)
    ]
    assert not others, f"one fault, one root cause; also named: {others}"


@eighth_of_the_pairs
def test_the_fault_is_named_by_its_check(pair):
    report = judged(pair, pair.faulty, only=[pair.check])
    assert_named(pair, report)
    assert_stored(report, pair)


@quick_pairs
def test_the_repaired_loop_passes_that_check(pair):
    report = judged(pair, pair.fixed, only=[pair.check])
    assert report.ok, described(report)


@odd_loops(every=12)
def test_an_odd_but_correct_loop_is_silent(name):
    own = own_check(name)
    in_turn = [check for i, check in enumerate(registry.of("loop")) if (i + number(name) // SEEDS) % SHARE == 0]
    assert_silent(name, only=[own] if own in registry.of("loop") else in_turn)


@every_pair_in_corpus
def test_the_fault_is_the_only_root_cause(pair):
    skip = {} if pair.check in LONG else LONG
    only = ["baseline"] if pair.check == "baseline" else None  # what is a fault by itself too, others name
    assert_named(pair, judged(pair, pair.faulty, only=only, skip={} if only else skip))


@every_pair_in_corpus
def test_the_repaired_loop_passes_every_check(pair):
    report = check_loop(pair.fixed, raises=False)
    assert report.ok, described(report)


@pytest.mark.corpus
@pytest.mark.parametrize("fault", [pytest.param(f, id=f"{f.check}-{name}") for name, f in FAULTS.items()])
def test_a_fault_from_a_thread_is_named(fault):
    (result,) = check_loop(fault.make, only=[fault.check], raises=False).results
    assert result.outcome == "failed", fault.what


@pytest.mark.corpus
@odd_loops(every=1)
def test_an_odd_but_correct_loop_is_silent_in_every_check(name):
    assert_silent(name, only=None)


def assert_silent(name, only):
    skip = {} if ODD[name].fixed_seed_ok else {"determinism": ODD[name].why}
    seed = number(name) % SEEDS
    report = check_loop(ODD[name].make, seed=seed, only=only, skip=skip, raises=False)
    assert report.ok, f"seed {seed}: {ODD[name].why}\n{described(report)}"


def test_one_quick_pair_a_cause():
    causes = [(p.check, p.cause) for p in PAIRS.values() if p.quick]
    assert len(causes) == len(set(causes))


def test_every_stored_text_has_its_pair():
    PAIRS.load_all()
    LOSS_PAIRS.load_all()
    for check in (file.stem for file in FOLDER.glob("*.txt")):
        known = {p.name for p in (*PAIRS.values(), *LOSS_PAIRS.values()) if p.check == check}
        assert set(stored(check)) <= known, f"python scripts/verdicts.py run --own --store --only {check}"
