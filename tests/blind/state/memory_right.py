"""Loops that keep things from step to step as they should, as projects wrote them."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def blobs(n=64, width=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=g) * 1.5
    y = torch.randint(0, classes, (n,), generator=g)
    return centers[y] + torch.randn(n, width, generator=g), y


def loader(batch_size=8, width=12, classes=4, seed=1):
    return DataLoader(TensorDataset(*blobs(64, width, classes, seed)), batch_size=batch_size, shuffle=True)


def text(n, length, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    return (start + step * torch.arange(length)) % vocab


def mlp(width=12, classes=4, hidden=32):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@right(
    "memory",
    "the running sum adds detached losses and stays a tensor to avoid a synchronization",
    thread="MultimediaTechLab/YOLO#83",
)
def detached_sum():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    totals = defaultdict(lambda: torch.zeros(()))

    def train(batches):
        model.train()
        for x, y in batches:
            logits = model(x)
            losses = {"cls": F.cross_entropy(logits, y), "reg": 1e-3 * logits.square().mean()}
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            for k, v in losses.items():
                totals[k] += v.detach()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "the history of the run grows by floats for each step: losses, rates, gradient norms",
    thread="Quantinuum/lambeq#251",
)
def float_history():
    class Trainer:
        def __init__(self):
            self.model = mlp()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
            self.train_costs, self.records = [], []

        def fit(self, batches):
            for x, y in batches:
                loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                norms = {k: p.grad.norm().item() for k, p in self.model.named_parameters()}
                self.optimizer.step()
                self.scheduler.step()
                self.train_costs.append(loss.item())
                self.records.append({"lr": self.scheduler.get_last_lr()[0], "norms": norms})

    t = Trainer()
    return TrainLoop(model=t.model, optimizer=t.optimizer, scheduler=t.scheduler, batches=loader(), fit=t.fit)


@right(
    "memory",
    "truncated backpropagation: the state is carried over and detached at each window",
    thread="pytorch/examples word_language_model",
)
def truncated_bptt():
    vocab = 24

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.rnn, self.decoder = nn.Embedding(vocab, 16), nn.LSTM(16, 24), nn.Linear(24, vocab)

        def forward(self, tokens, hidden):
            out, hidden = self.rnn(self.encoder(tokens), hidden)
            return self.decoder(out), hidden

    def repackage(h):
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage(v) for v in h)

    stream = text(4, 97, vocab, 0).T
    windows = [(stream[i : i + 8], stream[i + 1 : i + 9]) for i in range(0, 88, 8)]
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train(batches):
        model.train()
        hidden = (torch.zeros(1, 4, 24), torch.zeros(1, 4, 24))
        for data, targets in batches:
            hidden = repackage(hidden)
            model.zero_grad()
            out, hidden = model(data, hidden)
            F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=windows, fit=train, batch_dim=1)


@right(
    "memory",
    "the graph is kept over k2 = 3 windows on purpose and is dropped after the step",
    thread="https://discuss.pytorch.org/t/implementing-truncated-backpropagation-through-time/15500",
)
def graph_over_windows():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRUCell(3, 16), nn.Linear(16, 3)

        def forward(self, x, h):
            h = self.cell(x, h)
            return self.out(h), h

    g = torch.Generator().manual_seed(0)
    series = torch.randn(25, 6, 3, generator=g).cumsum(0) * 0.2
    pairs = [(series[i], series[i + 1]) for i in range(24)]
    model = Cell()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(batches):
        h, losses = torch.zeros(6, 16), []
        for step, (x, target) in enumerate(batches, 1):
            pred, h = model(x, h)
            losses.append(F.mse_loss(pred, target))
            if step % 3 == 0 or step == len(batches):
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
                losses.clear()
                h = h.detach()

    return TrainLoop(model=model, optimizer=optimizer, batches=pairs, fit=train)


@right(
    "memory",
    "the replay buffer fills up to its capacity with detached transitions, allocated as they come",
    thread="Kaixhin/Rainbow#33",
)
def replay_buffer():
    @dataclass
    class Transition:
        obs: np.ndarray
        action: int
        reward: float
        next_obs: np.ndarray

    class DQN:
        def __init__(self):
            self.q = mlp(4, 2, 24)
            self.target = copy.deepcopy(self.q).requires_grad_(False)
            self.optimizer = torch.optim.Adam(self.q.parameters(), lr=2e-3)
            self.memory, self.rng, self.updates = deque(maxlen=1000), random.Random(0), 0

        def act(self, obs):
            with torch.no_grad():
                greedy = int(self.q(torch.as_tensor(obs)[None]).argmax())
            return greedy if self.rng.random() > 0.1 else self.rng.randrange(2)

        def learn(self, batches):
            for obs in batches:
                for o in obs.numpy():
                    a = self.act(o)
                    nxt = (0.9 * o + 0.1 * (1 if a else -1)).astype(np.float32)
                    self.memory.append(Transition(o.copy(), a, float(-abs(nxt).sum()), nxt))
                sample = self.rng.sample(list(self.memory), min(8, len(self.memory)))
                o = torch.as_tensor(np.stack([t.obs for t in sample]))
                n = torch.as_tensor(np.stack([t.next_obs for t in sample]))
                r, a = torch.tensor([t.reward for t in sample]), torch.tensor([t.action for t in sample])
                target = r + 0.9 * self.target(n).max(1).values
                loss = F.smooth_l1_loss(self.q(o).gather(1, a[:, None])[:, 0], target)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.updates += 1
                if self.updates % 4 == 0:
                    self.target.load_state_dict(self.q.state_dict())

    agent = DQN()
    observations = list(torch.randn(12, 4, 4, generator=torch.Generator().manual_seed(0)))
    return TrainLoop(model=agent.q, optimizer=agent.optimizer, batches=observations, fit=agent.learn)


@right(
    "memory", "a contrastive queue of a fixed size is overwritten in a ring", thread="facebookresearch/moco builder.py"
)
def moco_ring():
    class MoCo(nn.Module):
        def __init__(self, dim=8, size=64):
            super().__init__()
            self.encoder_q = mlp(12, dim)
            self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys):
            p = int(self.ptr)
            self.queue[:, p : p + len(keys)] = keys.T
            self.ptr[0] = (p + len(keys)) % self.queue.shape[1]

        def forward(self, a, b):
            q = F.normalize(self.encoder_q(a), dim=1)
            with torch.no_grad():
                for pq, pk in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    pk.mul_(0.9).add_(pq, alpha=0.1)
                k = F.normalize(self.encoder_k(b), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
            self.enqueue(k)
            return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))

    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        for x, _ in batches:
            loss = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train, rows_interact=True)


@right(
    "memory",
    "the hook keeps the last activation with its graph only: it is used in the loss of the same step",
    thread="pytorch/pytorch#46386",
)
def last_activation():
    teacher, student = mlp(hidden=48).requires_grad_(False), mlp(hidden=16)
    project = nn.Linear(16, 48)
    kept = {}

    def keep(name):
        def hook(module, args, output):
            kept[name] = output

        return hook

    teacher[1].register_forward_hook(keep("teacher"))
    student[1].register_forward_hook(keep("student"))
    optimizer = torch.optim.Adam([*student.parameters(), *project.parameters()], lr=3e-3)

    def train(batches):
        for x, y in batches:
            with torch.no_grad():
                soft = teacher(x).softmax(1)
            logits = student(x)
            loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, soft)
            loss = loss + F.mse_loss(project(kept["student"]), kept["teacher"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model={"student": student, "project": project}, optimizer=optimizer, batches=loader(), fit=train)


@right("memory", "hooks are registered and removed in each step", thread="chr5tphr/zennit#11")
def hooks_per_step():
    model = mlp(hidden=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Watch:
        def __init__(self, modules):
            self.modules, self.handles, self.outputs = modules, [], []

        def __enter__(self):
            self.handles = [m.register_forward_hook(lambda m, a, out: self.outputs.append(out)) for m in self.modules]
            return self

        def __exit__(self, *exc):
            for h in self.handles:
                h.remove()
            self.outputs.clear()

    def train(batches):
        for x, y in batches:
            with Watch([model[1]]) as watch:
                loss = F.cross_entropy(model(x), y) + 1e-3 * sum(o.abs().mean() for o in watch.outputs)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "outputs of an epoch are collected detached for its metric and freed at its end",
    thread="Lightning-AI/pytorch-lightning#4313",
)
def epoch_outputs_cleared():
    class LitModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.outputs, self.logged = mlp(), [], []

        def training_step(self, x, y):
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.outputs.append({"loss": loss.detach(), "preds": logits.detach(), "target": y})
            return loss

        def on_train_epoch_end(self):
            preds = torch.cat([o["preds"] for o in self.outputs]).argmax(1)
            self.logged.append((preds == torch.cat([o["target"] for o in self.outputs])).float().mean().item())
            self.outputs.clear()

    module = LitModule()
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-3)

    def fit(batches):
        module.train()
        for x, y in batches:
            optimizer.zero_grad()
            module.training_step(x, y).backward()
            optimizer.step()
        module.on_train_epoch_end()

    return TrainLoop(model=module, optimizer=optimizer, batches=loader(), fit=fit)


@right(
    "memory",
    "the AUC of an epoch needs all its scores: detached, one per row, dropped by reset() at its end",
    thread="Lightning-AI/torchmetrics list states",
)
def scores_of_the_epoch():
    class BinaryAUROC:
        def __init__(self):
            self.reset()

        def reset(self):
            self.preds, self.target = [], []

        @torch.no_grad()
        def update(self, preds, target):
            self.preds.append(preds.detach().clone())
            self.target.append(target)

        def compute(self):
            p, t = torch.cat(self.preds), torch.cat(self.target).bool()
            return (p[t][:, None] > p[~t][None]).float().mean().item()

    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, generator=g)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).float()), batch_size=8)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    auroc, epochs = BinaryAUROC(), []

    def fit(batches):
        for features, target in batches:
            logits = model(features)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits, target).backward()
            optimizer.step()
            auroc.update(logits.sigmoid(), target)
        epochs.append(auroc.compute())
        auroc.reset()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right(
    "memory",
    "the last five snapshots of the weights are kept for averaging, then the oldest goes",
    thread="facebookresearch/fairseq average_checkpoints.py",
)
def last_snapshots():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    snapshots = deque(maxlen=5)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            snapshots.append({k: v.detach().clone() for k, v in model.state_dict().items()})

    def average():
        mean = {k: torch.stack([s[k] for s in snapshots]).mean(0) for k in snapshots[0]} if snapshots else None
        x, y = blobs(32, seed=1)
        averaged = copy.deepcopy(model)
        if mean:
            averaged.load_state_dict(mean)
        with torch.no_grad():
            return (averaged(x).argmax(1) == y).float().mean().item()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train, evaluate=average)


@right(
    "memory",
    "L-BFGS collects its history of up to 20 updates in the first steps",
    thread="torch.optim.LBFGS history_size",
)
def lbfgs_history():
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=20)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=g)
    data = [(x, x[:, :2].sum(1, keepdim=True))]

    def train(batches):
        for features, target in batches:

            def closure(features=features, target=target):
                optimizer.zero_grad()
                loss = F.mse_loss(model(features), target)
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "memory",
    "MAML builds the graph of its inner steps with create_graph, and it ends with the outer step",
    thread="facebookresearch/higher#75",
)
def maml_inner_graph():
    net = mlp(1, 1, 24)
    meta = torch.optim.Adam(net.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(0)

    def task():
        phase, x = torch.rand(1, generator=g) * 3, torch.rand(16, 1, generator=g) * 6 - 3
        return {"x": x, "y": torch.sin(x + phase)}

    def fit(batches):
        for t in batches:
            params = dict(net.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(net, params, (t["x"][:8],)), t["y"][:8])
                grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
                params = {k: p - 0.05 * d for (k, p), d in zip(params.items(), grads, strict=True)}
            meta.zero_grad()
            F.mse_loss(functional_call(net, params, (t["x"][8:],)), t["y"][8:]).backward()
            meta.step()

    return TrainLoop(model=net, optimizer=meta, batches=[task() for _ in range(10)], fit=fit)


@right(
    "memory",
    "WGAN-GP: autograd.grad with create_graph for the penalty, only floats are logged",
    thread="pytorch/pytorch#78622",
)
def wgan_penalty():
    gen, critic = mlp(6, 12, 24), nn.Sequential(nn.Linear(12, 32), nn.Softplus(), nn.Linear(32, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    log = []

    def train(batches):
        for i, (real, _) in enumerate(batches):
            fake = gen(torch.randn(len(real), 6)).detach()
            mix = torch.rand(len(real), 1)
            x = (mix * real + (1 - mix) * fake).requires_grad_()
            (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * (grad.norm(dim=1) - 1).square().mean()
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()
            log.append((loss.item(), grad.norm().item()))
            if i % 2:
                opt_g.zero_grad()
                (-critic(gen(torch.randn(len(real), 6))).mean()).backward()
                opt_g.step()

    return TrainLoop(model={"generator": gen, "critic": critic}, optimizer=[opt_g, opt_c], batches=loader(), fit=train)


@right(
    "memory",
    "backward(create_graph=True) for a curvature term; .grad is set to None after each step, which breaks the cycle",
    thread="f-dangel/cockpit#30",
)
def create_graph_backward():
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def hutchinson(params, grads):
        vs = [torch.randint_like(p, 2) * 2 - 1 for p in params]
        hv = torch.autograd.grad(grads, params, vs)
        return sum((v * h).sum() for v, h in zip(vs, hv, strict=True)).item()

    traces = []

    def train(batches):
        for x, y in batches:
            params = list(model.parameters())
            F.cross_entropy(model(x), y).backward(create_graph=True)
            traces.append(hutchinson(params, [p.grad for p in params]))
            for p in params:
                p.grad = p.grad.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right("memory", "retain_graph=True for the first of two backward passes over one graph", thread="isds-neu/PeRCNN#3")
def two_backward_passes():
    trunk, heads = nn.Linear(12, 24), nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 12)])
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=3e-3)

    def train(batches):
        for x, y in batches:
            h = F.relu(trunk(x))
            optimizer.zero_grad()
            F.cross_entropy(heads[0](h), y).backward(retain_graph=True)
            nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
            (0.5 * F.mse_loss(heads[1](h), x)).backward()
            optimizer.step()

    return TrainLoop(model={"trunk": trunk, "heads": heads}, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "features of a frozen backbone are cached per sample: the cache is full after the first epoch",
    thread="MoonshotAI/Kimi-Audio#117",
)
def feature_cache():
    class Cached:
        def __init__(self, backbone):
            self.backbone, self.store = backbone.eval().requires_grad_(False), {}

        @torch.no_grad()
        def __call__(self, index, x):
            missing = [i for i, k in enumerate(index.tolist()) if k not in self.store]
            if missing:
                for i, f in zip(missing, self.backbone(x[missing]), strict=True):
                    self.store[int(index[i])] = f.clone()
            return torch.stack([self.store[k] for k in index.tolist()])

    x, y = blobs(64, seed=1)
    data = DataLoader(TensorDataset(torch.arange(64), x, y), batch_size=8, shuffle=True)
    features, head = Cached(nn.Sequential(nn.Linear(12, 48), nn.ReLU())), nn.Linear(48, 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)

    def train(batches):
        for index, images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(head(features(index, images)), labels).backward()
            optimizer.step()

    return TrainLoop(model=head, optimizer=optimizer, batches=data, fit=train)


@right(
    "memory",
    "the losses of four micro-batches are summed with their graphs and go backward together",
    thread="huggingface/transformers gradient accumulation",
)
def summed_micro_batches():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train(batches, accumulate=4):
        total = 0.0
        for i, (x, y) in enumerate(batches, 1):
            total = total + F.cross_entropy(model(x), y) / accumulate
            if i % accumulate == 0 or i == len(batches):
                total.backward()
                optimizer.step()
                optimizer.zero_grad()
                total = 0.0

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(4), fit=train)


@right(
    "memory",
    "PPO: the rollout with old log-probabilities is built without gradients and cleared after its epochs",
    thread="DLR-RM/stable-baselines3 RolloutBuffer",
)
def ppo_rollouts():
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pi, self.v = nn.Sequential(nn.Linear(4, 24), nn.Tanh()), nn.Linear(24, 2), nn.Linear(24, 1)

        def forward(self, obs):
            h = self.body(obs)
            return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(1)

    net = ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    buffer = []

    def learn(batches):
        for obs in batches:
            with torch.no_grad():
                for part in obs.split(4):
                    dist, value = net(part)
                    action = dist.sample()
                    reward = part[:, 0] * (2 * action - 1)
                    buffer.append((part, action, dist.log_prob(action), reward - value, reward))
            o, a, old, adv, ret = (torch.cat(c) for c in zip(*buffer, strict=True))
            for _ in range(3):
                dist, value = net(o)
                ratio = (dist.log_prob(a) - old).exp()
                loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() + 0.5 * F.mse_loss(value, ret)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            buffer.clear()

    observations = list(torch.randn(8, 16, 4, generator=torch.Generator().manual_seed(0)))
    return TrainLoop(model=net, optimizer=optimizer, batches=observations, fit=learn)


@right(
    "memory", "DINO's center and the teacher are averages made under no_grad", thread="facebookresearch/dino DINOLoss"
)
def dino_center():
    student, teacher = mlp(12, 16), mlp(12, 16)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    state = {"center": torch.zeros(1, 16)}

    def train(batches):
        for x, _ in batches:
            views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
            with torch.no_grad():
                out = teacher(views[0])
                target = ((out - state["center"]) / 0.1).softmax(1)
                state["center"] = 0.9 * state["center"] + 0.1 * out.mean(0, keepdim=True)
            loss = -(target * (student(views[1]) / 0.3).log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
                    t.mul_(0.99).add_(s, alpha=0.01)

    return TrainLoop(model=student, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "the output and loss of the last step stay on the trainer, with one graph, for callbacks",
    thread="fastai Learner.pred and Learner.loss",
)
def learner_attributes():
    class Learner:
        def __init__(self, model, opt):
            self.model, self.opt, self.cbs, self.seen = model, opt, [self.smooth], 0.0

        def smooth(self):
            self.seen = 0.9 * self.seen + 0.1 * self.loss.item()

        def fit(self, batches):
            for self.xb, self.yb in batches:
                self.pred = self.model(self.xb)
                self.loss = F.cross_entropy(self.pred, self.yb)
                self.loss.backward()
                self.opt.step()
                self.opt.zero_grad()
                for cb in self.cbs:
                    cb()

    model = mlp()
    learner = Learner(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    return TrainLoop(model=model, optimizer=learner.opt, batches=loader(), fit=learner.fit)


@right(
    "memory",
    "scalars wait as detached tensors and are flushed every four steps (asynchronous logging)",
    thread="horovod/horovod#641",
)
def buffered_logging():
    class AsyncLogger:
        def __init__(self, every=4):
            self.every, self.pending, self.lines = every, [], []

        def log(self, **values):
            self.pending.append({k: v.detach() for k, v in values.items()})
            if len(self.pending) == self.every:
                self.lines.append({k: torch.stack([p[k] for p in self.pending]).mean().item() for k in values})
                self.pending.clear()

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger = AsyncLogger()

    def train(batches):
        for x, y in batches:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.log(loss=loss, margin=logits.topk(2).values.diff(dim=1).abs().mean())

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right("memory", "the custom Function saves its own output with save_for_backward", thread="pytorch/pytorch#5569")
def output_saved():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            y = (x * scale).exp()
            ctx.scale = scale
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y * ctx.scale, None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 4)

        def forward(self, x):
            return self.b(Exp.apply(-self.a(x).square(), 0.5))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "the curriculum lengthens the sequences with the steps, so that each step needs more than the last, "
    "up to the full length",
    thread="microsoft/DeepSpeed curriculum learning",
)
def growing_sequences():
    vocab = 24
    model = nn.Sequential(nn.Embedding(vocab, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"step": 0}

    def length(full):
        return min(full, 4 + 2 * state["step"])

    def train(batches):
        for tokens in batches:
            t = tokens[:, : length(tokens.shape[1])]
            loss = F.cross_entropy(model(t[:, :-1]).transpose(1, 2), t[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(text(48, 33, vocab, 0), batch_size=8), fit=train
    )


@right("memory", "masks and positions are kept in an lru_cache of eight lengths", thread="facebookresearch/ParlAI#2487")
def cached_masks():
    vocab, dim = 24, 16

    @lru_cache(maxsize=8)
    def causal(length):
        return torch.ones(length, length, dtype=torch.bool).tril()

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, vocab)

        def forward(self, tokens):
            q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=causal(tokens.shape[1])))

    batches_of_lengths = [text(8, n, vocab, n) for n in (6, 9, 7, 12, 8, 10, 9, 6)]
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(batches):
        for tokens in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches_of_lengths, fit=train)


@right(
    "memory",
    "the CycleGAN pool fills up to 50 detached images and replaces them from then on",
    thread="junyanz/pytorch-CycleGAN-and-pix2pix image_pool.py",
)
def image_pool():
    class ImagePool:
        def __init__(self, size=50):
            self.size, self.images = size, []

        def query(self, images):
            out = []
            for image in images.detach():
                if len(self.images) < self.size:
                    self.images.append(image.clone())
                    out.append(image)
                elif random.random() > 0.5:
                    i = random.randrange(self.size)
                    out.append(self.images[i])
                    self.images[i] = image.clone()
                else:
                    out.append(image)
            return torch.stack(out)

    gen, disc = mlp(12, 12, 24), mlp(12, 1, 24)
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (gen, disc))
    pool = ImagePool()

    def train(batches):
        for real, _ in batches:
            fake = gen(real + 0.3 * torch.randn_like(real))
            opt_g.zero_grad()
            ((disc(fake) - 1).square().mean() + 10 * F.l1_loss(fake, real)).backward()
            opt_g.step()
            opt_d.zero_grad()
            ((disc(real) - 1).square().mean() + disc(pool.query(fake)).square().mean()).backward()
            opt_d.step()

    return TrainLoop(
        model={"generator": gen, "discriminator": disc}, optimizer=[opt_g, opt_d], batches=loader(16), fit=train
    )


@right(
    "memory",
    "SVRG keeps one snapshot of weights and full gradient, made anew every five steps",
    thread="https://papers.nips.cc/paper/4937 SVRG implementations",
)
def svrg_snapshot():
    model = nn.Linear(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x_all, y_all = blobs(64, seed=1)
    anchor = {"net": None, "full": None, "step": 0}

    def grads(net, x, y):
        return torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))

    def train(batches):
        for x, y in batches:
            if anchor["step"] % 5 == 0:
                anchor["net"] = copy.deepcopy(model)
                anchor["full"] = grads(anchor["net"], x_all, y_all)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p, old, full in zip(model.parameters(), grads(anchor["net"], x, y), anchor["full"], strict=True):
                p.grad += full - old
            optimizer.step()
            anchor["step"] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "losses of the last 20 steps in a deque, detached, for skipping spikes; a spike's batch is not kept",
    thread="huggingface/transformers loss spikes",
)
def spike_filter():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    recent, skipped = deque(maxlen=20), []

    def train(batches):
        for step, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y)
            if len(recent) >= 5 and loss.detach() > 5 * torch.stack(tuple(recent)).median():
                skipped.append(step)
                continue
            recent.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "class-incremental training: the head grows when a new class is seen, and the optimizer gets its rows",
    thread="ContinualAI/avalanche IncrementalClassifier",
)
def incremental_head():
    class Incremental(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Sequential(nn.Linear(12, 24), nn.ReLU()), nn.ModuleDict()

        def forward(self, x):
            h = self.body(x)
            return torch.cat([head(h) for head in self.heads.values()], 1)

    model = Incremental()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def adapt(labels):
        needed = 2 * (int(labels.max()) // 2 + 1)
        while len(model.heads) < needed:
            head = nn.Linear(24, 1)
            model.heads[str(len(model.heads))] = head
            optimizer.add_param_group({"params": head.parameters()})

    x, y = blobs(64, seed=1)
    order = torch.argsort(y // 2, stable=True)
    tasks = list(zip(x[order].split(8), y[order].split(8), strict=True))

    def train(batches):
        for xb, yb in batches:
            adapt(yb)
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=tasks, fit=train)


@right(
    "memory",
    "data echoing: a small buffer of the last four batches is trained on again",
    thread="https://arxiv.org/abs/1907.05550",
)
def data_echoing():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recent = deque(maxlen=4)

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def train(batches):
        for batch in batches:
            recent.append(batch)
            step(*batch)
            step(*recent[int(torch.randint(len(recent), ()))])

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "the offloading hooks pop what they packed, and the tracker is empty after each step",
    thread="huggingface/trl#5700",
)
def offloading_popped():
    class Offload(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            self.tracker, self.next_id = {}, 0
            super().__init__(self.pack, self.unpack)

        def pack(self, tensor):
            self.next_id += 1
            self.tracker[self.next_id] = tensor.clone()
            return self.next_id

        def unpack(self, key):
            return self.tracker.pop(key)

        def __enter__(self):
            self.tracker.clear()
            return super().__enter__()

    model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    offload = Offload()

    def train(batches):
        model.train()
        for x, y in batches:
            with offload:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@right(
    "memory",
    "AdaGrad's and Adam's states come to life in the first step; the second optimizer starts after four steps",
    thread="junyanz/pytorch-CycleGAN-and-pix2pix delayed discriminator",
)
def delayed_discriminator():
    ae, disc = mlp(12, 12, 24), mlp(12, 1, 24)
    opt_ae, opt_disc = torch.optim.Adam(ae.parameters(), lr=2e-3), torch.optim.Adagrad(disc.parameters(), lr=1e-2)
    state = {"step": 0, "start": 4}

    def train(batches):
        for x, _ in batches:
            recon = ae(x + 0.2 * torch.randn_like(x))
            active = state["step"] >= state["start"]
            loss = F.l1_loss(recon, x) + (0.1 * F.softplus(-disc(recon)).mean() if active else 0.0)
            opt_ae.zero_grad()
            loss.backward()
            opt_ae.step()
            if active:
                loss_d = F.softplus(-disc(x)).mean() + F.softplus(disc(recon.detach())).mean()
                opt_disc.zero_grad()
                loss_d.backward()
                opt_disc.step()
            state["step"] += 1

    return TrainLoop(model={"ae": ae, "disc": disc}, optimizer=[opt_ae, opt_disc], batches=loader(), fit=train)
