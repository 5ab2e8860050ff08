"""Trainers whose own state is not in their checkpoint, each beside the same with it: faulty and right."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import lightning as L
import peft
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer


def net(dropout=0.0):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


def labelled(rows=8):
    x = torch.randn(rows, 4)
    return x, (x.sum(dim=1) > 0).long()


def rows(count=32):
    x, y = labelled(count)
    return [{"x": x[i], "labels": y[i]} for i in range(count)]


class Rows(nn.Module):
    """A classifier as the HF Trainer calls it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = net(dropout)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def hf(out, *, dropout=0.0, kind=transformers.Trainer, model=None, callbacks=(), fields=None, **settings):
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, **settings}
    args = transformers.TrainingArguments(out, use_cpu=True, **settings)
    model = Rows(dropout) if model is None else model
    trainer = kind(
        model=model,
        args=args,
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=list(callbacks),
    )
    return from_trainer(trainer, **(fields or {}))


# --- HF Trainer: subclasses, models, callbacks and optimizers with state of their own -------------------------------


class Annealed(transformers.Trainer):
    """A penalty that grows with the forward passes that the trainer counts itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = 0

    def weight(self):
        self.seen += self.model.training  # the Trainer evaluates with compute_loss as well
        return min(1.0, self.seen / 20)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] + self.weight() * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


class AnnealedByTheTrainersCount(Annealed):
    def weight(self):
        return min(1.0, (1 + self.state.global_step) / 20)


class AnnealedAndSaved(Annealed):
    """The count beside the weights, where the Trainer's own two functions are."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        (folder / "seen.json").write_text(json.dumps(self.seen))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.seen = json.loads((Path(resume_from_checkpoint) / "seen.json").read_text())


class HeadSaved(transformers.Trainer):
    """Writes the last layer only, although all of the model trains."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict=self.model.net[3].state_dict(prefix="net.3."))


class Centred(Rows):
    """Takes the running mean of its logits off them."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2), persistent=persistent)

    def forward(self, x, labels=None):
        logits = self.net(x)
        if self.training:
            self.centre.lerp_(logits.detach().mean(dim=0), 0.1)
        logits = logits - self.centre * torch.tensor([1.0, -1.0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Shadow(transformers.TrainerCallback):
    """An average of the weights, that evaluation is done with."""

    def __init__(self):
        self.average = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, value in model.state_dict().items():
            self.average.setdefault(name, value.clone()).lerp_(value, 0.1)

    def of(self, path):
        return Path(path) / "average.pt"

    def on_evaluate(self, args, state, control, **kwargs):
        pass


class ShadowSaved(Shadow):
    def on_save(self, args, state, control, **kwargs):
        torch.save(self.average, self.of(Path(args.output_dir) / f"checkpoint-{state.global_step}"))


class Averaged(transformers.Trainer):
    """Evaluates the average, and puts the weights back."""

    def shadow(self):
        return next(c for c in self.callback_handler.callbacks if isinstance(c, Shadow))

    def evaluate(self, *args, **kwargs):
        average = self.shadow().average
        if not average:
            return super().evaluate(*args, **kwargs)
        kept = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(average)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.model.load_state_dict(kept)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = self.shadow().of(resume_from_checkpoint)
        if path.exists():
            self.shadow().average = torch.load(path)


# --- Lightning: modules and callbacks with state of their own -----------------------------------------------------


class Module(L.LightningModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = net(dropout)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Counting(Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def beta(self):
        self.seen += 1
        return min(1.0, self.seen / 20)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y) + self.beta() * logits.square().mean()


class CountingSaved(Counting):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


class CountingByGlobalStep(Counting):
    def beta(self):
        return min(1.0, (1 + self.global_step) / 20)


class CountingByEpoch(Counting):
    def beta(self):
        return 0.1 * (1 + self.current_epoch)


class Contrast(Module):
    """Compares features with those of the last batches, kept in a queue."""

    def __init__(self):
        super().__init__()
        self.start_queue()

    def start_queue(self):
        self.queue = F.normalize(torch.randn(16, 2), dim=1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        one, other = F.normalize(self.net(x), dim=1), F.normalize(self.net(x + 0.1 * torch.randn_like(x)), dim=1)
        logits = torch.cat([one @ other.T, one @ self.queue.clone().to(one).T], dim=1) / 0.2
        self.queue.copy_(torch.cat([other.detach().to(self.queue), self.queue])[: len(self.queue)])
        return F.cross_entropy(logits, torch.arange(len(x)))


class ContrastWithBuffer(Contrast):
    def start_queue(self):
        self.register_buffer("queue", F.normalize(torch.randn(16, 2), dim=1))


class HeadDropped(Module):
    """Leaves the head out as the checkpoint is loaded, as for another number of classes."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("net.3.")}


class MomentsDropped(Module):
    """Makes its checkpoints smaller."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["optimizer_states"] = []


class Average(L.Callback):
    """An average of the weights, that validation is done with."""

    def __init__(self):
        self.average, self.kept = {}, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for name, value in module.named_parameters():
            self.average.setdefault(name, value.detach().clone()).lerp_(value.detach(), 0.1)

    def on_validation_start(self, trainer, module):
        if self.average:
            self.kept = copy.deepcopy(module.state_dict())
            module.load_state_dict(self.average, strict=False)

    def on_validation_end(self, trainer, module):
        if self.kept is not None:
            module.load_state_dict(self.kept)
            self.kept = None


class AverageSaved(Average):
    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


def lightning(out, *, kind=Module, callbacks=(), **settings):
    trainer = L.Trainer(accelerator="cpu", default_root_dir=out, callbacks=list(callbacks), logger=False, **settings)
    module = kind()
    data = None
    if callbacks:
        data = L.LightningDataModule.from_datasets(
            torch.utils.data.TensorDataset(*labelled(16)), torch.utils.data.TensorDataset(*labelled(16)), batch_size=8
        )
        module.validation_step = lambda batch, batch_idx: module.log("val_loss", module.training_step(batch, batch_idx))
    return from_lightning(module, trainer, datamodule=data, batch=labelled())


# --- Accelerate ----------------------------------------------------------------------------------------------------


class Ema:
    def __init__(self, model):
        self.average = copy.deepcopy(model).requires_grad_(False)

    def update(self, model):
        for old, new in zip(self.average.parameters(), model.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)

    def state_dict(self):
        return self.average.state_dict()

    def load_state_dict(self, state):
        self.average.load_state_dict(state)


class Count:
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def with_accelerate(out, *, dropout=0.0, registered=True, scheduled=True, model_prepared=True, ema=False, accumulate=1):
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, count = net(dropout), Count()
    average = Ema(model) if ema else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    optimizer = accelerator.prepare(optimizer)
    if model_prepared:
        model = accelerator.prepare(model)
    if scheduled:
        schedule = accelerator.prepare(schedule)
    if registered:
        accelerator.register_for_checkpointing(count)
        if ema:
            accelerator.register_for_checkpointing(average)

    def fit(batches):
        model.train()
        for x, y in batches:
            count.seen += 1
            logits = model(x)
            loss = F.cross_entropy(logits, y) + min(1.0, count.seen / 20) * logits.square().mean()
            if ema:
                with torch.no_grad():
                    wanted = average.average(x).softmax(dim=1)
                loss = loss + F.cross_entropy(logits, wanted)
            with accelerator.accumulate(model):
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if ema:
                average.update(model)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        batch=labelled(),
        fit=fit,
        save=accelerator.save_state,
        load=accelerator.load_state,
    )


# --- PEFT ----------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class WithHead(nn.Module):
    """Llama's features, a norm with running statistics if wanted, and a fresh head."""

    def __init__(self, norm):
        super().__init__()
        self.trunk = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, labels=None):
        hidden = self.trunk(input_ids=input_ids).last_hidden_state.mean(dim=1)
        logits = self.head(self.norm(hidden))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def texts(count=32):
    return [{"input_ids": row, "labels": row.sum() % 3} for row in torch.randint(1, 31, (count, 8))]


def adapted(*, norm=False, modules_to_save=None, thawed=()):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules_to_save)
    model = peft.get_peft_model(WithHead(norm), config)
    for name, parameter in model.named_parameters():
        if any(part in name for part in thawed):
            parameter.requires_grad = True
    return model


def lora_by_trainer(out, *, norm=False, modules_to_save=None, thawed=()):
    model = adapted(norm=norm, modules_to_save=modules_to_save, thawed=thawed)
    args = transformers.TrainingArguments(out, use_cpu=True, learning_rate=1e-2, per_device_train_batch_size=4)
    return from_trainer(transformers.Trainer(model=model, args=args, train_dataset=texts()))


def lora_by_hand(out, *, how="adapters", modules_to_save=("head",), thawed=()):
    """Adapters and optimizer in two files, loaded as one of several ways says."""
    model = adapted(modules_to_save=list(modules_to_save) or None, thawed=thawed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = {name: torch.stack([row[name] for row in texts(4)]) for name in ("input_ids", "labels")}

    def fit(batches):
        model.train()
        for given in batches:
            optimizer.zero_grad()
            model(**given)["loss"].backward()
            optimizer.step()

    def save(folder):
        if how == "trainable":
            torch.save({n: p for n, p in model.named_parameters() if p.requires_grad}, folder / "trainable.pt")
        elif how == "lora_only":
            torch.save({n: v for n, v in model.state_dict().items() if "lora_" in n}, folder / "lora.pt")
        else:
            model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load(folder):
        if how == "trainable":
            model.load_state_dict(torch.load(folder / "trainable.pt"), strict=False)
        elif how == "lora_only":
            model.load_state_dict(torch.load(folder / "lora.pt"), strict=False)
        elif how == "other_name":
            model.load_adapter(folder, "resumed", is_trainable=True)
        elif how == "wrapped_again":
            peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
        elif how == "twice":
            for _ in range(2):
                model.load_adapter(folder, "default", is_trainable=True)
        else:
            model.load_adapter(folder, "default", is_trainable=True)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, save=save, load=load)


# --- Each with the verdict that resume_equivalence gives -----------------------------------------------------------


def made(function, **given):
    """``function`` with what is made anew for each loop: callables named ``make_...``."""

    def make():
        fresh = {n.removeprefix("make_"): v() if n.startswith("make_") else v for n, v in given.items()}
        return function("out", **fresh)

    return make


FAULTY = {
    "hf-counter": (made(hf, kind=Annealed), "counter_lost", "trainer.seen"),
    "hf-buffer-not-persistent": (made(hf, make_model=lambda: Centred(False)), "buffer_lost", "centre"),
    "hf-part-of-the-weights-saved": (made(hf, kind=HeadSaved), "load_raises", "load()"),
    "hf-average-of-a-callback": (
        made(hf, kind=Averaged, make_callbacks=lambda: [Shadow()]),
        "average_lost",
        "callbacks[1].average",
    ),
    "lightning-counter": (made(lightning, kind=Counting), "counter_lost", "model.seen"),
    "lightning-queue": (made(lightning, kind=Contrast), "state_lost", "model.queue"),
    "lightning-head-dropped": (made(lightning, kind=HeadDropped), "weights_not_loaded", "net.3.weight"),
    "lightning-moments-dropped": (made(lightning, kind=MomentsDropped), "optimizer_state_lost", "_optimizers[0]"),
    "lightning-average-of-a-callback": (
        made(lightning, make_callbacks=lambda: [Average()]),
        "average_lost",
        "trainer.callbacks[0].average",
    ),
    "accelerate-counter-not-registered": (made(with_accelerate, registered=False), "counter_lost", "count.seen"),
    "accelerate-schedule-not-prepared": (made(with_accelerate, scheduled=False), "scheduler_restarts", "scheduler"),
    "accelerate-model-not-prepared": (made(with_accelerate, model_prepared=False), "weights_not_loaded", "0.weight"),
    "peft-head-thawed": (made(lora_by_trainer, thawed=("head",)), "weights_not_loaded", "head.weight"),
    "peft-norm-not-saved": (made(lora_by_trainer, norm=True, modules_to_save=["head"]), "buffer_lost", "running_mean"),
    "peft-adapters-only-by-hand": (made(lora_by_hand, how="lora_only"), "weights_not_loaded", "head"),
    "peft-other-name": (made(lora_by_hand, how="other_name"), "weights_not_loaded", "lora_A.default"),
    "peft-wrapped-again": (made(lora_by_hand, how="wrapped_again"), "load_raises", "load()"),
}
"""The cause, and what the finding names."""

RIGHT = {
    **{f"hf-dropout-{p}": made(hf, dropout=p) for p in (0.0, 0.3)},
    **{f"lightning-dropout-{p}": made(lightning, kind=lambda p=p: Module(p)) for p in (0.0, 0.3)},
    **{f"accelerate-dropout-{p}": made(with_accelerate, dropout=p) for p in (0.0, 0.3)},
    "hf-accumulating": made(hf, dropout=0.3, gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=1),
    "hf-adafactor": made(hf, optim="adafactor"),
    "hf-ignore-data-skip": made(hf, dropout=0.3, ignore_data_skip=True),
    "hf-count-of-the-trainer": made(hf, kind=AnnealedByTheTrainersCount),
    "hf-counter-saved": made(hf, kind=AnnealedAndSaved),
    "hf-buffer": made(hf, make_model=lambda: Centred(True)),
    "hf-average-saved": made(hf, kind=Averaged, make_callbacks=lambda: [ShadowSaved()]),
    "lightning-accumulating": made(
        lightning, kind=lambda: Module(0.3), accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=7
    ),
    "lightning-counter-saved": made(lightning, kind=CountingSaved),
    "lightning-global-step": made(lightning, kind=CountingByGlobalStep),
    "lightning-current-epoch": made(lightning, kind=CountingByEpoch),
    "lightning-queue-as-buffer": made(lightning, kind=ContrastWithBuffer),
    "lightning-average-saved": made(lightning, make_callbacks=lambda: [AverageSaved()]),
    "accelerate-accumulating": made(with_accelerate, accumulate=2),
    "accelerate-average-registered": made(with_accelerate, ema=True),
}

ADVISED = {
    "peft-trainer": (made(lora_by_trainer, modules_to_save=["head"]), "drawn_from_seed"),
    "peft-trainer-norm": (made(lora_by_trainer, norm=True, modules_to_save=["head", "norm"]), "drawn_from_seed"),
    "peft-frozen-head": (made(lora_by_trainer), "drawn_from_seed"),
    "peft-by-hand": (made(lora_by_hand), "drawn_from_seed"),
    "peft-trainable-by-hand": (made(lora_by_hand, how="trainable"), "drawn_from_seed"),
    "peft-loaded-twice": (made(lora_by_hand, how="twice"), "drawn_from_seed"),
}
"""A base that comes from elsewhere is right, one that the seed draws is not: the two look the same."""
