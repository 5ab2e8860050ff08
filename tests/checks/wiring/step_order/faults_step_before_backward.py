"""Steps between forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair

# Regression: with zeros in place of None, and where torch notices the changed weights.


def train_mlp_stepping_first(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), y)
        optimizer.step()
        loss.backward()


def train_mlp_step_zero_backward(model, optimizer, batches):
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        optimizer.step()
        loss.backward()


def train_mlp_forward_step_backward(model, optimizer, batches):
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()


def train_mlp(model, optimizer, batches):
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def regression(train):
    def make():
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            batches=lambda n: [data.table(seed=i) for i in range(n)],
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


for name, train, complaint in (
    ("zero_forward_step_backward", train_mlp_stepping_first, "modified by an inplace operation"),
    ("forward_zero_step_backward", train_mlp_step_zero_backward, None),
    ("forward_step_zero_backward", train_mlp_forward_step_backward, "modified by an inplace operation"),
):
    pair(
        f"mlp_{name}",
        "step_order",
        "step_before_backward",
        where="optimizer.step()",
        raises=complaint,
        faulty=regression(train),
        fixed=regression(train_mlp),
    )


# FactorVAE: the discriminator's loss goes back through the encoder, whose weights were stepped, after another forward
# pass of its own.


def factorised(late):
    def make():
        encoder, decoder, critic = relu_mlp(6, 16, 4), nn.Linear(4, 6), relu_mlp(4, 16, 2)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
        of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)

        def fit(batches):
            for x, other in batches:
                z = encoder(x)
                scores = critic(z)
                optimizer.zero_grad()
                (F.mse_loss(decoder(z), x) + (scores[:, :1] - scores[:, 1:]).mean()).backward(retain_graph=True)
                optimizer.step()
                mixed = critic(encoder(other)[torch.randperm(len(x))].detach())
                scores = scores if late else critic(z.detach())
                real, fake = torch.zeros(len(x)).long(), torch.ones(len(x)).long()
                of_critic.zero_grad()
                (0.5 * (F.cross_entropy(scores, real) + F.cross_entropy(mixed, fake))).backward()
                of_critic.step()

        return TrainLoop(
            model={"encoder": encoder, "decoder": decoder, "critic": critic},
            optimizer=[optimizer, of_critic],
            batch=(data.table()[0], data.table(seed=1)[0]),
            fit=fit,
        )

    return make


pair(
    "critic_after_the_step_of_the_encoder",
    "step_order",
    "step_before_backward",
    where="optimizer.step()",
    raises="modified by an inplace operation",
    faulty=factorised(late=True),
    fixed=factorised(late=False),
)
