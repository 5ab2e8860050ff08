"""Sequences, policies, survival, diffusion and graphs."""

from __future__ import annotations

import contextlib
import copy
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from scripts.public.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[], TrainLoop]

CPU = torch.device("cpu")


def word_model(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "examples/word_language_model"
        skip = "Corpus", "batchify(corpus", "'Transformer':\n    model", "optimizer = torch"
        model = Source(folder / "model.py").RNNModel("LSTM", 20, 16, 16, 1, 0.1, True)
        script = Source(folder / "main.py", skip, corpus=SimpleNamespace(dictionary=range(20)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        settings = {"model": "LSTM", "bptt": 6, "clip": 0.25, "use_optimizer": True, "batch_size": 4}
        script.names.update(
            model=model,
            optimizer=optimizer,
            args=SimpleNamespace(**settings, log_interval=100, dry_run=False),
            device=CPU,
        )

        def fit(batches: Any) -> None:
            for ids in batches:
                script.names["train_data"] = ids
                script.names["train"]()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randint(0, 20, (7, 4)), fit=fit, batch_dim=1)

    return make


def policy_gradient(root: Path, name: str) -> Make:
    def make() -> TrainLoop:
        path = root / f"examples/reinforcement_learning/{name}.py"
        script = Source(path, ("gym.", "env.", "import gym"), {"seed": 0, "gamma": 0.99}, gym=MagicMock())
        model = script.names.get("policy") or script.names["model"]

        def fit(batches: Any) -> None:
            for states, rewards in batches:
                for state in states:
                    script.select_action(state.numpy())
                model.rewards.extend(rewards.tolist())
                script.finish_episode()

        batch = torch.rand(10, 4), torch.rand(10)
        return TrainLoop(model=model, optimizer=script.optimizer, batch=batch, fit=fit)

    return make


def graph(root: Path) -> Make:
    def make() -> TrainLoop:
        script = Source(root / "examples/gcn/main.py", ("parser", "wget"))
        model = script.GCN(8, 16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        links = ((torch.rand(12, 12) < 0.3).float() + torch.eye(12)).clamp(max=1)
        batch = torch.rand(12, 8), links / links.sum(1, keepdim=True), torch.randint(0, 3, (12,))

        def fit(batches: Any) -> None:
            for epoch, (x, adjacency, y) in enumerate(batches):
                seen = torch.arange(len(y)) < 8
                script.train_iter(epoch, model, optimizer, nn.NLLLoss(), (x, adjacency), y, seen, ~seen, 1000)

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def nano_gpt(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "nanoGPT"
        gpt = Source(folder / "model.py")
        model = gpt.GPT(gpt.GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=16, dropout=0.0))
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
        script = Source(folder / "train.py", ("",), os=MagicMock(), time=MagicMock(), math=math, torch=torch)
        script.nested("get_lr")
        script.names["time"].time.return_value = 0.0
        plain = {"decay_lr": True, "warmup_iters": 10, "lr_decay_iters": 100, "min_lr": 1e-4, "learning_rate": 1e-3}
        modes = {"eval_interval": 10**9, "master_process": False, "ddp": False, "eval_only": False, "log_interval": 10}
        script.names.update(plain, **modes)

        def fit(batches: Any) -> None:
            stream = iter(batches)
            first = next(stream)
            rest = {"iter_num": 0, "local_iter_num": 0, "running_mfu": -1.0, "t0": 0.0, "max_iters": 10**9}
            with contextlib.suppress(StopIteration):
                script.block(
                    "while True",
                    **rest,
                    X=first[0],
                    Y=first[1],
                    get_batch=lambda _split: next(stream),
                    model=model,
                    raw_model=model,
                    optimizer=optimizer,
                    ctx=contextlib.nullcontext(),
                    scaler=torch.amp.GradScaler("cpu", enabled=False),
                    gradient_accumulation_steps=1,
                    grad_clip=1.0,
                )

        batch = torch.randint(0, 20, (4, 8)), torch.randint(0, 20, (4, 8))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def cleanrl(root: Path, name: str, block: str) -> Make:
    space = SimpleNamespace(shape=(4,), n=2)
    envs = SimpleNamespace(single_observation_space=space, single_action_space=space)

    def ppo() -> TrainLoop:
        script = Source(root / f"cleanrl/cleanrl/{name}.py", ("import tyro",))
        agent = script.Agent(envs)
        optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
        settings = {"update_epochs": 1, "batch_size": 16, "minibatch_size": 16, "norm_adv": True, "clip_coef": 0.2}
        weights = {"clip_vloss": True, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None}

        def fit(batches: Any) -> None:
            for given in batches:
                names = ("obs", "actions", "logprobs", "advantages", "returns", "values")
                script.block(
                    block,
                    args=SimpleNamespace(**{**settings, **weights, "batch_size": len(given[0])}),
                    agent=agent,
                    optimizer=optimizer,
                    clipfracs=[],
                    b_inds=np.arange(len(given[0])),
                    **{f"b_{n}": v for n, v in zip(names, given, strict=True)},
                )

        rows = [torch.rand(16) for _ in range(4)]
        batch = torch.rand(16, 4), torch.randint(0, 2, (16,)), -rows[0], rows[1], rows[2], rows[3]
        return TrainLoop(model=agent, optimizer=optimizer, batch=batch, fit=fit)

    def dqn() -> TrainLoop:
        script = Source(root / f"cleanrl/cleanrl/{name}.py", ("import tyro",))
        model = script.QNetwork(envs)
        target = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
        settings = SimpleNamespace(learning_starts=-1, train_frequency=1, gamma=0.99, batch_size=8)
        settings.target_network_frequency, settings.tau = 2, 1.0

        def fit(batches: Any) -> None:
            for step, given in enumerate(batches, 1):
                data = SimpleNamespace(**given)
                nets = {"q_network": model, "target_network": target, "optimizer": optimizer}
                store = SimpleNamespace(sample=lambda _n, data=data: data)
                script.block(block, args=settings, global_step=step, rb=store, writer=MagicMock(), **nets)

        batch = {"observations": torch.rand(8, 4), "next_observations": torch.rand(8, 4)}
        batch["actions"], batch["rewards"] = torch.randint(0, 2, (8, 1)), torch.rand(8, 1)
        batch["dones"] = (torch.rand(8, 1) < 0.2).float()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return ppo if name == "ppo" else dqn


def soft_actor_critic(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "spinningup/spinup/algos/pytorch/sac"
        core = Source(folder / "core.py")
        space = SimpleNamespace(shape=(4,), high=np.ones(2))
        ac = core.MLPActorCritic(space, SimpleNamespace(shape=(2,), high=np.ones(2)), hidden_sizes=(16,))
        target = copy.deepcopy(ac)
        for weight in target.parameters():
            weight.requires_grad = False
        q_params = [*ac.q1.parameters(), *ac.q2.parameters()]
        pi_optimizer, q_optimizer = torch.optim.Adam(ac.pi.parameters()), torch.optim.Adam(q_params)
        script = Source(folder / "sac.py", ("parser", "args"))
        script.names.update(ac=ac, ac_targ=target, q_params=q_params, logger=MagicMock(), gamma=0.99, alpha=0.2)
        script.names.update(pi_optimizer=pi_optimizer, q_optimizer=q_optimizer, polyak=0.995)
        script.nested("compute_loss_q")
        script.nested("compute_loss_pi")
        update = script.nested("update")

        def fit(batches: Any) -> None:
            for data in batches:
                update(data)

        batch = {"obs": torch.rand(8, 4), "act": torch.rand(8, 2), "rew": torch.rand(8), "obs2": torch.rand(8, 4)}
        batch["done"] = (torch.rand(8) < 0.2).float()
        return TrainLoop(model=ac, optimizer=[pi_optimizer, q_optimizer], batch=batch, fit=fit)

    return make


def survival(root: Path, name: str) -> Make:
    def make() -> TrainLoop:
        folder = root / "pycox/pycox/models"
        source = Source(folder / "loss.py", utils=Source(folder / "utils.py", TupleTree=MagicMock()))
        source.names["utils"] = SimpleNamespace(**Source(folder / "utils.py").names)
        criterion = source.names[name]()
        cox = name.startswith("Cox")
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1 if cox else 6))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches: Any) -> None:
            for x, durations, events in batches:
                optimizer.zero_grad()
                loss = criterion(model(x), durations, events)
                loss.backward()
                optimizer.step()

        durations = torch.rand(12) if cox else torch.randint(0, 6, (12,))
        batch = torch.rand(12, 5), durations, (torch.rand(12) < 0.6).float()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def variational(root: Path, file: str, name: str) -> Make:
    def make() -> TrainLoop:
        base = Source(root / "PyTorch-VAE/models/base.py", Tensor=torch.Tensor, Any=Any, List=list)
        types = {"Tensor": torch.Tensor, "List": list, "Any": Any, "BaseVAE": base.BaseVAE}
        skip = ("from models", "from .types_")
        source = Source(root / f"PyTorch-VAE/models/{file}.py", skip, **types)
        model = source.names[name](in_channels=3, latent_dim=8)
        experiment = Source(root / "PyTorch-VAE/experiment.py", ("from models", "from utils"), **types)
        step = experiment.nested("training_step")
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        self = SimpleNamespace(model=model, params={"kld_weight": 0.00025}, forward=model, log_dict=lambda *_a, **_k: 0)

        def fit(batches: Any) -> None:
            model.train()
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                step(self, batch, number).backward()
                optimizer.step()

        batch = 2 * torch.rand(4, 3, 64, 64) - 1, torch.randint(0, 2, (4,))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def diffusion(root: Path, objective: str) -> Make:
    def make() -> TrainLoop:
        file = "denoising-diffusion-pytorch/denoising_diffusion_pytorch/denoising_diffusion_pytorch_1d.py"
        source = Source(root / file, ("__version__",))
        unet = source.Unet1D(dim=8, dim_mults=(1, 2), channels=2)
        model = source.GaussianDiffusion1D(unet, seq_length=16, timesteps=50, objective=objective)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def fit(batches: Any) -> None:
            for series in batches:
                loss = model(series)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.rand(4, 2, 16), fit=fit)

    return make


def loops(root: Path) -> dict[str, Make]:
    vae = ("vanilla_vae", "VanillaVAE"), ("beta_vae", "BetaVAE"), ("logcosh_vae", "LogCoshVAE"), ("dip_vae", "DIPVAE")
    losses = ("CoxPHLoss", "NLLLogistiHazardLoss", "NLLPMFLoss", "NLLMTLRLoss", "BCESurvLoss")
    return {
        "pytorch/examples word_language_model": word_model(root),
        "pytorch/examples reinforce": policy_gradient(root, "reinforce"),
        "pytorch/examples actor_critic": policy_gradient(root, "actor_critic"),
        "pytorch/examples gcn": graph(root),
        "nanoGPT train": nano_gpt(root),
        "cleanrl ppo": cleanrl(root, "ppo", "for epoch in range(args.update_epochs)"),
        "cleanrl dqn": cleanrl(root, "dqn", "if global_step > args.learning_starts"),
        "spinningup sac": soft_actor_critic(root),
        **{f"pycox {name}": survival(root, name) for name in losses},
        **{f"PyTorch-VAE {name}": variational(root, file, name) for file, name in vae},
        **{f"diffusion {o}": diffusion(root, o) for o in ("pred_noise", "pred_x0", "pred_v")},
    }
