"""Forward passes in training mode that train nothing, and what is made of their results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.train_mode.evaluations import evaluations
from pytest_trainloop.runs.evidence import Evidence


class Switched(nn.Module):
    """Asks for its mode, and does the same in both."""

    def forward(self, x):
        return x.clone() if self.training else x


def evidence(use, *, every=3, held_out=True, draw=False, dropout=0.5, looks=1):
    """The evidence on a loop that hands what its model gives for other rows, in training mode, to ``use``."""

    def make():
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), Switched(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        others, labels = torch.randn(8, 6), torch.randint(3, (8,))

        def fit(batches):
            extra = torch.zeros(())
            for i, (x, y) in enumerate(batches):
                loss = F.cross_entropy(model(x), y) + extra
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if i % every == every - 1:
                    given = torch.randn(8, 6) if draw else others if held_out else x
                    with torch.no_grad():
                        out = torch.stack([model(given) for _ in range(looks)]).mean(0)
                    made = use(out, labels if held_out else y, optimizer)
                    extra = torch.zeros(()) if made is None else made

        batch = (torch.randn(8, 6), torch.randint(3, (8,)))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return Evidence(make)


def levels(*args, **kwargs):
    return [level for _, level in evaluations(evidence(*args, **kwargs))]


@pytest.mark.parametrize(
    "score",
    [
        lambda out, y, _o: print(f"{(out.argmax(1) == y).float().mean():.3f}"),
        lambda out, y, _o: F.cross_entropy(out, y).item() and None,
        lambda out, y, _o: float((out.softmax(1).max(1).values).mean()) and None,
        lambda out, y, _o: (out.argmax(1) == y).sum().tolist() and None,
        lambda out, _y, _o: out.argmax(1).tolist() and None,
        lambda out, y, _o: float((out.argmax(1).numpy() == y.numpy()).mean()) > 2 or None,
    ],
    ids=["printed", "a loss", "a mean", "a count", "predictions for a fixed set", "predictions compared by numpy"],
)
def test_a_number_made_of_the_results_is_a_score(score):
    assert levels(score) == ["fault"]


@pytest.mark.parametrize(
    "use",
    [
        lambda out, _y, _o: None,
        lambda out, _y, _o: out.softmax(1).multinomial(1)[0, 0].item() and None,
        lambda out, _y, _o: torch.distributions.Categorical(logits=out).sample() is None or None,
        lambda out, _y, _o: 0.1 * out.mean(),
    ],
    ids=["unused", "drawn", "a distribution checks its arguments", "trained on"],
)
def test_what_is_drawn_chosen_or_trained_on_is_no_score(use):
    assert levels(use) == []


def test_a_score_that_sets_the_lr_is_one_all_the_same():
    def lower(out, y, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5 if F.cross_entropy(out, y).item() > 1.0 else 0.9

    assert levels(lower) == ["fault"]


def score(out, y, _optimizer):
    F.cross_entropy(out, y).item()


def test_a_look_at_the_training_batch_is_advice():
    assert levels(score, held_out=False) == ["advice"]


def test_a_look_with_every_step_is_advice():
    assert levels(score, every=1) == ["advice"]


def actions(out, _y, _optimizer):
    out.argmax(1).tolist()


def test_what_is_chosen_for_new_inputs_is_no_score():
    assert levels(actions, draw=True) == []


def test_the_mode_that_changes_nothing_is_none_of_our_business():
    assert levels(score, dropout=0.0) == []


def test_several_looks_at_the_same_are_samples():
    assert levels(score, looks=4) == []
