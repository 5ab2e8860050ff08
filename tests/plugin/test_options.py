"""--trainloop-list, --trainloop-explain, and options that cannot be right."""

from __future__ import annotations

import pytest
import torch


def test_list(run):
    result = run("--trainloop-list")
    assert result.ret == 0
    assert result.outlines[-4:] == [
        "check         family    checks that",
        "step_order    wiring    Steps read fresh gradients",
        "accumulation  batch     Splits give one gradient",
        "overfit       learning  One batch can be learnt",
    ]
    result.stdout.no_fnmatch_line("*test session starts*")


def test_explain(run):
    result = run("--trainloop-explain", "step_order")
    assert result.ret == 0
    assert result.stdout.str().endswith(
        """\
step_order (wiring)

Steps read fresh gradients.

What it holds
    Something that must be true.

Causes
  stale
    a gradient is consumed twice
  lost
    none is"""
    )


def test_explain_a_cause(run):
    result = run("--trainloop-explain", "step_order:stale")
    assert result.ret == 0
    assert result.stdout.str().endswith(
        """\
step_order:stale
    a gradient is consumed twice

The whole page: pytest --trainloop-explain step_order"""
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("step_ordr", "ERROR: there is no check 'step_ordr'; the nearest name is 'step_order'"),
        ("stael", "ERROR: there is no check 'stael'; the nearest name is 'step_order:stale'"),
        ("nonsense", "ERROR: there is no check 'nonsense'; --trainloop-list shows all checks"),
        ("step_order:stael", "ERROR: step_order names no cause 'stael'; the nearest name is 'stale'"),
    ],
)
def test_explain_an_unknown_name(run, name, sentence):
    result = run("--trainloop-explain", name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([sentence])


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--trainloop-seed=-2", "ERROR: --trainloop-seed is -2; a number from 0 to 2**63 - 1 is needed"),
        (f"--trainloop-seed={2**63}", f"ERROR: --trainloop-seed is {2**63}; a number from 0 to 2**63 - 1 is needed"),
        ("--trainloop-timeout=0", "ERROR: --trainloop-timeout is 0; a number of seconds above 0 is needed"),
        ("--trainloop-isolate --pdb", "ERROR: --trainloop-isolate and --pdb are given; one of them is needed"),
        ("--trainloop-device=tpu", "*--trainloop-device is 'tpu'; auto, cpu, cuda, or one of several as cuda:1, is *"),
        ("--trainloop-seed=x", "*argument --trainloop-seed: invalid int value: 'x'"),
    ],
)
def test_values_that_cannot_be(run, option, sentence):
    result = run("--trainloop", *option.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([sentence])


@pytest.mark.parametrize("switch", [(), ("--trainloop",)])
@pytest.mark.parametrize("option", ["--trainloop-json", "--trainloop-sarif", "--trainloop-report"])
def test_an_option_that_names_no_file(run, option, switch):
    result = run(*switch, f"{option}=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {option} names no file; one is needed, as in {option}=out/trainloop.*"])


def test_cuda_where_there_is_none_is_an_error(pytester, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makepyfile("def test_plain(): ...")
    result = run("--trainloop", "--trainloop-device=cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: the device of the loops is cuda, but torch finds no CUDA device here; *"])


def test_one_of_several_devices(pytester, run, monkeypatch, log):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pytester.makepyfile(
        test_a="import pytest\nfrom conftest import *\n@pytest.mark.trainloop\ndef test_gpt(device='cpu'): return {}"
    )
    run("--trainloop", "--trainloop-device=cuda:1").stdout.fnmatch_lines(["*trainloop: seed 0, device cuda:1, *"])
    assert log("subject")[0].endswith("{'device': 'device'} 0 120.0 cuda:1")
    result = run("--trainloop", "--trainloop-device=cuda:2")
    result.stderr.fnmatch_lines(
        ["ERROR: the device of the loops is cuda:2, but torch finds only cuda:0 to cuda:1 here*"]
    )
    result = run("--trainloop", "--trainloop-device=cuda:x")
    result.stderr.fnmatch_lines(
        ["ERROR: --trainloop-device is 'cuda:x'; auto, cpu, cuda, or one of several as cuda:1,*"]
    )


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_an_error_under_xdist_too(session):
    pytest.importorskip("xdist")
    result = session.runpytest_subprocess("--trainloop", "--trainloop-device=cuda", "-n1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: the device of the loops is cuda, but torch finds no CUDA device here; *"])


def test_items_on_cuda_carry_the_marker(pytester, run, monkeypatch, log):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.trainloop
        def test_gpt(device="cpu"): return {}

        def test_plain(): ...
        """
    )
    result = run("--trainloop", "--trainloop-device=cuda", "-m", "trainloop_cuda", "-v")
    result.assert_outcomes(passed=3, deselected=1)
    result.stdout.fnmatch_lines(["*::test_gpt[[]*-cuda[]] PASSED*"])
    assert log("subject")[0].endswith("{'device': 'device'} 0 120.0 cuda")
    run("--trainloop", "-m", "trainloop_cuda").assert_outcomes(deselected=4)


def test_the_help_names_every_option_and_ini_key(run):
    text = run("--help").stdout.str()
    for name in ("", "-list", "-explain", "-only", "-seed", "-timeout", "-device", "-strict", "-json"):
        assert f"--trainloop{name}" in text
    for key in ("only", "skip", "xfail", "options", "knobs", "strict", "seed", "timeout", "device"):
        assert f"trainloop_{key}" in text
