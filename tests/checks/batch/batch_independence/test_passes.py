"""Gradients of one pass: which rows meet, which positions are seen, which tensors are read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop.checks.batch.batch_independence.label_rows import LabelRows
from pytest_trainloop.checks.batch.batch_independence.passes import RowPasses
from pytest_trainloop.checks.batch.causality.passes import CausalPasses
from pytest_trainloop.checks.batch.input_dependence.passes import InputRuns, named
from pytest_trainloop.loop import TrainLoop
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.tracing.forward_pass import weighted_sum


class Net(nn.Module):
    def __init__(self, forward, **layers):
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), forward

    def forward(self, *args, **kwargs):
        return self.function(self.layers, *args, **kwargs)


def evidence(net, batch, loss_of):
    def make():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for item in batches:
                optimizer.zero_grad()
                loss_of(model, item).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return Evidence(make)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


TABLE = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4)


def table(forward, **layers):
    return evidence(lambda: Net(forward, body=nn.Linear(6, 9), head=nn.Linear(9, 4), **layers), TABLE, classify)


def test_each_entry_has_a_weight_of_its_own():
    values = torch.full((50,), 0.1, requires_grad=True)
    (slope,) = torch.autograd.grad(weighted_sum(values), values)
    assert torch.unique(slope).numel() == 50
    assert float(slope.abs().min()) > 0


def test_rows_that_do_not_meet():
    assert table(lambda m, x: m["head"](F.dropout(m["body"](x)).relu())).shared(RowPasses).interaction() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_rows_are_told_behind_a_checkpoint_that_draws(reentrant):
    def forward(m, x, between=lambda h: h):
        h = checkpoint(lambda h: F.dropout(between(h)).relu(), m["body"](x), use_reentrant=reentrant)
        return m["head"](h)

    assert table(forward).shared(RowPasses).interaction() is None
    found = table(lambda m, x: forward(m, x, lambda h: h.softmax(0))).shared(RowPasses).interaction()
    assert found is not None


@pytest.mark.parametrize(
    ("between", "why", "op"),
    [
        (lambda h: h.softmax(0), "softmax", "softmax"),
        (lambda h: F.normalize(h, dim=0), "normalised", "normalize"),
        (lambda h: h - h.mean(0), "normalised", "sub"),
        (lambda h: h * (h.pow(2).mean(0) + 1e-6).rsqrt(), "normalised", "mul"),
        (lambda h: h / h.abs().max(), "unknown", "max"),
        (lambda h: h.T.reshape(len(h), -1), "views", "reshape"),
        (lambda h: h + h.roll(1, 0), "unknown", "roll"),
        (lambda h: F.batch_norm(h, None, None, training=True), "batch_norm", "batch_norm"),
    ],
    ids="softmax length centred rms range reshape roll batch_norm".split(),
)
def test_what_lets_rows_meet(between, why, op):
    found = table(lambda m, x: m["head"](between(m["body"](x)))).shared(RowPasses).interaction()
    assert found is not None
    assert found.rows_known
    assert (found.why, found.ops[0].name) == (why, op)


def test_a_statistic_beside_the_rows_scales_none_of_them():
    def forward(m, x):
        hidden = m["body"](x)
        return m["head"](hidden) + (hidden - hidden.mean(0)).square().mean()

    found = table(forward).shared(RowPasses).interaction()
    assert found is not None
    assert found.why == "unknown"


TEXT = torch.randint(20, (5, 12), generator=torch.Generator().manual_seed(1))


def language(mix, loss_of=None):
    def forward(m, ids):
        hidden = m["embed"](ids)
        return m["head"](hidden + mix(hidden))

    def next_token(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return evidence(lambda: Net(forward, embed=nn.Embedding(20, 7), head=nn.Linear(7, 20)), TEXT, loss_of or next_token)


@pytest.mark.parametrize(
    ("mix", "kind", "offsets"),
    [
        (lambda h: F.pad(h, (0, 0, 0, 1))[:, 1:], "other", (0, 1)),
        (lambda h: F.scaled_dot_product_attention(h, h, h), "attention", (-7, 8)),
        (lambda h: F.layer_norm(h, h.shape[1:]), "statistics", (-7, 8)),
        (lambda h: h.mean(1, keepdim=True), "statistics", (-7, 8)),
    ],
    ids="next attention norm mean".split(),
)
def test_what_lets_positions_see_later_ones(mix, kind, offsets):
    found = language(mix).shared(CausalPasses).leak()
    assert found is not None
    assert found.modes == ("training", "evaluation")
    assert (found.ahead, found.kind, found.offsets[0], found.offsets[-1]) == (1, kind, *offsets)


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
        lambda h: h.cumsum(1),
        lambda h: F.pad(h, (0, 0, 1, 0))[:, :-1],
        lambda h: h.mean(1, keepdim=True).detach(),
    ],
    ids="attention sum previous detached".split(),
)
def test_positions_that_see_no_later_ones(mix):
    assert language(mix).shared(CausalPasses).leak() is None


def test_labels_in_another_order_than_outputs():
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    mixed = table(lambda m, x: m["head"](m["body"](x[order])))
    assert mixed.shared(LabelRows.of).mismatched
    together = evidence(
        lambda: Net(lambda m, x: m["head"](x), head=nn.Linear(6, 4)),
        TABLE,
        lambda model, batch: F.cross_entropy(model(batch[0][order]), batch[1][order]),
    )
    partners = together.shared(LabelRows.of)
    assert partners.mismatched == []
    assert partners.pairs[:3] == [(3, 3), (0, 0), (7, 7)]


def test_labels_moved_on_by_a_constant_number_of_rows():
    moved = evidence(
        lambda: Net(lambda m, x: m["head"](x), head=nn.Linear(6, 4)),
        TABLE,
        lambda model, batch: F.cross_entropy(model(batch[0][:-1]), batch[1][1:]),
    ).shared(LabelRows.of)
    assert moved.mismatched == []
    assert moved.pairs[0] == (1, 0)


def test_tensors_that_are_read_and_not():
    assert table(lambda m, x: m["head"](m["body"](x))).shared(InputRuns).unused() is None
    blind = table(lambda m, x: m["head"](m["body"](torch.ones_like(x)))).shared(InputRuns).unused()
    assert blind is not None
    assert blind.no_input_used
    assert [tensor.name for tensor in blind.tensors] == ["batch[0]"]


def test_places_in_a_nest():
    x, y, z = torch.zeros(1), torch.ones(2), torch.ones(3)
    found = dict(named({"a": [x, {"b": y}], "c": z}))
    assert [found[id(t)] for t in (x, y, z)] == ["batch['a'][0]", "batch['a'][1]['b']", "batch['c']"]
