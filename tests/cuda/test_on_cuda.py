"""What holds on a CUDA device: the same verdicts, and a watched run that neither waits for the device nor fills it."""

from __future__ import annotations

import warnings

import pytest
import torch

from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.run import fit_of
from tests.devices.loops import FAULTS, PLACES, language_model
from tests.loops.corpus import ODD

pytestmark = pytest.mark.trainloop_cuda

MIXED = ["mixed_gpt", "mixed_convolutions", "mixed_lstm", "mixed_vit", "mixed_lora", "mixed_contrast", "mixed_experts"]
STEPS = 10


@pytest.mark.parametrize("name", MIXED)
def test_right_loops_in_mixed_precision_pass_the_battery(name):
    results = check_loop(ODD[name].make, device="cuda", raises=False).results
    bad = [(r.check, r.reason, [f.summary for f in r.faults]) for r in results if r.outcome in ("failed", "error")]
    assert bad == []
    assert {"precision_parity", "step_order"} <= {r.check for r in results if r.outcome == "passed"}


def overflowing(precision="fp16", device="cpu"):
    loop = ODD["mixed_gpt"].make(precision=precision, device=device)
    with torch.no_grad():
        loop.model.blocks[0].mlp[0].weight.mul_(1e4)
        loop.model.blocks[0].mlp[2].weight.mul_(1e4)
    return loop


def test_an_overflow_in_float16_is_found_where_it_is():
    (result,) = check_loop(overflowing, only=["precision_parity"], device="cuda", raises=False).results
    assert [f.cause for f in result.faults] == ["overflow"]


def bare_and_watched(name):
    """A warm loop of some steps, and the watch to run it in."""
    loop = ODD[name].make(precision="bf16", device="cuda")
    batches = first_batches(loop, STEPS)
    fit_of(loop)(batches)
    return lambda: fit_of(loop)(batches), Watch(loop.modules, loop.optimizers)


def synchronisations(work):
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in caught)


def test_a_watched_step_waits_for_the_device_at_most_once():
    work, watch = bare_and_watched("mixed_gpt")
    bare = synchronisations(work)

    def watched():
        with watch:
            work()

    assert synchronisations(watched) - bare <= STEPS


def test_a_watched_run_takes_at_most_a_tenth_more_memory():
    work, watch = bare_and_watched("mixed_convolutions")

    def peak(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    bare = peak(work)

    def watched():
        with watch:
            work()

    blocks = 4 * 2**20  # what is kept of each tensor, a few blocks: they do not grow with the model
    assert peak(watched) <= 1.1 * bare + blocks


@pytest.mark.parametrize("place", ["one", "two"])
@pytest.mark.parametrize("fault", FAULTS)
def test_checks_say_on_cuda_what_they_say_on_the_cpu(place, fault):
    if place == "two" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device is there, two are needed")
    there = [device.replace("stand_in", "cuda") for device in PLACES[place]]
    here, found = ({r.check: said(r) for r in judged(*devices, fault)} for devices in (PLACES["cpu"], there))
    assert found == here


def judged(first, second, fault):
    return check_loop(language_model(first, second, fault), raises=False, budget=float("inf")).results


def said(result):
    return result.outcome, [finding.cause for finding in result.findings]


def test_one_of_several_devices():
    last = torch.cuda.device_count() - 1

    def make(device="cpu"):
        return language_model(device, device, "none")()

    results = check_loop(make, only=["step_order"], device=f"cuda:{last}", raises=False).results
    assert [r.outcome for r in results] == ["passed"]


def test_memory_is_that_of_the_allocator():
    def make(device="cpu"):
        return language_model(device, device, "none")()

    (result,) = check_loop(make, only=["memory_growth"], device="cuda", raises=False).results
    assert result.outcome == "passed"
