"""Right learning rates and schedules that look odd, from public threads and training scripts."""

from __future__ import annotations

import bisect
import copy
import math
from dataclasses import dataclass

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.blind.cases import right


def digits(rows=96, width=16, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    return TensorDataset(centers[labels] + 0.5 * torch.randn(rows, width, generator=generator), labels)


def curve(rows=96, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return TensorDataset(x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2])


def text(rows=48, length=12, vocab=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(vocab, (rows, 1), generator=generator)
    return TensorDataset((start + 3 * torch.arange(length + 1)) % vocab)


def mlp(width=16, hidden=32, out=4):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


class Tagger(nn.Module):
    """A small backbone under a head."""

    def __init__(self, width=16, hidden=32, classes=4):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


class TinyLM(nn.Module):
    def __init__(self, vocab=20, width=24, length=32):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(ids) + self.positions(torch.arange(length))
        return self.out(self.norm(self.block(x, src_mask=mask, is_causal=True)))


def next_token_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


# --- shapes of schedules ----------------------------------------------------------------------------


@right("schedules", "warm-up, a long constant stretch and a short decay (WSD)", thread="wandb/senpai#543")
def wsd(epochs=10):
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    loader = DataLoader(text(), batch_size=8, shuffle=True)
    steps = len(loader) * epochs
    warmup, decay = 3, steps // 5

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        if step < steps - decay:
            return 1.0
        return max(0.0, (steps - step) / decay)

    scheduler = lr_scheduler.LambdaLR(optimizer, factor)

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=steps)


@right(
    "schedules", "the stable phase alone: warm-up, then constant; the decay is another run", thread="allenai/OLMo#376"
)
def stable_phase():
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    loader = DataLoader(text(), batch_size=8, shuffle=True)

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=200)


@right(
    "schedules",
    "warm restarts, each cycle twice as long: the rate jumps up on purpose",
    thread="igorshmukler/kokoro-ruslan#20",
)
def sgdr():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2, eta_min=1e-4)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@right(
    "schedules",
    "a new scheduler at each restart, after the groups' rate was put back by hand",
    thread="pytorch/pytorch#78003",
)
def restart_by_hand(base=0.05, period=5):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=base, momentum=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    run = {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, period), "since": 0}

    def restart():
        for group in optimizer.param_groups:
            group["lr"] = base
            group.pop("initial_lr", None)
        run.update(scheduler=lr_scheduler.CosineAnnealingLR(optimizer, period), since=0)

    def train(batches):
        for x, y in batches:
            if run["since"] == period:
                restart()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            run["scheduler"].step()
            run["since"] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "schedules",
    "snapshot ensembles: cosine cycles to 0, a copy of the weights at each end",
    thread="https://deadneurons.com/notebooks/snapshot-ensembles/content.html",
)
def snapshot_ensemble(cycles=5):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    total = len(loader) * 2 * cycles
    period = math.ceil(total / cycles)
    snapshots, count = [], [0]

    def train(batches):
        for x, y in batches:
            at = count[0] % period
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (math.cos(math.pi * at / period) + 1)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count[0] += 1
            if at == period - 1:
                snapshots.append(copy.deepcopy(model.state_dict()))
                del snapshots[:-cycles]

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=total)


@right("schedules", "triangular2: up and down in ever lower triangles", thread="Lightning-AI/pytorch-lightning#5631")
def triangular():
    model = mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = lr_scheduler.CyclicLR(optimizer, 2e-4, 2e-2, 4, mode="triangular2", cycle_momentum=False)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@right("schedules", "one cycle over exactly the steps of the run, momentum cycled with it", thread="espnet/espnet#3319")
def one_cycle(epochs=5):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    total = len(loader) * epochs
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    done = [0]

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            done[0] += 1
            if done[0] < total:
                scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=total)


@right(
    "schedules",
    "inverse square root: it never ends, and is stepped with the updates",
    thread="facebookresearch/ParlAI#4384",
)
def inverse_sqrt(warmup=4):
    model = TinyLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    scheduler = lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, math.sqrt(warmup) / math.sqrt(step + 1))
    )
    loader = DataLoader(text(), batch_size=8, shuffle=True)

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=150)


@right(
    "schedules",
    "InverseLR with an exponential warm-up, per step and not per epoch: works as intended",
    thread="crowsonkb/k-diffusion#50",
)
def inverse_lr():
    class InverseLR(lr_scheduler.LRScheduler):
        def __init__(self, optimizer, inv_gamma=20.0, power=0.5, warmup=0.8, min_lr=1e-5):
            self.inv_gamma, self.power, self.warmup, self.min_lr = inv_gamma, power, warmup, min_lr
            super().__init__(optimizer)

        def get_lr(self):
            warmup = 1 - self.warmup ** (self.last_epoch + 1)
            factor = (1 + self.last_epoch / self.inv_gamma) ** -self.power
            return [warmup * max(self.min_lr, base * factor) for base in self.base_lrs]

    model = nn.Sequential(nn.Linear(9, 48), nn.SiLU(), nn.Linear(48, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.95, 0.999), weight_decay=1e-3)
    scheduler = InverseLR(optimizer)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        for x, _ in batches:
            sigma = torch.rand(len(x), 1) + 0.1
            denoised = model(torch.cat([x + sigma * torch.randn_like(x), sigma], 1))
            loss = F.mse_loss(denoised, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@right("schedules", "a constant schedule, stepped at every batch", thread="facebookresearch/fairchem#233")
def constant_schedule():
    model = mlp(8, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=120)


@right(
    "schedules", "linear decay to exactly 0 at the last step, the last window short", thread="pytorch/torchtitan#1010"
)
def linear_to_zero(accumulate=1, epochs=6):
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    loader = DataLoader(digits(), batch_size=8, shuffle=True)
    steps = math.ceil(len(loader) / accumulate) * epochs
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))

    def train(batches):
        batches = list(batches)
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            optimizer.zero_grad()
            for x, y in window:
                (F.cross_entropy(model(x), y) / len(window)).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=steps)


@right(
    "schedules",
    "a learning-rate range test: the rate rises by a factor each batch",
    thread="davidtvs/pytorch-lr-finder#11",
)
def lr_range_test(start_lr=1e-4, growth=1.05):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=start_lr, momentum=0.9)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: min(growth**i, 1000.0))
    history = {"lr": [], "loss": []}
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def range_test(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            history["lr"].append(scheduler.get_last_lr()[0])
            history["loss"].append(loss.item())
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=range_test)


@right("schedules", "rates by hand from a table of milestones", thread="graphdeco-inria/gaussian-splatting#230")
def rate_table():
    table = {0: 0.02, 3: 0.1, 40: 0.02, 80: 0.004}
    starts, rates = list(table), list(table.values())
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    step = [0]

    def train(batches):
        for x, y in batches:
            optimizer.param_groups[0]["lr"] = rates[bisect.bisect_right(starts, step[0]) - 1]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step[0] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=100)


# --- warm-ups and chains ----------------------------------------------------------------------------


@right("schedules", "two factors at once: ChainedScheduler of a warm-up and a decay", thread="pytorch/pytorch#64037")
def chained():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.98)]
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@right("schedules", "SequentialLR: warm-up, then a cosine over what is left", thread="pytorch/pytorch#67586")
def sequential(epochs=5, warmup=4):
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    steps = len(loader) * epochs
    scheduler = lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warmup),
            lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup),
        ],
        milestones=[warmup],
    )

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=steps)


@right(
    "schedules",
    "two schedulers on one optimizer with two clocks: a warm-up per batch in the first epoch, MultiStepLR per epoch",
    thread="pytorch/vision#1213",
)
def two_clocks(epochs=3):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    main_scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[8, 11], gamma=0.1)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    epoch_of = [0]

    def train_one_epoch(batches):
        warmup = None
        if epoch_of[0] == 0:
            warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, len(batches) - 1))
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if warmup is not None:
                warmup.step()

    def main(batches):
        for _ in range(epochs):
            train_one_epoch(batches)
            main_scheduler.step()
            epoch_of[0] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=main, epochs=13)


@right(
    "schedules",
    "in the warm-up the biases' rate falls from 0.1 while the weights' rises from 0, the momentum too",
    thread="https://github.com/ultralytics/yolov5/blob/master/train.py",
)
def yolo_warmup(lr0=0.01, epochs=10, nw=8):
    model = mlp(16, 48, 4)
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD(biases, lr=lr0, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": weights, "weight_decay": 5e-4})
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def lf(epoch):
        return max(1 - epoch / epochs, 0) * 0.99 + 0.01

    scheduler = lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)
    state = {"ni": 0, "epoch": 0}

    def train_epoch(batches):
        for x, y in batches:
            ni = state["ni"]
            if ni <= nw:
                share = ni / nw
                for j, group in enumerate(optimizer.param_groups):
                    first, last = (0.1 if j == 0 else 0.0), group["initial_lr"] * lf(state["epoch"])
                    group["lr"] = first + share * (last - first)
                    group["momentum"] = 0.8 + share * (0.937 - 0.8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            state["ni"] += 1
        scheduler.step()
        state["epoch"] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_epoch, epochs=epochs)


class ScheduledOptim:
    """Writes the rate, then steps."""

    def __init__(self, optimizer, lr_mul, d_model, n_warmup_steps):
        self.optimizer, self.lr_mul, self.d_model = optimizer, lr_mul, d_model
        self.n_warmup_steps, self.n_steps = n_warmup_steps, 0

    def step_and_update_lr(self):
        self.n_steps += 1
        n = self.n_steps
        scale = self.d_model**-0.5 * min(n**-0.5, n * self.n_warmup_steps**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_mul * scale
        self.optimizer.step()


@right(
    "schedules",
    "the rate is written before the step, and Adam is built without one: the wrapper sets the first rate too",
    thread="jadore801120/attention-is-all-you-need-pytorch#188",
)
def scheduled_optim():
    model = TinyLM()
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    optimizer = ScheduledOptim(adam, 0.1, 24, 8)
    loader = DataLoader(text(), batch_size=8, shuffle=True)

    def train_epoch(batches):
        for (ids,) in batches:
            adam.zero_grad()
            next_token_loss(model, ids).backward()
            optimizer.step_and_update_lr()

    return TrainLoop(model=model, optimizer=adam, batches=loader, fit=train_epoch)


@right(
    "schedules",
    "LambdaLR returns the rate itself, over groups whose own lr is 1.0 and 0.1: a share and not a rate",
    thread="tsun/SSRT#5",
)
def relative_groups(lr=0.1):
    model = Tagger()
    optimizer = torch.optim.SGD(
        [{"params": model.backbone.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 1.0}],
        lr=lr,
        momentum=0.9,
        nesterov=True,
    )
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda x: lr * (1.0 + 0.01 * float(x)) ** -0.75)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@right("schedules", "Noam over Adam(lr=1.0): the lambda is the rate", thread="pytorch/pytorch#45895")
def noam(d_model=24, warmup=6):
    model = TinyLM(width=d_model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = lr_scheduler.LambdaLR(
        optimizer, lambda s: 0.05 * d_model**-0.5 * min((s + 1) ** -0.5, (s + 1) * warmup**-1.5)
    )
    loader = DataLoader(text(), batch_size=8, shuffle=True)

    def train(batches):
        for (ids,) in batches:
            next_token_loss(model, ids).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


# --- rates of groups --------------------------------------------------------------------------------


@right("schedules", "the backbone decays, the head has a constant lambda", thread="Lightning-AI/pytorch-lightning#4983")
def constant_head(epochs=8):
    model = Tagger()
    optimizer = torch.optim.AdamW(
        [{"params": model.backbone.parameters(), "lr": 5e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    steps = len(loader) * epochs
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda step: max(0.0, 1 - step / steps), lambda _: 1.0])

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=steps)


@right("schedules", "gradual unfreezing by rates: a group's factor is 0 until its turn", thread="FluxVLA/FluxVLA#100")
def gradual_unfreezing(epochs=10):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    layers = [model[4], model[2], model[0]]
    optimizer = torch.optim.AdamW(
        [{"params": layer.parameters(), "lr": 1e-2 / 2.6**i} for i, layer in enumerate(layers)]
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    total = len(loader) * epochs

    def factor_from(first):
        return lambda step: 0.0 if step < first else max(0.05, 1 - (step - first) / (total - first))

    scheduler = lr_scheduler.LambdaLR(optimizer, [factor_from(2 * i) for i in range(3)])

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=total)


@right(
    "schedules",
    "layer-wise decay: deep layers learn at an eighth of the head's rate",
    thread="open-mmlab/mmpretrain#1399",
)
def layer_wise(decay=0.5):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)], nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(
        [{"params": part.parameters(), "lr": 1e-2 * decay ** (len(model) - 1 - i)} for i, part in enumerate(model)],
        weight_decay=0.05,
    )
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=90)


@right(
    "schedules",
    "lr_scale in the groups, read by adjust_learning_rate at each iteration's share of the epoch",
    thread="facebookresearch/mae#177",
)
def mae_finetune():
    @dataclass
    class Args:
        lr: float = 1e-2
        min_lr: float = 1e-5
        warmup_epochs: int = 1
        epochs: int = 10

    args = Args()
    model = Tagger()
    optimizer = torch.optim.AdamW(
        [
            {"params": list(model.backbone.parameters()), "lr_scale": 0.3},
            {"params": list(model.head.parameters()), "lr_scale": 1.0},
        ],
        lr=args.lr,
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    at = {"epoch": 0.0}

    def adjust_learning_rate(epoch):
        if epoch < args.warmup_epochs:
            lr = args.lr * epoch / args.warmup_epochs
        else:
            done = min(1.0, (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs))
            lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    def train_one_epoch(batches):
        for x, y in batches:
            adjust_learning_rate(at["epoch"])
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            at["epoch"] += 1 / len(loader)

    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=train_one_epoch, steps=len(loader) * args.epochs
    )


@right(
    "schedules",
    "poly decay by hand in every group, the head at ten times the rate",
    thread="https://github.com/kazuto1011/deeplab-pytorch",
)
def deeplab(epochs=5):
    model = Tagger()
    base = 0.02
    optimizer = torch.optim.SGD(
        [{"params": model.backbone.parameters(), "lr": base}, {"params": model.head.parameters(), "lr": 10 * base}],
        lr=base,
        momentum=0.9,
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    iter_max = len(loader) * epochs
    i = [0]

    def poly():
        lr = base * max(0.0, 1 - i[0] / iter_max) ** 0.9
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[1]["lr"] = 10 * lr

    def train(batches):
        for x, y in batches:
            poly()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            i[0] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=iter_max)


@right(
    "schedules",
    "Adam is built with lr=0.0, each group has its own, and only the positions' group is decayed, by its name",
    thread="graphdeco-inria/gaussian-splatting#230",
)
def gaussian_splatting(position_lr_max_steps=100):
    class Gaussians(nn.Module):
        def __init__(self, count=24):
            super().__init__()
            self.xyz = nn.Parameter(torch.rand(count, 2))
            self.color = nn.Parameter(torch.randn(count, 3) * 0.3)
            self.scaling = nn.Parameter(torch.full((count, 1), -1.5))

        def forward(self, points):
            distance = (points[:, None] - self.xyz[None]).pow(2).sum(-1)
            weight = torch.exp(-distance / (2 * self.scaling.exp().pow(2).T))
            return weight @ self.color

    model = Gaussians()
    optimizer = torch.optim.Adam(
        [
            {"params": [model.xyz], "lr": 1e-2, "name": "xyz"},
            {"params": [model.color], "lr": 2.5e-2, "name": "f_dc"},
            {"params": [model.scaling], "lr": 5e-3, "name": "scaling"},
        ],
        lr=0.0,
        eps=1e-15,
    )
    source = torch.Generator().manual_seed(2)
    points = torch.rand(128, 2, generator=source)
    image = TensorDataset(points, torch.stack([points[:, 0], points[:, 1], points.sum(1) / 2], 1))
    loader = DataLoader(image, batch_size=32, shuffle=True)
    iteration = [0]

    def update_learning_rate(step):
        t = min(1.0, step / position_lr_max_steps)
        for group in optimizer.param_groups:
            if group["name"] == "xyz":
                group["lr"] = math.exp(math.log(1e-2) * (1 - t) + math.log(1e-4) * t)

    def training(batches):
        for where, color in batches:
            iteration[0] += 1
            update_learning_rate(iteration[0])
            F.l1_loss(model(where), color).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=training, steps=position_lr_max_steps, rows_interact=False
    )


@right(
    "schedules",
    "the frozen part stays in the optimizer in a group of rate 0, as fine-tuning from a given layer does",
    thread="kenshohara/3D-ResNets-PyTorch#129",
)
def finetune_from_layer():
    model = Tagger()
    optimizer = torch.optim.SGD(
        [{"params": model.backbone.parameters(), "lr": 0.0}, {"params": model.head.parameters()}],
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-3,
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[30, 45], gamma=0.1)

    def train_epoch(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=loader,
        fit=train_epoch,
        frozen=("backbone.",),
        epochs=60,
    )


@right(
    "schedules",
    "a group is added at the unfreezing: ExponentialLR works on the groups' own rates and takes it along",
    thread="luxonis/luxonis-train#234",
)
def added_group():
    model = Tagger()
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=5e-3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    seen = [0]

    def train(batches):
        for x, y in batches:
            if seen[0] == 3:
                model.backbone.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 1e-3})
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            seen[0] += 1

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@right(
    "schedules",
    "two phases: the head is trained, then everything under a new optimizer with a new scheduler of its own",
    thread="fastai/fastai#2133",
)
def probe_then_tune(epochs=8, probe=4):
    model = Tagger()
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    total = len(loader) * epochs

    class Phases:
        def __init__(self):
            self.step = 0
            model.backbone.requires_grad_(False)
            self.create(model.head.parameters(), 1e-2, probe)

        def create(self, parameters, lr, length):
            self.optimizer = torch.optim.AdamW(parameters, lr=lr)
            self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda i: max(0.1, 1 - i / length))

        def fit(self, batches):
            for x, y in batches:
                if self.step == probe:
                    model.backbone.requires_grad_(True)
                    self.create(model.parameters(), 6e-3, total - probe)
                self.optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                self.optimizer.step()
                self.scheduler.step()
                self.step += 1

    return TrainLoop(model=model, batches=loader, fit=Phases().fit, steps=total)


# --- several optimizers -----------------------------------------------------------------------------


def gan_losses(generator, discriminator, x):
    fake = generator(torch.randn(len(x), 8))
    d_loss = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
    return d_loss, lambda: F.softplus(-discriminator(fake)).mean()


def ring(rows=64):
    angle = 2 * math.pi * torch.rand(rows, generator=torch.Generator().manual_seed(4))
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))


@right(
    "schedules",
    "a constant critic at four times the rate beside a decaying generator (TTUR)",
    thread="brain-research/self-attention-gan#25",
)
def ttur():
    generator, discriminator = mlp(8, 32, 2), mlp(2, 32, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), 5e-4, (0.0, 0.9))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 2e-3, (0.0, 0.9))
    g_scheduler = lr_scheduler.LinearLR(g_optimizer, 1.0, 0.1, total_iters=200)
    loader = DataLoader(ring(), batch_size=16, shuffle=True)

    def train(batches):
        for (x,) in batches:
            d_loss, g_loss = gan_losses(generator, discriminator, x)
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            g_loss().backward()
            g_optimizer.step()
            g_scheduler.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optimizer, d_optimizer],
        batches=loader,
        fit=train,
        steps=200,
    )


@right(
    "schedules",
    "one scheduler for two optimizers: its factor is copied into the other's groups by hand",
    thread="pytorch/pytorch#67761",
)
def one_for_two():
    encoder, decoder = mlp(8, 24, 4), mlp(4, 24, 8)
    adam = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    sgd = torch.optim.SGD(decoder.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.ExponentialLR(adam, gamma=0.99)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        for x, _ in batches:
            adam.zero_grad()
            sgd.zero_grad()
            F.mse_loss(decoder(encoder(x)), x).backward()
            adam.step()
            sgd.step()
            scheduler.step()
            factor = scheduler.get_last_lr()[0] / 3e-3
            for group in sgd.param_groups:
                group["lr"] = 0.05 * factor

    return TrainLoop(model={"encoder": encoder, "decoder": decoder}, optimizer=[adam, sgd], batches=loader, fit=train)


@right("schedules", "SAC: three optimizers at constant rates, no schedule at all", thread="hill-a/stable-baselines#976")
def sac():
    actor, critic = mlp(4, 32, 2), mlp(5, 32, 1)
    log_alpha = nn.Parameter(torch.zeros(1))
    actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    alpha_optimizer = torch.optim.Adam([log_alpha], 3e-4)
    source = torch.Generator().manual_seed(5)
    states = torch.randn(96, 4, generator=source)
    actions = torch.rand(96, 1, generator=source) * 2 - 1
    buffer = TensorDataset(states, actions, -(states[:, :1] - actions).pow(2))

    def sample(state):
        mean, log_std = actor(state).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-3, 1).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        return action, normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)

    def train(batches):
        for state, action, reward in batches:
            critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), reward)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            new, log_prob = sample(state)
            actor_loss = (log_alpha.exp().detach() * log_prob - critic(torch.cat([state, new], 1))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            alpha_loss = -(log_alpha * (log_prob.detach() - 1.0)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_alpha = log_alpha

    return TrainLoop(
        model={"actor": actor, "critic": critic, "alpha": Temperature()},
        optimizer=[actor_optimizer, critic_optimizer, alpha_optimizer],
        batches=DataLoader(buffer, batch_size=32, shuffle=True),
        fit=train,
    )


@right(
    "schedules",
    "WGAN: the critic is stepped for every batch and the generator for every third, the schedulers once an epoch",
    thread="AutoResearch/EEG-GAN#58",
)
def wgan(n_critic=3, epochs=2):
    generator, critic = mlp(8, 32, 2), mlp(2, 32, 1)
    g_optimizer = torch.optim.RMSprop(generator.parameters(), 1e-3)
    c_optimizer = torch.optim.RMSprop(critic.parameters(), 1e-3)
    schedulers = [lr_scheduler.ExponentialLR(o, 0.95) for o in (g_optimizer, c_optimizer)]
    loader = DataLoader(ring(), batch_size=8, shuffle=True)
    count = [0]

    def train(batches):
        for _ in range(epochs):
            for (x,) in batches:
                fake = generator(torch.randn(len(x), 8)).detach()
                c_optimizer.zero_grad()
                (critic(fake).mean() - critic(x).mean()).backward()
                c_optimizer.step()
                with torch.no_grad():
                    for p in critic.parameters():
                        p.clamp_(-0.3, 0.3)
                if count[0] % n_critic == 0:
                    g_optimizer.zero_grad()
                    (-critic(generator(torch.randn(len(x), 8))).mean()).backward()
                    g_optimizer.step()
                count[0] += 1
            for scheduler in schedulers:
                scheduler.step()

    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[g_optimizer, c_optimizer],
        batches=loader,
        fit=train,
        epochs=30,
    )


# --- schedules per epoch, plateaus, averages --------------------------------------------------------


@right(
    "schedules",
    "MultiStepLR(30, 60, 80) once an epoch in a run of 90: in a few epochs the rate does not move",
    thread="pytorch/pytorch#3814",
)
def resnet_recipe():
    model = mlp(16, 48, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [30, 60, 80], gamma=0.1)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train_epoch(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train_epoch, epochs=90)


@right(
    "schedules",
    "the cosine is stepped once an epoch over T_max = epochs and never comes up again",
    thread="AntreasAntoniou/HowToTrainYourMAMLPytorch#43",
)
def cosine_per_epoch(epochs=4):
    model = mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=1e-5)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def main(batches):
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            if scheduler.last_epoch < epochs:
                scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=loader,
        fit=main,
        steps=len(loader) * epochs,
        epochs=epochs,
    )


@right(
    "schedules", "ReduceLROnPlateau on the validation loss, once an epoch", thread="Lightning-AI/pytorch-lightning#673"
)
def plateau(epochs=3):
    model = mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, min_lr=1e-5)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)
    val_x, val_y = curve(rows=32, seed=7).tensors

    def validate():
        model.eval()
        with torch.no_grad():
            return F.mse_loss(model(val_x), val_y).item()

    def main(batches):
        for _ in range(epochs):
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            scheduler.step(validate())

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=main, epochs=40)


@right("schedules", "ReduceLROnPlateau(mode='max') on the accuracy", thread="skorch-dev/skorch#364")
def plateau_on_accuracy(epochs=3):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=2)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    val_x, val_y = digits(rows=40).tensors

    def main(batches):
        for _ in range(epochs):
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                accuracy = (model(val_x).argmax(1) == val_y).float().mean().item()
            scheduler.step(accuracy)

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=main)


@right(
    "schedules",
    "from swa_start on SWALR takes over and the cosine is no longer stepped",
    thread="https://pytorch.org/docs/stable/optim.html#putting-it-all-together",
)
def swa(epochs=3, swa_start=20):
    model = mlp()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=swa_start)
    swa_scheduler = SWALR(optimizer, anneal_epochs=2, swa_lr=0.02)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    epoch = [0]

    def main(batches):
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            epoch[0] += 1
            if epoch[0] > swa_start:
                average.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=main, epochs=30)


# --- by hand, in the loop ---------------------------------------------------------------------------


@right(
    "schedules", "no scheduler: get_lr(it) is written into the groups at each iteration", thread="karpathy/nanoGPT#578"
)
def nano_gpt(accumulate=1, max_iters=60):
    learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 3
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    loader = DataLoader(text(), batch_size=4, shuffle=True)

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > max_iters:
            return min_lr
        ratio = (it - warmup_iters) / (max_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    iter_num = [0]

    def train(batches):
        micro_batches = list(batches)
        for start in range(0, len(micro_batches) - accumulate + 1, accumulate):
            for (ids,) in micro_batches[start : start + accumulate]:
                (next_token_loss(model, ids) / accumulate).backward()
            for param_group in optimizer.param_groups:
                param_group["lr"] = get_lr(iter_num[0])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            iter_num[0] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=max_iters)


@right(
    "schedules",
    "PPO anneals once an update: eight steps at one rate, then the next",
    thread="https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py",
)
def ppo_anneal(num_updates=20, update_epochs=4, minibatches=2):
    agent = Tagger(width=6, classes=4)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    update = [0]
    source = torch.Generator().manual_seed(6)

    def rollouts(n):
        for _ in range(n):
            yield torch.randn(32, 6, generator=source)

    def act(logits):
        return torch.distributions.Categorical(logits=logits[:, :3])

    def learn(obs):
        frac = max(0.0, 1.0 - update[0] / num_updates)
        optimizer.param_groups[0]["lr"] = frac * 2.5e-3
        with torch.no_grad():
            out = agent(obs)
            actions = act(out).sample()
            old = act(out).log_prob(actions)
            returns = (actions == (obs[:, 0] > 0).long()).float()
            advantages = returns - out[:, 3]
        for _ in range(update_epochs):
            for index in torch.randperm(len(obs)).chunk(minibatches):
                new = agent(obs[index])
                ratio = (act(new).log_prob(actions[index]) - old[index]).exp()
                adv = advantages[index]
                pg_loss = -torch.min(adv * ratio, adv * ratio.clamp(0.8, 1.2)).mean()
                loss = pg_loss - 0.01 * act(new).entropy().mean() + 0.5 * F.mse_loss(new[:, 3], returns[index])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        update[0] += 1

    return TrainLoop(
        model=agent,
        optimizer=optimizer,
        batches=lambda n: list(rollouts(n)),
        fit=lambda batches: [learn(obs) for obs in batches],
        steps=num_updates * update_epochs * minibatches,
    )


@right("schedules", "the rate is a tensor and is written in place", thread="pytorch/pytorch#1244")
def tensor_rate(total=80):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(4e-3), foreach=False)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    step = [0]

    def train(batches):
        for x, y in batches:
            for group in optimizer.param_groups:
                group["lr"].fill_(4e-3 * max(0.02, 1 - step[0] / total))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step[0] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=total)


@right(
    "schedules",
    "Adafactor shrinks its own relative step; the groups' lr is constant and nothing schedules it",
    thread="https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html",
)
def adafactor():
    model = TinyLM()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    loader = DataLoader(text(), batch_size=8, shuffle=True)

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "schedules",
    "the inner rate of the meta-learner is constant, the outer one is annealed",
    thread="AntreasAntoniou/HowToTrainYourMAMLPytorch#43",
)
def maml(inner_lr=0.05):
    model = mlp(8, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-4)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def adapted_loss(x, y):
        weights = dict(model.named_parameters())
        support, query = slice(0, len(x), 2), slice(1, len(x), 2)
        inner = F.mse_loss(torch.func.functional_call(model, weights, (x[support],)), y[support])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - inner_lr * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, fast, (x[query],)), y[query])

    def train(batches):
        for x, y in batches:
            if len(x) < 2:
                continue
            optimizer.zero_grad()
            adapted_loss(x, y).backward()
            optimizer.step()
            if scheduler.last_epoch < scheduler.T_max:
                scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=loader,
        fit=train,
        steps=100,
        rows_interact=True,
    )


@right(
    "schedules",
    "the scheduler is stepped only where the scaler made the step",
    thread="huggingface/accelerate#301",
)
def scaled_steps(precision="fp32", epochs=8):
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    steps = len(loader) * epochs
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: max(0.0, 1 - i / steps))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=precision == "fp16")

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
                logits = model(x)
            scaler.scale(F.cross_entropy(logits.float(), y)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()

    return TrainLoop(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, batches=loader, fit=train, steps=steps
    )


# --- frameworks -------------------------------------------------------------------------------------


@right(
    "schedules",
    "a linear decay per step over the trainer's estimated_stepping_batches",
    thread="Lightning-AI/pytorch-lightning#4466",
)
def lightning_per_step():
    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: max(0.0, 1 - i / max(1, total)))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def train_dataloader(self):
            return DataLoader(digits(), batch_size=16, shuffle=True)

    return from_lightning(Classifier())


@right(
    "schedules",
    "manual optimization: on_train_epoch_end steps the schedulers of both optimizers",
    thread="voicepaw/so-vits-svc-fork#291",
)
def lightning_manual():
    class Gan(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = mlp(8, 32, 2), mlp(2, 32, 1)

        def configure_optimizers(self):
            g = torch.optim.AdamW(self.generator.parameters(), 1e-3, betas=(0.5, 0.99))
            d = torch.optim.AdamW(self.discriminator.parameters(), 1e-3, betas=(0.5, 0.99))
            return [g, d], [lr_scheduler.ExponentialLR(g, 0.99), lr_scheduler.ExponentialLR(d, 0.99)]

        def training_step(self, batch, batch_idx):
            g, d = self.optimizers()
            d_loss, g_loss = gan_losses(self.generator, self.discriminator, batch[0])
            d.zero_grad()
            self.manual_backward(d_loss)
            d.step()
            g.zero_grad()
            self.manual_backward(g_loss())
            g.step()

        def on_train_epoch_end(self):
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def train_dataloader(self):
            return DataLoader(ring(), batch_size=16, shuffle=True)

    return from_lightning(Gan())


@right(
    "schedules",
    "the prepared scheduler is sized in optimizer steps and called at each micro-batch: Accelerate skips the rest",
    thread="huggingface/transformers#27872",
)
def accelerate_prepared(accumulate=2, epochs=8):
    from transformers import get_scheduler

    accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = Tagger()
    loader = DataLoader(digits(), batch_size=8, shuffle=True)
    max_train_steps = epochs * math.ceil(len(loader) / accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=max_train_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def train(batches):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=max_train_steps)


class RowClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = digits().tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


def training_arguments(**more):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        **more,
    )


@right("schedules", "the Trainer's own cosine with warm-up", thread="huggingface/transformers#24758")
def hf_cosine(accumulate=1):
    from transformers import Trainer

    args = training_arguments(
        gradient_accumulation_steps=accumulate, num_train_epochs=5, lr_scheduler_type="cosine", warmup_steps=2
    )
    return from_trainer(Trainer(model=RowClassifier(), args=args, train_dataset=Rows()))


@right(
    "schedules",
    "the scheduler that is handed over is sized in the optimizer steps of the run",
    thread="huggingface/transformers#24088",
)
def hf_own_schedule(epochs=5):
    from transformers import Trainer, get_cosine_schedule_with_warmup

    args = training_arguments(gradient_accumulation_steps=2, num_train_epochs=epochs)
    model, data = RowClassifier(), Rows()
    steps = len(data) // 8 // 2 * epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, steps)
    trainer = Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, scheduler))
    return from_trainer(trainer, steps=steps)
