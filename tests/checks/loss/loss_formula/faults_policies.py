"""Losses of policies, of values and of survival models written by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def rollout(rows=8):
    state = torch.randn(rows, 6)
    action = torch.randint(4, (rows,))
    return {
        "state": state,
        "action": action,
        "log_prob": -1.4 + 0.2 * torch.randn(rows),
        "advantage": torch.randn(rows) + (action == state[:, :4].argmax(1)).to(state.dtype),
    }


def policy(loss_of, batch=rollout, outputs=4):
    def make():
        model = relu_mlp(6, 16, outputs)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return loop(model, batch(), loss_of, optimizer)

    return make


def clipped(ratio_of=lambda new, old: (new - old).exp(), pick=torch.min, eps=0.2):
    def loss_of(model, b):
        choice = Categorical(logits=model(b["state"]))
        new = choice.log_prob(b["action"])
        ratio = ratio_of(new, b["log_prob"])
        one, two = ratio * b["advantage"], torch.clamp(ratio, 1 - eps, 1 + eps) * b["advantage"]
        return -pick(one, two).mean() - 0.01 * choice.entropy().mean()

    return loss_of


pair(
    "larger_of_both_products",
    "loss_formula",
    "extreme_turned",
    quick=True,
    where="return -pick(one, two).mean()",
    faulty=policy(clipped(pick=torch.max)),
    fixed=policy(clipped()),
)

pair(
    "old_policy_over_the_new_one",
    "loss_formula",
    "turned_round",
    where="return -pick(one, two).mean()",
    faulty=policy(clipped(lambda new, old: (old - new).exp())),
    fixed=policy(clipped()),
)


def completions(rows=8):
    """One advantage for all tokens of a row (GRPO)."""
    b = {name: tensor.unflatten(0, (rows, 3)) for name, tensor in rollout(3 * rows).items()}
    return {**b, "advantage": b["advantage"].mean(1, keepdim=True)}


pair(
    "objective_of_completions_negated_twice",
    "loss_formula",
    "sign_flipped",
    faulty=policy(lambda model, b: -clipped()(model, b), completions),
    fixed=policy(clipped(), completions),
)


def transitions(rows=8):
    state = torch.randn(rows, 6)
    action = torch.randint(4, (rows,))
    return {
        "state": state,
        "action": action,
        "reward": (action == state[:, :4].argmax(1)).to(state.dtype) + 0.1 * torch.randn(rows),
        "next": state.roll(1, 1),
        "done": (torch.arange(rows) % 4 == 0).to(state.dtype),
    }


def q_learning(detach):
    def loss_of(model, b):
        value = model(b["state"]).gather(1, b["action"][:, None]).squeeze(1)
        following = model(b["next"]).max(1).values
        target = b["reward"] + 0.9 * (1 - b["done"]) * (following.detach() if detach else following)
        return nn.functional.smooth_l1_loss(value, target)

    return loss_of


pair(
    "target_of_the_same_network_with_gradient",
    "loss_formula",
    "target_with_gradient",
    quick=True,
    where='target = b["reward"] + 0.9',
    faulty=policy(q_learning(False), transitions),
    fixed=policy(q_learning(True), transitions),
)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = relu_mlp(6, 16, 4), relu_mlp(6, 16, 1)


def actor_critic(detach):
    def make():
        model = ActorCritic()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for b in batches:
                choice = Categorical(logits=model.actor(b["state"]))
                advantage = b["reward"] - model.critic(b["state"]).squeeze(1)
                weight = advantage.detach() if detach else advantage
                actor_loss = -(choice.log_prob(b["action"]) * weight).mean()
                critic_loss = advantage.pow(2).mean()
                optimizer.zero_grad()
                (actor_loss + 0.5 * critic_loss).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=transitions(), fit=fit)

    return make


pair(
    "advantage_with_gradient",
    "loss_formula",
    "target_with_gradient",
    where='actor_loss = -(choice.log_prob(b["action"]) * weight).mean()',
    faulty=actor_critic(False),
    fixed=actor_critic(True),
)


def without_minus(sign):
    def loss_of(model, b):
        choice = Categorical(logits=model(b["state"]))
        ratio = torch.exp(choice.log_prob(b["action"]) - b["log_prob"])
        objective = torch.min(ratio * b["advantage"], ratio.clamp(0.8, 1.2) * b["advantage"])
        return sign * objective.mean() - 0.01 * choice.entropy().mean()

    return loss_of


pair(
    "clipped_objective_minimised",
    "loss_formula",
    "sign_flipped",
    where="objective = torch.min(",
    faulty=policy(without_minus(1)),
    fixed=policy(without_minus(-1)),
)


# Patients sorted by time before the network sees them, and sums over the risks of those at risk.


def patients(rows=8):
    x, time = torch.randn(rows, 6), 0.2 + 5 * torch.rand(rows)
    return {"x": x, "time": time, "event": (torch.arange(rows) % 3 != 0).to(x.dtype)}


def up_to(risk):
    return risk.logcumsumexp(0)


def cox(at_risk, *, latest_first):
    def loss_of(model, b):
        order = b["time"].sort(descending=latest_first).indices
        risk, event = model(b["x"][order]).squeeze(1), b["event"][order]
        return -((risk - at_risk(risk)) * event).sum() / event.sum()

    return policy(loss_of, patients, outputs=1)


pair(
    "patients_sorted_earliest_first",
    "loss_formula",
    "turned_round",
    change="sort(descending=latest_first)",
    faulty=cox(up_to, latest_first=False),
    fixed=cox(up_to, latest_first=True),
)
