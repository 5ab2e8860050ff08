"""Right losses of policies and values that resemble a textbook form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.unusual_fields import ratio_of, rollout, trained
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd


def transitions(rows=8):
    state = torch.randn(rows, 6)
    return {
        "state": state,
        "action": torch.randint(4, (rows, 1)),
        "reward": torch.randn(rows, 1),
        "next": state + 0.3 * torch.randn(rows, 6),
        "mask": (torch.arange(rows) % 4 != 3).float()[:, None],
        "old": 0.2 + 0.1 * torch.rand(rows, 1),
    }


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def pi(self, x):
        return self.policy(self.body(x).relu()).softmax(1)

    def v(self, x):
        return self.value(self.body(x).relu())


@odd(
    notes="the target has a gradient beside numpy, where advantages are made of it, and none where the value is fitted"
)
def target_detached_where_it_is_used():
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def fit(batches):
        for b in batches:
            td_target = b["reward"] + 0.98 * model.v(b["next"]) * b["mask"]
            delta = (td_target - model.v(b["state"])).detach().numpy()
            advantages, running = [], 0.0
            for d in delta[::-1]:
                running = 0.98 * 0.95 * running + d[0]
                advantages.append([running])
            advantage = torch.tensor(advantages[::-1]).to(td_target.dtype)
            ratio = torch.exp(torch.log(model.pi(b["state"]).gather(1, b["action"])) - torch.log(b["old"]))
            surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 0.9, 1.1) * advantage)
            loss = -surrogate + F.smooth_l1_loss(model.v(b["state"]), td_target.detach())
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=transitions(), fit=fit)


@odd(
    notes="the error of the target is logged with its gradient, and weighs rows; the value is fitted to a detached one"
)
def error_with_a_gradient_is_only_logged():
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    logged = []

    def fit(batches):
        for b in batches:
            target = b["reward"] + 0.98 * b["mask"] * model.v(b["next"])
            value = model.v(b["state"])
            error = target - value
            priority = error.abs().detach() + 1e-3
            logged.append(error.square().mean().item())
            log_prob = torch.log(model.pi(b["state"]).gather(1, b["action"]))
            loss = -(log_prob * error.detach()).mean() + (priority * (value - target.detach()).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=transitions(), fit=fit)


@odd(notes="the clip is in the space of logarithms: bounds around 0, and no exponential")
def clipped_logarithms_of_the_ratio():
    def loss_of(model, b):
        new = Categorical(logits=model(b["state"])).log_prob(b["action"])
        change = new - b["old"]
        return -torch.min(change * b["gain"], change.clamp(-0.2, 0.2) * b["gain"]).mean()

    return trained(loss_of, rollout())


@odd(notes="SAC: the temperature is trained by its own loss, whose target is an entropy")
def learned_temperature():
    actor = relu_mlp(6, 16, 4)
    temperature = nn.Parameter(torch.zeros(1))
    of_actor = torch.optim.Adam(actor.parameters(), lr=3e-3)
    of_temperature = torch.optim.Adam([temperature], lr=3e-3)
    critic = relu_mlp(8, 16, 1).requires_grad_(False)

    def fit(batches):
        for b in batches:
            mean, log_std = actor(b["state"]).chunk(2, 1)
            policy = Normal(mean, log_std.clamp(-5, 2).exp())
            raw = policy.rsample()
            log_prob = (policy.log_prob(raw) - torch.log(1 - raw.tanh().square() + 1e-6)).sum(1, keepdim=True)
            worth = critic(torch.cat([b["state"], raw.tanh()], 1))
            of_actor.zero_grad()
            (temperature.exp().detach() * log_prob - worth).mean().backward()
            of_actor.step()
            of_temperature.zero_grad()
            (-(temperature.exp() * (log_prob + -2.0).detach()).mean()).backward()
            of_temperature.step()

    model = nn.ModuleDict({"actor": actor, "critic": critic})
    model.register_parameter("temperature", temperature)
    return TrainLoop(model=model, optimizer=[of_actor, of_temperature], batch=rollout(), fit=fit, frozen=("critic.",))


@odd(notes="advantage-weighted regression: an exponential of the advantage weighs logarithms of probabilities")
def advantage_weighted_regression():
    model = ActorCritic()

    def loss_of(_, b):
        value = model.v(b["state"])
        weight = torch.exp((b["reward"] - value.detach()) / 0.5).clamp(max=20)
        log_prob = torch.log(model.pi(b["state"]).gather(1, b["action"]))
        return -(log_prob * weight).mean() + F.mse_loss(value, b["reward"])

    return trained(loss_of, transitions(), model=model)


@odd(notes="expectile regression of values (IQL): both sides are squared, with unequal weights")
def expectiles_of_values():
    model = ActorCritic()

    def loss_of(_, b):
        error = b["reward"] - model.v(b["state"])
        weight = torch.where(error > 0, 0.7, 0.3)
        return (weight * error.square()).mean()

    return trained(loss_of, transitions(), model=model)


@odd(notes="conservative values: the logarithm of the sum of all values is lowered, and the taken one raised")
def conservative_values():
    def loss_of(model, b):
        values = model(b["state"])
        taken = values.gather(1, b["action"])
        return (values.logsumexp(1, keepdim=True) - taken).mean() + F.mse_loss(taken, b["reward"])

    return trained(loss_of, transitions())


@odd(notes="a cost of each step is divided by the probability that was sampled, with a baseline that is taken away")
def plain_gradient_with_a_running_baseline():
    baseline = torch.zeros(())

    def loss_of(model, b):
        gain = b["gain"] - baseline
        baseline.lerp_(b["gain"].float().mean(), 0.1)
        return -(Categorical(logits=model(b["state"])).log_prob(b["action"]) * gain).mean()

    return trained(loss_of, rollout())


@odd(notes="the ratio is penalised by its divergence in place of a clip")
def divergence_in_place_of_the_clip():
    def loss_of(model, b):
        ratio = ratio_of(model, b)
        return -(ratio * b["gain"]).mean() + 0.5 * (ratio - 1 - ratio.log()).mean()

    return trained(loss_of, rollout())


@odd(notes="quantile regression of values with a Huber loss: weights by the sign of an error without a gradient")
def quantile_huber():
    def loss_of(model, b):
        share = (torch.arange(4, dtype=b["reward"].dtype) + 0.5) / 4
        target = b["reward"] + torch.randn(8, 4, dtype=b["reward"].dtype)
        error = target[:, None, :] - model(b["state"])[:, :, None]
        size = torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)
        return ((share[None, :, None] - (error.detach() < 0).to(share)).abs() * size).mean(2).sum(1).mean()

    return trained(loss_of, transitions())


@odd(notes="a multiplier of a constraint grows with the cross entropy, which is detached there (CQL's alpha prime)")
def multiplier_of_a_score():
    model, log_alpha = relu_mlp(6, 16, 4), nn.Parameter(torch.zeros(1))
    optimizers = torch.optim.Adam(model.parameters(), lr=5e-3), torch.optim.Adam([log_alpha], lr=1e-2)
    model.log_alpha = log_alpha

    def fit(batches):
        for b in batches:
            q = model(b["state"])
            taken = q.gather(1, b["action"])
            penalty = (q.logsumexp(1, keepdim=True) - taken).mean() - 1.0
            optimizers[1].zero_grad()
            (-(log_alpha.exp() * penalty.detach())).sum().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (F.smooth_l1_loss(taken, b["reward"]) + log_alpha.detach().exp().squeeze() * penalty).backward()
            optimizers[0].step()

    return TrainLoop(model=model, optimizer=optimizers, batch=transitions(), fit=fit)
