"""Roots taken apart, and numbers that no backward pass goes through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop.instruments.tracing.root_terms import RootTerms
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain


def seen(loss_of, steps=1):
    found = RootTerms()
    Evidence(lambda: plain.loop(nn.Linear(3, 2), torch.randn(4, 3), loss_of)).rerun(
        contexts=found.contexts, before_item=found.take_batch, enough=lambda record: record.rounds >= steps
    )
    return found


def parts(loss_of):
    return [(term.op, term.cut) for term in seen(loss_of).roots[0].terms if not term.live]


def square(model, x):
    return (model(x) ** 2).mean()


def test_a_sum_of_terms_with_a_gradient_has_no_constant():
    (root,) = seen(lambda m, x: square(m, x) + 0.5 * m(x).abs().sum() / 4).roots
    assert [term.live for term in root.terms] == [True, True]


@pytest.mark.parametrize(
    ("term", "cut"),
    [
        (lambda m, x: square(m, x).item(), "number"),
        (lambda m, x: square(m, x).detach(), "end"),
        (lambda m, x: 0.1 * square(m, x).detach(), "end"),
        (lambda m, x: square(m, x.detach()).data, "end"),
        (lambda m, x: (m(x).detach() ** 2).mean(), "before"),
        (lambda m, x: m(x).argmax(-1).float().mean(), "before"),
        (lambda m, x: m(x).round().mean(), "before"),
        (lambda m, x: torch.tensor(square(m, x).item(), requires_grad=True), "number"),
    ],
)
def test_what_is_added_without_a_gradient_is_told_by_how_it_lost_it(term, cut):
    found = [kind for _, kind in parts(lambda m, x: square(m, x) + term(m, x))]
    assert found == [cut]


def test_a_derivative_without_a_graph_is_told_from_others():
    def loss_of(model, x, create_graph):
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(square(model, x), x, retain_graph=True, create_graph=create_graph)[0]
        return square(model, x) + (slope**2).sum()

    assert [kind for _, kind in parts(lambda m, x: loss_of(m, x, False))] == ["derivative"]
    assert parts(lambda m, x: loss_of(m, x, True)) == []


def test_numbers_that_no_backward_pass_goes_through():
    def loss_of(model, x):
        lost = model(x).abs().sum()
        weight = 0.0 * model(x).sum()
        del lost
        return square(model, x) + weight

    scalars = seen(loss_of).scalars
    assert [s.op for s in scalars if not s.used] == ["sum"]
    assert [s.weights for s in scalars if s.op == "sum" and s.used] == [[0.0]]


def test_nothing_of_the_loop_is_kept():
    found = seen(square, steps=3)
    assert len(found.roots) == 3
    assert not found._by_node
    assert found._lineage is None
