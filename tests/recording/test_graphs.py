"""Marks on the graphs of backward passes: they die with the graph, and change nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.recording.graphs import metadata_of
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, net


def watched(body, *, steps=9):
    """The watch of a run in which ``body(model, x)`` makes each loss, and what it kept."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch({"": model}, [optimizer]) as watch:
        for x, _ in batches(steps):
            optimizer.zero_grad()
            body(model, x)
            optimizer.step()
    return watch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


FREED = {
    "plain": lambda model, x: model(x).sum().backward(),
    "retained": lambda model, x: model(x).sum().backward(retain_graph=True),
    "two roots": lambda model, x: torch.autograd.backward([model(x).sum(), model(x).mean()]),
    "grad": lambda model, x: torch.autograd.grad(model(x).sum(), list(model.parameters())),
    "create_graph": lambda model, x: sum(
        g.square().sum() for g in torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
    ).backward(),
    "custom function": lambda model, x: Square.apply(model(x)).sum().backward(),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).sum().backward(),
    "reentrant checkpoint": lambda model, x: (
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()
    ),
    "functorch": lambda model, x: torch.func.vmap(model)(x).sum().backward(),
    "hessian": lambda model, x: torch.autograd.functional.hessian(lambda y: model(y).square().sum(), x[:1]),
    "compiled": lambda model, x: torch.compile(model, backend="eager")(x).sum().backward(),
}


@pytest.mark.parametrize("case", FREED)
def test_what_a_pass_went_through_is_gone_later(case):
    watch = watched(FREED[case])
    assert watch.record.graphs is not None
    assert watch.record.graphs.rounds == 9
    assert watch.record.graphs.kept == ()


def test_a_graph_that_no_pass_went_through_carries_no_mark():
    kept = []

    def body(model, x):
        kept.append(model(x).mean())
        model(x).sum().backward()

    watch = watched(body)
    assert watch.record.graphs.kept == ()


def test_a_pass_for_some_inputs_marks_the_way_to_them_alone():
    kept = []

    def body(model, x):
        x = x.clone().requires_grad_()
        kept.append(model(torch.ones(1, 3)).sum())
        torch.autograd.grad((x.sum() * kept[-1]).square(), x)
        model(x).sum().backward()

    assert watched(body).record.graphs.kept == ()


def test_a_retained_graph_may_be_used_again():
    kept = []

    def body(model, x):
        kept.append(model(x).sum())
        kept[-1].backward(retain_graph=True)

    watch = watched(body)
    assert watch.record.graphs.all_kept
    assert watch.graphs.retained() >= {1, 2, 3, 4, 5, 6}


def test_a_pass_through_earlier_graphs_is_known():
    carried = [torch.zeros(())]

    def body(model, x):
        carried[0] = carried[0] + model(x).sum()
        carried[0].backward(retain_graph=True)

    watch = watched(body, steps=1)
    assert watch.graphs.reaches == {1: frozenset()}
    linear = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.01)
    total = torch.zeros(())
    with Watch({"": linear}, [optimizer]) as watch:
        for x, _ in batches(4):
            optimizer.zero_grad()
            total = total + linear(x).sum()  # linear: no step changes what its graph needs
            total.backward(retain_graph=True)
            optimizer.step()
    assert watch.graphs.reaches == {1: frozenset(), 2: {1}, 3: {1, 2}, 4: {1, 2, 3}}


def test_one_loss_that_is_backpropagated_twice_is_no_earlier_graph():
    model = net()
    watch = Watch({"": model}, [torch.optim.SGD(model.parameters(), lr=0.01)])
    with watch:
        loss = model(batches(1)[0][0]).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert watch.record.refused is None


def test_a_mark_keeps_no_tensor_alive_and_leaves_with_the_graph():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch({"": model}, [optimizer]) as watch:
        out = model(batches(1)[0][0])
        ref, node = weakref.ref(out), out.grad_fn
        out.sum().backward()
        assert watch.graphs.window_of(node) == 1
        assert watch.graphs.alive() == {1}
        del out, node
        gc.collect()
        assert ref() is None
        assert watch.graphs.alive() == set()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_keeps_its_own_metadata():
    model = net()
    with Watch({"": model}, [torch.optim.SGD(model.parameters(), lr=0.01)]), torch.autograd.detect_anomaly(False):
        out = model(batches(1)[0][0]).sum()
        out.backward()
        assert "traceback_" in metadata_of(out.grad_fn)


def test_graphs_of_another_run_are_not_those_of_this_one():
    kept = []

    def body(model, x):
        kept.append(model(x).sum())
        kept[-1].backward()

    watched(body)
    assert watched(FREED["plain"]).record.graphs.kept == ()
