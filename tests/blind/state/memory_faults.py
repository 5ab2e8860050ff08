"""Loops whose memory grows from step to step, as projects wrote them."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


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


@fault(
    "memory",
    "self.total_loss sums the losses as tensors, so that the graphs of all steps stay alive",
    thread="BatsResearch/labelmodels#4",
    check="memory_growth",
)
def running_sum():
    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer
            self.total_loss, self.steps = 0.0, 0

        def train_step(self, x, y):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.total_loss += loss
            self.steps += 1

        def fit(self, batches):
            self.model.train()
            for x, y in batches:
                self.train_step(x, y)
            return float(self.total_loss) / self.steps

    model = mlp()
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    return TrainLoop(model=model, optimizer=trainer.optimizer, batches=loader(), fit=trainer.fit)


@fault(
    "memory",
    "history['loss'] collects the loss tensors with their graphs for the plot",
    thread="TRI-ML/packnet-sfm#51",
    check="memory_growth",
)
def loss_history():
    data = loader()
    encoder, decoder = nn.Linear(12, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 12))
    model = nn.Sequential(encoder, decoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    history = defaultdict(list)

    def train(batches):
        for x, _ in batches:
            recon = model(x)
            loss = F.smooth_l1_loss(recon, x) + 1e-3 * encoder.weight.abs().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            history["loss"].append(loss)
            history["lr"].append(scheduler.get_last_lr()[0])
        return history

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=data, fit=train)


@fault(
    "memory",
    "training_step_outputs keeps the logits of every step with their graph, and nobody clears the list",
    thread="Lightning-AI/pytorch-lightning#4098",
    check="memory_growth",
)
def epoch_outputs():
    class LitClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.training_step_outputs = mlp(), []

        def training_step(self, batch):
            x, y = batch
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.training_step_outputs.append({"preds": logits, "target": y})
            return loss

        def epoch_accuracy(self):
            preds = torch.cat([o["preds"] for o in self.training_step_outputs]).argmax(1)
            return (preds == torch.cat([o["target"] for o in self.training_step_outputs])).float().mean().item()

    module = LitClassifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    logged = []

    def fit(batches):
        module.train()
        for batch in batches:
            loss = module.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logged.append(module.epoch_accuracy())

    return TrainLoop(model=module, optimizer=optimizer, batches=loader(), fit=fit)


@fault(
    "memory",
    "the metric's state (sum_error) is updated with predictions that have a graph",
    thread="Lightning-AI/torchmetrics#2597",
    check="memory_growth",
)
def metric_state():
    class MeanAbsoluteError:
        def __init__(self):
            self.sum_error, self.total = torch.tensor(0.0), 0

        def update(self, preds, target):
            self.sum_error = self.sum_error + (preds - target).abs().sum()
            self.total += target.numel()

        def compute(self):
            return self.sum_error / self.total

    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, generator=g)
    data = DataLoader(TensorDataset(x, x[:, :3].sum(1)), batch_size=8)
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    metric = MeanAbsoluteError()

    def fit(batches):
        for features, target in batches:
            preds = model(features)
            loss = F.mse_loss(preds, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metric.update(preds, target)
        return f"mae {metric.compute():.3f}"

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@fault(
    "memory",
    "the EMA is computed outside torch.no_grad(): each shadow tensor is the end of a graph over all updates",
    thread="ultralytics/ultralytics#25315",
    check="memory_growth",
)
def ema_graph():
    class ModelEMA:
        def __init__(self, model, decay=0.99):
            self.decay, self.updates = decay, 0
            self.shadow = {k: p.detach().clone() for k, p in model.named_parameters()}

        def update(self, model):
            self.updates += 1
            d = min(self.decay, (1 + self.updates) / (10 + self.updates))
            for k, p in model.named_parameters():
                self.shadow[k] = d * self.shadow[k] + (1 - d) * p

    model = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    ema = ModelEMA(model)

    def train_one_epoch(batches):
        model.train()
        for signals, labels in batches:
            loss = F.cross_entropy(model(signals[:, None]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train_one_epoch)


@fault(
    "memory",
    "the forward hook appends the activations of every step to self.activations and is never removed",
    thread="meta-pytorch/opacus#176",
    check="memory_growth",
)
def activation_hook():
    class ActivationLogger:
        def __init__(self, model):
            self.activations = defaultdict(list)
            for name, module in model.named_modules():
                if isinstance(module, nn.ReLU):
                    module.register_forward_hook(self.make(name))

        def make(self, name):
            def hook(module, args, output):
                self.activations[name].append(output)

            return hook

        def sparsity(self):
            return {k: (v[-1] == 0).float().mean().item() for k, v in self.activations.items()}

    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    logger = ActivationLogger(model)
    lines = []

    def train(batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % 4 == 0:
                lines.append(logger.sparsity())

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@fault(
    "memory",
    "the replay buffer stores the LSTM state with its graph",
    thread="Metta-AI/metta#1139",
    check="memory_growth",
)
def replay_lstm_state():
    @dataclass
    class Experience:
        obs: torch.Tensor
        reward: torch.Tensor
        state: tuple[torch.Tensor, torch.Tensor]

    @dataclass
    class ReplayBuffer:
        capacity: int = 50_000
        items: deque = field(default_factory=deque)

        def add(self, item):
            if len(self.items) == self.capacity:
                self.items.popleft()
            self.items.append(item)

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.value = nn.Linear(6, 16), nn.LSTMCell(16, 16), nn.Linear(16, 1)

        def forward(self, obs, state):
            h, c = self.lstm(torch.tanh(self.embed(obs)), state)
            return self.value(h).squeeze(1), (h, c)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    buffer = ReplayBuffer()
    g = torch.Generator().manual_seed(0)

    def rollouts(n):
        return [{"obs": torch.randn(8, 6, generator=g), "reward": torch.randn(8, generator=g)} for _ in range(n)]

    def learn(batches):
        state = (torch.zeros(8, 16), torch.zeros(8, 16))
        for data in batches:
            value, new_state = agent(data["obs"], state)
            loss = F.mse_loss(value, data["reward"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            buffer.add(Experience(data["obs"], data["reward"], new_state))
            state = tuple(s.detach() for s in new_state)

    return TrainLoop(model=agent, optimizer=optimizer, batches=rollouts, fit=learn)


@fault(
    "memory",
    "saved_log_probs is not cleared after an episode is finished",
    thread="pytorch/examples reinforce.py",
    check="memory_growth",
)
def reinforce_episode():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1, self.dropout, self.affine2 = nn.Linear(4, 32), nn.Dropout(0.2), nn.Linear(32, 2)
            self.saved_log_probs, self.rewards = [], []

        def forward(self, x):
            return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(0)

    def select_action(state):
        dist = torch.distributions.Categorical(policy(state[None]))
        action = dist.sample()
        policy.saved_log_probs.append(dist.log_prob(action))
        return action.item()

    def finish_episode():
        ret, returns = 0.0, deque()
        for r in policy.rewards[::-1]:
            ret = r + 0.99 * ret
            returns.appendleft(ret)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_probs = policy.saved_log_probs[-len(policy.rewards) :]
        loss = torch.stack([-lp * r for lp, r in zip(log_probs, returns, strict=True)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del policy.rewards[:]

    def train(batches):
        for start in batches:
            state = start
            for _ in range(6):
                action = select_action(state)
                policy.rewards.append(float(state[0]) * (1 if action else -1))
                state = 0.8 * state + 0.3 * torch.randn(4, generator=g)
            finish_episode()

    return TrainLoop(model=policy, optimizer=optimizer, batches=list(torch.randn(12, 4, generator=g)), fit=train)


@fault(
    "memory",
    "the image pool of the discriminator keeps the generator's images without detach()",
    thread="Lightning-AI/torchmetrics#2597 (CycleGAN)",
    check="memory_growth",
)
def image_pool():
    class ImagePool:
        def __init__(self, size=500):
            self.size, self.images = size, []

        def query(self, images):
            out = []
            for image in images:
                if len(self.images) < self.size:
                    self.images.append(image)
                    out.append(image)
                else:
                    i = int(torch.randint(0, self.size, ()))
                    out.append(self.images[i])
                    self.images[i] = image
            return torch.stack(out)

    gen, disc = mlp(12, 12, 24), mlp(12, 1, 24)
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (gen, disc))
    pool = ImagePool()

    def train(batches):
        for real, _ in batches:
            fake = gen(real + 0.3 * torch.randn_like(real))
            loss_g = F.mse_loss(disc(fake), torch.ones(len(real), 1)) + 10 * F.l1_loss(fake, real)
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            old = pool.query(fake)
            loss_d = F.mse_loss(disc(real), torch.ones(len(real), 1)) + disc(old.detach()).square().mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

    return TrainLoop(
        model={"generator": gen, "discriminator": disc}, optimizer=[opt_g, opt_d], batches=loader(), fit=train
    )


@fault(
    "memory",
    "the queue is a concatenation of features that are detached when read, and not when they are put in",
    thread="bnu-wangxun/Deep_Metric#45",
    check="memory_growth",
)
def cross_batch_memory():
    class XBM:
        def __init__(self, size=4096):
            self.size, self.feats, self.targets = size, None, None

        def enqueue(self, feats, targets):
            if self.feats is None:
                self.feats, self.targets = feats, targets
            else:
                self.feats = torch.cat([feats, self.feats])[: self.size]
                self.targets = torch.cat([targets, self.targets])[: self.size]

        def get(self):
            return self.feats.detach(), self.targets

    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    xbm = XBM()

    def contrastive(a, ya, b, yb):
        sim = a @ b.T
        same = ya[:, None] == yb[None]
        return (1 - sim)[same].mean() + F.relu(sim - 0.5)[~same].sum() / len(a)

    def train(batches):
        for x, y in batches:
            feats = F.normalize(model(x), dim=1)
            loss = contrastive(feats, y, feats, y)
            if xbm.feats is not None:
                loss = loss + 0.5 * contrastive(feats, y, *xbm.get())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            xbm.enqueue(feats, y)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(16), fit=train, rows_interact=True)


@fault(
    "memory",
    "the stash of the reversible Function is emptied in backward(), which never runs for the auxiliary "
    "head: no loss uses it",
    thread="RobinBruegger/RevTorch#1",
    check="memory_growth",
)
def reversible_stash():
    stash = {}

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.key = max(stash, default=0) + 1
            y = x + torch.tanh(x @ weight)
            stash[ctx.key] = (x, y)
            ctx.save_for_backward(weight)
            return y

        @staticmethod
        def backward(ctx, grad):
            x, _ = stash.pop(ctx.key)
            (weight,) = ctx.saved_tensors
            inner = grad * (1 - torch.tanh(x @ weight) ** 2)
            return grad + inner @ weight.T, x.T @ inner

    class RevNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = (nn.Parameter(torch.randn(12, 12) * 0.2) for _ in range(2))
            self.head = nn.Linear(12, 4)

        def forward(self, x):
            main = Reversible.apply(x, self.w1)
            aux = Reversible.apply(main, self.w2)
            return self.head(main), aux

    model = RevNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        model.train()
        for x, y in batches:
            logits, _ = model(x)
            optimizer.zero_grad()
            F.cross_entropy(logits, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@fault(
    "memory",
    "grad_norms keeps norms of gradients made with create_graph=True, each with the graph of its backward pass",
    thread="pytorch/pytorch#4661",
    check="memory_growth",
)
def gradient_penalty_log():
    critic = nn.Sequential(nn.Linear(12, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    log = {"grad_norms": [], "wasserstein": []}

    def penalty(real, fake):
        mix = torch.rand(len(real), 1)
        x = (mix * real + (1 - mix) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        norms = grad.norm(dim=1)
        log["grad_norms"].append(norms)
        return ((norms - 1) ** 2).mean()

    def train(batches):
        for real, _ in batches:
            fake = torch.randn_like(real) * 2
            distance = critic(real).mean() - critic(fake).mean()
            loss = -distance + 10 * penalty(real, fake)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log["wasserstein"].append(distance.item())

    return TrainLoop(model=critic, optimizer=optimizer, batches=loader(), fit=train)


@fault(
    "memory",
    "a new gradient hook is registered on the embedding's weight in every step (register_hook), none is removed",
    thread="chr5tphr/zennit#13",
    check="memory_growth",
)
def masked_embedding_hook():
    vocab = 32

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(vocab, 16),
                nn.GRU(16, 16, batch_first=True),
                nn.Linear(16, vocab),
            )

        def forward(self, tokens):
            return self.out(self.rnn(self.embed(tokens))[0])

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    pretrained_rows = torch.arange(vocab) < 8

    def train(batches):
        model.train()
        for tokens in batches:
            logits = model(tokens[:, :-1])
            present = torch.zeros(vocab, dtype=torch.bool)
            present[tokens.unique()] = True

            def keep(grad, logits=logits, present=present):
                scale = 1.0 / max(logits.shape[1], 1)
                return torch.where((pretrained_rows & present)[:, None], grad * scale, grad)

            model.embed.weight.register_hook(keep)
            loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(text(48, 9, vocab, 0), batch_size=8), fit=train
    )


@fault(
    "memory",
    "the cache of features that two heads share is keyed by step and never emptied: features stay with their graph",
    thread="deepchecks/deepchecks#1341",
    check="memory_growth",
)
def cached_features():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU())
            self.cls, self.seg = nn.Linear(8, 3), nn.Conv2d(8, 1, 1)
            self._cache, self.step = {}, 0

        def features(self, images):
            if self.step not in self._cache:
                self._cache[self.step] = self.backbone(images)
            return self._cache[self.step]

        def classify(self, images):
            return self.cls(self.features(images).mean((2, 3)))

        def segment(self, images):
            return self.seg(self.features(images))

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (48,), generator=g)
    x = torch.randn(48, 1, 8, 8, generator=g) + y[:, None, None, None]
    data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        for images, labels in batches:
            model.step += 1
            loss = F.cross_entropy(model.classify(images), labels)
            loss = loss + F.mse_loss(model.segment(images), F.avg_pool2d(images, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "memory",
    "the running mean that balances the losses is updated with the loss tensor and only detached where it divides",
    thread="pnnl/neuromancer#292",
    check="memory_growth",
)
def balanced_losses():
    class LossBalancer:
        def __init__(self, names, decay=0.9):
            self.decay, self.mean = decay, dict.fromkeys(names)

        def __call__(self, losses):
            total = 0.0
            for name, value in losses.items():
                old = self.mean[name]
                self.mean[name] = value if old is None else self.decay * old + (1 - self.decay) * value
                total = total + value / self.mean[name].detach().clamp(min=1e-3)
            return total

    trunk, heads = (
        nn.Sequential(nn.Linear(12, 24), nn.ReLU()),
        nn.ModuleDict({"cls": nn.Linear(24, 4), "rec": nn.Linear(24, 12)}),
    )
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    balance = LossBalancer(heads)

    def train(batches):
        for x, y in batches:
            h = trunk(x)
            losses = {"cls": F.cross_entropy(heads["cls"](h), y), "rec": F.mse_loss(heads["rec"](h), x)}
            optimizer.zero_grad()
            balance(losses).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@fault(
    "memory",
    "the tracker of the offloaded activations keeps every packed tensor: unpack reads it and does not pop it",
    thread="huggingface/trl#5738",
    check="memory_growth",
)
def offloaded_activations():
    class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            self.tracker, self.next_id = {}, 0
            super().__init__(self.pack, self.unpack)

        def pack(self, tensor):
            self.next_id += 1
            self.tracker[self.next_id] = tensor.to("cpu", copy=True)
            return self.next_id

        def unpack(self, key):
            return self.tracker[key]

    model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    offload = OffloadActivations()

    def training_step(x, y):
        with offload:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        return loss.item()

    def train(batches):
        model.train()
        for x, y in batches:
            training_step(x, y)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(), fit=train)


@fault(
    "memory",
    "the memory vector is an average over the outputs of all steps that is detached where it is read only",
    thread="pytorch/pytorch#2198",
    check="memory_growth",
)
def recurrent_memory():
    vocab, dim = 24, 16

    class MemoryLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(vocab, dim),
                nn.GRU(dim, dim, batch_first=True),
                nn.Linear(dim, vocab),
            )
            self.memory = torch.zeros(dim)

        def forward(self, tokens):
            x = self.embed(tokens) + self.memory.detach()
            h, last = self.rnn(x)
            self.memory = 0.9 * self.memory + 0.1 * last[0].mean(0)
            return self.out(h)

    model = MemoryLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train(batches):
        for tokens in batches:
            loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(text(48, 9, vocab, 0), batch_size=8), fit=train
    )


@fault(
    "memory",
    "the attention maps of all steps are kept in self.attention_maps for a picture of the last one",
    thread="IBM/mi-prometheus#111",
    check="memory_growth",
)
def attention_maps():
    class Attention(nn.Module):
        def __init__(self, dim=12):
            super().__init__()
            self.qkv, self.attention_maps = nn.Linear(dim, 3 * dim), []

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
            self.attention_maps.append(weights)
            return weights @ v

    class SetClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = Attention(), nn.Linear(12, 3)

        def forward(self, sets):
            return self.head(self.attention(sets).mean(1))

    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (48,), generator=g)
    sets = torch.randn(48, 10, 12, generator=g) + y[:, None, None]
    data = DataLoader(TensorDataset(sets, y), batch_size=8, shuffle=True)
    model = SetClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    pictures = []

    def train(batches):
        for x, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
        pictures.append(model.attention.attention_maps[-1][0].detach().numpy().copy())

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)
