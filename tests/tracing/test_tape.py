"""What every tensor of a step was made of."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.tracing.tape import Gone, Listener, Tape
from pytest_trainloop.instruments.tracing.tape_queries import (
    addends,
    again,
    axis_of,
    behind,
    layout,
    made_of,
    of_unit_rows,
    unmoved,
)
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain

ROWS = 4


def seen(loss_of, look, *, net=None, batch=None, tape=None):
    """What ``look`` finds of the first loss, or of the tensors that ``loss_of`` gives with it, while they live."""
    tape = tape or Tape()
    found = []

    def loss(net, item):
        out = loss_of(net, item)
        tensors = out if isinstance(out, tuple) else (out,)
        if tape.is_on and not found:
            values = [tape.of(t) for t in tensors]
            with tape.watch.suspended():
                found.append(look(*values))
        return tensors[0]

    def make():
        data = batch if batch is not None else (torch.randn(ROWS, 3), torch.randn(ROWS, 2))
        return plain.loop(net() if net else nn.Linear(3, 2), data, loss)

    Evidence(make).rerun(contexts=tape.contexts, before_item=tape.take)
    return found[0]


def ops(value):
    return [one.op for one in made_of(value) if one.op]


def test_a_value_knows_its_calls_back_to_parameters_and_batch():
    def look(loss):
        leaves = [(v.path, v.parameter) for v in made_of(loss) if v.call is None]
        call = next(v.call for v in made_of(loss) if v.op == "linear")
        return ops(loss), sorted(leaves), call.module, call.place.code

    found, leaves, module, code = seen(lambda net, b: (net(b[0]) - b[1]).square().mean(), look, net=Inside)
    assert found == ["mean", "square", "sub", "linear"]
    assert leaves == [("", True), ("", True), ("batch[0]", False), ("batch[1]", False)]
    assert module == "inner"
    assert "self.inner(x)" in code


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return self.inner(x)


def test_a_value_knows_of_which_tensors_of_the_batch_it_was_made():
    def look(loss, out):
        return bin(loss.batch), bin(out.batch)

    def loss(net, batch):
        out = net(batch[0])
        return F.mse_loss(out, batch[1]), out

    assert seen(loss, look) == ("0b11", "0b1")


def test_an_operator_that_writes_in_place_makes_a_new_value_of_the_same_tensor():
    def loss(net, batch):
        out = net(batch[0])
        out += 1
        out.mul_(2)
        return out.sum(), out

    def look(_, out):
        before = out.parents[0]
        return ops(out), before.tensor, before.parents[0].tensor, out.tensor is not None

    assert seen(loss, look) == (["mul", "add", "linear"], None, None, True)


def through_a_view(net, batch):
    out = net(batch[0]).clone()
    column = out[:, 0]
    column *= 2
    return out.sum(), out


def through_a_detached_tensor(net, batch):
    out = net(batch[0]).clone()
    out.detach()[:, 0].mul_(2)
    return out.sum(), out


@pytest.mark.parametrize("loss", [through_a_view, through_a_detached_tensor])
def test_a_write_by_way_of_another_tensor_is_seen(loss):
    def look(_, out):
        before, writer = out.parents
        with pytest.raises(Gone):
            again(out, {before.parents[0]: torch.zeros(ROWS, 2)})
        return (
            out.op,
            before.op,
            before.tensor,
            writer.op,
            "mul_" in writer.call.place.code or "*=" in out.call.place.code,
        )

    assert seen(loss, look) == ("write", "clone", None, "mul", True)


def test_a_write_by_way_of_a_view_does_not_hide_the_layer_and_its_positions():
    def loss(net, batch):
        out = net(batch[0])
        out.detach()[0, 0].zero_()
        return out.sum(), out

    def look(_, out):
        return out.op, behind(out).op, layout(out).layer.op

    assert seen(loss, look) == ("write", "linear", "linear")


def test_calls_are_made_again_with_other_values():
    def loss(net, batch):
        out = net(batch[0])
        return (out.square() * out.exp()).mean(), out

    def look(loss, out):
        other = torch.arange(8.0, dtype=torch.float64).reshape(ROWS, 2) / 8
        return torch.equal(again(loss, {out: other}), (other.square() * other.exp()).mean())

    assert seen(loss, look)


def test_what_was_freed_is_computed_again_and_what_was_drawn_is_gone():
    def loss(net, batch):
        out = net(batch[0])
        return (out * (torch.ones(ROWS, 2) + 1)).sum() * 1.0, (out + torch.rand(ROWS, 2)).sum(), out

    def look(plain, drawn, out):
        other = torch.ones(ROWS, 2)
        with pytest.raises(Gone):
            again(drawn, {out: other})
        return float(again(plain, {out: other}))

    assert seen(loss, look) == 16.0


def test_writes_are_made_again_on_copies():
    def loss(net, batch):
        out = net(batch[0])
        weights = torch.ones(ROWS, 2)
        weights[1:] = 3
        return (weights * out).sum(), out

    def look(loss, out):
        return [float(again(loss, {out: torch.ones(ROWS, 2)})) for _ in range(2)]

    assert seen(loss, look) == [20.0, 20.0]


def test_questions_to_single_values():
    def loss(net, batch):
        rows = F.normalize(net(batch[0]))
        table = rows @ rows.T
        return table.softmax(1).sum() + 2 * table.mean(), table, table.softmax(0).view(-1).float()

    def look(loss, table, moved):
        terms = sorted(value.op for value, alive in addends(loss, frozenset({"add", "mul"})) if alive)
        return of_unit_rows(table), axis_of(unmoved(moved)), terms

    assert seen(loss, look) == (True, 0, ["mean", "sum"])


class Listening(Listener):
    """Notes what a tape reports while calls are made."""

    def __init__(self):
        self.seen, self.steps = [], 0

    def before(self, call, args, kwargs):
        self.seen.append(f"before {call.op}")

    def after(self, call, args, kwargs, out):
        self.seen.append(f"after {call.op}")

    def raised(self, call, args, kwargs, error):
        self.seen.append(f"{call.op} raised {type(error).__name__}")

    def began(self, frame):
        self.seen.append(f"{frame.f_code.co_name} began")
        return "running"

    def ended(self, running, result):
        self.seen.append(f"{running} ended with {tuple(result.shape)}")

    def new_step(self):
        self.steps += 1


def counted_loss(scores):
    return (scores * 2).sum()


def test_a_listener_gets_calls_of_its_names_and_functions_that_run():
    listener = Listening()
    named = lambda frame: frame.f_code.co_name == "counted_loss"  # noqa: E731
    tape = Tape(listener, frozenset({"exp", "view"}), named)

    def loss(net, batch):
        out = net(batch[0])
        with pytest.raises(RuntimeError):
            out.view(5)
        return counted_loss(out) + out.exp().sum()

    seen(loss, lambda loss: None, tape=tape)
    assert listener.seen[:6] == [
        "before view",
        "view raised RuntimeError",
        "counted_loss began",
        "running ended with ()",
        "before exp",
        "after exp",
    ]
    assert listener.steps > 1


def test_nothing_of_a_step_is_held_after_it():
    held, alive = [], []

    def loss(net, batch):
        if held and not alive:
            alive.append(held[0]() is not None)
        out = net(batch[0])
        held.append(weakref.ref(out))
        return out.square().sum()

    gc.disable()
    try:
        seen(loss, lambda loss: None)
    finally:
        gc.enable()
    assert alive == [False]


def test_the_batch_of_each_step_is_known():
    tape, bits = Tape(), []

    def loss(net, batch):
        out = net(batch[0])
        if tape.is_on:
            bits.append(tape.of(out).batch)
        return F.mse_loss(out, batch[1])

    seen(loss, lambda loss: None, tape=tape)
    assert len(bits) > 2
    assert set(bits) == {1}


def test_a_function_that_gives_its_input_back_written_to_writes():
    def loss(net, batch):
        out = net(batch[0])
        return F.relu(out, inplace=True).sum(), out

    def look(_, out):
        given = torch.full((ROWS, 2), -1.0)
        again(out, {out.parents[0]: given})
        return out.op, out.call.writes, given.sum().item()

    assert seen(loss, look) == ("relu", True, -8.0)
