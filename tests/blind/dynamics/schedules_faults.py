"""Faulty learning rates and schedules, from public threads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.blind.cases import fault


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


@fault(
    "schedules",
    "both schedulers are built on the generator's optimizer: it decays twice, the discriminator's never",
    thread="Lornatang/SRGAN-PyTorch#53",
    check="schedule",
)
def srgan():
    generator, discriminator = mlp(8, 32, 2), mlp(2, 32, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 1e-3, (0.5, 0.999))
    g_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
    d_scheduler = lr_scheduler.StepLR(g_optimizer, step_size=4, gamma=0.5)
    source = torch.Generator().manual_seed(1)
    real = TensorDataset(torch.randn(64, 2, generator=source) * 0.3 + torch.tensor([1.0, -1.0]))
    loader = DataLoader(real, batch_size=16, shuffle=True)

    def train(batches):
        for (x,) in batches:
            fake = generator(torch.randn(len(x), 8))
            d_optimizer.zero_grad()
            d_real, d_fake = discriminator(x), discriminator(fake.detach())
            d_loss = F.binary_cross_entropy_with_logits(d_real, torch.ones_like(d_real))
            d_loss = d_loss + F.binary_cross_entropy_with_logits(d_fake, torch.zeros_like(d_fake))
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            score = discriminator(fake)
            g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
            g_loss.backward()
            g_optimizer.step()
            d_scheduler.step()
            g_scheduler.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optimizer, d_optimizer],
        batches=loader,
        fit=train,
    )


class FreezeThenTune:
    """Trains the head first, then everything."""

    def __init__(self, model, total, tune_from=3):
        self.model, self.tune_from, self.seen = model, tune_from, 0
        self.model.backbone.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(model.head.parameters(), lr=5e-3)
        self.scheduler = lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=total)

    def unfreeze(self):
        self.model.backbone.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def fit(self, batches):
        for x, y in batches:
            if self.seen == self.tune_from:
                self.unfreeze()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.seen += 1


@fault(
    "schedules",
    "unfreeze() makes a new AdamW and the LinearLR goes on driving the old one, so the new rate is constant",
    thread="Lightning-AI/pytorch-lightning#8720",
    check="schedule",
)
def freeze_then_tune(epochs=4):
    model = Tagger()
    loader = DataLoader(digits(), batch_size=8, shuffle=True)
    trainer = FreezeThenTune(model, total=len(loader) * epochs)
    return TrainLoop(model=model, batches=loader, fit=trainer.fit, steps=len(loader) * epochs)


@fault(
    "schedules",
    "adjust_learning_rate writes into the copies of optimizer.state_dict()['param_groups'], so the rate stays at 0.1",
    thread="pytorch/examples#64",
    check="schedule",
)
def imagenet_main(lr=0.1):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    progress = {"iteration": 0}

    def adjust_learning_rate(iteration):
        rate = lr * (0.5 ** (iteration // 3))
        for param_group in optimizer.state_dict()["param_groups"]:
            param_group["lr"] = rate

    def train(batches):
        model.train()
        for x, target in batches:
            adjust_learning_rate(progress["iteration"])
            loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress["iteration"] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "schedules",
    "the poly schedule is written to param_groups[0] only: the head's group keeps its first rate",
    thread="speedinghzl/pytorch-segmentation-toolbox#12",
    check="schedule",
)
def segmentation_poly(epochs=5, power=0.9):
    model = Tagger()
    base = 0.02
    optimizer = torch.optim.SGD(
        [{"params": model.backbone.parameters(), "lr": base}, {"params": model.head.parameters(), "lr": 10 * base}],
        lr=base,
        momentum=0.9,
    )
    loader = DataLoader(digits(), batch_size=12, shuffle=True)
    max_iter = len(loader) * epochs
    state = {"i": 0}

    def lr_poly(i):
        return base * max(0.0, 1 - i / max_iter) ** power

    def train(batches):
        for images, labels in batches:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr_poly(state["i"])
            F.cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            state["i"] += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=max_iter)


@fault(
    "schedules",
    "the groups carry lr_scale, which nobody reads: all layers train at the one rate",
    thread="huggingface/pytorch-image-models#2532",
    check="schedule",
)
def vit_layer_decay(layer_decay=0.5):
    class Encoder(nn.Module):
        def __init__(self, width=16, depth=3):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)
            )
            self.head = nn.Linear(width, 4)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    model = Encoder()
    depth = len(model.blocks)
    groups = [
        {"params": list(block.parameters()), "lr_scale": layer_decay ** (depth - i), "weight_decay": 0.05}
        for i, block in enumerate(model.blocks)
    ]
    groups.append({"params": list(model.head.parameters()), "lr_scale": 1.0, "weight_decay": 0.05})
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train_one_epoch(batches):
        model.train()
        for samples, targets in batches:
            loss = F.cross_entropy(model(samples), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_one_epoch)


class FastaiSchedule:
    """One cycle over the run, as in fastai."""

    def __init__(self, optimizer, total, lr_max):
        self.optimizer, self.total, self.lr_max = optimizer, total, lr_max

    def step(self, i):
        up = int(0.4 * self.total)
        at = i / up if i < up else 1 - (i - up) / (self.total - up)
        self.optimizer.lr = self.lr_max * (0.1 + 0.9 * max(0.0, at))


@fault(
    "schedules",
    "the one-cycle writes optimizer.lr, an attribute that no torch optimizer reads",
    thread="V2AI/Det3D#109",
    check="schedule",
)
def detector_one_cycle(epochs=4):
    model = mlp(8, 48, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loader = DataLoader(curve(), batch_size=8, shuffle=True)
    schedule = FastaiSchedule(optimizer, len(loader) * epochs, 3e-3)
    counter = iter(range(10**6))

    def train(batches):
        for x, y in batches:
            schedule.step(next(counter))
            optimizer.zero_grad()
            F.smooth_l1_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=len(loader) * epochs)


@fault(
    "schedules",
    "the new rate is computed and logged, and the old one (learning_rate instead of new_lr) is written to the groups",
    thread="dmlc/dgl#1456",
    check="schedule",
)
def gcmc(train_decay=0.5, patience=2):
    model = mlp(8, 32, 1)
    learning_rate = 1e-2
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    loader = DataLoader(curve(), batch_size=16)
    logged = []

    def train(batches):
        new_lr, no_better, best = learning_rate, 0, math.inf
        for x, rating in batches:
            model.train()
            loss = F.mse_loss(model(x), rating)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rmse = loss.detach().sqrt().item()
            if rmse < 0.9 * best:
                best, no_better = rmse, 0
                continue
            no_better += 1
            if no_better >= patience:
                new_lr = max(new_lr * train_decay, 1e-4)
                logged.append(f"change the LR to {new_lr:g}")
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                no_better = 0

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "schedules",
    "a line in the loop sets every group's lr to the configured one before each step, over what the scheduler wrote",
    thread="SPOClab-ca/dn3#6",
    check="schedule",
)
def eeg_process():
    @dataclass
    class Config:
        lr: float = 1e-3
        epochs: int = 6

    config = Config()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.epochs * len(loader) + 1, cycle_momentum=False
    )

    def set_hyper():
        for group in optimizer.param_groups:
            group["lr"] = config.lr

    def train_step(x, y):
        model.train()
        set_hyper()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def fit(batches):
        for x, y in batches:
            train_step(x, y)
            if scheduler.last_epoch < scheduler.total_steps - 1:
                scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=loader,
        fit=fit,
        steps=config.epochs * len(loader),
    )


@fault(
    "schedules",
    "with manual optimization nobody calls step() of the ExponentialLR that configure_optimizers returns",
    thread="voicepaw/so-vits-svc-fork#291",
    check="schedule",
)
def voice_module():
    class Voice(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = mlp(8, 32, 1)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.net.parameters(), 2e-3, betas=(0.8, 0.99))
            return [optimizer], [lr_scheduler.ExponentialLR(optimizer, gamma=0.98)]

        def training_step(self, batch, batch_idx):
            x, y = batch
            optimizer = self.optimizers()
            loss = F.l1_loss(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def train_dataloader(self):
            return DataLoader(curve(), batch_size=16, shuffle=True)

    return from_lightning(Voice())


@fault(
    "schedules",
    "the scheduler is stepped in train_one_epoch after each image batch and again after the epoch",
    thread="pytorch/vision#1261",
    check="schedule",
)
def detection_reference(epochs=3):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train_one_epoch(batches):
        model.train()
        for images, targets in batches:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    def main(batches):
        for _ in range(epochs):
            train_one_epoch(batches)
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=main, epochs=26)


@fault(
    "schedules",
    "the cosine is sized in optimizer steps and stepped once a micro-batch: it is back at the top when the run ends",
    thread="starVLA/starVLA#210",
    check="schedule",
)
def vla_trainer(accumulate=2, epochs=4):
    model = Tagger()
    loader = DataLoader(digits(), batch_size=8, shuffle=True)
    steps = len(loader) * epochs // accumulate
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    def train(batches):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches, 1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    return TrainLoop(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=steps, epochs=epochs
    )


@fault(
    "schedules",
    "StepLR(3, 0.1) is meant in epochs and is stepped after every batch: the rate is gone within the first epoch",
    thread="ivadomed/ivadomed#55",
    check="overfit_one_batch",
)
def gesture_detector(num_epochs=10):
    model = mlp(16, 48, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    loader = DataLoader(digits(), batch_size=8, shuffle=True)

    def run_epoch(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=run_epoch, epochs=num_epochs
    )


@fault(
    "schedules",
    "T_max is len(loader) * epochs, in batches, and the scheduler is stepped once an epoch: it hardly moves",
    thread="sthalles/SimCLR#8",
    check="schedule",
)
def simclr(epochs=3):
    encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3, weight_decay=1e-6)
    loader = DataLoader(digits(), batch_size=16, shuffle=True, drop_last=True)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader) * epochs, eta_min=0)

    def info_nce(x):
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        z = F.normalize(encoder(views), dim=1)
        similarity = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(x)))

    def train(batches):
        for _ in range(epochs):
            for x, _ in batches:
                loss = info_nce(x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()

    return TrainLoop(
        model=encoder,
        optimizer=optimizer,
        batches=loader,
        fit=train,
        steps=len(loader) * epochs,
        epochs=epochs,
        rows_interact=True,
    )


@fault(
    "schedules",
    "'interval': 'step' stands beside the lr_scheduler entry and not in it: OneCycleLR is stepped once an epoch",
    thread="Lightning-AI/pytorch-lightning#6948",
    check="schedule",
)
def one_cycle_module(max_epochs=6):
    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = lr_scheduler.OneCycleLR(
                optimizer, max_lr=1e-2, epochs=max_epochs, steps_per_epoch=len(self.train_dataloader())
            )
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train_loss", "interval": "step"}

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            return loss

        def train_dataloader(self):
            return DataLoader(digits(), batch_size=8, shuffle=True)

    module = Classifier()
    return from_lightning(module, steps=max_epochs * len(module.train_dataloader()))


@fault(
    "schedules",
    "the linear decay spans len(loader) * epochs micro-batches, four times the optimizer steps that are made",
    thread="vllm-project/speculators#859",
    check="schedule",
)
def draft_model(accumulate=4, num_epochs=2):
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    loader = DataLoader(text(), batch_size=4, shuffle=True)
    total_steps = num_epochs * len(loader)
    warmup = max(1, total_steps // 20)
    scheduler = lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.0, (total_steps - step) / (total_steps - warmup)))
    )

    def train(batches):
        optimizer.zero_grad(set_to_none=True)
        for i, (ids,) in enumerate(batches):
            (next_token_loss(model, ids) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=loader,
        fit=train,
        steps=len(loader) * num_epochs // accumulate,
    )


@fault(
    "schedules",
    "the cosine gets max_epoch as its horizon and is stepped each iteration: it goes down and up all through the run",
    thread="ScrollPrize/villa#1495",
    check="schedule",
)
def ink_detection():
    @dataclass
    class Manager:
        max_epoch: int = 5
        initial_lr: float = 1e-2

    mgr = Manager()
    model = mlp(16, 48, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=mgr.initial_lr, momentum=0.99, nesterov=True)
    loader = DataLoader(digits(rows=120), batch_size=8, shuffle=True)
    is_per_iteration = True

    def lr_lambda(step):
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * step / mgr.max_epoch)))

    scheduler = lr_scheduler.LambdaLR(optimizer, lr_lambda)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimizer.step()
            if is_per_iteration:
                scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=loader,
        fit=train,
        steps=len(loader) * mgr.max_epoch,
    )


@fault(
    "schedules",
    "T_max is the number of warm-up steps and not of decay steps: the rate rises again right after it fell",
    thread="lucidrains/imagen-pytorch#71",
    check="schedule",
)
def unet_trainer(warmup_steps=4, cosine_decay_max_steps=60):
    unet = nn.Sequential(nn.Linear(9, 48), nn.SiLU(), nn.Linear(48, 8))
    optimizer = torch.optim.Adam(unet.parameters(), lr=2e-3, betas=(0.9, 0.99))
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=warmup_steps)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        for x0, _ in batches:
            t = torch.rand(len(x0), 1)
            noise = torch.randn_like(x0)
            noisy = torch.cos(t * math.pi / 2) * x0 + torch.sin(t * math.pi / 2) * noise
            loss = F.mse_loss(unet(torch.cat([noisy, t], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=unet, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=64)


@fault(
    "schedules",
    "the schedule spans num_epochs * len(loader) and max_steps stops the run at a fifth of it",
    thread="vllm-project/speculators#1104",
    check="schedule",
)
def budgeted_run(num_epochs=10, max_steps=24):
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(text(), batch_size=4, shuffle=True)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_epochs * len(loader))

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=max_steps)


@fault(
    "schedules",
    "num_training_steps is multiplied by the accumulation although the prepared scheduler steps with the optimizer",
    thread="huggingface/diffusers#4387",
    check="schedule",
)
def controlnet(accumulate=4, epochs=3):
    from transformers import get_scheduler

    accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = Tagger()
    loader = DataLoader(digits(), batch_size=4, shuffle=True)
    max_train_steps = epochs * math.ceil(len(loader) / accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=1 * accumulate,
        num_training_steps=max_train_steps * accumulate,
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def train(batches):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
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


@fault(
    "schedules",
    "the scheduler that is handed to the Trainer is sized in batches, without the division by the accumulation",
    thread="huggingface/diffusers#1957",
    check="schedule",
)
def hf_finetuning(accumulate=4, epochs=4):
    from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=epochs,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    model, data = RowClassifier(), Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = len(data) // args.per_device_train_batch_size
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, batches * epochs)
    trainer = Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, scheduler))
    return from_trainer(trainer, steps=batches * epochs // accumulate)


@fault(
    "schedules",
    "the lambda returns lr * decay and LambdaLR multiplies it by lr once more: 1e-4 instead of 1e-2",
    thread="lhoyer/MIC#60",
    check="schedule",
)
def domain_adaptation(lr=1e-2, lr_gamma=0.001, lr_decay=0.75):
    classifier, critic = Tagger(), mlp(32, 32, 1)
    optimizer = torch.optim.SGD(classifier.parameters(), lr, momentum=0.9, weight_decay=1e-3, nesterov=True)
    ad_optimizer = torch.optim.SGD(critic.parameters(), lr, momentum=0.9, weight_decay=1e-3, nesterov=True)
    schedulers = [
        lr_scheduler.LambdaLR(o, lambda x: lr * (1.0 + lr_gamma * float(x)) ** (-lr_decay))
        for o in (optimizer, ad_optimizer)
    ]
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train(batches):
        for x, y in batches:
            features = classifier.backbone(x)
            target = classifier.backbone(x + 0.3)
            ad_optimizer.zero_grad()
            source_score, target_score = critic(features.detach()), critic(target.detach())
            ad_loss = F.softplus(-source_score).mean() + F.softplus(target_score).mean()
            ad_loss.backward()
            ad_optimizer.step()
            optimizer.zero_grad()
            loss = F.cross_entropy(classifier.head(features), y) + 0.1 * F.softplus(-critic(target)).mean()
            loss.backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()

    return TrainLoop(
        model={"classifier": classifier, "critic": critic},
        optimizer=[optimizer, ad_optimizer],
        batches=loader,
        fit=train,
    )


class Dampening:
    """Linear warm-up that scales the rate of the groups."""

    def __init__(self, optimizer, warmup_period):
        self.optimizer, self.warmup_period, self.count = optimizer, warmup_period, 0
        self.dampen()

    def dampen(self):
        self.count += 1
        omega = min(1.0, self.count / self.warmup_period)
        for group in self.optimizer.param_groups:
            group["lr"] *= omega


@fault(
    "schedules",
    "the warm-up multiplies the current rate and not the first one: the rate falls to nothing instead of rising",
    thread="Tony-Y/pytorch_warmup#1",
    check="schedule",
)
def warmup_library():
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = Dampening(optimizer, warmup_period=8)
    loader = DataLoader(text(), batch_size=8, shuffle=True)

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            optimizer.step()
            warmup.dampen()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "schedules",
    "whether the warm-up is over is asked of the rate (lr < 1), which is always so: the decay never begins",
    thread="facebookresearch/ParlAI#4384",
    check="schedule",
)
def dialogue_agent(warmup_updates=4, max_updates=40):
    model = TinyLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.05 + (step + 1) / warmup_updates))
    decay = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / (max_updates - warmup_updates)))
    optimizer.param_groups[0]["lr"] = warmup.get_last_lr()[0]
    loader = DataLoader(text(), batch_size=8, shuffle=True)
    updates = [0]

    def is_warming_up():
        return updates[0] < warmup_updates or optimizer.param_groups[0]["lr"] < 1.0

    def train(batches):
        for (ids,) in batches:
            optimizer.zero_grad()
            next_token_loss(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            updates[0] += 1
            if is_warming_up():
                warmup.step()
            else:
                decay.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=max_updates)


class WarmupMultiStepLR(lr_scheduler.LRScheduler):
    def __init__(self, optimizer, milestones, gamma=0.1, warmup_factor=0.0, warmup_iters=10, last_epoch=-1):
        self.milestones, self.gamma = milestones, gamma
        self.warmup_factor, self.warmup_iters = warmup_factor, warmup_iters
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        factor = 1.0
        if self.last_epoch < self.warmup_iters:
            alpha = self.last_epoch // self.warmup_iters
            factor = self.warmup_factor * (1 - alpha) + alpha
        decayed = sum(self.last_epoch >= m for m in self.milestones)
        return [base * factor * self.gamma**decayed for base in self.base_lrs]


@fault(
    "schedules",
    "the warm-up divides integers: its factor is warmup_factor (0) all through, so the first ten steps do nothing",
    thread="facebookresearch/maskrcnn-benchmark#335",
    check="schedule",
)
def maskrcnn():
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = WarmupMultiStepLR(optimizer, milestones=[60, 80])
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def do_train(batches):
        model.train()
        for images, targets in batches:
            losses = {"loss_classifier": F.cross_entropy(model(images), targets)}
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=do_train, steps=90)


class WarmUpLR:
    def __init__(self, optimizer, warmup_epochs):
        self.optimizer, self.warmup_epochs = optimizer, warmup_epochs
        self.init_lr = optimizer.param_groups[0]["lr"] / warmup_epochs
        self.step()

    def step(self):
        for group, lr in zip(self.optimizer.param_groups, self.get_lr()):  # noqa: B905
            group["lr"] = lr

    def get_lr(self):
        return [self.init_lr * epoch for epoch in range(1, self.warmup_epochs + 1)]


@fault(
    "schedules",
    "get_lr lists the rates of all warm-up epochs as if they were groups: the one group stays at a quarter of its rate",
    thread="lingxitong/MIL_BASELINE#47",
    check="schedule",
)
def mil_baseline(epochs=8, warmup=4):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    warmup_scheduler = WarmUpLR(optimizer, warmup)
    after = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    def train(batches):
        for epoch in range(epochs):
            for bag, label in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(bag), label).backward()
                optimizer.step()
            if epoch + 1 < warmup:
                warmup_scheduler.step()
            else:
                after.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, epochs=epochs)


@fault(
    "schedules",
    "with the schedule switched off gamma is 0 and not 1: after the first four steps the rate is 0 for good",
    thread="LINCellularNeuroscience/VAME#26",
    check="schedule",
)
def rnn_vae(optimizer_scheduler=False):
    class SequenceVAE(nn.Module):
        def __init__(self, width=8, hidden=24, latent=4):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(width, hidden), nn.Linear(latent, width)
            self.mean, self.log_var = nn.Linear(hidden, latent), nn.Linear(hidden, latent)

        def forward(self, x):
            h = torch.tanh(self.encoder(x))
            mean, log_var = self.mean(h), self.log_var(h)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
            return self.decoder(z), mean, log_var

    model = SequenceVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, amsgrad=True)
    if optimizer_scheduler:
        scheduler = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.2)
    else:
        scheduler = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        model.train()
        for x, _ in batches:
            decoded, mean, log_var = model(x)
            kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
            loss = F.mse_loss(decoded, x, reduction="sum") / len(x) + 0.1 * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train)


@fault(
    "schedules",
    "the exponent of gamma is negative: the rate is ten times as high after each n_steps, and not a tenth",
    thread="SYSU-SAIL/PAM#4",
    check="schedule",
)
def stereo_epochs():
    @dataclass
    class Config:
        lr: float = 2e-4
        gamma: float = 0.1
        n_steps: int = 2
        n_epochs: int = 6

    cfg = Config()
    net = mlp(8, 32, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    loader = DataLoader(curve(), batch_size=16, shuffle=True)

    def train(batches):
        for epoch in range(cfg.n_epochs):
            lr = cfg.lr * (cfg.gamma ** -(epoch // cfg.n_steps))
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr
            for high, _ in batches:
                low = high + 0.1 * torch.randn_like(high)
                loss = F.mse_loss(net(low), high)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train, epochs=cfg.n_epochs)


@fault(
    "schedules",
    "the rate is scaled by the batch size in the config and once more in the optimizer's builder: 5e-7 for SGD",
    thread="facebookresearch/dinov2#320",
    check="update_ratio",
)
def scaled_config(batch_size=8, base_lr=5e-4):
    def apply_scaling_rules(config):
        return {**config, "lr": config["lr"] * config["batch_size"] / 256}

    def build_optimizer(config, parameters):
        lr = config["lr"] * config["batch_size"] / 256
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    config = apply_scaling_rules({"lr": base_lr, "batch_size": batch_size})
    model = Tagger()
    optimizer = build_optimizer(config, model.parameters())
    loader = DataLoader(digits(), batch_size=batch_size, shuffle=True)

    def do_train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=do_train)


@fault(
    "schedules",
    "ReduceLROnPlateau gets the accuracy with the default mode 'min': it cuts the rate while the accuracy rises",
    thread="md-mohaiminul/ViS4mer#4",
    check="schedule",
)
def long_video(epochs=6):
    model = mlp(16, 48, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.2)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    val_x, val_y = digits(rows=40, seed=0).tensors

    def evaluate():
        model.eval()
        with torch.no_grad():
            return (model(val_x).argmax(1) == val_y).float().mean().item()

    def main(batches):
        for _ in range(epochs):
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            acc = evaluate()
            scheduler.step(acc)

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=main, epochs=epochs)


@fault(
    "schedules",
    "ReduceLROnPlateau(mode='max') is left from the AUC and gets the validation loss: it cuts while the loss falls",
    thread="FunctionLab/selene#115",
    check="schedule",
)
def selene_model():
    class TrainModel:
        def __init__(self, report_every=2):
            self.model = mlp(8, 32, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.scheduler = lr_scheduler.ReduceLROnPlateau(
                self.optimizer, "max", patience=2, threshold=1e-3, factor=0.5
            )
            self.report_every, self.step = report_every, 0
            self.valid = curve(rows=32, seed=3).tensors

        def validate(self):
            self.model.eval()
            with torch.no_grad():
                return F.mse_loss(self.model(self.valid[0]), self.valid[1]).item()

        def train_and_validate(self, batches):
            for x, y in batches:
                self.model.train()
                loss = F.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                if self.step % self.report_every == 0:
                    self.scheduler.step(math.ceil(self.validate() * 1000.0) / 1000.0)

    run = TrainModel()
    return TrainLoop(
        model=run.model,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        batches=DataLoader(curve(), batch_size=16, shuffle=True),
        fit=run.train_and_validate,
    )


@fault(
    "schedules",
    "the group that is added at the unfreezing is unknown to the schedule's base rates: it keeps its rate to the end",
    thread="huggingface/transformers#20029",
    check="schedule",
)
def unfreeze_callback(epochs=5, unfreeze_at=3):
    class LinearWithWarmup:
        def __init__(self, optimizer, warmup, total):
            self.optimizer, self.warmup, self.total, self.count = optimizer, warmup, total, 0
            self.base_lrs = [group["lr"] for group in optimizer.param_groups]
            self.write()

        def write(self):
            i = self.count
            factor = min((i + 1) / self.warmup, max(0.0, (self.total - i) / (self.total - self.warmup)))
            for group, base in zip(self.optimizer.param_groups, self.base_lrs):  # noqa: B905
                group["lr"] = base * factor

        def step(self):
            self.count += 1
            self.write()

    model = Tagger()
    model.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=4e-3)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    steps = len(loader) * epochs
    scheduler = LinearWithWarmup(optimizer, 2, steps)

    def train(batches):
        for x, y in batches:
            if scheduler.count == unfreeze_at and len(optimizer.param_groups) == 1:
                model.backbone.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 1e-3})
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, steps=steps)


@fault(
    "schedules",
    "a new CosineAnnealingLR at the restart takes the rate that has just reached 0 for its base, and stays there",
    thread="pytorch/pytorch#78003",
    check="schedule",
)
def warm_restarts(cycle=4):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)

    class Run:
        iteration = 0
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, cycle, last_epoch=-1)

    run = Run()

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.scheduler.step()
            run.iteration += 1
            if run.iteration % cycle == 0:
                run.scheduler = lr_scheduler.CosineAnnealingLR(optimizer, cycle, last_epoch=-1)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "schedules",
    "the encoder's group starts at rate 0 to be released later, and the schedule multiplies that 0 for ever",
    thread="open-mmlab/mmdetection#8210",
    check="schedule",
)
def gradual_release(epochs=4):
    model = Tagger()
    optimizer = torch.optim.AdamW(
        [{"params": model.backbone.parameters(), "lr": 0.0}, {"params": model.head.parameters(), "lr": 3e-3}]
    )
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    total = len(loader) * epochs
    release = total // 8

    def backbone_factor(step):
        return 0.0 if step < release else 1.0 - (step - release) / (total - release)

    scheduler = lr_scheduler.LambdaLR(optimizer, [backbone_factor, lambda step: max(0.0, 1.0 - step / total)])

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader, fit=train, steps=total)


@fault(
    "schedules",
    "optimizer and scheduler are made anew at the start of every epoch: the decay begins again each time",
    thread="nianticlabs/manydepth#46",
    check="schedule",
)
def depth_trainer(num_epochs=3, total_epochs=20):
    class DepthTrainer:
        def __init__(self):
            self.models = {"encoder": nn.Linear(8, 32), "depth": nn.Sequential(nn.ReLU(), nn.Linear(32, 1))}
            self.parameters_to_train = [p for m in self.models.values() for p in m.parameters()]

        def set_optimizer(self):
            self.model_optimizer = torch.optim.Adam(self.parameters_to_train, 2e-3)
            self.model_lr_scheduler = lr_scheduler.StepLR(self.model_optimizer, step_size=15, gamma=0.1)

        def run_epoch(self, batches):
            for inputs, depth in batches:
                loss = F.l1_loss(self.models["depth"](self.models["encoder"](inputs)), depth)
                self.model_optimizer.zero_grad()
                loss.backward()
                self.model_optimizer.step()
            self.model_lr_scheduler.step()

        def train(self, batches):
            for _ in range(num_epochs):
                self.set_optimizer()
                self.run_epoch(batches)

    trainer = DepthTrainer()
    loader = DataLoader(curve(), batch_size=16, shuffle=True)
    return TrainLoop(model=trainer.models, batches=loader, fit=trainer.train, epochs=total_epochs)


@fault(
    "schedules",
    "each learn() counts its progress from 0 over its own few steps: the linear schedule is run through every time",
    thread="HumanCompatibleAI/imitation#262",
    check="schedule",
)
def adversarial_imitation(rounds=30):
    class Policy:
        def __init__(self):
            self.net = mlp(8, 32, 3)
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-3)

        def learn(self, batch, gradient_steps=2):
            states, actions = batch
            for i in range(gradient_steps):
                remaining = 1.0 - i / gradient_steps
                for group in self.optimizer.param_groups:
                    group["lr"] = 3e-3 * remaining
                log_prob = F.log_softmax(self.net(states), 1).gather(1, actions[:, None])
                self.optimizer.zero_grad()
                (-log_prob.mean()).backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optimizer.step()

    policy = Policy()
    data = TensorDataset(*digits(width=8, classes=3).tensors)
    return TrainLoop(
        model=policy.net,
        optimizer=policy.optimizer,
        batches=DataLoader(data, batch_size=16, shuffle=True),
        fit=lambda batches: [policy.learn(batch) for batch in batches],
        steps=2 * rounds,
    )
