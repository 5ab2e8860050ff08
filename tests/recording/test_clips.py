"""What is recorded of torch's clips of gradients, also of those that find nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from pytest_trainloop.recording.events import ClipCall
from pytest_trainloop.recording.torch_internals import clip_cells
from pytest_trainloop.recording.watch import Watch


def calls(clip, *, rounds=2, declared=True):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch({"": model} if declared else None, [optimizer] if declared else ()) as watch:
        for _ in range(rounds):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            clip(model)
            optimizer.step()
    return watch.record.of(ClipCall)


def test_a_clip_by_norm_that_was_imported_before():
    first, _ = calls(lambda model: clip_grad_norm_(model.parameters(), 0.5))
    assert (first.by, first.limit, first.parts) == ("clip_grad_norm_", 0.5, [[0, 1]])
    assert first.totals == [pytest.approx((first.norms[0] ** 2 + first.norms[1] ** 2) ** 0.5)]
    assert first.place.code.startswith("first, _ = calls(lambda model: clip_grad_norm_")


def test_a_clip_by_value_has_the_norms_that_it_leaves():
    first, _ = calls(lambda model: clip_grad_value_(model.parameters(), 1e-3))
    assert first.by == "clip_grad_value_"
    assert first.left == {0: pytest.approx(1e-3 * 6**0.5), 1: pytest.approx(1e-3 * 2**0.5)}


def test_the_calls_of_one_loop_over_parameters_are_one_event():
    def apart(model):
        for p in model.parameters():
            clip_grad_norm_(p, 0.5)

    assert [call.parts for call in calls(apart)] == [[[0], [1]], [[0], [1]]]


@pytest.mark.parametrize(
    "given",
    [
        lambda m: [p.grad for p in m.parameters()],
        lambda m: m.state_dict().values(),
        lambda m: [p.data for p in m.parameters()],
    ],
    ids=["gradients", "state_dict", "data"],
)
def test_what_stands_for_a_parameter_is_told(given):
    first, _ = calls(lambda model: clip_grad_norm_(given(model), 0.5))
    assert (first.parts, sorted(first.stand_ins), first.others) == ([[]], [0, 1], 0)
    assert not first.found


def test_an_iterator_that_is_used_up_is_known_again_and_warned_of_once_on_the_line():
    kept = []

    def clip(model):
        kept[:] = kept or [model.parameters()]
        clip_grad_norm_(kept[0], 0.5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = calls(clip)
    assert (first.given, second.given) == ([0, 1], [])
    assert first.iterator == second.iterator == 0
    with warnings.catch_warnings(record=True) as without_us:
        warnings.simplefilter("always")
        clip_grad_norm_((p for p in ()), 0.5)
    places = [(w.filename, "empty generator" in str(w.message)) for w in caught]
    assert places == [(__file__, True)] * len(without_us)  # torch 2.6 warns of none


def test_a_tensor_that_a_later_step_makes_known():
    delta = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([delta], lr=0.1)
    with Watch() as watch:
        delta.square().sum().backward()
        clip_grad_norm_([delta], 0.5)
        optimizer.step()
    (call,) = watch.record.of(ClipCall)
    assert (call.given, call.others) == ([0], 0)
    assert call.norms == {0: pytest.approx(12**0.5)}


def test_the_cells_are_put_back_after_an_exception():
    before = {name: cell.cell_contents for name, cell in clip_cells().items()}
    with pytest.raises(ZeroDivisionError), Watch():
        raise ZeroDivisionError
    assert {name: cell.cell_contents for name, cell in clip_cells().items()} == before
    assert {"clip_grad_norm_", "clip_grad_value_"} <= set(before)
