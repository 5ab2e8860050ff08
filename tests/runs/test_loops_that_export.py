"""Loops that trace or export their model, as for a log, and models that get their shapes from the first batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop


class OverRows(nn.Module):
    """Its rows are normalised by each other."""

    def __init__(self, lazy=False):
        super().__init__()
        self.a, self.b = (nn.LazyLinear(16) if lazy else nn.Linear(6, 16)), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(F.normalize(self.a(x), dim=0))


def loop(act, *, lazy=False):
    def make():
        model = OverRows(lazy)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for i, (x, y) in enumerate(batches):
                if i == 0:
                    act(model, x)
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(
            model=model, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randint(0, 4, (8,))), fit=fit
        )

    return make


def fake(model, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)


ACTS = {
    "nothing": lambda model, x: None,
    "trace": lambda model, x: torch.jit.trace(model, torch.randn(3, 6)),
    "script": lambda model, x: torch.jit.script(model),
    "export": lambda model, x: torch.export.export(model, (x,)),
    "fake tensors": fake,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ACTS)
def test_the_fault_is_found_all_the_same(name):
    checks = ["batch_independence", "input_dependence", "loss_contract", "causality"]
    results = {r.check: r for r in check_loop(loop(ACTS[name]), only=checks, raises=False).results}
    assert [f.cause for f in results["batch_independence"].findings] == ["normalised_over_rows"]
    assert results["input_dependence"].outcome == results["loss_contract"].outcome == "passed"
    assert "no loss function of torch is called with the next tokens" in results["causality"].reason


def test_a_lazy_model_is_judged_as_one_that_is_not():
    results = {r.check: r for r in check_loop(loop(lambda model, x: None, lazy=True), raises=False).results}
    plain = {r.check: r for r in check_loop(loop(lambda model, x: None), raises=False).results}
    assert [f.cause for f in results["batch_independence"].findings] == ["normalised_over_rows"]
    assert {c: r.outcome for c, r in results.items()} == {c: r.outcome for c, r in plain.items()}
