"""Returns, advantages and targets that reach into other episodes or rows."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass, fields

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning
from tests.blind.cases import fault


class ActorCritic(nn.Module):
    def __init__(self, obs=5, actions=3, hidden=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh())
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, obs):
        hidden = self.body(obs)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def rollout(steps, envs, obs=5, actions=3, ends=0.2):
    """A rollout, time first."""
    return {
        "obs": torch.randn(steps, envs, obs),
        "actions": torch.randint(0, actions, (steps, envs)),
        "rewards": torch.randn(steps, envs),
        "dones": (torch.rand(steps, envs) < ends).float(),
        "next_obs": torch.randn(envs, obs),
    }


@fault(
    "rl",
    "the recursion multiplies by masks[t - 1]: the first reward of the next episode enters, a last one is lost",
    thread="zafarali/policy-gradient-methods#10",
    check="batch_independence",
)
def reinforce_masks():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def discounted(rewards, masks, gamma=0.99):
        returns, running = torch.zeros_like(rewards), 0.0
        for t in reversed(range(len(rewards))):
            running = rewards[t] + gamma * running * masks[t - 1]
            returns[t] = running
        return returns

    def update(data):
        returns = discounted(data["rewards"], data["masks"])
        log_probs = Categorical(logits=policy(data["states"])).log_prob(data["actions"])
        loss = -(log_probs * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def play():
        masks = torch.ones(20)
        masks[[5, 12, 19]] = 0
        return {
            "states": torch.randn(20, 4),
            "actions": torch.randint(0, 2, (20,)),
            "rewards": torch.randn(20),
            "masks": masks,
        }

    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=lambda n: [play() for _ in range(n)],
        fit=lambda batches: [update(data) for data in batches],
    )


@fault(
    "rl",
    "compute_gae takes not_done from terminated alone: at a truncation the advantage of the next episode leaks back",
    thread="Toni-SM/skrl#449",
    check="batch_independence",
)
def time_limited_gae():
    torch.manual_seed(0)
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)

    def compute_gae(rewards, terminated, values, last_values, discount_factor=0.99, lambda_coefficient=0.95):
        advantage, advantages = 0, torch.zeros_like(rewards)
        not_done = 1 - terminated
        for i in reversed(range(len(rewards))):
            next_values = values[i + 1] if i < len(rewards) - 1 else last_values
            advantage = (
                rewards[i] - values[i] + discount_factor * not_done[i] * (next_values + lambda_coefficient * advantage)
            )
            advantages[i] = advantage
        returns = advantages + values
        return returns, (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    def update(memory):
        with torch.no_grad():
            old, values = agent(memory["obs"])
            old_log_prob = old.log_prob(memory["actions"])
            last_values = agent(memory["next_obs"])[1]
        returns, advantages = compute_gae(memory["rewards"], memory["terminated"], values, last_values)
        for _ in range(2):
            policy, value = agent(memory["obs"])
            ratio = (policy.log_prob(memory["actions"]) - old_log_prob).exp()
            surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -surrogate.mean() + F.mse_loss(value, returns)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

    def collect():
        memory = rollout(10, 6, ends=0.0)
        memory["terminated"] = torch.zeros(10, 6)
        memory["truncated"] = torch.zeros(10, 6)
        memory["truncated"][4] = 1
        return memory

    return TrainLoop(
        model=agent,
        optimizer=optimizer,
        batches=[collect() for _ in range(3)],
        fit=lambda batches: [update(memory) for memory in batches],
        batch_dim=1,
    )


@fault(
    "rl",
    "advantage (t, 1) times log_probs (t,) is (t, t): each action is weighed by the advantages of all steps",
    thread="higgsfield-ai/higgsfield#24",
    check="batch_independence",
)
def notebook_a2c():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
            self.actor = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=-1))

        def forward(self, x):
            return Categorical(self.actor(x)), self.critic(x)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters())

    def compute_returns(rewards, masks, gamma=0.99):
        running, returns = torch.zeros(1), []
        for reward, mask in zip(reversed(rewards), reversed(masks), strict=True):
            running = reward + gamma * running * mask
            returns.insert(0, running)
        return torch.stack(returns)

    def train(batches):
        for state, action, reward, mask in batches:
            dist, values = model(state)
            returns = compute_returns(reward[:, None], mask[:, None]).detach()
            advantage = returns - values
            actor_loss = -(dist.log_prob(action) * advantage.detach()).mean()
            critic_loss = advantage.pow(2).mean()
            loss = actor_loss + 0.5 * critic_loss - 0.001 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def episode():
        mask = torch.ones(14)
        mask[-1] = 0
        return torch.randn(14, 4), torch.randint(0, 2, (14,)), torch.rand(14), mask

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [episode() for _ in range(n)], fit=train)


@fault(
    "rl",
    "cumprod(dim=1) multiplies the discounts over the rows of the batch; the horizon is dimension 0",
    thread="juliusfrost/dreamer-pytorch#59",
    check="batch_independence",
)
def dreamer_discount():
    torch.manual_seed(0)
    dynamics = nn.GRUCell(3, 12)
    dynamics.requires_grad_(False)
    actor = nn.Sequential(nn.Linear(12, 16), nn.ELU(), nn.Linear(16, 3), nn.Tanh())
    value = nn.Sequential(nn.Linear(12, 16), nn.ELU(), nn.Linear(16, 1))
    reward_head = nn.Linear(12, 1).requires_grad_(False)
    continue_head = nn.Linear(12, 1).requires_grad_(False)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=8e-5)
    opt_value = torch.optim.Adam(value.parameters(), lr=8e-5)

    def imagine(state, horizon=5):
        states = []
        for _ in range(horizon):
            state = dynamics(actor(state), state)
            states.append(state)
        return torch.stack(states)

    def lambda_return(reward, values, discount, bootstrap, lam=0.95):
        following = torch.cat([values[1:], bootstrap[None]])
        target = reward + discount * following * (1 - lam)
        outputs, last = [], bootstrap
        for t in reversed(range(len(reward))):
            last = target[t] + discount[t] * lam * last
            outputs.append(last)
        return torch.stack(outputs[::-1])

    def train(batches):
        for start in batches:
            states = imagine(start)
            reward = reward_head(states).squeeze(-1)
            discount = 0.99 * continue_head(states).squeeze(-1).sigmoid()
            values = value(states).squeeze(-1)
            returns = lambda_return(reward[:-1], values[:-1], discount[:-1], values[-1])
            weights = torch.cumprod(discount[:-1].detach(), dim=1)
            actor_loss = -(weights * returns).mean()
            opt_actor.zero_grad()
            actor_loss.backward()
            opt_actor.step()
            prediction = value(states[:-1].detach()).squeeze(-1)
            value_loss = (weights * (prediction - returns.detach()).pow(2)).mean()
            opt_value.zero_grad()
            value_loss.backward()
            opt_value.step()

    return TrainLoop(
        model={
            "actor": actor,
            "value": value,
            "dynamics": dynamics,
            "reward": reward_head,
            "continue": continue_head,
        },
        optimizer=[opt_actor, opt_value],
        batches=[torch.randn(8, 12) for _ in range(4)],
        fit=train,
        frozen=("dynamics", "reward", "continue"),
    )


@fault(
    "rl",
    "rew[t] is the reward from before the observation, r[t - 1]: returns of step t take the step before it in",
    thread="openai/spinningup#50",
    check="batch_independence",
)
def vpg_epoch():
    torch.manual_seed(0)
    pi = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    v = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    pi_optimizer = torch.optim.Adam(pi.parameters(), lr=3e-4)
    v_optimizer = torch.optim.Adam(v.parameters(), lr=1e-3)

    def discount_cumsum(x, discount):
        out, running = torch.zeros_like(x), 0.0
        for t in reversed(range(len(x))):
            running = x[t] + discount * running
            out[t] = running
        return out

    class Buffer:
        def __init__(self, gamma=0.99, lam=0.95):
            self.gamma, self.lam, self.adv, self.ret = gamma, lam, [], []

        def finish_path(self, rew, val):
            val = torch.cat([val, torch.zeros(1)])
            deltas = rew + self.gamma * val[1:] - val[:-1]
            self.adv.append(discount_cumsum(deltas, self.gamma * self.lam))
            self.ret.append(discount_cumsum(rew, self.gamma))

        def get(self):
            adv = torch.cat(self.adv)
            return (adv - adv.mean()) / adv.std(), torch.cat(self.ret)

    def update(epoch):
        buffer = Buffer()
        with torch.no_grad():
            values = v(epoch["o"]).squeeze(-1)
        rew = torch.cat([torch.zeros(1), epoch["r"][:-1]])
        start = 0
        for t in range(len(rew)):
            if epoch["done"][t] or t == len(rew) - 1:
                buffer.finish_path(rew[start : t + 1], values[start : t + 1])
                start = t + 1
        adv, ret = buffer.get()
        logp = Categorical(logits=pi(epoch["o"])).log_prob(epoch["a"])
        ratio = (logp - logp.detach()).exp()
        pi_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        pi_optimizer.zero_grad()
        pi_loss.backward()
        pi_optimizer.step()
        v_loss = ((v(epoch["o"]).squeeze(-1) - ret) ** 2).mean()
        v_optimizer.zero_grad()
        v_loss.backward()
        v_optimizer.step()

    def draw(n=18):
        done = torch.zeros(n, dtype=torch.bool)
        done[[5, 11, 17]] = True
        return {
            "o": torch.randn(n, 4),
            "a": torch.randint(0, 3, (n,)),
            "r": torch.randn(n),
            "done": done,
        }

    return TrainLoop(
        model=[pi, v],
        optimizer=[pi_optimizer, v_optimizer],
        batches=lambda n: [draw() for _ in range(n)],
        fit=lambda batches: [update(epoch) for epoch in batches],
    )


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def log_probs(self, ids):
        states, _ = self.rnn(self.embed(ids[:, :-1]))
        scores = self.head(states).log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)


@fault(
    "rl",
    "rewards[:1] in the statistics: mean and deviation are those of the first group, for all groups",
    thread="ServiceNow/PipelineRL#54",
    check="batch_independence",
)
def pipeline_rollouts():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @dataclass
    class Rollouts:
        input_ids: torch.Tensor
        rewards: torch.Tensor

    def populate(batch):
        mean = batch.rewards[:1].mean(dim=1, keepdim=True)
        std = batch.rewards[:1].std(dim=1, keepdim=True)
        return (batch.rewards - mean) / (std + 1e-4)

    def train(batches):
        for batch in batches:
            advantages = populate(batch).flatten()
            log_probs = model.log_probs(batch.input_ids.flatten(0, 1))
            loss = -(log_probs * advantages[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw():
        return Rollouts(torch.randint(0, 16, (5, 4, 7)), torch.randn(5, 4))

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(3)], fit=train)


@fault(
    "rl",
    "mean and std of rewards over dim=0 of all completions of all prompts: no statistics of a group",
    thread="XU-YIJIE/grpo-flat#2",
    check="batch_independence",
)
def grpo_flat():
    torch.manual_seed(0)
    model, reference = TinyLM(), TinyLM()
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group_num = 4

    def grpo_advantage(rewards, epsilon=1e-4):
        rewards = rewards.to(torch.float32)
        mean = rewards.mean(dim=0, keepdim=True)
        std = rewards.std(dim=0, keepdim=True)
        return (rewards - mean) / (std + epsilon)

    def step(prompts, completions, rewards):
        ids = torch.cat([prompts.repeat_interleave(group_num, 0), completions.flatten(0, 1)], dim=1)
        advantages = grpo_advantage(rewards.flatten())
        logp = model.log_probs(ids)[:, 3:]
        with torch.no_grad():
            ref = reference.log_probs(ids)[:, 3:]
        kl = (ref - logp).exp() - (ref - logp) - 1
        loss = (-(logp - logp.detach()).exp() * advantages[:, None] + 0.04 * kl).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def draw():
        level = torch.arange(5.0)[:, None]
        return (
            torch.randint(0, 16, (5, 4)),
            torch.randint(0, 16, (5, group_num, 6)),
            level + torch.rand(5, group_num),
        )

    return TrainLoop(
        model={"policy": model, "reference": reference},
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=lambda batches: [step(*batch) for batch in batches],
        frozen=("reference",),
    )


Transition = namedtuple("Transition", "obs action reward next_obs done")


def transitions(n, obs=4, actions=3):
    return Transition(
        torch.randn(n, obs),
        torch.randint(0, actions, (n, 1)),
        torch.randn(n, 1),
        torch.randn(n, obs),
        (torch.rand(n, 1) < 0.2).float(),
    )


def q_network(obs=4, actions=3):
    return nn.Sequential(nn.Linear(obs, 24), nn.ReLU(), nn.Linear(24, actions))


@fault(
    "rl",
    "q (n, 1) against reward (n, 1) + (n,) of max(1)[0]: the target is (n, n), of all pairs of transitions",
    thread="kengz/SLM-Lab#372",
    check="loss_contract",
)
def dqn_shapes():
    torch.manual_seed(0)
    net = q_network()
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def train(batches):
        for b in batches:
            q = net(b.obs).gather(1, b.action)
            with torch.no_grad():
                next_q = target(b.next_obs).max(1)[0]
                q_target = b.reward + 0.99 * (1 - b.done) * next_q
            loss = F.smooth_l1_loss(q, q_target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.data.lerp_(p.data, 0.05)

    return TrainLoop(
        model={"net": net, "target": target},
        optimizer=optimizer,
        batches=lambda n: [transitions(10) for _ in range(n)],
        fit=train,
        frozen=("target",),
    )


@fault(
    "rl",
    "the sum of output times action mask has no dim: one Q for the whole batch is compared with each target",
    thread="simoninithomas/Deep_reinforcement_learning_Course#51",
    check="batch_independence",
)
def space_invaders():
    torch.manual_seed(0)

    class DQN(nn.Module):
        def __init__(self, actions=3):
            super().__init__()
            self.conv = nn.Conv2d(2, 6, 3)
            self.fc = nn.Linear(6 * 16, actions)

        def forward(self, frames, action_mask):
            output = self.fc(F.elu(self.conv(frames)).flatten(1))
            return output, torch.sum(output * action_mask)

    model = DQN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2.5e-4)
    gamma = 0.9

    def train(batches):
        for states, actions, rewards, next_states, dones in batches:
            with torch.no_grad():
                following, _ = model(next_states, torch.ones(len(next_states), 3))
                target_q = torch.where(dones, rewards, rewards + gamma * following.max(1).values)
            _, q = model(states, actions)
            loss = (target_q - q).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def replay(n=9):
        frames = torch.rand(2, n, 2, 6, 6)
        actions = F.one_hot(torch.randint(0, 3, (n,)), 3).float()
        return frames[0], actions, torch.randn(n), frames[1], torch.rand(n) < 0.2

    return TrainLoop(model=model, optimizer=optimizer, batches=[replay() for _ in range(4)], fit=train)


@fault(
    "rl",
    "the n-step sum adds rewards of later steps without looking at done: they are of the next episode",
    thread="younggyoseo/FastTD3#6",
    check="batch_independence",
)
def n_step_replay():
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
    critic = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    target = copy.deepcopy(critic).requires_grad_(False)
    opt_a = torch.optim.AdamW(actor.parameters(), lr=3e-4)
    opt_c = torch.optim.AdamW(critic.parameters(), lr=3e-4)
    n_steps, gamma = 3, 0.97

    def q(net, obs, act):
        return net(torch.cat([obs, act], -1)).squeeze(-1)

    def update(b):
        discounts = gamma ** torch.arange(n_steps)
        reward = (b["rewards"] * discounts).sum(1)
        done = b["dones"].amax(1)
        with torch.no_grad():
            following = q(target, b["last_obs"], actor(b["last_obs"]))
            backup = reward + gamma**n_steps * (1 - done) * following
        critic_loss = F.mse_loss(q(critic, b["obs"], b["actions"]), backup)
        opt_c.zero_grad()
        critic_loss.backward()
        opt_c.step()
        actor_loss = -q(critic, b["obs"], actor(b["obs"])).mean()
        opt_a.zero_grad()
        actor_loss.backward()
        opt_a.step()
        with torch.no_grad():
            for p, t in zip(critic.parameters(), target.parameters(), strict=True):
                t.lerp_(p, 0.01)

    def sample(n=12):
        return {
            "obs": torch.randn(n, 4),
            "actions": torch.rand(n, 2) * 2 - 1,
            "rewards": torch.randn(n, n_steps),
            "dones": (torch.rand(n, n_steps) < 0.25).float(),
            "last_obs": torch.randn(n, 4),
        }

    return TrainLoop(
        model={"actor": actor, "critic": critic, "target": target},
        optimizer=[opt_a, opt_c],
        batches=lambda n: [sample() for _ in range(n)],
        fit=lambda batches: [update(b) for b in batches],
        frozen=("target",),
    )


@fault(
    "rl",
    "td_error.pow(2) * weights.mean(): every transition gets the mean of the importance weights",
    thread="BY571/DQN-Atari-Agents#5",
    check="batch_independence",
)
def prioritized_agent():
    torch.manual_seed(0)

    class Agent:
        def __init__(self):
            self.qnetwork_local = q_network()
            self.qnetwork_target = copy.deepcopy(self.qnetwork_local).requires_grad_(False)
            self.optimizer = torch.optim.Adam(self.qnetwork_local.parameters(), lr=1e-3)

        def learn_per(self, experiences, weights):
            states, actions, rewards, next_states, dones = experiences
            with torch.no_grad():
                q_next = self.qnetwork_target(next_states).max(1, keepdim=True).values
                q_targets = rewards + 0.99 * q_next * (1 - dones)
            td_error = q_targets - self.qnetwork_local(states).gather(1, actions)
            loss = (td_error.pow(2) * weights.mean()).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.qnetwork_local.parameters(), 1)
            self.optimizer.step()
            for local, target in zip(self.qnetwork_local.parameters(), self.qnetwork_target.parameters(), strict=True):
                target.data.copy_(1e-2 * local.data + (1 - 1e-2) * target.data)
            return td_error.detach().abs().flatten()

    agent = Agent()
    return TrainLoop(
        model={"local": agent.qnetwork_local, "target": agent.qnetwork_target},
        optimizer=agent.optimizer,
        batches=lambda n: [(transitions(11), torch.rand(11, 1)) for _ in range(n)],
        fit=lambda batches: [agent.learn_per(e, w) for e, w in batches],
        frozen=("target",),
    )


@fault(
    "rl",
    "the GRU of the policy runs over the rollout without a look at episode starts: its state goes on into the next one",
    thread="ikostrikov/pytorch-a2c-ppo-acktr-gail#206",
    check="batch_independence",
)
def recurrent_policy():
    torch.manual_seed(0)

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(4, 16)
            self.dist, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, inputs, rnn_hxs, masks):
            x, rnn_hxs = self.gru(inputs, rnn_hxs)
            return Categorical(logits=self.dist(x)), self.value(x).squeeze(-1), rnn_hxs

    model = Policy()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4, eps=1e-5)

    def update(r):
        dist, values, _ = model(r["obs"], r["hxs"], r["masks"])
        with torch.no_grad():
            returns, running = torch.zeros_like(values), values[-1]
            for t in reversed(range(len(values))):
                running = r["rewards"][t] + 0.99 * running * r["masks"][t + 1]
                returns[t] = running
        advantages = returns - values
        action_loss = -(advantages.detach() * dist.log_prob(r["actions"])).mean()
        loss = 0.5 * advantages.pow(2).mean() + action_loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def collect():
        return {
            "obs": torch.randn(8, 5, 4),
            "hxs": torch.zeros(1, 5, 16),
            "masks": (torch.rand(9, 5) > 0.3).float(),
            "actions": torch.randint(0, 3, (8, 5)),
            "rewards": torch.randn(8, 5),
        }

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [collect() for _ in range(n)],
        fit=lambda batches: [update(r) for r in batches],
        batch_dim=1,
    )


@fault(
    "rl",
    "returns = storage.advantages + values, and storage.advantages is still zeros: the value cost never teaches",
    thread="vwxyzjn/cleanrl#337",
    check="gradient_reaches_every_param",
)
def jax_style_storage():
    torch.manual_seed(0)

    @dataclass
    class Storage:
        obs: torch.Tensor
        actions: torch.Tensor
        rewards: torch.Tensor
        dones: torch.Tensor
        advantages: torch.Tensor

        def replace(self, **changes):
            return Storage(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)

    actor = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-4, eps=1e-5)

    def train(batches):
        for storage in batches:
            with torch.no_grad():
                values = critic(storage.obs).squeeze(-1)
                logp_old = Categorical(logits=actor(storage.obs)).log_prob(storage.actions)
                advantages, last = torch.zeros_like(values), torch.zeros_like(values[0])
                for t in reversed(range(len(values) - 1)):
                    alive = 1 - storage.dones[t + 1]
                    delta = storage.rewards[t] + 0.99 * values[t + 1] * alive - values[t]
                    advantages[t] = last = delta + 0.99 * 0.95 * alive * last
                returns = storage.advantages + values
                storage = storage.replace(advantages=advantages)
            ratio = (Categorical(logits=actor(storage.obs)).log_prob(storage.actions) - logp_old).exp()
            adv = storage.advantages
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.9, 1.1)).mean()
            v_loss = 0.5 * (critic(storage.obs).squeeze(-1) - returns).square().mean()
            optimizer.zero_grad()
            (pg_loss + 0.5 * v_loss).backward()
            optimizer.step()

    def collect():
        r = rollout(9, 4)
        return Storage(r["obs"], r["actions"], r["rewards"], r["dones"], torch.zeros(9, 4))

    return TrainLoop(
        model={"actor": actor, "critic": critic},
        optimizer=optimizer,
        batches=[collect() for _ in range(3)],
        fit=train,
    )


@fault(
    "rl",
    "advantages are normalised along axis 0, the rollouts: each time step by itself, not over steps and rollouts",
    thread="tensorflow/agents#651",
    check="batch_independence",
)
def normalized_advantages():
    torch.manual_seed(0)
    mean_net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    log_std = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*mean_net.parameters(), log_std], lr=1e-3)
    policy = nn.ParameterDict({"log_std": log_std})

    def normalize(advantages, axes=(0,), epsilon=1e-8):
        mean = advantages.mean(axes, keepdim=True)
        variance = advantages.var(axes, keepdim=True, unbiased=False)
        return (advantages - mean) / (variance.sqrt() + epsilon)

    def train(batches):
        for batch in batches:
            advantages = normalize(batch["returns"] - batch["value_preds"])
            dist = Normal(mean_net(batch["observation"]), log_std.exp())
            log_probs = dist.log_prob(batch["action"]).sum(-1)
            ratio = (log_probs - batch["log_prob"]).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw():
        action = torch.randn(4, 10, 2)
        return {
            "observation": torch.randn(4, 10, 3),
            "action": action,
            "log_prob": Normal(torch.zeros(2), 1.0).log_prob(action).sum(-1),
            "returns": torch.randn(4, 10),
            "value_preds": torch.randn(4, 10),
        }

    return TrainLoop(
        model={"mean": mean_net, "policy": policy},
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=train,
    )


@fault(
    "rl",
    "the target keeps the next value where terminal is 1 and drops it elsewhere: it bootstraps over ends only",
    thread="ghliu/pytorch-ddpg#6",
    check="batch_independence",
)
def ddpg_terminal():
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1))
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    actor_optim = torch.optim.Adam(actor.parameters(), lr=1e-4)
    critic_optim = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def update_policy(batch):
        state, action, reward, next_state, terminal = batch
        with torch.no_grad():
            next_q = critic_target(torch.cat([next_state, actor(next_state)], 1))
            target_q = reward + 0.99 * terminal * next_q
        value_loss = F.mse_loss(critic(torch.cat([state, action], 1)), target_q)
        critic_optim.zero_grad()
        value_loss.backward()
        critic_optim.step()
        policy_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
        actor_optim.zero_grad()
        policy_loss.backward()
        actor_optim.step()
        for p, t in zip(critic.parameters(), critic_target.parameters(), strict=True):
            t.data.mul_(0.999).add_(p.data, alpha=0.001)

    def sample(n=12):
        terminal = torch.zeros(n, 1)
        terminal[::5] = 1.0
        return torch.randn(n, 4), torch.randn(n, 1).tanh(), torch.randn(n, 1), torch.randn(n, 4), terminal

    return TrainLoop(
        model={"actor": actor, "critic": critic, "critic_target": critic_target},
        optimizer=[actor_optim, critic_optim],
        batches=[sample() for _ in range(4)],
        fit=lambda batches: [update_policy(b) for b in batches],
        frozen=("critic_target",),
    )


class FrameLSTM(nn.Module):
    def __init__(self, actions=3):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.lstm = nn.LSTM(16, 12, 1)
        self.out = nn.Linear(12, actions)

    def forward(self, frames):
        features = F.relu(self.conv(frames)).flatten(2)
        states, _ = self.lstm(features)
        return self.out(states[:, -1])


@fault(
    "rl",
    "nn.LSTM(16, 12, 1) has no batch_first and gets (rows, channels, 16): it runs over the replayed transitions",
    thread="AndersonJo/dqn-pytorch#1",
    check="batch_independence",
)
def lstm_dqn():
    torch.manual_seed(0)

    class LitDQN(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.policy = FrameLSTM()
            self.target = copy.deepcopy(self.policy).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            frames, actions, rewards, next_frames, dones = batch
            q = self.policy(frames).gather(1, actions[:, None]).squeeze(1)
            with torch.no_grad():
                y = rewards + 0.99 * (1 - dones) * self.target(next_frames).max(1).values
            return F.smooth_l1_loss(q, y)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for p, t in zip(self.policy.parameters(), self.target.parameters(), strict=True):
                t.data.lerp_(p.data, 0.05)

        def configure_optimizers(self):
            return torch.optim.RMSprop(self.policy.parameters(), lr=1e-3)

        def train_dataloader(self):
            n = 36
            data = TensorDataset(
                torch.rand(n, 2, 6, 6),
                torch.randint(0, 3, (n,)),
                torch.randn(n),
                torch.rand(n, 2, 6, 6),
                (torch.rand(n) < 0.1).float(),
            )
            return DataLoader(data, 9, shuffle=True)

    return from_lightning(LitDQN(), frozen=("target",))


@fault(
    "rl",
    "pixel_values.repeat(num_generations, 1) against prompts that repeat_interleave: images of other prompts",
    thread="StarsfieldAI/R1-V#54",
    check="batch_independence",
)
def vision_grpo():
    torch.manual_seed(0)
    accelerator = fresh_accelerator(cpu=True)
    num_generations = 3

    class VisionLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.embed = nn.Linear(8, 16), nn.Embedding(20, 16)
            self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

        def forward(self, input_ids, pixel_values):
            states, _ = self.rnn(self.embed(input_ids), torch.tanh(self.vision(pixel_values))[None])
            return self.head(states)

    model = VisionLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches):
        for b in batches:
            prompts = b["prompt_ids"].repeat_interleave(num_generations, dim=0)
            pixels = b["pixel_values"].repeat(num_generations, 1)
            ids = torch.cat([prompts, b["completion_ids"].flatten(0, 1)], dim=1)
            logp = model(ids[:, :-1], pixels).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            rewards = b["rewards"]
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            ratio = (logp - logp.detach()).exp()[:, 3:]
            loss = -(ratio * advantages.flatten()[:, None]).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def draw(n=4):
        return {
            "prompt_ids": torch.randint(0, 20, (n, 4)),
            "pixel_values": torch.randn(n, 8),
            "completion_ids": torch.randint(0, 20, (n, num_generations, 5)),
            "rewards": torch.randn(n, num_generations),
        }

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [draw() for _ in range(n)], fit=train)


@fault(
    "rl",
    "groups are cut by a stride of group_size although some prompts have fewer rows: later rows join other groups",
    thread="areal-project/AReaL#1419",
    check="batch_independence",
)
def rollout_workflow():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    class Normalization:
        def __init__(self, group_size, eps=1e-5):
            self.group_size, self.eps = group_size, eps

        def __call__(self, x):
            out = torch.zeros_like(x)
            for i in range(len(x) // self.group_size):
                s = slice(i * self.group_size, (i + 1) * self.group_size)
                out[s] = (x[s] - x[s].mean()) / (x[s].std(unbiased=False) + self.eps)
            return out

    normalize = Normalization(group_size=4)

    def train(batches):
        for data in batches:
            advantages = normalize(data["rewards"])
            logp = model.log_probs(data["input_ids"])
            loss = -(logp * advantages[:, None] * data["loss_mask"][:, 1:]).sum() / data["loss_mask"].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw():
        sizes = torch.tensor([4, 3, 4, 2])
        uid = torch.repeat_interleave(torch.arange(4), sizes)
        mask = torch.ones(len(uid), 8)
        mask[:, :3] = 0
        return {
            "input_ids": torch.randint(0, 16, (len(uid), 8)),
            "loss_mask": mask,
            "uid": uid,
            "rewards": torch.rand(len(uid)) + uid,
        }

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(3)], fit=train)


@fault(
    "rl",
    "r - v is (n,) minus (n, 1): advantages of all pairs of rows are multiplied with the log-probabilities",
    thread="thu-ml/tianshou#155",
    check="batch_independence",
)
def a2c_policy():
    torch.manual_seed(0)
    preprocess = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
    actor, critic = nn.Linear(16, 2), nn.Linear(16, 1)
    log_std = nn.Parameter(torch.zeros(1))
    model = nn.ModuleDict({"preprocess": preprocess, "actor": actor, "critic": critic})
    model.register_parameter("log_std", log_std)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @dataclass
    class Config:
        vf_coef: float = 0.5
        ent_coef: float = 0.01
        max_grad_norm: float = 0.5

    config = Config()

    def learn(batch):
        hidden = preprocess(batch.obs)
        dist = Independent(Normal(actor(hidden), log_std.exp().expand(2)), 1)
        v = critic(hidden)
        r = batch.returns
        a_loss = -(dist.log_prob(batch.act) * (r - v).detach()).mean()
        vf_loss = F.mse_loss(r[:, None], v)
        loss = a_loss + config.vf_coef * vf_loss - config.ent_coef * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()

    Step = namedtuple("Step", "obs act returns")
    data = [Step(torch.randn(10, 4), torch.randn(10, 2), torch.randn(10)) for _ in range(4)]
    return TrainLoop(
        model=model, optimizer=optimizer, batches=data, fit=lambda batches: [learn(batch) for batch in batches]
    )


@fault(
    "rl",
    "mask = discount > 0 takes the step that ends an episode out of the loss: its reward never teaches",
    thread="google-deepmind/acme#239",
    check="batch_independence",
)
def r2d2_learner():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.q = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 3)

        def forward(self, obs):
            return self.q(self.gru(obs)[0])

    online = Net()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)

    def learn(d):
        q = online(d["obs"])
        with torch.no_grad():
            following = target(d["obs"])[:, 1:].gather(-1, q[:, 1:].argmax(-1, keepdim=True)).squeeze(-1)
            y = d["reward"][:, :-1] + 0.99 * d["discount"][:, :-1] * following
        error = y - q[:, :-1].gather(-1, d["action"][:, :-1, None]).squeeze(-1)
        mask = (d["discount"] > 0).float()[:, :-1]
        loss = (0.5 * error.square() * mask).sum(1) / (mask.sum(1) + 1e-5)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        with torch.no_grad():
            for p, t in zip(online.parameters(), target.parameters(), strict=True):
                t.lerp_(p, 0.05)

    def draw(rows=6, steps=8):
        ends = torch.randint(2, 7, (rows, 1))
        alive = (torch.arange(steps) <= ends).float()
        return {
            "obs": torch.randn(rows, steps, 4) * alive[..., None],
            "action": torch.randint(0, 3, (rows, steps)),
            "reward": torch.randn(rows, steps) * alive,
            "discount": (torch.arange(steps) < ends).float(),
        }

    return TrainLoop(
        model={"online": online, "target": target},
        optimizer=optimizer,
        batches=lambda n: [draw() for _ in range(n)],
        fit=lambda batches: [learn(d) for d in batches],
        frozen=("target",),
    )
