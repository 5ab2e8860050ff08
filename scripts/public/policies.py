"""Reinforcement learning: minimalRL, TD3, pytorch-a2c-ppo-acktr-gail, PyTorch-Tutorial.

Rows of a batch are the steps of one episode, or the transitions that a replay buffer draws from.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import torch

from pytest_trainloop import TrainLoop
from scripts.public.source import Source, imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Make = Callable[[], TrainLoop]

CPU = torch.device("cpu")


def transitions(rows: int, states: int = 4, actions: int | None = 2) -> tuple[torch.Tensor, ...]:
    """State, action, reward, next state, probability of the action, end of the episode."""
    action = torch.rand(rows) - 0.5 if actions is None else torch.randint(0, actions, (rows,))
    chances = 0.3 + 0.4 * torch.rand(rows)
    s, s_prime = torch.randn(rows, states), torch.randn(rows, states)
    return s, action, torch.rand(rows), s_prime, chances, torch.arange(rows) % 10 == 9


def steps(batch: Any) -> Iterator[tuple[Any, ...]]:
    """The transitions as an environment gives them: arrays and plain numbers."""
    for s, a, r, s_prime, chance, done in zip(*batch, strict=True):
        yield s.numpy(), a.item(), r.item(), s_prime.numpy(), chance.item(), bool(done)


def on_policy(root: Path, name: str, model_name: str) -> Make:
    """The loops of minimalRL that collect an episode and train on it: ``model.train_net()``."""

    def make() -> TrainLoop:
        script = imported(root / "minimalRL", name)
        model = getattr(script, model_name)()

        def fit(batches: Any) -> None:
            for batch in batches:
                hidden = torch.zeros(1, 1, 32), torch.zeros(1, 1, 32)
                for s, a, r, s_prime, chance, done in steps(batch):
                    if name == "REINFORCE":
                        model.put_data((r, model(torch.from_numpy(s).float())[a]))
                    elif name == "actor_critic":
                        model.put_data((s, a, r, s_prime, done))
                    elif name == "ppo-lstm":
                        before, (_, hidden) = hidden, model.pi(torch.from_numpy(s).float(), hidden)
                        model.put_data((s, a, r, s_prime, chance, before, hidden, done))
                    else:
                        model.put_data((s, a, r, s_prime, chance, done))
                model.train_net()

        return TrainLoop(model=model, optimizer=model.optimizer, batch=transitions(20), fit=fit)

    return make


def ppo_continuous(root: Path) -> Make:
    def make() -> TrainLoop:
        script = imported(root / "minimalRL", "ppo-continuous")
        script.buffer_size, script.minibatch_size, script.K_epoch = 2, 4, 2
        model = script.PPO()

        def fit(batches: Any) -> None:
            for batch in batches:
                for rollout in zip(*batch, strict=True):
                    model.put_data(list(steps(rollout)))
                model.train_net()

        rows = transitions(24, 3, None)
        batch = tuple(values.view(8, 3, *values.shape[1:]) for values in rows)
        return TrainLoop(model=model, optimizer=model.optimizer, batch=batch, fit=fit)

    return make


def replay(root: Path, name: str) -> Make:
    """dqn, ddpg and sac of minimalRL: a replay buffer, filled with the rows of the batch."""

    def memory(script: Any, batch: Any) -> Any:
        script.batch_size = len(batch[0])
        buffer = script.ReplayBuffer()
        for s, a, r, s_prime, _chance, done in steps(batch):
            buffer.put((s, a, r, s_prime, (0.0 if done else 1.0) if name == "dqn" else done))
        return buffer

    def dqn(script: Any) -> TrainLoop:
        q, q_target = script.Qnet(), script.Qnet()
        q_target.load_state_dict(q.state_dict())
        optimizer = torch.optim.Adam(q.parameters(), lr=script.learning_rate)

        def fit(batches: Any) -> None:
            for episode, batch in enumerate(batches):
                script.train(q, q_target, memory(script, batch), optimizer)
                if episode % 20 == 0 and episode != 0:
                    q_target.load_state_dict(q.state_dict())

        models = {"q": q, "q_target": q_target}
        return TrainLoop(model=models, optimizer=optimizer, batch=transitions(32), fit=fit)

    def ddpg(script: Any) -> TrainLoop:
        q, q_target, mu, mu_target = script.QNet(), script.QNet(), script.MuNet(), script.MuNet()
        q_target.load_state_dict(q.state_dict())
        mu_target.load_state_dict(mu.state_dict())
        mu_optimizer = torch.optim.Adam(mu.parameters(), lr=script.lr_mu)
        q_optimizer = torch.optim.Adam(q.parameters(), lr=script.lr_q)

        def fit(batches: Any) -> None:
            for batch in batches:
                script.train(mu, mu_target, q, q_target, memory(script, batch), q_optimizer, mu_optimizer)
                script.soft_update(mu, mu_target)
                script.soft_update(q, q_target)

        models = {"q": q, "mu": mu, "q_target": q_target, "mu_target": mu_target}
        optimizers = [q_optimizer, mu_optimizer]
        return TrainLoop(model=models, optimizer=optimizers, batch=transitions(32, 3, None), fit=fit)

    def sac(script: Any) -> TrainLoop:
        q1, q2, q1_target, q2_target = (script.QNet(script.lr_q) for _ in range(4))
        pi = script.PolicyNet(script.lr_pi)
        q1_target.load_state_dict(q1.state_dict())
        q2_target.load_state_dict(q2.state_dict())

        def fit(batches: Any) -> None:
            for batch in batches:
                rows = memory(script, batch).sample(script.batch_size)
                td_target = script.calc_target(pi, q1_target, q2_target, rows)
                q1.train_net(td_target, rows)
                q2.train_net(td_target, rows)
                pi.train_net(q1, q2, rows)
                q1.soft_update(q1_target)
                q2.soft_update(q2_target)

        models = {"pi": pi, "q1": q1, "q2": q2, "q1_target": q1_target, "q2_target": q2_target}
        optimizers = [pi.optimizer, pi.log_alpha_optimizer, q1.optimizer, q2.optimizer]
        return TrainLoop(model=models, optimizer=optimizers, batch=transitions(32, 3, None), fit=fit)

    return lambda: {"dqn": dqn, "ddpg": ddpg, "sac": sac}[name](imported(root / "minimalRL", name))


def acer(root: Path) -> Make:
    def make() -> TrainLoop:
        script = imported(root / "minimalRL", "acer")
        model = script.ActorCritic()
        optimizer = torch.optim.Adam(model.parameters(), lr=script.learning_rate)

        def fit(batches: Any) -> None:
            for batch in batches:
                memory = script.ReplayBuffer()
                script.batch_size = len(batch[0])
                for s, a, r, prob, done in zip(*batch, strict=True):
                    rows = zip(s.numpy(), a.tolist(), r.tolist(), prob.numpy(), done.tolist(), strict=True)
                    memory.put(list(rows))
                script.train(model, optimizer, memory, on_policy=True)
                script.train(model, optimizer, memory)

        prob = torch.softmax(torch.randn(4, 10, 2), 2)
        s, a, r = torch.randn(4, 10, 4), torch.randint(0, 2, (4, 10)), torch.rand(4, 10)
        return TrainLoop(model=model, optimizer=optimizer, batch=(s, a, r, prob, torch.zeros(4, 10).bool()), fit=fit)

    return make


def a2c(root: Path) -> Make:
    def make() -> TrainLoop:
        script = Source(root / "minimalRL/a2c.py")
        model = script.ActorCritic()
        optimizer = torch.optim.Adam(model.parameters(), lr=script.learning_rate)

        def fit(batches: Any) -> None:
            for states, rewards, done in batches:
                rows = zip(states[1:].numpy(), rewards.numpy(), done.numpy(), strict=True)
                envs = SimpleNamespace(step=lambda _actions, rows=rows: (*next(rows), {}))
                names = {"model": model, "optimizer": optimizer, "envs": envs, "s": states[0].numpy()}
                script.block("while step_idx", **names, step_idx=0, max_train_steps=5, PRINT_INTERVAL=10**9)

        batch = torch.randn(6, 3, 4), torch.rand(5, 3), torch.zeros(5, 3)
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, batch_dim=1)

    return make


def a3c(root: Path) -> Make:
    """One worker of a3c, in this process. An episode is a batch."""

    def make() -> TrainLoop:
        script = imported(root / "minimalRL", "a3c")
        model = script.ActorCritic()

        def fit(batches: Any) -> None:
            stream, rest = iter(batches), []

            def reset() -> Any:
                states, rewards = next(stream)
                ends = [*[False] * (len(rewards) - 1), True]
                rest[:] = zip(states[1:].numpy(), rewards.tolist(), ends, strict=True)
                return states[0].numpy()

            env = SimpleNamespace(reset=reset, step=lambda _action: (*rest.pop(0), {}), close=lambda: None)
            script.gym, script.max_train_ep = SimpleNamespace(make=lambda _name: env), 10**9
            with contextlib.suppress(StopIteration):
                script.train(model, 0)

        return TrainLoop(model=model, batch=(torch.randn(11, 4), torch.rand(10)), fit=fit)

    return make


def td3(root: Path) -> Make:
    def make() -> TrainLoop:
        agent = imported(root / "TD3", "TD3").TD3(3, 1, 2.0)

        def fit(batches: Any) -> None:
            for batch in batches:
                agent.train(SimpleNamespace(sample=lambda _n, batch=batch: batch))

        rows = torch.randn(32, 3), torch.rand(32, 1), torch.randn(32, 3), torch.rand(32, 1), torch.ones(32, 1)
        models = {"actor": agent.actor, "critic": agent.critic}
        optimizers = [agent.actor_optimizer, agent.critic_optimizer]
        return TrainLoop(model=models, optimizer=optimizers, batch=rows, fit=fit)

    return make


def actor_critic(root: Path, name: str) -> Make:
    """PPO and A2C of pytorch-a2c-ppo-acktr-gail."""

    def make() -> TrainLoop:
        folder = root / "pytorch-a2c-ppo-acktr-gail"
        space = type("Discrete", (), {"n": 3})()
        policy = imported(folder, "a2c_ppo_acktr.model").Policy((4,), space, base_kwargs={"recurrent": False})
        storage = imported(folder, "a2c_ppo_acktr.storage")
        if name == "ppo":
            algorithm = imported(folder, "a2c_ppo_acktr.algo.ppo").PPO
            agent = algorithm(policy, 0.2, 2, 2, 0.5, 0.01, lr=2.5e-4, eps=1e-5, max_grad_norm=0.5)
        else:
            algorithm = imported(folder, "a2c_ppo_acktr.algo.a2c_acktr").A2C_ACKTR
            agent = algorithm(policy, 0.5, 0.01, lr=7e-4, eps=1e-5, alpha=0.99, max_grad_norm=0.5)

        def fit(batches: Any) -> None:
            for states, actions, chances, values, rewards in batches:
                rows = storage.RolloutStorage(len(rewards), rewards.shape[1], (4,), space, 1)
                rows.obs[0].copy_(states[0])
                given = zip(states[1:], actions, chances, values, rewards, strict=True)
                for s, a, chance, value, reward in given:
                    ones = torch.ones_like(reward)
                    rows.insert(s, torch.zeros(len(s), 1), a, chance, value, reward, ones, ones)
                with torch.no_grad():
                    last = policy.get_value(rows.obs[-1], rows.recurrent_hidden_states[-1], rows.masks[-1])
                rows.compute_returns(last, True, 0.99, 0.95)
                agent.update(rows)

        numbers = [torch.rand(5, 4, 1) for _ in range(3)]
        batch = torch.randn(6, 4, 4), torch.randint(0, 3, (5, 4, 1)), -1 - numbers[0] / 10, numbers[1], numbers[2]
        return TrainLoop(model=policy, optimizer=agent.optimizer, batch=batch, fit=fit, batch_dim=1)

    return make


def tutorial_dqn(root: Path) -> Make:
    def make() -> TrainLoop:
        env = MagicMock()
        space = SimpleNamespace(n=2, sample=lambda: 0)
        env.make.return_value.unwrapped.action_space = space
        env.make.return_value.unwrapped.observation_space = SimpleNamespace(shape=(4,))
        path = root / "PyTorch-Tutorial/tutorial-contents/405_DQN_Reinforcement_learning.py"
        script = Source(path, ("import gym", "env.step"), gym=env)
        agent = script.DQN()

        def fit(batches: Any) -> None:
            for s, a, r, s_prime in batches:
                rows = torch.cat([s, a[:, None], r[:, None], s_prime], 1)
                agent.memory = np.asarray(rows.numpy(), dtype=float)
                script.names.update(MEMORY_CAPACITY=len(rows), BATCH_SIZE=len(rows))
                agent.learn()

        models = {"eval_net": agent.eval_net, "target_net": agent.target_net}
        return TrainLoop(model=models, optimizer=agent.optimizer, batch=transitions(32)[:4], fit=fit)

    return make


def loops(root: Path) -> dict[str, Make]:
    nets = {"REINFORCE": "Policy", "actor_critic": "ActorCritic", "ppo": "PPO", "ppo-lstm": "PPO", "vtrace": "Vtrace"}
    return {
        **{f"minimalRL {name}": on_policy(root, name, model) for name, model in nets.items()},
        "minimalRL ppo-continuous": ppo_continuous(root),
        **{f"minimalRL {name}": replay(root, name) for name in ("dqn", "ddpg", "sac")},
        "minimalRL acer": acer(root),
        "minimalRL a2c": a2c(root),
        "minimalRL a3c": a3c(root),
        "TD3": td3(root),
        "pytorch-a2c-ppo-acktr ppo": actor_critic(root, "ppo"),
        "pytorch-a2c-ppo-acktr a2c": actor_critic(root, "a2c"),
        "PyTorch-Tutorial 405_DQN": tutorial_dqn(root),
    }
