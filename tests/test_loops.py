"""The corpora: every odd but correct loop is silent, every fault is named, every repaired twin passes everything."""

import pytest

from pytest_trainloop.runner import check_loop
from tests.loops.faults import PAIRS
from tests.loops.odd import ODD

SEEDS = 3
"""Seeds over which the odd loops are spread, each under one of them (scripts/seeds.py runs more)."""

LONG = dict.fromkeys(("overfit_one_batch", "update_ratio"), "takes long, and is explained by the fault")


def said(report):
    return [
        f"{r.check}: {r.outcome} {r.reason} {[(f.level, f.cause, f.summary) for f in r.findings]}"
        for r in report.results
        if r.outcome in ("failed", "error", "unreliable") or r.findings
    ]


@pytest.mark.parametrize(("name", "seed"), [(name, n % SEEDS) for n, name in enumerate(sorted(ODD))])
def test_an_odd_but_correct_loop_is_silent(name, seed):
    skip = {} if ODD[name].fixed_seed_ok else {"determinism": ODD[name].why}
    report = check_loop(ODD[name].make, seed=seed, skip=skip, raises=False)
    assert report.ok, f"seed {seed}: {ODD[name].why}\n" + "\n".join(said(report))


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_fault_is_named_with_its_culprits_and_line(name):
    pair = PAIRS[name]
    report = check_loop(pair.faulty, raises=False, skip={} if pair.check in LONG else LONG)
    named = [
        f
        for r in report.results
        for f in r.findings
        if (f.check, f.cause, f.level) == (pair.check, pair.cause, pair.level)
    ]
    assert named, "\n".join(said(report))
    assert set(pair.culprits or ()) <= {c for f in named for c in f.culprits}
    assert pair.where is None or any(pair.where in f.where for f in named)
    assert all(words in f"{f.summary} {f.measured} {f.shown_by}" for f in named[:1] for words in pair.mentions)
    explained = {check for f in named for check in f.explains}
    others = [
        (f.check, f.cause)
        for r in report.results
        for f in r.faults
        if f.cause != pair.cause and f.check not in explained
    ]
    assert not others, f"one fault, one root cause; also named: {others}"


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_repaired_twin_passes_every_check(name):
    report = check_loop(PAIRS[name].fixed, raises=False)
    assert report.ok, "\n".join(said(report))
