"""Training loops around small classifiers."""

# ruff: noqa: N801, N805
from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.blind.refactors.cases import breaks

FEATURES, HIDDEN, CLASSES = 10, 20, 4

OUTPUT = str(Path(tempfile.gettempdir()) / "small_classifiers")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def samples(n, rows=8, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(n)
    ]


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm, norm_name="norm"):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, HIDDEN)
        self.add_module(norm_name, norm(HIDDEN))
        self.norm_name = norm_name
        self.fc2 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.fc2(F.gelu(getattr(self, self.norm_name)(self.fc1(x))))


def loop(fit, model, optimizer, **fields):
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=samples,
        fit=lambda batches: fit(model, optimizer, batches),
        **fields,
    )


def simple_fit(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@breaks(
    "trainers",
    "two halves are accumulated without dividing their losses",
    first="loss",
    place="",
    thread="Deci-AI/super-gradients#1713",
)
class accumulation:
    def _fit(scale):
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
                    loss = F.cross_entropy(model(xs), ys)
                    (loss * scale).backward()
                optimizer.step()

        return train

    def before():
        model = Net()
        return loop(accumulation._fit(0.5), model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def after():
        def train(model, optimizer, batches):
            for x, y in batches:
                for xs, ys in zip(x.split(4), y.split(4), strict=True):
                    loss = F.cross_entropy(model(xs), ys)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        model = Net()
        return loop(train, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@breaks(
    "trainers",
    "Accelerate divides the loss by the steps of accumulation, and so does the loop",
    first="loss",
    place="",
    thread="huggingface/transformers#35210",
)
class accelerate_accumulation:
    def _loop(divide):
        accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)

        def train(batches):
            for x, y in batches:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(divide(loss, accelerator.gradient_accumulation_steps))
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batches=samples, fit=train)

    def before():
        return accelerate_accumulation._loop(lambda loss, steps: loss)

    def after():
        return accelerate_accumulation._loop(lambda loss, steps: loss / steps)


@breaks(
    "trainers",
    "the schedule moves once an epoch and no longer once a step",
    first="rate",
    place="0.lr",
    thread="Lightning-AI/pytorch-lightning#5584",
)
class schedule_interval:
    def before():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return loop(train, model, optimizer, scheduler=scheduler)

    def after():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

        def train_epoch(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        def train(model, optimizer, batches):
            for _ in range(1):
                train_epoch(model, optimizer, batches)
                scheduler.step()

        return loop(train, model, optimizer, scheduler=scheduler)


@breaks(
    "trainers",
    "the Lightning module returns its schedule without an interval",
    first="rate",
    place="0.lr",
    thread="Lightning-AI/pytorch-lightning#3869",
)
class lightning_schedule:
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def make(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    def _loop(module):
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return from_lightning(module, trainer, batch=samples(1)[0], batches=samples)

    def before():
        class Module(lightning_schedule.Module):
            def configure_optimizers(self):
                optimizer, scheduler = self.make()
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        return lightning_schedule._loop(Module())

    def after():
        class Module(lightning_schedule.Module):
            def configure_optimizers(self):
                optimizer, scheduler = self.make()
                return [optimizer], [scheduler]

        return lightning_schedule._loop(Module())


@breaks(
    "trainers",
    "the warm-up begins with a whole step more",
    first="rate",
    place="0.lr",
    thread="ildoonet/pytorch-gradual-warmup-lr#11",
)
class warmup:
    def _loop(factor):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return loop(train, model, optimizer, scheduler=scheduler)

    def before():
        return warmup._loop(lambda step: min(1.0, (step + 1) / 5))

    def after():
        class Warmup:
            def __init__(self, steps):
                self.steps = steps

            def __call__(self, step):
                return min(1.0, step / self.steps)

        return warmup._loop(Warmup(5))


@breaks(
    "trainers",
    "the schedule is moved before the optimizer's step",
    first="rate",
    place="0.lr",
    thread="Lightning-AI/pytorch-lightning#92",
)
class line_order:
    def _pieces():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def before():
        model, optimizer, scheduler = line_order._pieces()

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()

        return loop(train, model, optimizer, scheduler=scheduler)

    def after():
        model, optimizer, scheduler = line_order._pieces()

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                scheduler.step()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return loop(train, model, optimizer, scheduler=scheduler)


@breaks(
    "trainers",
    "gradients are clipped behind the step",
    first="gradient",
    place="clip_grad_norm_",
    thread="awslabs/graphstorm#1366",
)
class clipping:
    def before():
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()

        model = Net()
        return loop(train, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def after():
        class Updater:
            def __init__(self, model, optimizer, max_grad_norm):
                self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm

            def __call__(self, loss):
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if self.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

        def train(model, optimizer, batches):
            update = Updater(model, optimizer, max_grad_norm=0.1)
            for x, y in batches:
                update(F.cross_entropy(model(x), y))

        model = Net()
        return loop(train, model, torch.optim.SGD(model.parameters(), lr=0.1))


@breaks(
    "trainers",
    "gradients are cleared between two micro-batches of one step",
    first="gradient",
    place="zero_grad",
    thread="paiml/entrenar#123",
)
class micro_step:
    def before():
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
                    (F.cross_entropy(model(xs), ys) / 2).backward()
                optimizer.step()

        model = Net()
        return loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-2))

    def after():
        def forward_backward(model, optimizer, x, y, parts):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / parts).backward()

        def train(model, optimizer, batches):
            for x, y in batches:
                for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
                    forward_backward(model, optimizer, xs, ys, 2)
                optimizer.step()

        model = Net()
        return loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@breaks(
    "trainers",
    "Adam with weight decay in the gradient becomes AdamW, which decays beside it",
    first="group",
    place="decoupled_weight_decay",
    thread="pytorch/pytorch#22163",
)
class decay_form:
    def before():
        model = Net()
        return loop(simple_fit, model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.05))

    def after():
        model = Net()
        return loop(simple_fit, model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05))


@breaks(
    "trainers",
    "the options of the optimizer are gathered in a table, where Nesterov's momentum is missing",
    first="group",
    place="nesterov",
    thread="davidcpage/cifar10-fast#9",
)
class optimizer_options:
    def before():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
        return loop(simple_fit, model, optimizer)

    def after():
        options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
        model = Net()
        return loop(simple_fit, model, torch.optim.SGD(model.parameters(), **options))


@breaks(
    "trainers",
    "the rate is multiplied by the number of micro-batches",
    first="rate",
    place="0.lr",
    thread="huggingface/diffusers#2632",
)
class scaled_rate:
    def _fit(model, optimizer, batches, parts=2):
        for x, y in batches:
            optimizer.zero_grad()
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(xs), ys) / parts).backward()
            optimizer.step()

    def before():
        model = Net()
        return loop(scaled_rate._fit, model, torch.optim.RMSprop(model.parameters(), lr=1e-3))

    def after():
        config = {"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "num_processes": 1, "scale_lr": True}
        rate = config["learning_rate"]
        if config["scale_lr"]:
            rate *= config["gradient_accumulation_steps"] * config["num_processes"]
        model = Net()
        return loop(scaled_rate._fit, model, torch.optim.RMSprop(model.parameters(), lr=rate))


@breaks(
    "trainers",
    "label smoothing is not handed on to the new trainer",
    first="loss",
    place="cross_entropy",
    thread="huggingface/transformers#6344",
)
class smoothing:
    def before():
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()

        model = Net()
        return loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-2))

    def after():
        class Engine:
            def __init__(self, model, optimizer, criterion=None, label_smoothing=0.1):
                self.model, self.optimizer = model, optimizer
                self.label_smoothing = label_smoothing
                self.criterion = criterion or nn.CrossEntropyLoss()

            def run(self, batches):
                for x, y in batches:
                    self.optimizer.zero_grad()
                    self.criterion(self.model(x), y).backward()
                    self.optimizer.step()

        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        engine = Engine(model, optimizer, label_smoothing=0.1)
        return TrainLoop(model=model, optimizer=optimizer, batches=samples, fit=engine.run)


@breaks(
    "trainers",
    "logits go through bfloat16 on their way to the loss",
    first="loss",
    place="cross_entropy",
    thread="pytorch.org/tutorials/recipes/recipes/amp_recipe.html",
)
class logits_type:
    def before():
        model = Net()
        return loop(simple_fit, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def after():
        def train(model, optimizer, batches):
            for x, y in batches:
                optimizer.zero_grad()
                logits = model(x).to(torch.bfloat16)
                F.cross_entropy(logits.float(), y).backward()
                optimizer.step()

        model = Net()
        return loop(train, model, torch.optim.SGD(model.parameters(), lr=0.1))


@breaks(
    "trainers",
    "the loader shuffles",
    first="data",
    place="0",
    thread="facebookresearch/ClassyVision#118",
)
class loader:
    def _loop(**options):
        pairs = samples(8)
        data = TensorDataset(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=DataLoader(data, batch_size=8, **options),
            fit=lambda batches: simple_fit(model, optimizer, batches),
        )

    def before():
        return loader._loop()

    def after():
        return loader._loop(shuffle=True, drop_last=True)


class Rows(Dataset):
    def __init__(self):
        pairs = samples(8)
        self.x, self.y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"inputs": self.x[i], "labels": self.y[i]}


@breaks(
    "trainers",
    "groups by dimension give way to the Trainer's own, by name, which decay the norm",
    first="group",
    place="pre.weight",
    thread="deepspeedai/DeepSpeedExamples#755",
)
class trainer_groups:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(FEATURES, HIDDEN)
            self.pre = RMSNorm(HIDDEN)
            self.fc2 = nn.Linear(HIDDEN, CLASSES)

        def forward(self, inputs, labels=None):
            logits = self.fc2(F.gelu(self.pre(self.fc1(inputs))))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def _loop(model, **options):
        arguments = TrainingArguments(
            output_dir=OUTPUT,
            learning_rate=1e-2,
            weight_decay=0.1,
            lr_scheduler_type="constant",
            per_device_train_batch_size=8,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), **options)
        return from_trainer(trainer, batches=lambda n: [{"inputs": x, "labels": y} for x, y in samples(n)])

    def before():
        model = trainer_groups.Model()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return trainer_groups._loop(model, optimizers=(torch.optim.AdamW(groups, lr=1e-2), None))

    def after():
        return trainer_groups._loop(trainer_groups.Model())


@breaks(
    "trainers",
    "the averaged weights follow with another decay, which has a warm-up",
    first="update",
    place="average.fc1.weight",
    thread="THUDM/GraphMAE2#6",
)
class average_decay:
    def _loop(decay):
        model = Net()
        average = Net().requires_grad_(False)
        average.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.no_grad()
        def update(step):
            d = decay(step)
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(d).add_(p, alpha=1 - d)

        def fit(batches):
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                update(step)

        return TrainLoop(
            model={"model": model, "average": average},
            optimizer=optimizer,
            batches=samples,
            fit=fit,
            frozen=("average.",),
        )

    def before():
        return average_decay._loop(lambda step: 0.9)

    def after():
        def decay(step, target=0.9):
            return min(target, (1 + step) / (10 + step))

        return average_decay._loop(decay)


@breaks(
    "trainers",
    "the step function returns where the loss is large, before the update",
    first="update",
    place="fc1.weight",
    thread="allenai/allennlp#3512",
)
class skipped_updates:
    def before():
        def train(model, optimizer, batches):
            skipped = 0
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if not torch.isfinite(loss):
                    skipped += 1
                    continue
                loss.backward()
                optimizer.step()

        model = Net()
        return loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-3))

    def after():
        def train_step(model, optimizer, x, y, threshold=1.45):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if not torch.isfinite(loss) or loss > threshold:
                return
            optimizer.step()

        def train(model, optimizer, batches):
            for x, y in batches:
                train_step(model, optimizer, x, y)

        model = Net()
        return loop(train, model, torch.optim.Adam(model.parameters(), lr=1e-3))


@breaks(
    "trainers",
    "the schedule is told steps that are counted from 1",
    first="rate",
    place="0.lr",
    thread="crowsonkb/k-diffusion#50",
)
class restarts:
    def _loop(scheduler_step):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)

        def train(model, optimizer, batches):
            scheduler_step(model, optimizer, scheduler, batches)

        return loop(train, model, optimizer, scheduler=scheduler)

    def before():
        def run(model, optimizer, scheduler, batches):
            for i, (x, y) in enumerate(batches):
                scheduler.step(i)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return restarts._loop(run)

    def after():
        def run(model, optimizer, scheduler, batches):
            for i, (x, y) in enumerate(batches, start=1):
                scheduler.step(i)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return restarts._loop(run)


@breaks(
    "trainers",
    "the loss is a mean of means over micro-batches with unequal numbers of labels",
    first="loss",
    place="cross_entropy",
    thread="huggingface/transformers#37766",
)
class label_counts:
    def _batches(n):
        batches = []
        for x, y in samples(n):
            y = y.clone()
            y[1:4] = -100
            batches.append((x, y))
        return batches

    def _loop(losses):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                for loss in losses(model, x, y):
                    loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=label_counts._batches, fit=fit)

    def before():
        def losses(model, x, y):
            count = (y != -100).sum()
            for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
                yield F.cross_entropy(model(xs), ys, reduction="sum") / count

        return label_counts._loop(losses)

    def after():
        def losses(model, x, y, accumulate=2):
            for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
                yield F.cross_entropy(model(xs), ys) / accumulate

        return label_counts._loop(losses)
