"""From the line where a fault is seen to the statement that made the value, by the source."""

import pytest

from pytest_trainloop.instruments.tracing import definitions, statements, syntax

SOURCE = """\
import torch
from torch import nn

class Config:
    clip = 1e-4

def causal(length):
    return torch.ones(length, length).triu(2).bool()

class Model(nn.Module):
    def forward(self, x, pad):
        hidden = causal(x.shape[1])
        scores = x.masked_fill(hidden, -torch.inf)
        x = scores.softmax(-1) @ x
        x = x + self.position(self.places(x))
        return self.attention(x, x, x, key_padding_mask=pad, need_weights=False)

    def places(self, x):
        return torch.arange(x.shape[1])

def groups(model):
    skipped = ["LayerNorm.weight"]
    return [p for n, p in model.named_parameters() if not any(s in n for s in skipped)]

def cosine(optimizer, warmup, total):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / total)

def train(model, optimizer, loader, cfg):
    updates = len(loader)
    scheduler = cosine(optimizer, 2, updates)
    best = model.state_dict()
    for batch in loader:
        loss = criterion(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        meter(loss)
    model.load_state_dict(best)

def meter(value):
    total = total + value

def criterion(model, batch):
    with torch.no_grad():
        encoded = model(*batch)
    return (encoded - batch[0]).square().mean()

def weighted(model, batch, rng):
    order = rng.permutation(len(batch))
    rows = batch[order]
    wanted = batch[1]
    loss = nn.functional.l1_loss(model(rows), wanted)
    loss = loss * rows.mean()
    loss = nn.functional.mse_loss(model(batch[order]), wanted)
    return loss
"""


@pytest.fixture
def at(tmp_path, monkeypatch):
    """The line of a finding that has this text in it."""
    (tmp_path / "train.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    syntax.source_of.cache_clear()
    return lambda part: next(
        f"train.py:{number}   {line.strip()}"
        for number, line in enumerate(SOURCE.splitlines(), start=1)
        if line.strip().startswith(part)
    )


@pytest.mark.parametrize(
    ("ask", "seen", "made"),
    [
        (definitions.mask, "x = scores.softmax", "return torch.ones(length, length)"),
        (lambda line: definitions.positions(line)[0], "x = x + self.position", "return torch.arange"),
        (definitions.names_in_condition, "return [p for n", "skipped ="),
        (definitions.length_given, "return torch.optim", "updates ="),
        (definitions.value, "loss.backward()", "return (encoded"),
        (definitions.copied, "model.load_state_dict", "best ="),
        (statements.without_gradients, "encoded =", "with torch.no_grad()"),
        (lambda line: definitions.argument(line, "clip_grad_norm_", "max_norm", 1), "nn.utils.clip", "clip = 1e-4"),
        (lambda line: definitions.mask(line, of=definitions.CAUSAL_MASKS), "return self.attention", ""),
        (definitions.mask, "updates =", ""),
        (statements.after, "best =", "for batch in loader"),
        (definitions.index, "rows = batch", "order = rng"),
        (definitions.index, "loss = nn.functional.l1_loss", "order = rng"),
        (definitions.compared, "loss = nn.functional.mse_loss", "wanted ="),
        (definitions.subtracted, "loss = nn.functional.mse_loss", "wanted ="),
        (definitions.source_of_draws, "order = rng", "order = rng"),
        (statements.overwritten, "loss = nn.functional.l1_loss", ""),
        (statements.overwritten, "loss = loss *", "loss = nn.functional.mse_loss"),
    ],
)
def test_a_value_is_followed_to_the_statement_that_made_it(at, ask, seen, made):
    assert ask(at(seen)) == (at(made) if made else "")


def test_a_line_that_no_file_has_is_followed_nowhere():
    assert definitions.value("<stdin>:3   loss.backward()") == ""
