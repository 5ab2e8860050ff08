"""Forward passes in training mode that train nothing, and what is made of their results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.train_mode.evaluations import evaluated_in_training_mode
from pytest_trainloop.runs.evidence import Evidence


class Switched(nn.Module):
    """Asks for its mode, and does the same in both."""

    def forward(self, x):
        return x.clone() if self.training else x


class Dropping(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


class Wrapped(nn.Module):
    """Returns a dict in training mode, as detectors do."""

    def forward(self, x):
        return {"out": x} if self.training else x


def levels(use, *, every=3, held_out=True, draw=False, acts=nn.Dropout, look=lambda model, given: model(given)):
    """The levels of what is found in a loop that hands what ``look`` gives in training mode to ``use``."""

    def make():
        body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), acts(), Switched(), nn.Linear(16, 3))
        model = nn.Sequential(*body, Wrapped()) if look is unwrapped else body
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        others, labels = torch.randn(8, 6), torch.randint(3, (8,))

        def fit(batches):
            extra = torch.zeros(())
            for i, (x, y) in enumerate(batches):
                loss = F.cross_entropy(body(x), y) + extra
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if i % every == every - 1:
                    with torch.no_grad():
                        out = look(model, torch.randn(8, 6) if draw else others if held_out else x)
                    made = use(out, labels if held_out else y, optimizer)
                    extra = torch.zeros(()) if made is None else made

        batch = (torch.randn(8, 6), torch.randint(3, (8,)))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return [finding.level for finding in evaluated_in_training_mode(Evidence(make))]


def unwrapped(model, given):
    out = model(given)
    return out["out"] if isinstance(out, dict) else out


def score(out, y, _optimizer):
    F.cross_entropy(out, y).item()


def lower(out, y, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5 if F.cross_entropy(out, y).item() > 1.0 else 0.9


@pytest.mark.parametrize(
    "use",
    [
        score,
        lower,
        lambda out, y, _o: print(f"{(out.argmax(1) == y).float().mean():.3f}"),
        lambda out, y, _o: float((out.softmax(1).max(1).values).mean()) and None,
        lambda out, y, _o: (out.argmax(1) == y).sum().tolist() and None,
        lambda out, _y, _o: out.argmax(1).tolist() and None,
        lambda out, y, _o: float((out.argmax(1).numpy() == y.numpy()).mean()) > 2 or None,
    ],
    ids=["loss", "sets the lr", "printed", "mean", "count", "predictions for a fixed set", "compared by numpy"],
)
def test_a_number_made_of_the_results_is_a_score(use):
    assert levels(use) == ["fault"]


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


def test_what_is_chosen_for_new_inputs_is_no_score():
    assert levels(lambda out, _y, _o: out.argmax(1).tolist() and None, draw=True) == []


@pytest.mark.parametrize(
    ("level", "how"),
    [
        ("advice", {"held_out": False}),
        ("advice", {"every": 1}),
        ("advice", {"look": unwrapped}),
        ("fault", {"acts": Dropping}),
        ("fault", {"look": lambda model, x: torch.cat([model(part) for part in x.split(4)])}),
        ("fault", {"look": lambda model, x: model(input=x)}),
        ("fault", {"acts": lambda: nn.BatchNorm1d(16), "look": lambda model, x: (model(x) + model(x)) / 2}),
        ("", {"look": lambda model, x: torch.stack([model(x) for _ in range(4)]).mean(0)}),
        ("", {"look": lambda model, x: model(x[:1].repeat(8, 1))}),
        ("", {"acts": lambda: nn.Dropout(0.0)}),
    ],
    ids=[
        "the batch that was trained on",
        "with every step",
        "another structure",
        "functional dropout",
        "a set in batches",
        "by keyword",
        "a norm twice",
        "samples",
        "samples in one batch",
        "a mode that changes nothing",
    ],
)
def test_how_the_results_come_about_decides_the_level(level, how):
    assert levels(score, **how) == ([level] if level else [])
