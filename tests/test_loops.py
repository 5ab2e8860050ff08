"""The corpora: every odd but correct loop is silent, every fault is named, every repaired twin passes.

With TRAINLOOP_WHOLE=1 in the environment every loop is judged by the whole battery. That takes over an hour, so without
it every eighth fault and every eighth twin is, the others by the check that names the fault; and an odd loop by a
quarter of the checks, in turn, so that each check still meets a quarter of all odd loops.
"""

import os

import pytest

from pytest_trainloop import registry
from pytest_trainloop.api import check_loop
from tests.loops.corpus import ODD, PAIRS

SEEDS = 3
"""Seeds over which the odd loops are spread, each under one of them (scripts/seeds.py runs more)."""

LONG = dict.fromkeys(("overfit_one_batch", "update_ratio"), "takes long, and is explained by the fault")

WHOLE = bool(os.environ.get("TRAINLOOP_WHOLE"))


def said(report):
    return [
        f"{r.check}: {r.outcome} {r.reason} {[(f.level, f.cause, f.summary) for f in r.findings]}"
        for r in report.results
        if r.outcome in ("failed", "error", "unreliable") or r.findings
    ]


def in_turn(number):
    """The checks that an odd loop is judged by; None for all."""
    return None if WHOLE else [check for i, check in enumerate(registry.of("loop")) if (i + number) % 4 == 0]


def one_in_eight(number):
    return WHOLE or number % 8 == 0


@pytest.mark.parametrize(("name", "number"), [(name, n) for n, name in enumerate(sorted(ODD))])
def test_an_odd_but_correct_loop_is_silent(name, number):
    skip = {} if ODD[name].fixed_seed_ok else {"determinism": ODD[name].why}
    seed = number % SEEDS
    report = check_loop(ODD[name].make, seed=seed, only=in_turn(number // SEEDS), skip=skip, raises=False)
    assert report.ok, f"seed {seed}: {ODD[name].why}\n" + "\n".join(said(report))


@pytest.mark.parametrize(("name", "whole"), [(name, one_in_eight(n)) for n, name in enumerate(sorted(PAIRS))])
def test_the_fault_is_named_with_its_culprits_and_line(name, whole):
    pair = PAIRS[name]
    skip = {} if pair.check in LONG else LONG
    report = check_loop(pair.faulty, raises=False, only=None if whole else [pair.check], skip=skip)
    named = [
        f
        for r in report.results
        for f in r.findings
        if (f.check, f.cause, f.level) == (pair.check, pair.cause, pair.level)
    ]
    assert named, "\n".join(said(report))
    assert set(pair.culprits or ()) <= {c for f in named for c in f.culprits}
    assert pair.where is None or any(pair.where in f.where for f in named)
    told = " ".join((named[0].summary, named[0].measured, named[0].shown_by, named[0].repair))
    assert [words for words in pair.mentions if words not in told] == []
    explained = {check for f in named for check in f.explains}
    others = [
        (f.check, f.cause)
        for r in report.results
        for f in r.faults
        if f.cause != pair.cause and f.check not in explained
    ]
    assert not others, f"one fault, one root cause; also named: {others}"


@pytest.mark.parametrize(("name", "whole"), [(name, one_in_eight(n + 4)) for n, name in enumerate(sorted(PAIRS))])
def test_the_repaired_twin_passes(name, whole):
    report = check_loop(PAIRS[name].fixed, only=None if whole else [PAIRS[name].check], raises=False)
    assert report.ok, "\n".join(said(report))
